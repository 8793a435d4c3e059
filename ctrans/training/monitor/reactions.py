"""What a monitor does about an alarm, if you ask for it; nothing by default."""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_model
from torch import nn

from ctrans.measure.findings import Finding
from solvers import ConfigError, unknown

REACTIONS = ("skip", "save", "stop")
"""Names of reactions. "skip" skips a step whose gradient norm is not finite. It needs the norm of
each step. At a danger, which is an alarm more severe than a note, "save" saves the weights before
the step, and "stop" sets `monitor.stopped`.
"""


def check_reactions(react: Collection[str]) -> frozenset[str]:
    """Raises ConfigError with the nearest name for an unknown reaction."""
    if isinstance(react, str):
        raise ConfigError(f"react = {react!r}: give a list of names, as [{react!r}]")
    for name in react:
        if name == "lower":
            raise ConfigError(
                "react = 'lower' was removed, as in its trial it healed no more than a placebo:"
                " choose skip, save or stop"
            )
        if name not in REACTIONS:
            raise unknown("reaction", name, REACTIONS)
    return frozenset(react)


class Reactions:
    """The reactions `react` of one run to its alarms."""

    def __init__(
        self,
        react: Collection[str],
        root: nn.Module,
        out: Path | None,
        save: Callable[[Finding], object] | None,
    ):
        self.names = check_reactions(react)
        self.root = root
        self.out = out
        self.save = save
        self.stopped = False
        self.skipped = list[int]()

    def react(self, alarms: Collection[Finding], step: int) -> None:
        """Reacts before the optimiser's step, in all processes if one of them sees a danger."""
        if not self.names - {"skip"}:
            return
        dangers = _of_all_processes([alarm for alarm in alarms if alarm.severity != "note"])
        if not dangers:
            return
        if "stop" in self.names:
            self.stopped = True
        if "save" not in self.names:
            return
        if self.save is not None:  # last, as it may fail in one process only
            self.save(dangers[0])
        elif self.out is not None:
            save_model(self.root, str(self.out / f"before-step-{step:08d}.safetensors"))

    def skip(self, step: int) -> None:
        """Removes the gradients, so that the optimiser's step does nothing."""
        self.skipped.append(step)
        for parameter in self.root.parameters():
            parameter.grad = None


def distributed() -> bool:
    """Whether torch.distributed connects this process to others."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def _of_all_processes(dangers: list[Finding]) -> list[Finding]:
    """The dangers of all processes. Each sees other batches, and all must stop at the same step."""
    if not distributed() or torch.distributed.get_world_size() == 1:
        return dangers
    by_process: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(by_process, dangers)
    return [alarm for alarms in by_process for alarm in alarms]

"""What a monitor may do about an alarm, where it is asked to: nothing by default."""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_model
from torch import nn

from ctrans.findings import Finding
from solvers import ConfigError
from solvers.errors import unknown

LOWERED = 0.5
"""What a learning rate is multiplied with at each danger."""
LOWEST = 1 / 64

REACTIONS: dict[str, str] = {
    "skip": "leave out a step whose gradient spikes or is not finite: its gradients become None. Looks at every step's gradient norm",
    "save": "save the weights when a danger is told, before the step is made",
    "lower": "halve the learning rate at each danger, inside the optimiser's step, so that schedules go on as they were",
    "stop": "ask for the end of the training: `monitor.stopped`",
}


def check_reactions(react: Collection[str]) -> frozenset[str]:
    """Raises ConfigError with the nearest name for an unknown reaction."""
    if isinstance(react, str):
        raise ConfigError(f"react = {react!r}: give a list of names, as [{react!r}]")
    for name in react:
        if name not in REACTIONS:
            raise unknown("reaction", name, REACTIONS)
    return frozenset(react)


class Reactions:
    """Those that are asked for, of one run."""

    def __init__(self, react: Collection[str], root: nn.Module, out: Path | None, save: Callable[[Finding], object] | None):
        self.asked = check_reactions(react)
        self.root, self.out, self.save = root, out, save
        self.factor, self.stopped, self.skipped = 1.0, False, list[int]()
        self._lowered: dict[int, Any] = {}

    def to(self, alarms: Collection[Finding], step: int, optimizer: torch.optim.Optimizer | None) -> None:
        """Does what is asked for, before the optimiser's step: in all processes, where one of them
        sees a danger.
        """
        if not self.asked - {"skip"}:
            return
        dangers = _of_all_processes([alarm for alarm in alarms if alarm.severity != "note"])
        if not dangers:
            return
        if "save" in self.asked:
            self._save(dangers[0], step)
        if "lower" in self.asked and optimizer is not None:
            self.factor = max(LOWEST, self.factor * LOWERED)
            self.go_on(optimizer)
        self.stopped = self.stopped or "stop" in self.asked

    def go_on(self, optimizer: torch.optim.Optimizer | None) -> None:
        """Sees to it that a rate which was lowered, as in a run before this one, is low in the
        optimiser's steps.
        """
        if self.factor < 1 and optimizer is not None:
            self._lower(optimizer)

    def skip(self, step: int) -> None:
        """No gradient is left for the optimiser to step by."""
        self.skipped.append(step)
        for parameter in self.root.parameters():
            parameter.grad = None

    def _save(self, alarm: Finding, step: int) -> None:
        if self.save is not None:
            self.save(alarm)
        elif self.out is not None:
            save_model(self.root, str(self.out / f"before-step-{step:08d}.safetensors"))

    def _lower(self, optimizer: torch.optim.Optimizer) -> None:
        if id(optimizer) in self._lowered:
            return
        rates: list[Any] = []

        def before(*_: object) -> None:
            rates[:] = [group["lr"] for group in optimizer.param_groups]
            for group in optimizer.param_groups:
                group["lr"] = group["lr"] * self.factor

        def after(*_: object) -> None:
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate

        self._lowered[id(optimizer)] = (
            optimizer.register_step_pre_hook(before),
            optimizer.register_step_post_hook(after),
        )


def distributed() -> bool:
    """Whether this is one of several processes that talk to each other."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def _of_all_processes(dangers: list[Finding]) -> list[Finding]:
    """Those that any process sees, the first one's first: each sees its own batches, and weights
    must not part.
    """
    if not distributed() or torch.distributed.get_world_size() == 1:
        return dangers
    seen: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(seen, dangers)
    return [alarm for each in seen for alarm in each]

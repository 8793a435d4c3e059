"""What a monitor does about an alarm, if you ask for it; nothing by default."""

from __future__ import annotations

import math
import weakref
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
"""The factor of the learning rate at each danger."""
LOWEST = 1 / 64
"""The smallest product of these factors."""

REACTIONS = ("skip", "save", "lower", "stop")
"""Names of reactions. "skip" skips a step whose gradient norm is not finite. It needs the norm of
each step. At a danger, which is an alarm more severe than a note, "save" saves the weights before
the step, "lower" halves the learning rate inside the optimiser's steps, so that schedules are not
changed, and "stop" sets `monitor.stopped`.
"""


def check_reactions(react: Collection[str]) -> frozenset[str]:
    """Raises ConfigError with the nearest name for an unknown reaction."""
    if isinstance(react, str):
        raise ConfigError(f"react = {react!r}: give a list of names, as [{react!r}]")
    for name in react:
        if name not in REACTIONS:
            raise unknown("reaction", name, REACTIONS)
    return frozenset(react)


class Reactions:
    """The reactions `react` of one run to its alarms."""

    def __init__(self, react: Collection[str], root: nn.Module, out: Path | None, save: Callable[[Finding], object] | None):
        self.asked = check_reactions(react)
        self.root, self.out, self.save = root, out, save
        self.factor, self.stopped, self.skipped = 1.0, False, list[int]()

    def react(self, alarms: Collection[Finding], step: int, optimizer: torch.optim.Optimizer | None) -> None:
        """Reacts before the optimiser's step, in all processes if one of them sees a danger."""
        if not self.asked - {"skip"}:
            return
        dangers = _of_all_processes([alarm for alarm in alarms if alarm.severity != "note"])
        if not dangers:
            return
        self.stopped = self.stopped or "stop" in self.asked
        if "lower" in self.asked and optimizer is not None:
            self.factor = max(LOWEST, self.factor * LOWERED)
            self.attach(optimizer)
        if "save" not in self.asked:
            return
        if self.save is not None:  # last, as it may fail in one process only
            self.save(dangers[0])
        elif self.out is not None:
            save_model(self.root, str(self.out / f"before-step-{step:08d}.safetensors"))

    def attach(self, optimizer: torch.optim.Optimizer | None) -> None:
        """Lowers the optimiser's rates inside its steps, once a danger has lowered the factor."""
        if self.factor == 1 or optimizer is None:
            return
        if optimizer not in _LOWERED:
            _LOWERED[optimizer] = Lowered(optimizer)
        _LOWERED[optimizer].restore(optimizer)
        _LOWERED[optimizer].by.add(self)

    def detach(self) -> None:
        """Lowers no rate any more."""
        for lowered in _LOWERED.values():
            lowered.by.discard(self)

    def skip(self, step: int) -> None:
        """Removes the gradients, so that the optimiser's step does nothing."""
        self.skipped.append(step)
        for parameter in self.root.parameters():
            parameter.grad = None


class Lowered:
    """The rates of one optimiser inside its steps: lowered by the factors of all that react to it.

    It has one pair of hooks for each optimiser. Those of two monitors would run in the same order
    before and after a step, and the second would keep the rate that the first one lowered.
    """

    def __init__(self, optimizer: torch.optim.Optimizer):
        self.by: weakref.WeakSet[Reactions] = weakref.WeakSet()
        self._rates: list[tuple[Any, Any]] = []
        """The rate of each group outside of its step and inside; none outside of steps."""
        optimizer.register_step_pre_hook(self._before)
        optimizer.register_step_post_hook(self._after)

    def restore(self, optimizer: torch.optim.Optimizer) -> None:
        """The rates of before a step, unless another one was set meanwhile. After a step that raised,
        torch calls no hook that does it.
        """
        for group, (rate, inside) in zip(optimizer.param_groups, self._rates, strict=False):
            if group["lr"] is inside:
                group["lr"] = rate
        self._rates = []

    def _before(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        self.restore(optimizer)
        factor = math.prod(each.factor for each in self.by)
        if factor != 1:
            rates = [group["lr"] for group in optimizer.param_groups]
            self._rates = [(rate, None if rate is None else rate * factor) for rate in rates]  # Adafactor's may be None
            for group, (_, inside) in zip(optimizer.param_groups, self._rates, strict=True):
                group["lr"] = inside

    def _after(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        self.restore(optimizer)


_LOWERED: weakref.WeakKeyDictionary[torch.optim.Optimizer, Lowered] = weakref.WeakKeyDictionary()


def distributed() -> bool:
    """Whether torch.distributed connects this process to others."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def _of_all_processes(dangers: list[Finding]) -> list[Finding]:
    """The dangers of all processes. Each sees other batches, and all must react alike to keep equal
    weights.
    """
    if not distributed() or torch.distributed.get_world_size() == 1:
        return dangers
    seen: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(seen, dangers)
    return [alarm for each in seen for alarm in each]

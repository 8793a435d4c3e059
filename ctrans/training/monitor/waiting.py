"""Losses and gradient norms of the steps since the last report of a monitor."""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any

from ctrans.measure.reductions import detached, host_numbers, largest
from ctrans.training.monitor.hooks import in_a_line
from ctrans.training.monitor.memory import Memory, packed, unpacked
from ctrans.training.monitor.past import STEPS

LOGGER = logging.getLogger("ctrans.training.monitor")


def warn(step: int, words: str, error: Exception) -> None:
    """Logs an error of a step. A handler of the user's that raises ends no training."""
    with contextlib.suppress(Exception):
        LOGGER.warning("step %d: %s: %s", step, words, in_a_line(error))


class Waiting:
    """Steps, losses and gradient norms that no report has shown yet.

    It keeps the newest ones, at least `STEPS`, and the largest values of all before. With `scaled`,
    norms that overflow do not count, as a scaler handles them.
    """

    def __init__(self, *, scaled: bool):
        self._scaled = scaled
        self._kept: list[tuple[int, Any, Any]] = []
        self._warned: set[str] = set()

    def number(self, name: str, value: Any, step: int) -> Any:
        """A loss or a norm without its graph. None for what is no number, with one warning."""
        try:
            return detached(value)
        except Exception as error:  # a training may give anything
            if name not in self._warned:
                warn(step, f"unknown {name}", error)
            self._warned.add(name)
            return None

    def optimizer(self, given: Any, step: int) -> Any:
        """An optimiser. None for what has no groups of parameters, with one warning."""
        if given is None or (hasattr(given, "param_groups") and hasattr(given, "state")):
            return given
        if "optimizer" not in self._warned:
            kind = type(given).__name__
            warn(
                step,
                "unknown optimizer",
                TypeError(
                    f"a {kind} has no param_groups and no state: give one optimiser, or None"
                ),
            )
        self._warned.add("optimizer")
        return None

    def add(self, step: int, loss: Any, norm: Any) -> None:
        """Adds a step whose values are tensors, floats, or None if they are unknown."""
        self._kept.append((step, loss, norm))
        if len(self._kept) >= 2 * STEPS:
            old = self._kept[:-STEPS]
            losses = self._known(old, 1)
            norms = self._known(old, 2)
            peaks = (
                old[-1][0],
                largest(losses) if losses else None,
                largest(norms) if norms else None,
            )
            self._kept = [peaks, *self._kept[-STEPS:]]

    def take(self) -> tuple[list[tuple[int, float]], list[tuple[int, float]]]:
        """The known losses and norms, each with its step. They wait no longer."""
        kept = self._kept
        self._kept = []
        return self._known(kept, 1), self._known(kept, 2)

    def memory(self) -> Memory:
        """What waits, for a resumed run."""
        losses, norms = (packed(host_numbers([each[i] for each in self._kept])) for i in (1, 2))
        known = [[step, loss is not None, norm is not None] for step, loss, norm in self._kept]
        return {"waiting": known, "waiting_losses": losses, "waiting_norms": norms}

    def remember(self, memory: Mapping[str, Any]) -> None:
        """Continues from a result of `memory`."""
        losses = unpacked(memory["waiting_losses"])
        norms = unpacked(memory["waiting_norms"])
        for (step, has_loss, has_norm), loss, norm in zip(
            memory["waiting"], losses, norms, strict=True
        ):
            self.add(step, loss if has_loss else None, norm if has_norm else None)

    def _known(self, kept: Sequence[tuple[int, Any, Any]], i: int) -> list[tuple[int, float]]:
        """Steps and values of the known losses (i = 1) or norms (i = 2)."""
        values = host_numbers([each[i] for each in kept])
        known = [
            (each[0], value)
            for each, value in zip(kept, values, strict=True)
            if each[i] is not None
        ]
        if i == 2 and self._scaled:
            return [(step, norm) for step, norm in known if math.isfinite(norm)]
        return known

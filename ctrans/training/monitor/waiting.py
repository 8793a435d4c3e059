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
WITHOUT_OPTIMIZER = (
    "no optimizer was given, so learning rates, shares of weight decay, Adam's gradient ratios and"
    " the edge of stability are not measured: call monitor.step(loss, optimizer)"
)
WITHOUT_GRADIENTS = (
    "no weight has a gradient, so their norms and Adam's gradient ratios are not measured: call"
    " monitor.step after loss.backward() and before optimizer.zero_grad()"
)


Entry = tuple[int, Any, Any]
"""A step, its loss and its gradient norm: tensors, numbers, or None if they are unknown."""


def warn(step: int, message: str, error: Exception) -> None:
    """Logs an error of a step. A handler of the user's that raises ends no training."""
    with contextlib.suppress(Exception):
        LOGGER.warning("step %d: %s: %s", step, message, in_a_line(error))


class Waiting:
    """Steps, losses and gradient norms that no report has shown yet.

    It keeps the newest ones, at least `STEPS`, and the largest values of all before. With `scaled`,
    norms that overflow do not count, as a scaler handles them.
    """

    def __init__(self, *, scaled: bool):
        self._scaled = scaled
        self._entries: list[Entry] = []
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

    def optimizer(self, optimizer: Any, step: int) -> Any:
        """An optimiser. None for what has no groups of parameters, with one warning."""
        if optimizer is None or (
            hasattr(optimizer, "param_groups") and hasattr(optimizer, "state")
        ):
            return optimizer
        if "optimizer" not in self._warned:
            kind = type(optimizer).__name__
            warn(
                step,
                "unknown optimizer",
                TypeError(
                    f"a {kind} has no param_groups and no state: give one optimiser, or None"
                ),
            )
        self._warned.add("optimizer")
        return None

    def say_once(self, name: str, step: int, text: str) -> None:
        """Logs a remark, unless one of that name was logged before."""
        if name in self._warned:
            return
        self._warned.add(name)
        with contextlib.suppress(Exception):  # a handler of the user's may raise
            LOGGER.warning("step %d: %s", step, text)

    def add(self, step: int, loss: Any, norm: Any) -> None:
        """Adds a step whose values are tensors, floats, or None if they are unknown."""
        self._entries.append((step, loss, norm))
        if len(self._entries) >= 2 * STEPS:
            old = self._entries[:-STEPS]
            last_step, _, _ = old[-1]
            losses = self._known_losses(old)
            norms = self._known_norms(old)
            peaks = (
                last_step,
                largest(losses) if losses else None,
                largest(norms) if norms else None,
            )
            self._entries = [peaks, *self._entries[-STEPS:]]

    def take(self) -> tuple[list[tuple[int, float]], list[tuple[int, float]]]:
        """The known losses and norms, each with its step. They wait no longer."""
        entries = self._entries
        self._entries = []
        return self._known_losses(entries), self._known_norms(entries)

    def memory(self) -> Memory:
        """What waits, for a resumed run."""
        losses = host_numbers([loss for _, loss, _ in self._entries])
        norms = host_numbers([norm for _, _, norm in self._entries])
        return {
            "waiting": [
                [step, loss is not None, norm is not None] for step, loss, norm in self._entries
            ],
            "waiting_losses": packed(losses),
            "waiting_norms": packed(norms),
        }

    def remember(self, memory: Mapping[str, Any]) -> None:
        """Continues from a result of `memory`."""
        losses = unpacked(memory["waiting_losses"])
        norms = unpacked(memory["waiting_norms"])
        for (step, has_loss, has_norm), loss, norm in zip(
            memory["waiting"], losses, norms, strict=True
        ):
            self.add(step, loss if has_loss else None, norm if has_norm else None)

    def _known_losses(self, entries: Sequence[Entry]) -> list[tuple[int, float]]:
        """The steps and losses of the entries that have a loss."""
        return _known([(step, loss) for step, loss, _ in entries])

    def _known_norms(self, entries: Sequence[Entry]) -> list[tuple[int, float]]:
        """The steps and gradient norms of the entries that have one; with a loss scaler, of those
        whose norm is finite.
        """
        norms = _known([(step, norm) for step, _, norm in entries])
        if self._scaled:
            return [(step, norm) for step, norm in norms if math.isfinite(norm)]
        return norms


def _known(pairs: Sequence[tuple[int, Any]]) -> list[tuple[int, float]]:
    """The steps and values of (step, value) pairs whose value is known."""
    values = host_numbers([value for _, value in pairs])
    return [
        (step, number)
        for (step, value), number in zip(pairs, values, strict=True)
        if value is not None
    ]

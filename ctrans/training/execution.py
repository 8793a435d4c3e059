"""How a run is executed, apart from its settings: its threads, its device, and what `ctrans train`
adds to it. A checkpoint has it, so that a resumed run goes on alike.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch

from ctrans.base.json_values import is_step
from solvers import ConfigError, shown, unknown

LOGGER = logging.getLogger("ctrans.training")


@dataclass(frozen=True)
class Execution:
    """How the processes of a run compute, and the options of `ctrans train` that are no settings.

    - `threads`: CPU threads of each process, which decide the last bits of the weights; None if
      unknown, as of a run from before they were saved
    - `processes`: the number of processes
    - `device`: the name of the device; None if unknown
    - `tensorboard`: whether TensorBoard's files are written
    - `eval_depth`: further depths at which the finished run is evaluated
    - `plugins`: a digest of the user's plugins; None without plugins, and of a run from before it
      was saved
    """

    threads: int | None = None
    processes: int = 1
    device: str | None = None
    tensorboard: bool = False
    eval_depth: tuple[int, ...] = ()
    plugins: str | None = None

    def warn_if_other_than(self, earlier: Execution) -> None:
        """Logs what makes a resumed run's bits differ from those of a run that never stopped."""
        threads_count = self.processes == earlier.processes and None not in (
            self.threads,
            earlier.threads,
        )
        if threads_count and self.threads != earlier.threads:
            LOGGER.warning(
                "the run had %s CPU threads, and goes on with %s: its weights will differ in their"
                " last bits from those of a run that never stopped",
                earlier.threads,
                self.threads,
            )
        if None not in (self.plugins, earlier.plugins) and self.plugins != earlier.plugins:
            LOGGER.warning(
                "the plugins are not those with which the run was made: if one of them computes"
                " something else now, the run goes on with another function"
            )
        if earlier.device is None or self.device is None:
            return
        if torch.device(earlier.device).type != torch.device(self.device).type:
            LOGGER.warning(
                "the run was on device %r, and goes on on %r: its weights will differ in their last"
                " bits from those of a run that never stopped",
                earlier.device,
                self.device,
            )


DIGITS = 64
"""The length of a SHA-256 in hexadecimal digits."""
UNKNOWN = Execution()
"""The execution of a run from before executions were saved."""


def _is_count(value: Any) -> bool:
    return is_step(value) and value > 0


def _is_device(value: Any) -> bool:
    """Whether torch has a device of that name, here or elsewhere."""
    try:
        torch.device(value)
    except (RuntimeError, TypeError):
        return False
    return isinstance(value, str)


ALLOWED: dict[str, tuple[Callable[[Any], bool], str]] = {
    "threads": (lambda value: value is None or _is_count(value), "a number of threads or null"),
    "processes": (_is_count, "a number of processes"),
    "device": (lambda value: value is None or _is_device(value), "a name of a device or null"),
    "tensorboard": (lambda value: type(value) is bool, "true or false"),
    "eval_depth": (
        lambda value: isinstance(value, list) and all(map(_is_count, value)),
        "a list of numbers of blocks",
    ),
    "plugins": (
        lambda value: value is None or (isinstance(value, str) and len(value) == DIGITS),
        "a SHA-256 or null",
    ),
}
"""What JSON may have for each field, and that in words."""


def execution_in(content: Any, path: Path) -> Execution:
    """The execution in JSON from that file. Raises ConfigError for an unknown key, and for a value
    of another type.
    """
    if not isinstance(content, Mapping):
        raise ConfigError(
            f"execution = {shown(content)} in {str(path)!r}: give an object, or restore the file"
        )
    names = [field.name for field in fields(Execution)]
    for name, value in content.items():
        if name not in names:
            raise unknown(f"key of execution in {path.name}", name, names)
        fits, allowed = ALLOWED[name]
        if not fits(value):
            raise ConfigError(
                f"{name} = {shown(value)} in {str(path)!r}: give {allowed}, or restore the file"
            )
    values = dict(content)
    values["eval_depth"] = tuple(values.get("eval_depth", ()))
    return Execution(**values)

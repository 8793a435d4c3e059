"""A run's rows as TensorBoard scalars, where that package is installed."""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from solvers import ConfigError


def check_tensorboard() -> None:
    """Raises ConfigError if TensorBoard is not installed."""
    if importlib.util.find_spec("tensorboard") is None:
        raise ConfigError(
            "TensorBoard is not installed: pip install tensorboard, or leave out --tensorboard"
        )


@contextlib.contextmanager
def tensorboard(directory: Path, done: int) -> Iterator[Callable[[dict[str, Any]], None]]:
    """Gives a function that writes a row's numbers under its step; what is there of steps after
    `done` is forgotten.
    """
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(directory), purge_step=done + 1) as writer:

        def observe(row: dict[str, Any]) -> None:
            for name, value in row.items():
                if name != "step" and not isinstance(value, str):
                    writer.add_scalar(name, value, row["step"])

        yield observe

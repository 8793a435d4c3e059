"""The run's log: one JSON object per line and iteration, and one for settings that a resumed run
has anew and for divergence.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from solvers import ConfigError

LOG = "log.jsonl"
Row = dict[str, Any]
SMOOTH = 100
"""Of about this many stretches of iterations `curves` has means."""


def append(directory: Path, row: Row) -> None:
    """Adds a line; a number that JSON lacks is written as its name in quotes. ConfigError, and no
    line, where it cannot be.
    """
    line = json.dumps({key: value if _finite(value) else str(value) for key, value in row.items()}, allow_nan=False)
    path = directory / LOG
    length = path.stat().st_size if path.exists() else 0
    try:
        with path.open("a") as file:
            file.write(line + "\n")
    except OSError as error:
        with contextlib.suppress(OSError):
            os.truncate(path, length)
        raise _unwritten(path, error) from None


def read(directory: Path) -> Iterator[Row]:
    """The rows, up to a line that was not finished, without lines that are damaged."""
    path = directory / LOG
    if path.exists():
        yield from (row for row in map(_decode, _lines(path)) if row is not None)


def curves(rows: Iterable[Row]) -> dict[str, list[tuple[float, float]]]:
    """Pairs of a step and a figure, by what it is.

    Of iterations they are means over about `SMOOTH` stretches of equal length.
    """
    rows = list(rows)
    steps = [row for row in rows if "loss" in row]
    evaluations = [row for row in rows if "validation_loss" in row]
    stretch = max(1, len(steps) // SMOOTH)
    parts = [steps[i : i + stretch] for i in range(0, len(steps) - stretch + 1, stretch)]
    found = {}
    for name, key in {"training": "loss", "learning_rate": "learning_rate", "gradient_norm": "gradient_norm"}.items():
        found[name] = [(_mean(part, "step"), _mean(part, key)) for part in parts]
    for name, key in {"validation": "validation_loss", "growth": "growth", "largest": "largest"}.items():
        found[name] = [(float(row["step"]), float(row[key])) for row in evaluations]
    return found


def _mean(rows: Sequence[Row], name: str) -> float:
    return sum(float(row[name]) for row in rows) / len(rows)


def unsaved(directory: Path) -> bool:
    """Whether it is the log of a run that ended before its first checkpoint: nothing but rows of
    step 0.
    """
    rows = map(_decode, _lines(directory / LOG))
    return all(row is not None and row["step"] == 0 for row in rows)


def cut(directory: Path, step: int) -> None:
    """Keeps what led to the checkpoint of that iteration: what came after it will come again, or
    otherwise.

    Raises ConfigError, with the log as it was, where it cannot be written.
    """
    path, temporary = directory / LOG, directory / f".{LOG}"
    kept = [row for row in read(directory) if row["step"] < step or (row["step"] == step and "settings" not in row)]
    try:
        temporary.write_text("".join(json.dumps(row) + "\n" for row in kept if "diverged" not in row))
        os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise _unwritten(path, error) from None


def set_aside(directory: Path, generation: str) -> None:
    """Keeps the log of a run that is to be overwritten, by where its checkpoints are, until that
    has happened. Raises OSError.
    """
    if (directory / LOG).exists() and not (directory / _aside(generation)).exists():
        os.replace(directory / LOG, directory / _aside(generation))


def bring_back(directory: Path, generation: str) -> None:
    """The log of the run with those checkpoints, where it was set aside for one that never came to
    be; others' are removed.
    """
    aside = directory / _aside(generation)
    if aside.exists():
        os.replace(aside, directory / LOG)
    for other in directory.glob(_aside("*")):
        other.unlink()


def _aside(generation: str) -> str:
    return f".{generation}.{LOG}"


def _lines(path: Path) -> Iterator[str]:
    with path.open(errors="replace") as file:
        yield from file


def _decode(line: str) -> Row | None:
    """The row, or None where the line holds none."""
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if line.endswith("\n") and isinstance(row, dict) and isinstance(row.get("step"), int) else None


def _unwritten(path: Path, error: OSError) -> ConfigError:
    return ConfigError(f"cannot write {str(path)!r}: {error.strerror or error}; free some space, then go on with --resume")


def _finite(value: Any) -> bool:
    return not isinstance(value, float) or abs(value) < float("inf")

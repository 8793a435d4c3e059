"""The log of a run: one JSON object per line for each iteration, for changed settings of a resumed
run, and for divergence.
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
"""`curves` has means over about this number of stretches of iterations."""


def append(directory: Path, row: Row) -> None:
    """Adds a line, with inf and nan as texts. Raises ConfigError, and adds nothing, if it cannot
    write.
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
    """The rows, without lines that are incomplete or damaged."""
    path = directory / LOG
    if path.exists():
        yield from (row for row in map(_decode, _lines(path)) if row is not None)


def curves(rows: Iterable[Row]) -> dict[str, list[tuple[float, float]]]:
    """(step, value) pairs for each figure. Those of iterations are means over about `SMOOTH`
    stretches of equal length.
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
    """Whether the log has rows of step 0 only: the run ended before its first checkpoint."""
    rows = map(_decode, _lines(directory / LOG))
    return all(row is not None and row["step"] == 0 for row in rows)


def cut(directory: Path, step: int) -> None:
    """Removes the rows after the checkpoint of that iteration. Raises ConfigError, and changes
    nothing, if it cannot write.
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
    """Renames the log of a run that a new one overwrites, by the name of its directory of
    checkpoints. Raises OSError.
    """
    if (directory / LOG).exists() and not (directory / _aside(generation)).exists():
        os.replace(directory / LOG, directory / _aside(generation))


def bring_back(directory: Path, generation: str) -> None:
    """Restores the log that was set aside for these checkpoints, if there is one, and removes all
    others.
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
    """The row of a line, or None."""
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if line.endswith("\n") and isinstance(row, dict) and isinstance(row.get("step"), int) else None


def _unwritten(path: Path, error: OSError) -> ConfigError:
    return ConfigError(f"cannot write {str(path)!r}: {error.strerror or error}; free some space, then go on with --resume")


def _finite(value: Any) -> bool:
    return not isinstance(value, float) or abs(value) < float("inf")

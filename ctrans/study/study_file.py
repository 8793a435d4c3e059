"""Studies in TOML files:

name = "placements"
seeds = [0, 1]
learning_rates = [1e-3, 1e-2]
budget = 2.0           # processor hours
file = "book.txt"      # or bin = "DIR", or task = "digits"; default: Python's documentation

[base]                 # fields of GPTConfig and TrainConfig
depth = 4
iterations = 300

[vary]
placement = ["pre", "peri"]
dt = [1.0, 0.1]

[[cases]]              # cases one by one, with or without [vary]
norm = "rmsnorm"
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ctrans.base.given_files import read_toml
from ctrans.study.description import Study
from ctrans.training.data_sources import Source
from solvers import ConfigError, shown, unknown

KEYS = {
    "name": str,
    "base": dict,
    "vary": dict,
    "cases": list,
    "learning_rates": list,
    "seeds": list,
    "measure": list,
    "budget": (int, float),
}
PATHS = ("file", "bin")
SOURCES = (*PATHS, "task")
WHOLE = 2**63
"""TOML's limit of whole numbers, which Python's reader does not check."""


def read_study(path: Path) -> Study:
    """Reads a study. Raises ConfigError for an invalid file."""
    content = read_toml(path)
    _check_plain(content, path)
    for key, value in content.items():
        if key not in (*KEYS, *SOURCES):
            raise unknown(f"key in {str(path)!r}", key, [*KEYS, *SOURCES])
        kind: Any = KEYS.get(key, str)
        if not isinstance(value, kind) or isinstance(value, bool):
            kinds = kind
            if not isinstance(kind, tuple):
                kinds = (kind,)
            names = " or ".join(allowed.__name__ for allowed in kinds)
            raise ConfigError(
                f"{key} = {shown(value)} in {str(path)!r}: give a value of type {names}"
            )
    if not all(isinstance(case, dict) for case in content.get("cases", [])):
        raise ConfigError(
            f"cases in {str(path)!r} has a value that is no table: write each case as [[cases]]"
        )
    if "learning_rates" in content and "learning_rate" in content.get("base", {}):
        raise ConfigError(
            f"learning_rate in [base] of {str(path)!r} and learning_rates exclude each other: leave"
            " one out"
        )
    sources = [key for key in SOURCES if key in content]
    if len(sources) > 1:
        raise ConfigError(
            f"{' and '.join(sources)} in {str(path)!r} exclude each other: leave one out"
        )
    source: Source
    if "task" in content:
        source = {"task": content.pop("task")}
    else:
        paths: dict[str, str | None] = dict.fromkeys(PATHS)
        for key in PATHS:
            if key in content:  # paths are relative to the file
                paths[key] = str((path.parent / content.pop(key)).absolute())
        source = paths
    return Study(**{"name": path.stem, **content}, source=source)


def _check_plain(value: Any, path: Path) -> None:
    """Raises ConfigError for a date, and for a whole number of more than 64 bits."""
    if isinstance(value, dict):
        for part in value.values():
            _check_plain(part, path)
        return
    if isinstance(value, list):
        for part in value:
            _check_plain(part, path)
        return
    if isinstance(value, int):
        if -WHOLE <= value < WHOLE:
            return
        wrong = f"a whole number of {value.bit_length()} bits"
    elif isinstance(value, (str, float)):
        return
    else:
        wrong = str(value)
    raise ConfigError(
        f"{str(path)!r} has {wrong}: give texts, true or false, or numbers of at most 64 bits"
    )

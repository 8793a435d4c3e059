"""Studies in TOML files:

name = "placements"
seeds = [0, 1]
learning_rates = [1e-3, 1e-2]
budget = 2.0                      # processor hours
file = "book.txt"                 # or bin = "DIR", or task = "digits"; default: Python's documentation

[base]                            # fields of GPTConfig and TrainConfig
depth = 4
iterations = 300

[vary] placement = ["pre", "peri"] dt = [1.0, 0.1]

[[cases]]                         # cases one by one, with or without [vary]
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
            names = " or ".join(
                each.__name__ for each in (kind if isinstance(kind, tuple) else (kind,))
            )
            raise ConfigError(
                f"{key} = {shown(value)} in {str(path)!r}: give a value of type {names}"
            )
    if not all(isinstance(case, dict) for case in content.get("cases", [])):
        raise ConfigError(
            f"cases in {str(path)!r} has a value that is no table: write each case as [[cases]]"
        )
    if len(given := [key for key in SOURCES if key in content]) > 1:
        raise ConfigError(
            f"{' and '.join(given)} in {str(path)!r} exclude each other: leave one out"
        )
    if "task" in content:
        source: Source = {"task": content.pop("task")}
    else:  # paths are relative to the file
        source = {
            key: str((path.parent / content.pop(key)).absolute()) if key in content else None
            for key in PATHS
        }
    return Study(**{"name": path.stem, **content}, source=source)


def _check_plain(value: Any, path: Path) -> None:
    """Raises ConfigError for a date, and for a whole number of more than 64 bits."""
    if isinstance(value, (dict, list)):
        for each in value.values() if isinstance(value, dict) else value:
            _check_plain(each, path)
    elif not isinstance(value, (str, int, float)) or (
        isinstance(value, int) and not -WHOLE <= value < WHOLE
    ):
        if not isinstance(value, int):
            said = str(value)
        else:
            said = f"a whole number of {value.bit_length()} bits"
        raise ConfigError(
            f"{str(path)!r} has {said}: give texts, true or false, or numbers of at most 64 bits"
        )

"""Modules of the user's own that are imported before a command reads its choices, so that their table entries are among them.

Nothing is looked for: only what the user names after --plugin is run, in the order in which it is named.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

import click

LOADED: list[str] = []
"""What was imported, as it was named: results depend on it."""


def import_plugins(context: click.Context, parameter: click.Parameter, values: Sequence[str]) -> None:
    """Imports each value: the path of a file that ends in .py, or the name of a module that is installed or in this directory."""
    for value in values:
        try:
            _import_file(Path(value)) if value.endswith(".py") else _import_module(value)
        except click.ClickException:
            raise
        except Exception as error:  # somebody else's code may raise anything: it is named, with its place
            place = traceback.extract_tb(error.__traceback__)[-1]
            where = f"{place.filename}, line {place.lineno}"
            raise click.BadParameter(f"{value!r} failed at {where}: {type(error).__name__}: {error}") from None
        if value not in LOADED:
            LOADED.append(value)


def _import_file(path: Path) -> None:
    name = f"{path.stem} ({path.resolve()})"
    if name in sys.modules:
        return
    if not path.is_file():
        raise click.BadParameter(f"there is no file {str(path)!r}: give the path of a .py file, or the name of a module")
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None, "a file that ends in .py has a loader"
    assert spec.loader is not None, "a file that ends in .py has a loader"
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up while it runs
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise


def _import_module(name: str) -> None:
    if (here := os.getcwd()) not in sys.path:
        sys.path.append(here)  # at the end, so that it hides nothing that is installed
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise
        raise click.BadParameter(
            f"there is no module {name!r}: give the name of one that is installed or in this directory, or the path of a .py file"
        ) from None

"""Modules of the user's own that are imported before a command reads its choices, so that their
table entries are among them.

Nothing is looked for: only what the user names after --plugin is run, in the order in which it is
named.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import click

LOADED: list[str] = []
"""What was imported, as it was named: results depend on it."""


def import_plugins(context: click.Context, parameter: click.Parameter, values: Sequence[str]) -> None:
    """Imports each value: the path of a file that ends in .py, or the name of a module that is
    installed or in this directory.
    """
    for value in values:
        import_named(value)
        if value not in LOADED:
            LOADED.append(value)


def import_named(value: str) -> ModuleType:
    """The module: of a file whose path ends in .py, or of a name that is installed or in this
    directory.
    """
    module: ModuleType = _named(value, lambda: _import_file(Path(value)) if value.endswith(".py") else _import_module(value))
    return module


def called(value: str) -> Any:
    """What the function of "module:function" or "file.py:function" returns, called without
    arguments.
    """
    function = function_of(value)
    with _beside(value.rpartition(":")[0]):
        try:
            inspect.signature(function).bind()
        except TypeError as error:
            raise click.BadParameter(f"{value!r} is called without arguments: {error}") from None
        except ValueError:  # a function that does not say what it takes
            pass
        return _named(value, function)


def function_of(value: str) -> Callable[..., Any]:
    """The function of "module:function" or "file.py:function", not called."""
    where, colon, name = value.rpartition(":")
    if not colon or not name.isidentifier() or not where:
        raise click.BadParameter(f"{value!r} is no module:function: name a module, or a .py file, and a function in it")
    module = import_named(where)
    function: Any = getattr(module, name, None)
    if not callable(function):
        own = [key for key, value in vars(module).items() if inspect.isfunction(value) and value.__module__ == module.__name__]
        raise click.BadParameter(f"{where!r} has no function {name!r}; its functions: {', '.join(own) or 'none'}")
    return cast("Callable[..., Any]", function)


@contextlib.contextmanager
def _beside(where: str) -> Iterator[None]:
    """Inside, a file's own folder comes first among those that modules are imported from, as where
    Python runs it.
    """
    folder = str(Path(where).resolve().parent) if where.endswith(".py") else None
    if folder is not None:
        sys.path.insert(0, folder)
    try:
        yield
    finally:
        if folder in sys.path:
            sys.path.remove(folder)


def _named(value: str, act: Callable[[], Any]) -> Any:
    """What it gives; somebody else's code may raise anything, which is named, with its place."""
    try:
        return act()
    except click.ClickException:
        raise
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{place.filename}, line {place.lineno}"
        raise click.BadParameter(f"{value!r} failed at {where}: {type(error).__name__}: {error}") from None


def _import_file(path: Path) -> ModuleType:
    name = f"{path.stem} ({path.resolve()})"
    if name in sys.modules:
        return sys.modules[name]
    if not path.is_file():
        raise click.BadParameter(f"there is no file {str(path)!r}: give the path of a .py file, or the name of a module")
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None, "a file that ends in .py has a loader"
    assert spec.loader is not None, "a file that ends in .py has a loader"
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up while it runs
    try:
        with _beside(str(path)):
            spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _import_module(name: str) -> ModuleType:
    if (here := os.getcwd()) not in sys.path:
        sys.path.append(here)  # at the end, so that it hides nothing that is installed
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise
        raise click.BadParameter(
            f"there is no module {name!r}: give the name of one that is installed or in this directory, or the path of a .py file"
        ) from None

"""The user's own modules: those of --plugin, which add entries to the tables of ctrans, and those
of options that name a function.

ctrans runs only what the user names, in that order.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import chdir, contextmanager, redirect_stdout
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import click

from ctrans.base.printable import text_of
from ctrans.cli.exits import Exit
from ctrans.cli.say import stdout_apart

LOADED: dict[str, bytes] = {}
"""The plugins that were imported, as named, each with the SHA-256 of its file as it was then.
Results depend on them and show them.
"""
FILES: set[str] = set()
"""The files of the user's modules that were imported."""


def import_named(value: str) -> ModuleType:
    """Imports a .py file by its path, or a module that is installed or in this directory."""
    with _failures_of(value):
        if value.endswith(".py"):
            module = _import_file(Path(value))
        else:
            module = _import_module(value)
        FILES.add(str(getattr(module, "__file__", value)))  # built-in modules have none
        return module


def load_plugin(value: str) -> None:
    """Imports a plugin (see `import_named`)."""
    file = getattr(import_named(value), "__file__", None)
    content = b""  # built-in modules have no file
    if file is not None:
        content = Path(file).read_bytes()
    LOADED[value] = hashlib.sha256(content).digest()


def digest_of_plugins() -> str | None:
    """SHA-256 of the files of the plugins that were imported, in their order; None without plugins.
    What a plugin imports itself is not in it.
    """
    if not LOADED:
        return None
    return hashlib.sha256(b"".join(LOADED.values())).hexdigest()


def called(value: str) -> Any:
    """The result of the function "module:function" or "file.py:function", called without
    arguments.
    """
    function = function_of(value)
    with _folder_first(value.rpartition(":")[0]):
        try:
            inspect.signature(function).bind()
        except TypeError as error:
            raise click.BadParameter(f"{value!r} is called without arguments: {error}") from None
        except ValueError:  # a function without a signature
            pass
        with _failures_of(value):
            return function()


def function_of(value: str) -> Callable[..., Any]:
    """The function "module:function" or "file.py:function"."""
    where, colon, name = value.rpartition(":")
    if not colon or not name.isidentifier() or not where:
        raise click.BadParameter(
            f"{value!r} is no module:function: name a module, or a .py file, and a function in it"
        )
    module = import_named(where)
    function = getattr(module, name, None)
    if not callable(function):
        functions = [
            key
            for key, value in vars(module).items()
            if inspect.isfunction(value) and value.__module__ == module.__name__
        ]
        raise click.BadParameter(
            f"{where!r} has no function {name!r}; its functions: {', '.join(functions) or 'none'}"
        )
    return cast("Callable[..., Any]", function)


@contextmanager
def _folder_first(where: str) -> Iterator[None]:
    """Inside, Python imports from a file's own folder first, as if it ran the file."""
    if not where.endswith(".py"):
        yield
        return
    folder = str(Path(where).resolve().parent)
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        if folder in sys.path:
            sys.path.remove(folder)


@contextmanager
def _failures_of(value: str) -> Iterator[None]:
    """Turns any error of the user's code, and sys.exit, into one message with its place. What the
    code prints goes to stderr, since stdout may have to hold one JSON object. The directory stays
    that of the command, whose paths start there.
    """
    try:
        with stdout_apart(), redirect_stdout(sys.stderr), chdir(os.getcwd()):
            yield
    except (click.ClickException, Exit, KeyboardInterrupt):
        raise
    except BaseException as error:
        if isinstance(error, SyntaxError):
            where = f"{error.filename}, line {error.lineno}"
        else:
            frame = traceback.extract_tb(error.__traceback__)[-1]
            where = f"{frame.filename}, line {frame.lineno}"
        raise click.BadParameter(
            f"{value!r} failed at {where}: {type(error).__name__}: {text_of(error)}"
        ) from error


def _import_file(path: Path) -> ModuleType:
    name = f"{path.stem} ({path.resolve()})"
    if name in sys.modules:
        return sys.modules[name]
    if not path.is_file():
        raise click.BadParameter(
            f"there is no file {str(path)!r}: give the path of a .py file, or the name of a module"
        )
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None, "a file that ends in .py has a loader"
    assert spec.loader is not None, "a file that ends in .py has a loader"
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look up their module while it runs
    try:
        with _folder_first(str(path)):
            spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _import_module(name: str) -> ModuleType:
    working_directory = os.getcwd()
    if working_directory not in sys.path:
        sys.path.append(working_directory)  # last, so that installed modules come first
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise
        raise click.BadParameter(
            f"there is no module {name!r}: give the name of one that is installed or in this"
            " directory, or the path of a .py file"
        ) from None

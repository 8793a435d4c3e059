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
from contextlib import (
    AbstractContextManager,
    chdir,
    contextmanager,
    nullcontext,
    redirect_stdout,
)
from pathlib import Path
from types import ModuleType
from typing import Any, cast
from weakref import WeakKeyDictionary

import click

from ctrans.base.printable import text_of
from ctrans.cli.exits import Exit
from ctrans.cli.own_sources import OwnSources, SourceLoader, own_sources
from ctrans.cli.say import stdout_apart

LOADED: dict[str, bytes] = {}
"""The plugins that were imported, as named, each with the SHA-256 of its files as they were then.
Results depend on them and show them.
"""
FILES: set[str] = set()
"""The files of the user's modules that were imported, and of what these import from their own
folders.
"""
_SOURCES: WeakKeyDictionary[ModuleType, OwnSources] = WeakKeyDictionary()
"""The sources that each module was first imported from. Python runs no later bytes of them."""


def import_named(value: str) -> ModuleType:
    """Imports a .py file by its path, or a module that is installed or in this directory."""
    return _imported(value)[0]


def _imported(value: str) -> tuple[ModuleType, OwnSources]:
    """The module, and the sources that importing it for the first time loaded."""
    with _failures_of(value), own_sources(value) as sources:
        if value.endswith(".py"):
            module = _import_file(Path(value), sources)
        else:
            module = _import_module(value)
        # built-in modules have no file
        FILES.update([str(getattr(module, "__file__", value)), *sources.digests])
        return module, _SOURCES.setdefault(module, sources)


def load_plugin(value: str) -> None:
    """Imports a plugin (see `import_named`)."""
    module, sources = _imported(value)
    LOADED[value] = _digest(module, sources)


def _digest(module: ModuleType, sources: OwnSources) -> bytes:
    """SHA-256 of the plugin's file as it ran; with the modules that it loaded from its own folder,
    of that and of their paths and theirs.
    """
    file = getattr(module, "__file__", None)
    if file is None:  # a built-in module
        digest = hashlib.sha256(b"").digest()
    elif file in sources.digests:
        digest = sources.digests[file]
    else:  # compiled, or imported by another module
        digest = hashlib.sha256(Path(file).read_bytes()).digest()
        sources.digests[file] = digest
    digests = {path: value for path, value in sources.digests.items() if path != file}
    if not digests:
        return digest
    others = sorted((str(sources.relative(path)), digests[path]) for path in digests)
    parts = [digest]
    for name, digest_of_other in others:
        parts += [os.fsencode(name), b"\0", digest_of_other]
    return hashlib.sha256(b"".join(parts)).digest()


def digest_of_plugins() -> str | None:
    """SHA-256 of the files of the plugins that were imported, in their order; None without plugins.
    Modules that a plugin imports from its own folder or package are in it; others, and those that
    it imports later, are not.
    """
    if not LOADED:
        return None
    return hashlib.sha256(b"".join(LOADED.values())).hexdigest()


def called(value: str) -> Any:
    """The result of the function "module:function" or "file.py:function", called without
    arguments.
    """
    function = function_of(value)
    where = value.rpartition(":")[0]
    with _folder_first(where), own_sources(where):
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
        with stdout_apart(), redirect_stdout(sys.stderr), _directory_kept():
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


def _directory_kept() -> AbstractContextManager[None]:
    """At the end the process is in the directory that it is in now, if there is one."""
    try:
        return chdir(os.getcwd())
    except FileNotFoundError:  # someone removed it
        return nullcontext()


def _import_file(path: Path, sources: OwnSources) -> ModuleType:
    name = f"{path.stem} ({path.resolve()})"
    if name in sys.modules:
        return sys.modules[name]
    if not path.is_file():
        raise click.BadParameter(
            f"there is no file {str(path)!r}: give the path of a .py file, or the name of a module"
        )
    place = str(path.absolute())
    loader = SourceLoader(name, place, sources)
    spec = importlib.util.spec_from_file_location(name, place, loader=loader)
    assert spec is not None, "a file that ends in .py has a loader"
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look up their module while it runs
    try:
        with _folder_first(str(path)):
            loader.exec_module(module)
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

"""Requests: frozen dataclasses whose fields are the options of a command."""

from __future__ import annotations

import contextlib
import inspect
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, TypeVar

import click
from click.core import ParameterSource

from ctrans.base.option import check_options, option, options_of
from ctrans.cli.click_options import (
    GroupedCommand,
    OptionValues,
    parameters_of,
    settings_in,
)
from ctrans.cli.exits import Exit
from ctrans.cli.other_warnings import settle_other_warnings
from ctrans.cli.own_sources import file_of_module
from ctrans.cli.plugins import FILES
from ctrans.cli.say import stdout_apart
from solvers import ConfigError

OUTPUT = "Output"
"""The group of options that say what the command writes, and where."""
STDOUT = "ctrans.stdout"
"""The key of click's context for the stream that has the object of --json -."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """The request of any command. Fields made with `option` are options.

    - `command`: the command's name
    - `options`: the value of each option by name, in click's order; results show them
    - `typed`: the names of the options that the user typed
    """

    command: str
    options: OptionValues
    typed: frozenset[str]
    json_path: str | None = option(
        None,
        "Write the result as one JSON object to this file. - writes it to stdout and prints nothing"
        " else there.",
        group=OUTPUT,
        flags="--json",
        metavar="PATH",
    )
    html_path: str | None = option(
        None,
        "Also write the result as one HTML file. It has interactive figures and sortable tables,"
        " and needs no network (pip install 'ctrans[report]').",
        group=OUTPUT,
        flags="--html",
        metavar="PATH",
    )
    verbose: bool = option(
        default=False,
        help="Also print formulas, further tables, and others' warnings.",
        group=OUTPUT,
    )

    explain: bool = option(
        default=False,
        help="Also print what each figure and verdict means.",
        group=OUTPUT,
    )

    overwrite: bool = option(
        default=False,
        help="Replace files of the same names that ctrans did not write.",
        group=OUTPUT,
    )

    unshown: ClassVar[frozenset[str]] = frozenset(
        {"json_path", "html_path", "verbose", "explain", "overwrite"}
    )
    """Options that results do not show."""
    defaults: ClassVar[OptionValues] = {}
    """The command's defaults, where they differ from those of the fields."""
    common: ClassVar[frozenset[str]] = frozenset()
    """The options that --help shows; if there are none, it shows all. --help-all always does."""

    @property
    def quiet(self) -> bool:
        """Whether stdout holds the JSON only."""
        return self.json_path == "-"

    @property
    def inputs(self) -> list[Path]:
        """The files and directories that the command reads: paths among the values of its options,
        and the user's modules with what they imported from their own folders.
        """
        kind: Any = type(self)  # a class is hashable, which mypy does not know
        about = options_of(kind)
        inputs = [Path(file) for file in sorted(FILES) if os.path.isfile(file)]
        for name, value in self.options.items():
            if name not in about or about[name].group != OUTPUT:
                inputs += _paths_in(value)
        return inputs

    def shown(self, **resolved: Any) -> dict[str, Any]:
        """The options for JSON. `resolved` replaces values or appends them."""
        values = {name: value for name, value in self.options.items() if name not in self.unshown}
        return {name: _in_words(value) for name, value in (values | resolved).items()}


@dataclass(frozen=True, kw_only=True)
class WrittenRequest(Request):
    """The request of a command that writes files; `out` is their directory."""

    out: Path | None = option(
        None,
        "Directory for the result's files.",
        group=OUTPUT,
        default_words="out/COMMAND; none with --json -",
    )

    unshown = Request.unshown | {"out"}


def _paths_in(value: Any) -> list[Path]:
    """The files and directories that the value of an option names: a path, the beginning of
    FILE.py:FUNCTION, the file of the module in MODULE:FUNCTION, or several of them.
    """
    if isinstance(value, Path):
        return [value]
    if isinstance(value, tuple):
        return [path for entry in value for path in _paths_in(entry)]
    if isinstance(value, str):
        named = value.rpartition(":")[0]
        paths = [Path(text) for text in (value, named) if text and os.path.isfile(text)]
        if all(part.isidentifier() for part in named.split(".")):
            file = file_of_module(named)
            if file is not None:
                paths.append(file)
        return paths
    return []


def _in_words(value: Any) -> Any:
    """Paths, alone or in a tuple, as text."""
    if isinstance(value, tuple):
        return [_in_words(entry) for entry in value]
    if isinstance(value, Path):
        return str(value)
    return value


Asked = TypeVar("Asked", bound=Request)


def request_of(kind: type[Asked], context: click.Context) -> Asked:
    """The request of a command from click's parameters. Raises ConfigError for values that
    `check_options` does not allow.
    """
    options = context.params
    values: dict[str, Any] = {
        field: {name: options[name] for name in names} for field, names in settings_in(kind).items()
    }
    values |= {field.name: options[field.name] for field in fields(kind) if field.name in options}
    typed = [
        name
        for name in options
        if context.get_parameter_source(name) is ParameterSource.COMMANDLINE
    ]
    request = kind(
        command=str(context.command.name),
        options=MappingProxyType(dict(options)),
        typed=frozenset(typed),
        **values,
    )
    check_options(request)
    return request


def command_of(
    kind: type[Asked], name: str, epilog: str | None = None
) -> Callable[[Callable[[Asked], None]], click.Command]:
    """Makes a command of a function that takes a request. The command has the request's options."""

    def decorate(command: Callable[[Asked], None]) -> click.Command:
        @click.pass_context
        def call(context: click.Context, /, **_: object) -> None:
            settle_other_warnings(verbose=context.params["verbose"])
            request = request_of(kind, context)
            try:
                with contextlib.ExitStack() as stack:
                    if request.quiet:  # models of users may print
                        stack.enter_context(stdout_apart())
                        context.meta[STDOUT] = sys.stdout
                        stack.enter_context(contextlib.redirect_stdout(sys.stderr))
                    command(request)
            except SystemExit as stop:
                # rich exits where nobody reads
                nobody_reads = isinstance(stop.__context__, BrokenPipeError)
                if isinstance(stop, Exit) or nobody_reads:
                    raise
                raise ConfigError(
                    "code of a model or a plugin ended the command by sys.exit: remove that call"
                ) from None

        click_command = GroupedCommand(
            name,
            context_settings={"default_map": kind.defaults},
            callback=call,
            params=parameters_of(kind),
            help=inspect.getdoc(command),
            epilog=epilog,
        )
        click_command.common = kind.common
        return click_command

    return decorate


def check_exclusive(request: Request, *pairs: tuple[str, str]) -> None:
    """Raises ConfigError if both options of a pair are given."""
    kind: Any = type(request)  # a class is hashable, which mypy does not know
    about = options_of(kind)
    for pair in pairs:
        if all(getattr(request, name) not in (None, False) for name in pair):
            first, second = (about[name].flag(name) for name in pair)
            raise ConfigError(f"{first} and {second} exclude each other: choose one")


def absolute_paths(**paths: Path | None) -> dict[str, str | None]:
    """Paths as text that any directory may read."""
    return {name: None if path is None else str(path.absolute()) for name, path in paths.items()}

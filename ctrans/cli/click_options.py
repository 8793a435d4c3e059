"""Click options and commands, made from the fields of dataclasses (`ctrans.base.option`)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import click

from ctrans.base.option import OWN, FieldType, Option, defaults_of, field_types, option, options_of
from ctrans.dynamics.placement import PLACEMENTS, spell
from solvers import ConfigError, unknown

OptionValues = Mapping[str, Any]
"""Values of options by name."""
ARGUMENTS = "Arguments"
GROUPS = (
    *(
        ARGUMENTS,
        "Architecture",
        "Norms",
        "Residual",
        "Attention",
        "Feed-forward",
        "Experts",
        "Weights",
        "Data",
        "Training",
    ),
    *("Solver", OWN, "Monitor", "Device", "Other models", "Output"),
)
"""Groups of options in the order in which results show them."""
SETTINGS = "settings"
"""The key in a field's metadata that holds a dataclass and the names of its options that the
command has.
"""


def settings_of(cls: type, *, only: Sequence[str] = (), without: Sequence[str] = ()) -> Any:
    """A field of a request that holds the values of a dataclass's options by name.

    The options are all of them, those in `only`, or all but those in `without`.
    """
    names = only or [name for name in options_of(cls) if name not in without]
    return dataclasses.field(metadata={SETTINGS: (cls, tuple(names))})


def settings_in(kind: type) -> dict[str, tuple[str, ...]]:
    """The fields of a request that `settings_of` made, each with the names of its options."""
    return {
        field.name: field.metadata[SETTINGS][1]
        for field in fields(kind)
        if SETTINGS in field.metadata
    }


def argument(metavar: str, **click: Any) -> Any:
    """A field of a request that is a positional argument of the command."""
    return option(MISSING, "", group=ARGUMENTS, metavar=metavar, **click)


def placements_option(*default: str) -> Any:
    """The repeatable option ``--placement`` with these defaults."""
    words = (
        "Repeatable. all, or a name of the table; post/pre for attention and FFN; post*3+pre*9"
        " block by block."
    )
    return option(
        default,
        words,
        group="Architecture",
        choices=PLACEMENTS,
        other_choices=True,
        flags="--placement",
    )


class GroupedOption(click.Option):
    """An option with the heading that ``--help`` shows it under."""

    group = OWN


class GroupedCommand(click.Command):
    """A command whose ``--help`` shows options under headings, its own options first."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        rows: dict[str, list[tuple[str, str]]] = {OWN: []}
        for parameter in self.get_params(ctx):
            if (
                isinstance(parameter, click.Option)
                and (row := parameter.get_help_record(ctx)) is not None
            ):
                rows.setdefault(getattr(parameter, "group", OWN), []).append(row)
        for group, own in rows.items():
            with formatter.section(group):
                formatter.write_dl(own)


class AnyPath(click.Path):
    """A path. One that no system holds is an error of its option."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            return super().convert(value, param, ctx)
        except ValueError as error:
            self.fail(
                f"{str(value)!r} is no path ({error}): give the path of a file or directory",
                param,
                ctx,
            )


def parameters_of(kind: type) -> list[click.Parameter]:
    """The options and arguments of a command with this class of requests, sorted by group."""
    made = []
    for field in fields(kind):
        cls, names = field.metadata.get(SETTINGS, (kind, (field.name,)))
        about = options_of(cls)
        types = field_types(cls)
        defaults = defaults_of(cls)
        made += [
            (about[name].group, parameter_of(name, about[name], types[name], defaults[name]))
            for name in names
            if name in about
        ]
    places = {group: place for place, group in enumerate(GROUPS)}
    return [
        parameter
        for _, parameter in sorted(made, key=lambda each: places.get(each[0], len(places)))
    ]


def parameter_of(name: str, about: Option, own: FieldType, default: Any) -> click.Parameter:
    """The click option, or argument, of a field."""
    kind = AnyPath(path_type=Path) if own.kind is Path else None if own.kind is object else own.kind
    if about.group == ARGUMENTS:
        return click.Argument(
            [name], **{"type": kind, "nargs": -1 if own.several else 1, **about.click}
        )
    flags = about.flags or (about.flag(name),)
    settings: dict[str, Any] = {"help": _help_text(about), "type": kind, "multiple": own.several}
    if default is MISSING:
        settings["required"] = True
    else:
        settings |= {
            "default": default,
            "show_default": default not in (None, "") and not about.default_words,
        }
    if about.choices is not None:
        settings |= {"metavar": "NAME", "shell_complete": _completion(about.choices, own)}
    if own.kind is bool:
        settings |= {"type": None, "is_flag": True}
        if default is False:
            flags = flags
        else:
            flags = (f"{flags[0]}/--no-{flags[0].removeprefix('--')}",)
    if (
        own.kind is object and about.choices is not None
    ):  # a name, or the first one where none is given
        settings |= {
            "is_flag": False,
            "flag_value": next(iter(about.choices)),
            "metavar": "[NAME]",
            "default": None,
        }
        settings["callback"] = lambda context, parameter, value: value or default
    made = GroupedOption([*flags, name], **{**settings, **about.click})
    made.group = about.group
    return made


def _help_text(about: Option) -> str:
    """The option's help, the names of its choices, and what the default means."""
    if about.choices is None:
        names = ""
    else:
        names = f" One of {', '.join(about.choices)}."
    if about.default_words:
        default = f"  [default: {about.default_words}]"
    else:
        default = ""
    return f"{about.help}{names}{default}"


def _completion(choices: Mapping[str, Any], own: FieldType) -> Any:
    """Completes the names of an option's choices, and "all" for a repeatable option."""
    names = ["all"] * own.several
    return lambda context, parameter, begun: [
        name for name in (*names, *choices) if name.startswith(begun)
    ]


def once(context: click.Context, parameter: click.Parameter, values: Sequence[Any]) -> Any:
    """Callback that gives an option's only value. Raises ConfigError for several."""
    if len(values) > 1:
        raise one_model_only([(parameter.opts[0], value) for value in values])
    if values:
        return values[0]
    return None


def one_model_only(given: Sequence[tuple[str, Any]]) -> ConfigError:
    """The error of a command that takes one model and got several: flags and values."""
    words = ", ".join(f"{flag} {str(value)!r}" for flag, value in given)
    return ConfigError(
        f"{len(given)} models are given, {words}, but this command takes one: choose one"
    )


def expand(names: Sequence[str], table: Mapping[str, Any], what: str) -> list[str]:
    """The names without repetitions; `all` stands for the whole table. Raises ConfigError for a
    name that the table lacks.
    """
    wanted = dict.fromkeys(
        name for given in names for name in (table if given == "all" else [given])
    )
    for name in wanted:
        if name not in table:
            raise unknown(what, name, [*table, "all"])
    return list(wanted)


def expand_placements(names: Sequence[str]) -> list[str]:
    """The same for placements, as `ctrans.dynamics.placement.spell` writes mixed ones."""
    mixed = {name: spell(name) for name in names if set("/*+") & set(name)}
    return [
        mixed.get(name, name)
        for name in expand(names, {**PLACEMENTS, **mixed} if mixed else PLACEMENTS, "placement")
    ]

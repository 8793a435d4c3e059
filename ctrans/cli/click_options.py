"""Click's options and commands, made of the fields of dataclasses (`ctrans.option`)."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from ctrans.option import OWN, FieldType, Option, defaults_of, field_types, option, options_of
from ctrans.placement import PLACEMENTS, spell
from solvers import ConfigError
from solvers.errors import unknown

ARGUMENTS = "Arguments"
GROUPS = (
    *(ARGUMENTS, "Architecture", "Norms", "Residual", "Attention", "Feed-forward", "Experts", "Weights", "Data", "Training"),
    *("Solver", OWN, "Monitor", "Device", "Other models", "Output"),
)
"""Groups of options in the order in which results show them."""
SETTINGS = "settings"
"""Where the metadata of a request's field hold a dataclass whose options the command has, and their
names.
"""


def settings_of(cls: type, *, only: Sequence[str] = (), without: Sequence[str] = ()) -> Any:
    """A field of a request: the values of the options of that dataclass, by name; of all, of some,
    or of all but some.
    """
    names = only or [name for name in options_of(cls) if name not in without]
    return dataclasses.field(metadata={SETTINGS: (cls, tuple(names))})


def settings_in(kind: type) -> dict[str, tuple[str, ...]]:
    """The names of the options of each such field of a request."""
    return {field.name: field.metadata[SETTINGS][1] for field in dataclasses.fields(kind) if SETTINGS in field.metadata}


def argument(metavar: str, **click: Any) -> Any:
    """A field of a request that is an argument of the command, and no option."""
    return option(dataclasses.MISSING, "", group=ARGUMENTS, metavar=metavar, **click)


def placements_option(*default: str) -> Any:
    """Several placements, by default these."""
    words = "Repeatable. all, or a name of the table; post/pre for attention and FFN; post*3+pre*9 block by block."
    return option(default, words, group="Architecture", choices=PLACEMENTS, other_choices=True, flags="--placement")


class GroupedOption(click.Option):
    """An option with the heading under which ``--help`` has it."""

    group = OWN


class GroupedCommand(click.Command):
    """A command whose ``--help`` has its options under headings, its own ones first."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        rows: dict[str, list[tuple[str, str]]] = {OWN: []}
        for parameter in self.get_params(ctx):
            if isinstance(parameter, click.Option) and (row := parameter.get_help_record(ctx)) is not None:
                rows.setdefault(getattr(parameter, "group", OWN), []).append(row)
        for group, own in rows.items():
            with formatter.section(group):
                formatter.write_dl(own)


def parameters_of(kind: type) -> list[click.Parameter]:
    """The options and arguments of a command whose request is of this class, sorted by group."""
    made = [(about.group, parameter_of(name, about, own, default)) for name, about, own, default in _options_in(kind)]
    places = {group: place for place, group in enumerate(GROUPS)}
    return [parameter for _, parameter in sorted(made, key=lambda each: places.get(each[0], len(places)))]


def _options_in(kind: type) -> Iterator[tuple[str, Option, FieldType, Any]]:
    for field in dataclasses.fields(kind):
        cls, names = field.metadata.get(SETTINGS, (kind, (field.name,)))
        for name in names:
            if name in options_of(cls):
                yield name, options_of(cls)[name], field_types(cls)[name], defaults_of(cls)[name]


def parameter_of(name: str, about: Option, own: FieldType, default: Any) -> click.Parameter:
    """The option, or argument, of a field."""
    kind = click.Path(path_type=Path) if own.kind is Path else None if own.kind is object else own.kind
    if about.group == ARGUMENTS:
        return click.Argument([name], **{"type": kind, "nargs": -1 if own.several else 1, **about.click})
    flags = about.flags or (about.flag(name),)
    settings: dict[str, Any] = {"help": _help_text(about), "type": kind}
    if default is dataclasses.MISSING:
        settings["required"] = True
    else:
        settings |= {"default": default, "show_default": default not in (None, "")}
    if about.choices is not None:
        settings |= {"metavar": "NAME", "shell_complete": _names_of(about, own)}
    if own.several:
        settings["multiple"] = True
    if own.kind is bool:
        settings["type"] = None
        settings["is_flag"] = True
        flags = flags if default is False else (f"{flags[0]}/--no-{flags[0].removeprefix('--')}",)
    if own.kind is object and about.choices is not None:  # a name, or the first one where none is given
        settings |= {"is_flag": False, "flag_value": next(iter(about.choices)), "metavar": "[NAME]", "default": None}
        settings["callback"] = lambda context, parameter, value: value or default
    made = GroupedOption([*flags, name], **{**settings, **about.click})
    made.group = about.group
    return made


def _help_text(about: Option) -> str:
    """The option's help, the names of its choices, and in words what the default is."""
    names = "" if about.choices is None else f" One of {', '.join(about.choices)}."
    default = f"  [default: {about.default_words}]" if about.default_words else ""
    return f"{about.help}{names}{default}"


def _names_of(about: Option, own: FieldType) -> Any:
    """Completes the names of an option's choices, and of several "all"."""

    def complete(context: click.Context, parameter: click.Parameter, begun: str) -> list[str]:
        return [name for name in (*(["all"] if own.several else []), *(about.choices or ())) if name.startswith(begun)]

    return complete


def each(context: click.Context, parameter: click.Parameter, values: Sequence[Any]) -> Any:
    """The values of an option that is a model: None, the only one, or a tuple. Raises ConfigError
    for an empty one.
    """
    if "" in values:
        raise ConfigError(f"{parameter.opts[0]} '' names nothing: give a value, or leave the option out")
    return tuple(values) if len(values) > 1 else values[0] if values else None


def once(context: click.Context, parameter: click.Parameter, values: Sequence[Any]) -> Any:
    """`each` for a command that takes one model. Raises ConfigError for several."""
    if len(values) > 1:
        raise one_alone([(parameter.opts[0], value) for value in values])
    return each(context, parameter, values)


def one_alone(given: Sequence[tuple[str, Any]]) -> ConfigError:
    """The error of a command that takes one model and was given these, as flags and values."""
    words = ", ".join(f"{flag} {str(value)!r}" for flag, value in given)
    return ConfigError(f"{len(given)} models are given, {words}, and one is looked at: choose one")


def expand(names: Sequence[str], table: Mapping[str, Any], what: str) -> list[str]:
    """The names, each once; `all` stands for the whole table. Raises ConfigError for a name that is
    not in it.
    """
    wanted = dict.fromkeys(name for given in names for name in (table if given == "all" else [given]))
    for name in wanted:
        if name not in table:
            raise unknown(what, name, [*table, "all"])
    return list(wanted)


def expand_placements(names: Sequence[str]) -> list[str]:
    """The same for placements, each as `ctrans.placement.spell` writes it."""
    each = dict.fromkeys(name for given in names for name in (PLACEMENTS if given == "all" else [given]))
    return [spell(name) if set("/*+") & set(name) else expand([name], PLACEMENTS, "placement")[0] for name in each]

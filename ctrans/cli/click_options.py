"""Click options and commands, made from the fields of dataclasses (`ctrans.base.option`)."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import click

from ctrans.base.option import OWN, FieldType, Option, defaults_of, field_types, option, options_of
from ctrans.cli.say import say
from ctrans.dynamics.placement import PLACEMENTS, spell
from solvers import ConfigError, unknown

OptionValues = Mapping[str, Any]
"""Values of options by name."""
ARGUMENTS = "Arguments"
GROUPS = (
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
    "Solver",
    OWN,
    "Monitor",
    "Device",
    "Other models",
    "Output",
)
"""Groups of options in the order in which results show them."""
SETTINGS = "settings"
"""The key in a field's metadata that holds a dataclass and the names of its options that the
command has.
"""
ALL_OPTIONS = "ctrans.all_options"
"""The key of click's context that is set while ``--help-all`` shows a command's help."""


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
    help_text = (
        "Repeatable: all, or names. post/pre has one for attention and one for the FFN;"
        " post*3+pre*9 goes block by block."
    )
    return option(
        default,
        help_text,
        group="Architecture",
        choices=PLACEMENTS,
        other_choices=True,
        flags="--placement",
    )


class GroupedOption(click.Option):
    """An option with the heading that the help shows it under."""

    group = OWN


class GroupedCommand(click.Command):
    """A command whose help shows options under headings, its own options first.

    `common` are the names of the options that ``--help`` shows, in brief. If it is empty, it shows
    all of them. ``--help-all`` shows all options, and the epilog.
    """

    common: frozenset[str] = frozenset()

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        help_all = click.Option(
            ["--help-all"],
            help="Show all options and exit.",
            is_flag=True,
            is_eager=True,
            expose_value=False,
            callback=_show_all_help,
        )
        return [*super().get_params(ctx), help_all]

    def is_brief(self, context: click.Context) -> bool:
        """Whether the help that is being made shows the common options only."""
        return bool(self.common) and ALL_OPTIONS not in context.meta

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        rows: dict[str, list[tuple[str, str]]] = {OWN: []}
        for parameter in self.get_params(ctx):
            row = self._help_row(ctx, parameter)
            if row is not None:
                rows.setdefault(getattr(parameter, "group", OWN), []).append(row)
        for group, rows_of_group in rows.items():
            with formatter.section(group):
                formatter.write_dl(rows_of_group)
        if self.is_brief(ctx):
            count = sum(isinstance(parameter, click.Option) for parameter in self.params)
            formatter.write_paragraph()
            formatter.write_text(f"--help-all shows all {count} options.")

    def _help_row(
        self, context: click.Context, parameter: click.Parameter
    ) -> tuple[str, str] | None:
        """The option's flags and its help; None for what this help does not show."""
        if not isinstance(parameter, click.Option):
            return None
        row = parameter.get_help_record(context)
        shows_all_of_it = not isinstance(parameter, GroupedOption) or not self.is_brief(context)
        if row is None or shows_all_of_it:
            return row
        if parameter.name not in self.common:
            return None
        return row[0], brief_help(row[1])

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        if not self.is_brief(ctx):
            super().format_epilog(ctx, formatter)


def _show_all_help(
    context: click.Context,
    parameter: click.Parameter,
    value: bool,  # noqa: FBT001  # click gives it by its place
) -> None:
    """Callback that shows the help with all options."""
    if value and not context.resilient_parsing:
        context.meta[ALL_OPTIONS] = True
        say(context.get_help())
        context.exit()


def brief_help(help_text: str) -> str:
    """The first sentence of an option's help, the names of its choices, and its default."""
    sentence = re.split(r"(?<=\.)\s", help_text, maxsplit=1)[0]
    choices = re.search(r" One of [^.]*\.", help_text)
    if choices is not None and choices[0].strip() != sentence:
        sentence += choices[0]
    default = re.search(r"  \[(default|required).*\]$", help_text)
    if default is not None and default[0].strip() not in sentence:
        sentence += default[0]
    return sentence


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
    parameters: list[tuple[str, click.Parameter]] = []
    for field in fields(kind):
        cls, names = field.metadata.get(SETTINGS, (kind, (field.name,)))
        about = options_of(cls)
        types = field_types(cls)
        defaults = defaults_of(cls)
        parameters += [
            (about[name].group, parameter_of(name, about[name], types[name], defaults[name]))
            for name in names
            if name in about
        ]
    position = {group: number for number, group in enumerate(GROUPS)}
    parameters.sort(key=lambda row: position.get(row[0], len(position)))
    return [parameter for _, parameter in parameters]


def _click_type(field_type: FieldType) -> Any:
    """The type that click converts a value to; None if click chooses it."""
    if field_type.kind is Path:
        return AnyPath(path_type=Path)
    if field_type.kind is object:
        return None
    return field_type.kind


def parameter_of(name: str, about: Option, field_type: FieldType, default: Any) -> click.Parameter:
    """The click option, or argument, of a field."""
    kind = _click_type(field_type)
    if about.group == ARGUMENTS:
        nargs = -1 if field_type.several else 1
        return click.Argument([name], **{"type": kind, "nargs": nargs, **about.click})
    flags = about.flags or (about.flag(name),)
    settings: dict[str, Any] = {
        "help": _help_text(about),
        "type": kind,
        "multiple": field_type.several,
    }
    if default is MISSING:
        settings["required"] = True
    else:
        settings |= {
            "default": default,
            "show_default": default not in (None, "") and not about.default_words,
        }
    if about.choices is not None:
        settings |= {"metavar": "NAME", "shell_complete": _completion(about.choices, field_type)}
    if field_type.kind is bool:
        settings |= {"type": None, "is_flag": True}
        if default is not False:
            flags = (f"{flags[0]}/--no-{flags[0].removeprefix('--')}",)
    if field_type.kind is object and about.choices is not None:
        # a name, or the first one where none is given
        settings |= {
            "is_flag": False,
            "flag_value": next(iter(about.choices)),
            "metavar": "[NAME]",
            "default": None,
        }
        settings["callback"] = lambda context, parameter, value: value or default
    grouped_option = GroupedOption([*flags, name], **{**settings, **about.click})
    grouped_option.group = about.group
    return grouped_option


def _help_text(about: Option) -> str:
    """The option's help, the names of its choices, and what the default means."""
    help_text = about.help
    if about.choices is not None:
        help_text += f" One of {', '.join(about.choices)}."
    if about.default_words:
        help_text += f"  [default: {about.default_words}]"
    return help_text


def _completion(choices: Mapping[str, Any], field_type: FieldType) -> Any:
    """Completes the names of an option's choices, and "all" for a repeatable option."""

    def complete(context: click.Context, parameter: click.Parameter, begun: str) -> list[str]:
        names = list(choices)  # now, since plugins may have added some
        if field_type.several:
            names.insert(0, "all")
        return [name for name in names if name.startswith(begun)]

    return complete


def once(context: click.Context, parameter: click.Parameter, values: Sequence[Any]) -> Any:
    """Callback that gives an option's only value. Raises ConfigError for several."""
    if len(values) > 1:
        raise one_model_only([(parameter.opts[0], value) for value in values])
    if values:
        return values[0]
    return None


def one_model_only(models: Sequence[tuple[str, Any]]) -> ConfigError:
    """The error of a command that takes one model and got several: flags and values."""
    models_text = ", ".join(f"{flag} {str(value)!r}" for flag, value in models)
    return ConfigError(
        f"{len(models)} models are given, {models_text}, but this command takes one: choose one"
    )


def expand(names: Sequence[str], table: Mapping[str, Any], what: str) -> list[str]:
    """The names without repetitions; `all` stands for the whole table. Raises ConfigError for a
    name that the table lacks.
    """
    expanded: dict[str, None] = {}
    for name in names:
        if name == "all":
            expanded |= dict.fromkeys(table)
        else:
            expanded[name] = None
    for name in expanded:
        if name not in table:
            raise unknown(what, name, [*table, "all"])
    return list(expanded)


def expand_placements(names: Sequence[str]) -> list[str]:
    """The same for placements, as `ctrans.dynamics.placement.spell` writes mixed ones."""
    mixed = {name: spell(name) for name in names if set("/*+") & set(name)}
    table = {**PLACEMENTS, **mixed} if mixed else PLACEMENTS
    return [mixed.get(name, name) for name in expand(names, table, "placement")]

"""Options: dataclass fields with a help text and allowed values.

`option` makes such a field. `check_options` validates the values of an object. The command line
makes its options from the same fields (`ctrans.cli.click_options`), so that a new field of
`GPTConfig` is an option of every command.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
import sys
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Annotated, Any, TypeVar

from solvers import ConfigError, look_up, shown

Value = TypeVar("Value")
REQUIRED: Any = dataclasses.MISSING
"""The default of a required option."""
KEY = "ctrans"
"""The key of the `Option` in a field's metadata."""
OWN = "Options"
"""The heading of options without another one."""


@dataclass(frozen=True)
class Range:
    """Numbers from `low` to `high`, both included. `words` follow "give" in messages. Without words
    they are whole numbers.
    """

    low: float
    high: float
    words: str = ""

    def check(self, name: str, value: Any, *, whole: bool = False, hint: str = "") -> None:
        """Raises ConfigError unless the value is a number in the range. `hint` ends the message."""
        number = isinstance(value, int if whole else (int, float)) and not isinstance(value, bool)
        if number and self.low <= value <= self.high:
            return
        if number and value > self.high and not self.words:
            if value < 10**15:
                said = f"{value:,}"
            else:
                said = shown(value)
            raise ConfigError(f"{name} = {said}: give at most {self.high:,}")
        raise ConfigError(
            f"{name} = {shown(value)}: give"
            f" {self.words or f'a whole number of at least {self.low}'}{hint}"
        )


SMALLEST, LARGEST = math.ulp(0.0), sys.float_info.max
FINITE = Range(-LARGEST, LARGEST, "a finite number")
POSITIVE = Range(SMALLEST, LARGEST, "a positive finite number")
NOT_NEGATIVE = Range(0, LARGEST, "a finite number of at least 0")
BELOW_ONE = Range(0, math.nextafter(1, 0), "a number in [0, 1)")
COUNT = Range(1, 10**9)
SEED = Range(0, 2**63 - 1, "a whole number from 0 to 2^63 - 1")
WEIGHT = Range(SMALLEST, 1e37, "a positive number of at most 1e37, since weights are in float32")

Count = Annotated[int, COUNT]
Seed = Annotated[int, SEED]
Positive = Annotated[float, POSITIVE]


@dataclass(frozen=True)
class Option:
    """The description of an option.

    - `help`: one sentence or two for ``--help``, which appends the choices and the default
    - `group`: its heading in ``--help``; by default the class's `option_group`
    - `choices`: the table of its values; ctrans reads it when it is needed, so that plugins can add
      to it
    - `other_choices`: whether other values are allowed too, which the class checks itself
    - `limits`: the range of its numbers
    - `flags`: its names on the command line, if not that of the field
    - `default_words`: the meaning of a default of None
    - `click`: arguments of `click.Option` that replace the derived ones
    """

    help: str
    group: str
    choices: Mapping[str, Any] | None
    other_choices: bool
    limits: Range | None
    flags: tuple[str, ...]
    default_words: str
    click: Mapping[str, Any]

    def flag(self, name: str) -> str:
        """The first flag of the field of that name."""
        if self.flags:
            return self.flags[0]
        return "--" + name.replace("_", "-")


def option(
    default: Value,
    help: str,
    *,
    group: str = "",
    choices: Mapping[str, Any] | None = None,
    other_choices: bool = False,
    limits: Range | None = None,
    flags: str = "",
    default_words: str = "",
    **click: Any,
) -> Value:
    """A field of a dataclass that is an option (see `Option`). `flags` is one text, such as
    "--context --tokens".
    """
    words = tuple(flags.split())
    about = Option(help, group, choices, other_choices, limits, words, default_words, click)
    return dataclasses.field(default=default, metadata={KEY: about})


@dataclass(frozen=True)
class FieldType:
    """A field's type: that of one value, whether None is allowed, and whether there are several
    values.
    """

    kind: type
    optional: bool
    several: bool


@cache
def field_types(cls: type) -> Mapping[str, FieldType]:
    """The types of a dataclass's fields by name. For a union of several types other than None,
    `kind` is object.
    """
    hints = typing.get_type_hints(cls)
    return {field.name: _field_type(hints[field.name]) for field in fields(cls)}


def _field_type(hint: Any) -> FieldType:
    several = typing.get_origin(hint) is tuple
    if isinstance(hint, types.UnionType):
        members = typing.get_args(hint)
    else:
        members = (typing.get_args(hint)[0] if several else hint,)
    kinds = [member for member in members if member is not types.NoneType]
    if len(kinds) == 1 and kinds[0] in (bool, int, float, str, Path):
        kind = kinds[0]
    else:
        kind = object
    return FieldType(kind, types.NoneType in members, several)


@cache
def options_of(cls: type) -> Mapping[str, Option]:
    """The options of a dataclass by field name. Options without a group get that of the class that
    defines them.
    """
    found = {}
    for field in fields(cls):
        if KEY in field.metadata:
            home = next(each for each in cls.__mro__ if field.name in inspect.get_annotations(each))
            about: Option = field.metadata[KEY]
            if about.group:
                found[field.name] = about
            else:
                found[field.name] = dataclasses.replace(
                    about, group=getattr(home, "option_group", OWN)
                )
    return found


def defaults_of(cls: type) -> dict[str, Any]:
    """The defaults of a dataclass's options by field name."""
    return {field.name: field.default for field in fields(cls) if KEY in field.metadata}


def part_of(cls: type[Value], settings: object) -> Value:
    """An object of this dataclass with the values that `settings` has under its fields' names."""
    names = [field.name for field in fields(cls)]  # type: ignore[arg-type]  # a dataclass
    return cls(**{name: getattr(settings, name) for name in names})


def check_options(made: Any) -> None:
    """Raises ConfigError for the first field with a wrong type, an unknown choice or a value
    outside its limits.
    """
    cls: Any = type(made)
    about = options_of(cls)
    for name, own in field_types(cls).items():
        value = getattr(made, name)
        if own.several or (value is None and own.optional):
            continue
        if own.kind is bool and not isinstance(value, bool):
            raise ConfigError(f"{name} = {shown(value)}: give True or False")
        if name not in about:
            continue
        limits = about[name].limits
        choices = about[name].choices
        if limits is not None:
            limits.check(
                name, value, whole=own.kind is int, hint=", or leave it out" if own.optional else ""
            )
        if own.kind is str and choices is not None and not about[name].other_choices:
            look_up(name, value, choices)

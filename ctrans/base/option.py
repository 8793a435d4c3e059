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
        if whole:
            is_number = isinstance(value, int) and not isinstance(value, bool)
        else:
            is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if is_number and self.low <= value <= self.high:
            return
        if is_number and value > self.high and not self.words:
            if value < 10**15:
                value_text = f"{value:,}"
            else:
                value_text = shown(value)
            raise ConfigError(f"{name} = {value_text}: give at most {self.high:,}")
        allowed = self.words or f"a whole number of at least {self.low}"
        raise ConfigError(f"{name} = {shown(value)}: give {allowed}{hint}")


SMALLEST = math.ulp(0.0)
LARGEST = sys.float_info.max
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
    about = Option(
        help=help,
        group=group,
        choices=choices,
        other_choices=other_choices,
        limits=limits,
        flags=tuple(flags.split()),
        default_words=default_words,
        click=click,
    )
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
    if several:
        members = (typing.get_args(hint)[0],)
    elif isinstance(hint, types.UnionType):
        members = typing.get_args(hint)
    else:
        members = (hint,)
    kinds = [member for member in members if member is not types.NoneType]
    kind: type = object
    if len(kinds) == 1 and kinds[0] in (bool, int, float, str, Path):
        kind = kinds[0]
    return FieldType(kind, optional=types.NoneType in members, several=several)


@cache
def options_of(cls: type) -> Mapping[str, Option]:
    """The options of a dataclass by field name. Options without a group get that of the class that
    defines them.
    """
    options = {}
    for field in fields(cls):
        if KEY not in field.metadata:
            continue
        about: Option = field.metadata[KEY]
        if not about.group:
            group = getattr(_defining_class(cls, field.name), "option_group", OWN)
            about = dataclasses.replace(about, group=group)
        options[field.name] = about
    return options


def _defining_class(cls: type, field_name: str) -> type:
    """The class of `cls` and its bases that declares the field."""
    for base in cls.__mro__:
        if field_name in inspect.get_annotations(base):
            return base
    raise AssertionError("a field is declared in a class")


def defaults_of(cls: type) -> dict[str, Any]:
    """The defaults of a dataclass's options by field name."""
    return {field.name: field.default for field in fields(cls) if KEY in field.metadata}


def part_of(cls: type[Value], settings: object) -> Value:
    """An object of this dataclass with the values that `settings` has under its fields' names."""
    names = [field.name for field in fields(cls)]  # type: ignore[arg-type]  # a dataclass
    return cls(**{name: getattr(settings, name) for name in names})


def check_options(settings: Any) -> None:
    """Raises ConfigError for the first field with a wrong type, an unknown choice or a value
    outside its limits.
    """
    cls: Any = type(settings)
    options = options_of(cls)
    for name, field_type in field_types(cls).items():
        value = getattr(settings, name)
        if field_type.several or (value is None and field_type.optional):
            continue
        if field_type.kind is bool and not isinstance(value, bool):
            raise ConfigError(f"{name} = {shown(value)}: give True or False")
        if name not in options:
            continue
        limits = options[name].limits
        choices = options[name].choices
        if limits is not None:
            hint = ""
            if field_type.optional:
                hint = ", or leave it out"
            limits.check(name, value, whole=field_type.kind is int, hint=hint)
        if field_type.kind is str and choices is not None and not options[name].other_choices:
            look_up(name, value, choices)

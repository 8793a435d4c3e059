"""A dataclass from the JSON object that `ctrans.base.json_values.plain` made of it."""

from __future__ import annotations

import dataclasses
import enum
import math
import types
import typing
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, Literal, TypeVar, Union

from ctrans.base.old_names import with_missing
from solvers import ConfigError
from solvers.errors import shown

Made = TypeVar("Made")
NOT_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
"""Numbers that JSON lacks, by their texts."""


def from_json(kind: type[Made], value: Any) -> Made:
    """The dataclass with the fields of a JSON object, each as its annotation says.

    A field that the object lacks has its default, or is None if it may be. Further keys are left
    out. Raises ConfigError, with the field's name, for a value of another type.
    """
    made: Made = _value(kind, value, kind.__name__)
    return made


@cache
def _hints(kind: type) -> dict[str, Any]:
    return typing.get_type_hints(kind)


def _object(kind: Any, value: Any, name: str) -> Any:
    if not isinstance(value, Mapping):
        raise _wrong(name, value, "an object")
    value = with_missing(kind, value)
    given: dict[str, Any] = {}
    for field in dataclasses.fields(kind):
        if not field.init:
            continue
        hint = _hints(kind)[field.name]
        if field.name in value:
            given[field.name] = _value(hint, value[field.name], f"{name}.{field.name}")
        elif _is_required(field):
            given[field.name] = _value(hint, None, f"{name}.{field.name}")
    return kind(**given)


def _is_required(field: dataclasses.Field[Any]) -> bool:
    missing = dataclasses.MISSING
    return field.default is missing and field.default_factory is missing


def _value(hint: Any, value: Any, name: str) -> Any:
    origin = typing.get_origin(hint)
    arguments = typing.get_args(hint)
    if hint is Any:
        return value
    if dataclasses.is_dataclass(hint):
        return _object(hint, value, name)
    if origin in (Union, types.UnionType):
        return _one_of(arguments, value, name)
    if origin is Literal:
        if value not in arguments:
            raise _wrong(name, value, " or ".join(map(shown, arguments)))
        return value
    if origin is typing.Annotated:
        return _value(arguments[0], value, name)
    if origin is tuple and arguments and Ellipsis not in arguments:
        return _tuple(arguments, value, name)
    if origin in (list, tuple, Sequence):
        entry = arguments[0] if arguments else Any
        entries = [_value(entry, each, f"{name}[{i}]") for i, each in enumerate(_list(value, name))]
        return tuple(entries) if origin is tuple else entries
    if origin in (dict, Mapping):
        if not isinstance(value, Mapping):
            raise _wrong(name, value, "an object")
        return {
            _value(arguments[0], key, name): _value(arguments[1], entry, f"{name}[{key!r}]")
            for key, entry in value.items()
        }
    return _plain(hint, value, name)


def _tuple(kinds: tuple[Any, ...], value: Any, name: str) -> tuple[Any, ...]:
    entries = _list(value, name)
    if len(entries) != len(kinds):
        raise _wrong(name, value, f"a list of {len(kinds)}")
    return tuple(_value(kind, entry, name) for kind, entry in zip(kinds, entries, strict=True))


def _list(value: Any, name: str) -> list[Any]:
    if not isinstance(value, (list, tuple)):
        raise _wrong(name, value, "a list")
    return list(value)


def _one_of(kinds: tuple[Any, ...], value: Any, name: str) -> Any:
    """The value as the first of several types that it fits."""
    if value is None and type(None) in kinds:
        return None
    first_error = None
    for kind in kinds:
        if kind is type(None):
            continue
        try:
            return _value(kind, value, name)
        except ConfigError as error:
            first_error = first_error or error
    raise first_error or _wrong(name, value, "of another type")


def _plain(hint: Any, value: Any, name: str) -> Any:
    """A number, a text, a truth, or a member of an enumeration."""
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        members = {member.name.lower(): member for member in hint}
        if not isinstance(value, str) or value not in members:
            raise _wrong(name, value, " or ".join(members))
        return members[value]
    if hint is float:
        return _float(value, name)
    if hint is int:
        whole = isinstance(value, int) and not isinstance(value, bool)
        if not whole:
            raise _wrong(name, value, "a whole number")
        return value
    if isinstance(hint, type) and not isinstance(value, hint):
        raise _wrong(name, value, f"of the type {hint.__name__}")
    return value


def _float(value: Any, name: str) -> float:
    if isinstance(value, str) and value in NOT_FINITE:
        return NOT_FINITE[value]
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise _wrong(name, value, "a number")
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def _wrong(name: str, value: Any, wanted: str) -> ConfigError:
    return ConfigError(f"{name} = {shown(value)} is not {wanted}: make the result anew")

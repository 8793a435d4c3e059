"""JSON schemas of results, made from the classes that hold them: what a class's annotations say,
and its docstring.
"""

from __future__ import annotations

import dataclasses
import enum
import inspect
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Union, get_args, get_origin

from ctrans.base.option import options_of

Schema = dict[str, Any]

NUMBER: Schema = {"anyOf": [{"type": "number"}, {"enum": ["inf", "-inf", "nan"]}]}
"""A float: numbers that JSON lacks are texts."""
SIMPLE: dict[Any, Schema] = {
    float: NUMBER,
    int: {"type": "integer"},
    str: {"type": "string"},
    bool: {"type": "boolean"},
    type(None): {"type": "null"},
    Any: {},
    object: {},
}


def schema_of(kind: Any, /, **instead: Any) -> Schema:
    """What `ctrans.base.json_values.plain` makes of a value of that type. `instead` has types or
    schemas in the place of fields' own.

    A dataclass is an object with exactly its fields, described by its docstring; None is null, an
    enum its member's name in small letters. A schema stays as it is.
    """
    if isinstance(kind, dict):
        return kind
    if kind in SIMPLE:
        return SIMPLE[kind]
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return {"anyOf": [schema_of(each) for each in inner]}
    if origin is Literal:
        return {"enum": list(inner)}
    if inspect.isclass(origin or kind):
        made: type = origin or kind
        if dataclasses.is_dataclass(made):
            return _of_dataclass(made, instead)
        if issubclass(made, enum.Enum):
            return {"enum": [member.name.lower() for member in made]}
        if issubclass(made, Mapping):
            return {"type": "object", "additionalProperties": schema_of(inner[1]) if inner else {}}
        if issubclass(made, Sequence):
            return list_of(schema_of(inner[0]) if inner else {})
    raise TypeError(f"{kind!r} has no JSON schema: annotate the field with plain types")


def an_object(says: str, /, **properties: Any) -> Schema:
    """An object with exactly these keys, of these types or schemas."""
    return {
        "description": says,
        "type": "object",
        "properties": {name: schema_of(each) for name, each in properties.items()},
        "required": list(properties),
        "additionalProperties": False,
    }


def a_map(says: str, values: Any) -> Schema:
    """An object with any keys, and values of one type or schema."""
    return {"description": says, "type": "object", "additionalProperties": schema_of(values)}


def list_of(schema: Schema) -> Schema:
    """A list of such values."""
    return {"type": "array", "items": schema}


def described(says: str, kind: Any) -> Schema:
    """The type's schema, or the schema, with a description."""
    return {"description": says, **schema_of(kind)}


def _of_dataclass(kind: type, instead: Mapping[str, Any]) -> Schema:
    hints = typing.get_type_hints(kind)
    own = {field.name: hints[field.name] for field in dataclasses.fields(kind)} | dict(instead)
    own |= {name: described(about.help, own[name]) for name, about in options_of(kind).items()}
    return {"title": kind.__name__, **an_object(inspect.cleandoc(kind.__doc__ or ""), **own)}


def with_definitions(schema: Schema) -> Schema:
    """The same with the schema of every class once, under `$defs`."""
    definitions: Schema = {}

    def hoisted(part: Any) -> Any:
        if isinstance(part, list):
            return [hoisted(each) for each in part]
        if not isinstance(part, dict):
            return part
        made = {name: hoisted(each) for name, each in part.items()}
        if made.get("type") != "object" or not isinstance(made.get("title"), str):
            return made
        name = made["title"]
        while (
            definitions.setdefault(name, made) != made
        ):  # the same class with other fields in their place
            name += "_"
        return {"$ref": f"#/$defs/{name}"}

    return {**{name: hoisted(each) for name, each in schema.items()}, "$defs": definitions}

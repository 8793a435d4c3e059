"""Arguments of public functions are checked against their annotations: one place for the errors of
wrong types, shapes and limits.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
import os
import types
import typing
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from numbers import Integral, Real
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeGuard, TypeVar, Union

import jaxtyping
import torch
from jaxtyping import AbstractArray, jaxtyped
from torch import Tensor, nn

from solvers.errors import ConfigError, is_class, shown, unknown, with_article
from solvers.transforms import batched

Made = TypeVar("Made", bound=Callable[..., Any])
NUMBERS = {
    int: (Integral, "a whole number"),
    float: (Real, "a finite number"),
    complex: (complex, "a number"),
}
BYTES = (bytes, bytearray, memoryview)
"""What serves as bytes."""
PATHS = (str, os.PathLike)
PLAIN = {
    bool: "True or False",
    str: "text",
    bytes: "bytes",
    types.NoneType: "None",
    Tensor: "a dense tensor with numbers",
    Path: "a path whose names have at most 255 bytes",
}


def checked(made: Made, *, face: str | None = None, by_itself: Collection[str] = ()) -> Made:
    """The function or class, which raises ConfigError for an argument that its annotation excludes.

    - numbers: no bool is one, and a float is finite. Numbers of numpy and tensors without axes are
      numbers
    - tensors: dense, with numbers, and of the dtype and the number of axes of the annotation.
      Whether sizes agree between arguments is for the function to say
    - `Annotated[type, limits]`: also checked by `limits.check(name, value)`
    - a sequence: whatever has a length and entries by their number, but no text
    - lists and dictionaries: every entry, unless they are iterators

    - `face`: the package that offers the function to users. Inner code imports the function from
      its own module, so that nothing is checked twice
    - `by_itself`: arguments that the function checks itself, with messages that say more

    It checks nothing in `torch.compile`. For a class it checks the constructor.

    beartype 0.23 and strict pydantic 2.14 both let nan, sparse and meta tensors pass and exclude
    numpy's integers. beartype also takes True for a number, and looks at one entry of a list.
    """
    if isinstance(made, type):
        constructed: Any = made
        constructed.__init__ = _checked(
            constructed.__init__,
            made if dataclasses.is_dataclass(made) else constructed.__init__,
            by_itself,
        )
        return made
    checking: Made = _checked(made, inspect.unwrap(made), by_itself)
    if face is not None:
        checking.__module__ = face  # where pickle looks for this function
    return checking


def _checked(
    made: Callable[..., Any], annotated: Callable[..., Any], by_itself: Collection[str]
) -> Any:
    """The function that checks its arguments against the annotations of a function or a
    dataclass.
    """
    by_place = {inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD}
    signature = inspect.signature(made)
    places = [name for name, each in signature.parameters.items() if each.kind in by_place]

    @functools.wraps(made)
    def call(*arguments: Any, **named: Any) -> Any:
        if not torch.compiler.is_compiling():
            checks = _checks(annotated)
            try:
                for name, value in (*zip(places, arguments, strict=False), *named.items()):
                    if name in checks and name not in by_itself:
                        checks[name](name, value)
            except ConfigError:
                if binds(made, *arguments, **named):
                    # else Python's own error for a missing or an unknown argument comes first
                    raise
        return made(*arguments, **named)

    return call


def binds(made: Callable[..., Any], *arguments: Any, **named: Any) -> bool:
    """Whether the function has such arguments."""
    try:
        inspect.signature(made).bind(*arguments, **named)
    except (TypeError, ValueError):  # ValueError: some built-in functions have no signature
        return False
    return True


SIZES: Any = getattr(
    getattr(jaxtyping, "_decorator", None), "_JaxtypingContext", lambda: jaxtyped("context")
)
"""`jaxtyped("context")`, which itself would import jax where that is installed."""
SEVERAL = {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}
UNIONS = (Union, types.UnionType)
Test = Callable[[Any], bool]


@functools.cache
def _checks(made: Callable[..., Any]) -> dict[str, Callable[[str, Any], None]]:
    """A check for each annotated parameter but `*args` and `**options`."""
    hints = typing.get_type_hints(made, include_extras=True)
    known = {
        name: each
        for name, each in inspect.signature(made).parameters.items()
        if hints.get(name, Any) is not Any
    }
    return {name: _check(hints[name]) for name, each in known.items() if each.kind not in SEVERAL}


def _check(hint: Any) -> Callable[[str, Any], None]:
    """The function that raises ConfigError unless a value has the annotated type and is within its
    limits.
    """
    fits = _test(hint)
    if typing.get_origin(hint) in (*UNIONS, Literal):
        members = typing.get_args(hint)
    else:
        members = (hint,)
    limits = [
        each
        for member in members
        for each in getattr(member, "__metadata__", ())
        if hasattr(each, "check")
    ]

    def check(name: str, value: Any) -> None:
        if not fits(value):
            if typing.get_origin(hint) is Literal and isinstance(value, str):
                raise unknown(name, value, members)
            if isinstance(value, type):
                raise is_class(name, value)
            raise ConfigError(f"{name} = {shown(value)}: give {' or '.join(_words(hint))}")
        for each in limits:
            if value is not None:
                each.check(name, item(value))

    return check


@functools.cache
def _test(hint: Any) -> Test:
    """The function that says whether a value has the annotated type."""
    origin = typing.get_origin(hint)
    parts = typing.get_args(hint)
    kind = origin or hint
    if isinstance(hint, TypeVar):
        return _test(hint.__bound__ or Any)
    if origin is Annotated:
        if NOT_FINITE in parts:
            return _is_number(Real, _is_float)
        return _test(parts[0])
    if origin in UNIONS:
        fits = functools.reduce(_either, map(_test, parts))
        if Path not in parts:
            return fits
        return lambda value: fits(value) and (not isinstance(value, PATHS) or _is_path(value))
    if origin is Literal:
        types_of = tuple({type(part) for part in parts})
        return lambda value: isinstance(value, types_of) and value in parts
    if hint in NUMBERS:
        return _is_number(NUMBERS[hint][0], math.isfinite if hint is float else _any)
    if isinstance(hint, type) and issubclass(hint, AbstractArray):
        return lambda value: _is_array(value, hint)
    if kind is typing.get_origin(Callable[..., Any]):
        return callable
    if hint is bool:
        return lambda value: (
            (type(value) in (bool, int) and value in (0, 1))
            or type(value).__name__ in ("bool", "bool_")
        )  # numpy's
    if not isinstance(kind, type) or kind in (Any, object, type) or not _can_be_checked(kind):
        return lambda value: kind is not type or isinstance(value, type)
    if kind is tuple and parts and parts[-1] is not ...:
        entries = [_test(part) for part in parts]
        return lambda value: (
            _is_sequence(value) and len(value) == len(entries) and all(map(_holds, entries, value))
        )
    if issubclass(kind, Mapping) and parts:
        key, entry = map(_test, parts)
        return lambda value: (
            isinstance(value, kind)
            and all(key(name) and entry(each) for name, each in value.items())
        )
    if issubclass(kind, Iterable) and parts:
        several = _several(
            kind, None if parts[0] in (Any, object) else _test(parts[0]), text=str in parts
        )
        things = parts[0] is Tensor or dataclasses.is_dataclass(parts[0])
        # one array is no list of these
        if not things:
            return several
        return lambda value: (
            not isinstance(value, Tensor) and not hasattr(value, "shape") and several(value)
        )
    if issubclass(kind, Tensor):
        return lambda value: isinstance(value, kind) and has_numbers(value)
    if issubclass(kind, nn.Module):
        return lambda value: isinstance(
            getattr(value, "_orig_mod", value), kind
        )  # what torch.compile wraps
    if kind is Path:
        return lambda value: isinstance(value, os.PathLike) and _is_path(value)
    wanted = BYTES if kind is bytes else kind
    return lambda value: isinstance(value, wanted)


def _is_array(value: Any, annotation: Any) -> bool:
    """Whether the value has numbers of the annotated dtype and number of axes."""
    if isinstance(value, Tensor) and not has_numbers(value):
        return False
    with SIZES():  # names of sizes mean what they mean in this annotation alone
        return isinstance(value, annotation)


def _several(kind: type, entry: Test | None, *, text: bool) -> Test:
    """The function that says whether a value has entries that pass a test. An iterator's are left
    in it, and where anything passes none is taken: a loader of data may be long, and shuffle.
    """

    def fits(value: Any) -> bool:
        if isinstance(value, (str, bytes)):
            return text and isinstance(value, str)
        if not (_is_sequence(value) if kind in (Sequence, tuple) else isinstance(value, kind)):
            return False
        if (
            isinstance(value, Tensor) and value.is_nested
        ):  # it has no shape, and raises where one is asked for
            return False
        try:
            if entry is None:
                return getattr(value, "shape", None) != ()
            return isinstance(value, Iterator) or all(map(entry, value))
        except TypeError:  # a tensor without axes
            return False

    return fits


def _is_sequence(value: Any) -> bool:
    has_entries = (
        hasattr(value, "__len__")
        and hasattr(value, "__getitem__")
        and not isinstance(value, (str, bytes, Mapping))
    )
    return (
        has_entries
        and (not isinstance(value, Tensor) or has_numbers(value))
        and getattr(value, "shape", None) != ()
    )


def _is_number(kind: type, limits: Test) -> Test:
    plain = (int,) if kind is Integral else (int, float)  # what does not wait for an abstract class

    def is_one(value: Any) -> bool:
        if type(value) in plain:
            number = value
        else:
            number = item(value)
        try:
            fits = type(number) in plain or (
                isinstance(number, kind) and not isinstance(number, bool)
            )
            return fits and limits(number)
        except OverflowError:  # an integer beyond floats
            return False

    return is_one


def item(value: Any) -> Any:
    """The number in a tensor or an array without axes, and anything else as it is."""
    if isinstance(value, Tensor) and (batched() or not has_numbers(value)):
        return value  # a nested tensor has not even a shape
    if getattr(value, "shape", None) == ():
        return value.item()
    return value


def _either(one: Test, other: Test) -> Test:
    return lambda value: one(value) or other(value)


def _holds(test: Test, value: Any) -> bool:
    return test(value)


def _any(value: Any) -> bool:
    return True


def _is_float(value: Any) -> bool:
    float(value)  # raises OverflowError
    return True


def _is_path(value: Any) -> bool:
    """Whether a file system can have it."""
    try:
        names = os.fsencode(value)
    except UnicodeEncodeError:
        return False
    return (
        b"\0" not in names
        and len(names) < 4096
        and all(len(name) <= 255 for name in names.split(b"/"))
    )


def is_dense(value: object) -> TypeGuard[Tensor]:
    """Whether the value is a tensor that is neither sparse, nested nor quantised."""
    return (
        isinstance(value, Tensor)
        and value.layout is torch.strided
        and not (value.is_nested or value.is_quantized)
    )


def has_numbers(value: object) -> bool:
    """Whether the value is a dense tensor that is not on the meta device."""
    return is_dense(value) and not value.is_meta


NOT_FINITE = "nan, inf and -inf too"
AnyFloat = Annotated[float, NOT_FINITE]
"""A number that need not be finite, such as a figure of a report."""


@dataclasses.dataclass(frozen=True)
class FiniteEntries:
    """The limits of a tensor without nan and infinite entries."""

    words: ClassVar[str] = ""

    @staticmethod
    def check(name: str, value: Tensor | float) -> None:
        """Raises ConfigError for an entry that is not finite."""
        if not bool(torch.as_tensor(value).isfinite().all()):
            raise ConfigError(f"{name} has entries that are not finite: give finite ones")


Finite = FiniteEntries()
"""Limits for `Annotated[Tensor, Finite]`."""


def _can_be_checked(kind: type) -> bool:
    protocol = getattr(kind, "_is_protocol", False)
    return not protocol or getattr(kind, "_is_runtime_protocol", False)


def _words(hint: Any) -> list[str]:
    """The values that an annotation allows, in words."""
    if isinstance(hint, TypeVar):
        hint = hint.__bound__ or Any
    else:
        hint = hint
    origin = typing.get_origin(hint)
    parts = typing.get_args(hint)
    if origin is Annotated:
        return [word for each in parts[1:] if (word := getattr(each, "words", ""))] or _words(
            parts[0]
        )
    if origin in (Union, types.UnionType):
        return list(dict.fromkeys(word for part in parts for word in _words(part)))
    if origin is Literal:
        return [repr(part) for part in parts]
    if hint in NUMBERS:
        return [NUMBERS[hint][1]]
    if hint in PLAIN:
        return [PLAIN[hint]]
    if isinstance(hint, type) and issubclass(hint, AbstractArray):
        array: Any = hint
        if array.array_type is Tensor:
            kind = "dense tensor"
        else:
            kind = "numpy array"
        if isinstance(array.dtypes, tuple):
            types_of = f" and a type such as {array.dtypes[-1]}"
        else:
            types_of = ""
        return [f"a {kind} of shape ({array.dim_str}){types_of}"]
    kind = origin or hint
    if kind is typing.get_origin(Callable[..., Any]):
        return ["a function"]
    if isinstance(kind, type) and issubclass(kind, Mapping):
        return ["a dictionary"]
    if isinstance(kind, type) and issubclass(kind, (Collection, Iterable)) and parts:
        return [
            "a list" if parts[0] is Any else f"a list, each entry {' or '.join(_words(parts[0]))}"
        ]
    return [with_article(getattr(kind, "__name__", str(kind)))]

"""Weights on demand: matrices that are made when they are read, and dropped when others are read.

A model whose weights do not fit into memory consists of modules without matrices, and of a `Shelf`
that holds one piece of weights at a time. Reading a matrix puts its piece on the shelf, so the rest
of ctrans needs no change.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.utils._python_dispatch import _disable_current_modes

from solvers import ConfigError


@dataclass(frozen=True, eq=False)
class Piece:
    """Weights that are made together by a function, which gives the same weights at each call."""

    name: str
    make: Callable[[], dict[str, Tensor]]


WeightKey = tuple[Piece, str]
"""A weight on demand: its piece, and its name there. Modules that share a weight have one key."""
Alteration = Callable[[WeightKey, Tensor], Tensor]
"""What a weight becomes when it is made."""


TRIMMED = 1 << 20
"""From so many bytes on, the memory of weights that are dropped is given back at once."""


def _give_back() -> None:
    """Gives freed memory back to the system. The C library (glibc) keeps that of matrices of up to
    32 MB, of which others of other sizes may then find no use.
    """
    trim = getattr(_c_library(), "malloc_trim", None)
    if trim is not None:
        trim(0)


@functools.cache
def _c_library() -> Any:
    """The C library; None where it cannot be found so."""
    try:
        return ctypes.CDLL(None)
    except (OSError, TypeError):  # Windows has no library of this name
        return None


class Shelf:
    """The place for one piece. Reading from another piece drops the one before. Weights get the
    dtype and device of `like`.

    A copy has its own shelf, so that a model and its copy in another precision both work.
    `on_piece` is called with the name of each piece that is made.
    """

    def __init__(self, dtype: torch.dtype | None = None):
        self.like = torch.empty(0, dtype=dtype)
        self.on_piece: Callable[[str], None] | None = None
        self._piece: Piece | None = None
        self._weights: dict[str, Tensor] = {}
        self._alteration: Alteration | None = None

    def weight(self, piece: Piece, name: str) -> Tensor:
        """The weight of that name. It stays the same object while its piece is on the shelf."""
        if piece is not self._piece:
            self.clear()
            if self.on_piece is not None:
                self.on_piece(piece.name)
            # what counts or changes the operations of a model has no part in making its weights
            with _disable_current_modes():
                weights = piece.make()
                # one at a time, so that only one exists twice during a conversion
                self._weights = {
                    key: self._altered((piece, key), weights.pop(key).to(self.like))
                    for key in list(weights)
                }
            self._piece = piece
        return self._weights[name]

    def alter(self, alteration: Alteration | None) -> None:
        """From now on weights are altered when they are made; None ends that."""
        self.clear()
        self._alteration = alteration

    def _altered(self, key: WeightKey, weight: Tensor) -> Tensor:
        if self._alteration is None:
            return weight
        return self._alteration(key, weight)

    def clear(self) -> None:
        """Empties the shelf."""
        size = sum(weight.nbytes for weight in self._weights.values())
        self._piece = None
        self._weights = {}
        if size > TRIMMED:
            _give_back()

    def __deepcopy__(self, memo: dict[int, Any]) -> Shelf:
        twin = Shelf()
        twin.like = self.like
        twin.on_piece = self.on_piece
        memo[id(self)] = twin
        self.clear()  # the copy is used from now on
        return twin


@dataclass(frozen=True)
class Place:
    """Where a module finds its weights: the shelf, and for each weight its piece and its name
    there.
    """

    shelf: Shelf
    names: dict[str, WeightKey]

    def weight(self, name: str) -> Tensor:
        piece, name_in_piece = self.names[name]
        return self.shelf.weight(piece, name_in_piece)


class OnDemand(nn.Module):
    """The class of a module with weights on demand: a subclass of its own class with weights as
    properties.
    """

    place: Place

    def _save_to_state_dict(self, *args: Any, **kwargs: Any) -> None:
        check_present(self, "saved")

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        check_present(self, "loaded")

    def _apply(
        self,
        fn: Callable[[Tensor], Tensor],
        recurse: bool = True,  # noqa: FBT001, FBT002  # as in nn.Module
    ) -> OnDemand:
        """Applies `to`, `double` and similar calls to the shelf."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]  # torch gives it no types
        self.place.shelf.clear()
        self.place.shelf.like = fn(self.place.shelf.like)
        return self


@contextlib.contextmanager
def skeletons() -> Iterator[None]:
    """Inside, new modules have their vectors (norms, biases), but their matrices are on device
    "meta".
    """

    def without(
        module: nn.Module, name: str, parameter: nn.Parameter | None
    ) -> nn.Parameter | None:
        if parameter is None or parameter.dim() < 2 or parameter.is_meta:
            return None
        return nn.Parameter(parameter.to("meta"), parameter.requires_grad)

    handle = register_module_parameter_registration_hook(without)  # type: ignore[arg-type]  # it may return a parameter
    try:
        yield
    finally:
        handle.remove()


KnownPieces = dict[nn.Parameter, WeightKey]
"""The piece of a weight, and its name there, for weights that modules may share."""


def put_on_demand(
    module: nn.Module,
    piece: Piece,
    shelf: Shelf,
    *,
    prefix: str = "",
    known_pieces: KnownPieces | None = None,
) -> None:
    """Makes each part of the module without a matrix `OnDemand`, in place. Its weights are those of
    the piece with the name prefix + path. `known_pieces` has the weights that already have a
    piece, and gets those of this module.
    """
    if known_pieces is None:
        known_pieces = {}
    for path, part in list(module.named_modules()):
        parameters = dict(part.named_parameters(recurse=False))
        if not any(parameter.is_meta for parameter in parameters.values()):
            continue
        names: dict[str, WeightKey] = {}
        for name, parameter in parameters.items():
            name_in_piece = f"{prefix}{_path_to(path, name)}"
            names[name] = known_pieces.setdefault(parameter, (piece, name_in_piece))
            del part._parameters[name]
        kind: Any = type(part)  # a class is hashable, which mypy does not know
        part.__class__ = _on_demand(kind, tuple(parameters))
        part.place = Place(shelf, names)


def _path_to(path: str, name: str) -> str:
    """The name of a weight of the part at that path, which is empty for the module itself."""
    if path:
        return f"{path}.{name}"
    return name


@functools.cache
def _on_demand(kind: Any, names: tuple[str, ...]) -> type[nn.Module]:
    def reader(name: str) -> property:
        return property(lambda self: self.place.weight(name))

    return type(kind.__name__, (OnDemand, kind), {name: reader(name) for name in names})


def has_weights_on_demand(module: nn.Module) -> bool:
    """Whether any of the module's weights are made on demand."""
    return any(isinstance(part, OnDemand) for part in module.modules())


def watch(module: nn.Module, on_piece: Callable[[str], None]) -> None:
    """Calls `on_piece` with the name of each piece of the module's weights that is made from now
    on.
    """
    for part in module.modules():
        if isinstance(part, OnDemand):
            part.place.shelf.on_piece = on_piece


def plain_type(module: nn.Module) -> type[nn.Module]:
    """The module's class; of one with weights on demand that which it had before."""
    if isinstance(module, OnDemand):
        base: type[nn.Module] = type(module).__bases__[1]
        return base
    return type(module)


def clear_shelves(module: nn.Module) -> None:
    """Drops the weights that are in memory."""
    for shelf in _shelves(module):
        shelf.clear()


@contextlib.contextmanager
def altered(module: nn.Module, alteration: Alteration) -> Iterator[None]:
    """Inside, the module's weights on demand are altered when they are made: the piece in memory
    then exists only altered.
    """
    shelves = _shelves(module)
    try:
        for shelf in shelves:
            shelf.alter(alteration)
        yield
    finally:
        for shelf in shelves:
            shelf.alter(None)


def _shelves(module: nn.Module) -> list[Shelf]:
    parts = [part for part in module.modules() if isinstance(part, OnDemand)]
    return list(dict.fromkeys(part.place.shelf for part in parts))


@contextlib.contextmanager
def resident(module: nn.Module, keys: Collection[WeightKey]) -> Iterator[None]:
    """Inside, the modules that have one of these weights on demand are ordinary modules with
    parameters, which one may change.
    """
    parts = [
        part
        for part in module.modules()
        if isinstance(part, OnDemand) and not set(keys).isdisjoint(part.place.names.values())
    ]
    classes = [part.__class__ for part in parts]
    held: dict[WeightKey, nn.Parameter] = {}
    for part in parts:
        for name, key in part.place.names.items():
            if key not in held:
                held[key] = nn.Parameter(part.place.weight(name), requires_grad=False)
    clear_shelves(module)
    try:
        for part in parts:
            part.__class__ = plain_type(part)  # type: ignore[assignment]  # the class before
            for name, key in part.place.names.items():
                part._parameters[name] = held[key]
        yield
    finally:
        for part, kind in zip(parts, classes, strict=True):
            for name in part.place.names:
                del part._parameters[name]
            part.__class__ = kind


def check_present(module: nn.Module, purpose: str) -> None:
    """Raises ConfigError if weights are on demand, for a purpose that needs them all."""
    if has_weights_on_demand(module):
        raise ConfigError(
            f"weights that are made on demand cannot be {purpose}: make the model without on_demand"
        )


@dataclass(frozen=True)
class WeightReader:
    """A weight that is in memory or on demand. Two that are the same weight have the same key."""

    key: WeightKey | int
    read: Callable[[], Tensor]

    @property
    def on_demand(self) -> bool:
        return not isinstance(self.key, int)


def in_memory(weight: Tensor) -> WeightReader:
    """The reader of a weight that is in memory."""
    return WeightReader(id(weight), lambda: weight)


def readers_of(module: nn.Module) -> Iterator[tuple[str, WeightReader]]:
    """The module's parameters and weights on demand by name, each once. This makes none."""
    seen: set[WeightKey | int] = set()
    for path, part in module.named_modules():
        readers = {name: in_memory(weight) for name, weight in part.named_parameters(recurse=False)}
        if isinstance(part, OnDemand):
            for name, key in part.place.names.items():
                readers[name] = WeightReader(key, _reader(part.place, name))
        for name, reader in readers.items():
            if reader.key not in seen:
                seen.add(reader.key)
                yield _path_to(path, name), reader


def readers_on_demand(module: nn.Module) -> Iterator[tuple[str, WeightReader]]:
    """Those of them that are on demand."""
    return ((name, reader) for name, reader in readers_of(module) if reader.on_demand)


def _reader(place: Place, name: str) -> Callable[[], Tensor]:
    return lambda: place.weight(name)


def weights_of(module: nn.Module) -> dict[str, Tensor]:
    """All weights by name. This makes those on demand."""
    weights: dict[str, Tensor] = dict(module.named_parameters())
    for path, part in module.named_modules():
        if isinstance(part, OnDemand):
            for name in part.place.names:
                weights[_path_to(path, name)] = part.place.weight(name)
    return weights

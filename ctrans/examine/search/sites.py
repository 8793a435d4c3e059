"""Which weights of a module play the same role in several blocks, by their names alone.

A weight's name with its first number left open is its *pattern*: `h.*.attn.c_attn.weight`. Weights
of one pattern and shape are of blocks; a weight whose name has no such peers is outside of them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Collection, Iterator, Mapping, Sequence

from torch import Tensor, nn

from ctrans.dynamics.weights.on_demand import readers_on_demand

USUAL_SIZES = (8, 16, 32, 64, 128)
"""Channels of a head."""


@dataclasses.dataclass(frozen=True)
class NamedMatrix:
    """A linear map: its weight and its bias, if it has one, by their names.

    `place` is the name of the module without that of its block: `attn.c_proj`.
    """

    place: str
    weight: str
    bias: str | None

    @property
    def names(self) -> tuple[str, ...]:
        """The names of its weight and bias."""
        if self.bias is None:
            return (self.weight,)
        return (self.weight, self.bias)


@dataclasses.dataclass(frozen=True)
class Block:
    """What the blocks of one number have: their matrices and vectors, by place.

    - `title`: its name, as `h.3`
    - `vectors`: the names of other weights of one axis, such as gains
    """

    title: str
    matrices: Mapping[str, NamedMatrix]
    vectors: Mapping[str, str]

    @property
    def names(self) -> dict[str, str]:
        """The names of all its weights by place and the rest of the name."""
        return {
            name.removeprefix(f"{self.title}."): name
            for names in (
                *(matrix.names for matrix in self.matrices.values()),
                self.vectors.values(),
            )
            for name in names
        }


class WeightSites:
    """The blocks of a module, and the matrices and vectors outside of them. `known_heads` are
    numbers of heads that were read.
    """

    def __init__(self, module: nn.Module, known_heads: Collection[int] = ()):
        self.module = module
        self.known_heads = known_heads
        self.weights: dict[str, Tensor] = {
            name: weight.detach()
            for name, weight in module.named_parameters()
            if weight.is_floating_point() and not weight.is_meta
        }
        self.buffers: dict[str, Tensor] = {
            name: buffer.detach()
            for name, buffer in module.named_buffers()
            if buffer.is_floating_point() and not buffer.is_meta
        }
        self.kept: dict[str, Tensor] = {}
        inside = _in_blocks(self.weights, [name for name, _ in readers_on_demand(module)])
        matrices = _matrices(self.weights)
        in_matrices = {name for matrix in matrices for name in matrix.names}
        self.blocks: list[Block] = []
        for title in dict.fromkeys(inside.values()):
            own = {
                matrix.place.removeprefix(f"{title}."): dataclasses.replace(
                    matrix, place=matrix.place.removeprefix(f"{title}.")
                )
                for matrix in matrices
                if inside.get(matrix.weight) == title
            }
            vectors = {
                name.removeprefix(f"{title}."): name
                for name, weight in self.weights.items()
                if inside.get(name) == title and name not in in_matrices and weight.dim() == 1
            }
            self.blocks.append(Block(title, own, vectors))
        self.outside = {matrix.place: matrix for matrix in matrices if matrix.weight not in inside}
        self.outside_vectors = [
            name
            for name, weight in self.weights.items()
            if name not in inside and name not in in_matrices and weight.dim() == 1
        ]
        self.places: dict[int, list[tuple[nn.Module, str, str]]] = {}
        """By a tensor's id: the modules that hold it, under which names."""
        for module_name, part in module.named_modules():
            for held in (part._parameters, part._buffers):
                for leaf, tensor in held.items():
                    if tensor is not None:
                        name = f"{module_name}.{leaf}".removeprefix(".")
                        self.places.setdefault(id(tensor), []).append((part, leaf, name))
        self._ids = {
            name: id(tensor)
            for named in (module.named_parameters(), module.named_buffers())
            for name, tensor in named
        }

    def alike(self) -> list[list[Block]]:
        """The blocks in groups of those that have weights of the same places and shapes, in
        order.
        """
        groups: dict[tuple[object, ...], list[Block]] = {}
        for block in self.blocks:
            kind = tuple(
                (place, tuple(self.weights[name].shape)) for place, name in block.names.items()
            )
            groups.setdefault(kind, []).append(block)
        return list(groups.values())

    def head_counts(self) -> list[int]:
        """The numbers of heads that are known, and those that the module's attributes and config
        state, largest first; without any, those of heads of usual sizes.
        """
        counts = set(self.known_heads)
        sources = [_options(part) for part in self.module.modules()]
        sources += [_options(getattr(part, "config", None)) for part in self.module.modules()]
        for source in sources:
            for name, value in source.items():
                named = "head" in str(name).lower()
                if named and isinstance(value, int) and not isinstance(value, bool) and value > 1:
                    counts.add(value)
        if counts:
            return sorted(counts, reverse=True)
        widths = [weight.shape[1] for weight in self.weights.values() if weight.dim() == 2]
        width = max(widths, key=widths.count, default=0)
        return [width // size for size in USUAL_SIZES if width > size and width % size == 0]

    def keep(self, changed: Mapping[str, Tensor]) -> None:
        """From now on the module has these weights in `with_weights`, and further edits start from
        them.
        """
        self.kept |= changed
        for named in (self.weights, self.buffers):
            named.update({name: tensor for name, tensor in changed.items() if name in named})

    @contextlib.contextmanager
    def with_weights(self, changed: Mapping[str, Tensor]) -> Iterator[None]:
        """The module with other weights and buffers, wherever it holds them; the user's tensors
        stay untouched.
        """
        before: list[tuple[dict[str, Tensor | None], str, Tensor | None]] = []
        try:
            for name, tensor in {**self.kept, **changed}.items():
                for part, leaf, _ in self.places[self._ids[name]]:
                    if leaf in part._parameters:
                        before.append((part._parameters, leaf, part._parameters[leaf]))  # type: ignore[arg-type]  # a dictionary of parameters
                        part._parameters[leaf] = nn.Parameter(tensor, requires_grad=False)
                    else:
                        before.append((part._buffers, leaf, part._buffers[leaf]))
                        part._buffers[leaf] = tensor
            yield
        finally:
            for held, leaf, tensor_before in reversed(before):
                held[leaf] = tensor_before


def _in_blocks(weights: Mapping[str, Tensor], on_demand: Collection[str]) -> dict[str, str]:
    """The block's title of each weight that has a peer of the same pattern and shape, or of the
    same pattern among weights on demand, whose shapes are not known.
    """
    of_others = {_pattern(name)[1] for name in on_demand}
    patterns: dict[tuple[str, tuple[int, ...]], list[str]] = {}
    titles: dict[str, str] = {}
    for name, weight in weights.items():
        title, pattern = _pattern(name)
        if title:
            titles[name] = title
            patterns.setdefault((pattern, tuple(weight.shape)), []).append(name)
    return {
        name: titles[name]
        for (pattern, _), names in patterns.items()
        if len(names) > 1 or pattern in of_others
        for name in names
    }


def _pattern(name: str) -> tuple[str, str]:
    """The name up to its first number, and the name with that left open; "" twice for a name
    without a number.
    """
    parts = name.split(".")
    for i, part in enumerate(parts):
        if part.isdigit():
            return ".".join(parts[: i + 1]), ".".join((*parts[:i], "*", *parts[i + 1 :]))
    return "", ""


def _matrices(weights: Mapping[str, Tensor]) -> list[NamedMatrix]:
    """The weights of two axes, each with its bias."""
    found = []
    for name, weight in weights.items():
        if weight.dim() != 2:
            continue
        place, bias = _named(name)
        has_bias = bias in weights and weights[bias].numel() in weight.shape
        found.append(NamedMatrix(place, name, bias if has_bias else None))
    return found


def _named(name: str) -> tuple[str, str]:
    """The place of a matrix, and the name that its bias would have: of `attn.in_proj_weight` it is
    `attn.in_proj_bias`.
    """
    if name.endswith(".weight"):
        place = name.removesuffix(".weight")
        return place, f"{place}.bias"
    if name.endswith("_weight"):
        place = name.removesuffix("_weight")
        return place, f"{place}_bias"
    return name, ""


def parts_of(weight: Tensor, groups: Sequence[int]) -> tuple[int, list[Tensor]] | None:
    """A matrix that holds maps of these output sizes after one another: the axis of its outputs,
    and the maps. None if neither axis has that size.
    """
    for axis, size in enumerate(weight.shape):
        if size == sum(groups) and weight.shape[1 - axis] != size:
            return axis, list(weight.split(list(groups), axis))
    return None


def thirds(weight: Tensor) -> tuple[int, list[Tensor]] | None:
    """The three square maps that a matrix of (3 n, n) or (n, 3 n) holds; None for other ones."""
    n = math.isqrt(weight.numel() // 3)
    if 3 * n * n != weight.numel():
        return None
    return parts_of(weight, (n, n, n))


def _options(holder: object) -> Mapping[str, object]:
    """What a module or a configuration states by name."""
    if isinstance(holder, Mapping):
        return holder
    return getattr(holder, "__dict__", {})

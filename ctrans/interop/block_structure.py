"""A foreign block as sublayers whose fields are the block's own modules."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

from torch import nn

from ctrans.dynamics.depth import Depth
from ctrans.dynamics.fields import Kind
from ctrans.dynamics.placement import UNKNOWN as UNKNOWN_PLACEMENT
from ctrans.dynamics.sublayer import Sublayer
from ctrans.interop.anatomy import Anatomy, fields
from ctrans.interop.module_chain import ModuleChain
from ctrans.interop.norms import AdaptedNorm
from solvers import ConfigError

ROLES = ("input_norm", "output_norm", "state_norm")
"""The roles of a norm in a sublayer, in the order in which they act."""
UNKNOWN = UNKNOWN_PLACEMENT.name
"""What is said of the placement and the norms of a part."""
MIX = "mix"
"""The placement of a part that only scales the state and adds what does not depend on it."""
Roles = dict[str, Any]
"""The norms of a sublayer by role."""


@dataclass(frozen=True)
class Structure:
    """A block as sublayers whose fields are the block's own modules.

    - `sublayers`: attention and FFN; or one sublayer: of kind parallel with their sum
      (`ParallelMaps`), or of kind attention with the only map
    - `lengths`: s in X + s f(N X), the depth-time of each sublayer. It is 1 unless the block scales
      what it adds
    - `context`: the recorded keyword arguments of the attention
    """

    sublayers: tuple[Sublayer, ...]
    lengths: tuple[float, ...]
    context: dict[str, Any]

    @property
    def placement(self) -> str:
        """The placement's name, or two names such as "pre/output" where attention and FFN
        differ.
        """
        return "/".join(dict.fromkeys(_placement(part) for part in self.sublayers))

    @property
    def chains(self) -> tuple[Any, ...]:
        """Its attention, and its FFN if it has one: `ModuleChain`s, or the maps read from them."""
        return tuple(branch.field for part in self.sublayers for branch in part.branches.values())

    def depth(self, dt: float = 1.0) -> Depth:
        """The block alone; at dt = 1 it computes what the block computes."""
        return depth_of([self], dt)


def depth_of(structures: Sequence[Structure], dt: float) -> Depth:
    """All blocks in sequence, each segment dt times as long as in the model. If all lengths are
    equal, dt times that length is the step.
    """
    lengths = [length for structure in structures for length in structure.lengths]
    sublayers = [sublayer for structure in structures for sublayer in structure.sublayers]
    per_block = {len(structure.sublayers) for structure in structures}
    if len(per_block) > 1:
        raise ConfigError(
            "some blocks have an attention and an FFN and others have one map: all blocks must be"
            " of one kind"
        )
    if set(lengths) == {1.0}:
        return Depth(sublayers, dt, per_block=per_block.pop())
    if len(set(lengths)) == 1:
        return Depth(sublayers, dt * lengths[0], per_block=per_block.pop())
    spans = [Fraction(length) for length in lengths]
    return Depth(sublayers, dt, spans=spans, per_block=per_block.pop())


def period_of(kinds: Sequence[Kind]) -> int:
    """The number of parts of a block: the shortest pattern of an attention and an FFN that repeats,
    in any order; 1 if there is none. A pair that ends in an FFN, or a decoder's three, may be the
    only block.
    """
    count = len(kinds)
    for period in range(2, count + 1):
        pattern = list(kinds[:period])
        repeats = count // period
        if period * repeats != count or pattern * repeats != list(kinds):
            continue
        is_the_only_one = repeats == 1 and period <= 3 and pattern[-1] == "ffn"
        if {"attention", "ffn"} <= set(pattern) and (repeats > 1 or is_the_only_one):
            return period
    return 1


def unit_of(structures: Sequence[Structure], depth: Depth) -> str:
    """What the structures are called: "part" where they are not seen as blocks."""
    if {UNKNOWN, MIX} & {structure.placement for structure in structures}:
        return "part"
    return depth.unit


def _placement(sublayer: Sublayer) -> str:
    """The placement's name, or the names of the norms' roles where no placement has this
    combination.
    """
    if sublayer.kind == "part":
        return MIX if sublayer.field.label == MIX else UNKNOWN
    try:
        return sublayer.placement.name
    except ConfigError:
        return "+".join(role for role in ROLES if getattr(sublayer, role) is not None)


def alike(first: nn.Module, structure: Structure, block: nn.Module, anatomy: Anatomy) -> Structure:
    """The structure of a block built like `first`, whose structure is known. The block is not
    run.
    """
    paths = {part: path for path, part in first.named_modules()}
    parts = dict(block.named_modules())

    def counterpart(sublayer: Sublayer, field: ModuleChain) -> Sublayer:
        norms: Roles = {}
        for role in ROLES:
            norm = getattr(sublayer, role)
            if norm is not None:
                module = parts[paths[norm.module]]
                norms[role] = AdaptedNorm(
                    module, norm.form, norm.width, exact=norm.exact, stretch=norm.stretch
                )
        field.output_path = sublayer.field.output_path
        field.scale_path = sublayer.field.scale_path
        return Sublayer(field, sublayer.kind, gain=sublayer.gain, **norms)

    if len(structure.sublayers) != 2:
        raise ConfigError(
            f"blocks of class {type(block).__name__} cannot be read on demand: load the whole model"
        )
    pairs = zip(structure.sublayers, fields(block, anatomy), strict=True)
    return replace(structure, sublayers=tuple(counterpart(*pair) for pair in pairs))


def make_of(block: nn.Module) -> tuple[object, ...]:
    """The build of a block: the path and class of each module, its settings and its scalar
    buffers.
    """
    return tuple((path, type(part), _settings(part)) for path, part in block.named_modules())


PLAIN = (bool, int, float, str)
NUMBERS = ("layer_idx", "layer_id", "layer_number", "block_idx")
"""Names under which libraries keep a block's index, which does not change what it computes."""


def _settings(part: nn.Module) -> tuple[tuple[str, object], ...]:
    settings: dict[str, object] = {}
    for name, value in vars(part).items():
        if isinstance(value, PLAIN) and name not in NUMBERS:
            settings[name] = value
    for name, buffer in part.named_buffers(recurse=False):
        if buffer.numel() == 1:
            settings[name] = float(buffer)
    return tuple(sorted(settings.items()))

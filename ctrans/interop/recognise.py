"""Which norms surround attention and FFN of a foreign block: read from what the block computes, not from names.

The block is run once and its norms noted in the order in which they act. That order leaves a few ways to put them into the
equation X <- N_state(X + N_out f(N_in X)) of attention and then of the FFN; the one that gives the block's output is its structure.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from itertools import combinations
from typing import Any

import torch
from torch import Tensor, nn

from ctrans.depth import Depth
from ctrans.fields import Kind
from ctrans.interop.anatomy import Anatomy, fields
from ctrans.interop.block_calls import Call
from ctrans.interop.module_chain import ModuleChain
from ctrans.interop.norms import AdaptedNorm, as_norm
from ctrans.interop.rounding import tolerance
from ctrans.ode_block import in_context
from ctrans.sublayer import Sublayer
from solvers import ConfigError

ROLES = ("input_norm", "output_norm", "state_norm")
"""What a norm can be to a sublayer, in the order in which they act."""
PLACES = tuple((sublayer, role) for sublayer in (0, 1) for role in ROLES)
Roles = dict[str, Any]
"""The norms of a sublayer by role."""


@dataclasses.dataclass(frozen=True)
class Structure:
    """A block as two sublayers whose fields are its own modules, to be called with the context of a forward pass."""

    attention: Sublayer
    ffn: Sublayer

    @property
    def placement(self) -> str:
        """The placement's name; the two names, as "pre/output", where attention and FFN differ."""
        first, second = _placement(self.attention), _placement(self.ffn)
        return first if first == second else f"{first}/{second}"

    @property
    def sublayers(self) -> list[Sublayer]:
        return [self.attention, self.ffn]


def recognise(block: nn.Module, call: Call, anatomy: Anatomy) -> Structure:
    """The structure that reproduces the block in the context of that call; the model is to be in eval mode.

    Raises ConfigError that lists what acts where if none does (parallel attention and FFN, scaled residuals, cross-attention).
    """
    if "flow" in vars(block):
        raise ConfigError(f"a {type(block).__name__} is an ODE already: call discretize(model) first")
    attention, ffn = fields(block, anatomy)
    x = _telling_state(block, call)
    acting = _order(block, [attention, ffn], x, call)
    expected = block(x, **call.context)
    structures = [
        Structure(Sublayer(attention, "attention", **first), Sublayer(ffn, "ffn", **second))
        for first, second in _assignments(acting)
    ]
    misses = sorted(
        ((float((_output(structure, x, call) - expected).norm() / expected.norm()), structure) for structure in structures),
        key=lambda miss: miss[0],
    )
    if misses and misses[0][0] <= tolerance(x.dtype):
        return misses[0][1]
    nearest = "; ".join(f"{structure.placement!r} is off by {miss:.1g}" for miss, structure in misses[:2])
    raise ConfigError(
        f"{type(block).__name__} is no attention and FFN with norms in any known placement: in it act, in this order, "
        f"{', '.join(name for name, _ in acting)}{'; ' if nearest else ''}{nearest}"
    )


def alike(first: nn.Module, structure: Structure, block: nn.Module, anatomy: Anatomy) -> Structure:
    """The structure of a block of the same make as one whose structure is known, without running it."""
    paths, parts = {part: path for path, part in first.named_modules()}, dict(block.named_modules())

    def same(sublayer: Sublayer, field: ModuleChain) -> Sublayer:
        norms = {role: norm for role in ROLES if (norm := getattr(sublayer, role)) is not None}
        own: Roles = {role: AdaptedNorm(parts[paths[norm.module]], norm.form) for role, norm in norms.items()}
        return Sublayer(field, sublayer.kind, **own)

    return Structure(
        *(same(sublayer, field) for sublayer, field in zip(structure.sublayers, fields(block, anatomy), strict=True))
    )


def make_of(block: nn.Module) -> tuple[object, ...]:
    """What a block is built of: every module's path and class, its settings, and its buffers that are numbers."""
    return tuple((path, type(part), _settings(part)) for path, part in block.named_modules())


PLAIN = (bool, int, float, str)
NUMBERS = ("layer_idx", "layer_id", "layer_number", "block_idx")
"""How libraries call a block's number, which says nothing of what it computes."""


def _settings(part: nn.Module) -> tuple[tuple[str, object], ...]:
    found: dict[str, object] = {
        name: value for name, value in vars(part).items() if isinstance(value, PLAIN) and name not in NUMBERS
    }
    found |= {name: float(buffer) for name, buffer in part.named_buffers(recurse=False) if buffer.numel() == 1}
    return tuple(sorted(found.items()))


def _telling_state(block: nn.Module, call: Call) -> Tensor:
    """A random state as small as the block's increments, on which a block that barely acts differs from any other."""
    x = torch.randn(call.x.shape, generator=torch.Generator().manual_seed(0)).to(call.x)
    y = block(x, **call.context)
    if not isinstance(y, Tensor):
        raise ConfigError(
            f"{type(block).__name__} returns a {type(y).__name__}: only blocks that return the state alone are known"
        )
    scale = float((y - x).norm() / x.norm())
    if math.isnan(scale):
        bad = next((name for name, weight in block.named_parameters() if not weight.isfinite().all()), "a weight on demand")
        raise ConfigError(f"{type(block).__name__} has weights that are not finite, such as {bad}: is the file damaged?")
    if not 0 < scale < math.inf:
        raise ConfigError(
            f"{type(block).__name__} changes a state by {scale:g} times its size, from which its structure cannot be read: "
            "are its weights those of a trained or initialised model?"
        )
    return scale * x


def _output(structure: Structure, x: Tensor, call: Call) -> Tensor:
    output: Tensor = in_context(Depth(structure.sublayers, 1.0), call.context)(x)
    return output


def _order(block: nn.Module, chains: Sequence[ModuleChain], x: Tensor, call: Call) -> list[tuple[str, AdaptedNorm | Kind | None]]:
    """What acts in the block outside attention and FFN, and these, in order: (name, norm, kind or, for anything else, None)."""
    kinds: dict[nn.Module, Kind] = {chains[0].stages[0]: "attention", chains[1].stages[0]: "ffn"}
    inside = {part for chain in chains for stage in chain.stages for part in stage.modules()}
    order: list[tuple[str, AdaptedNorm | Kind | None]] = []
    handles = []
    for name, part in block.named_modules():
        if part in kinds:
            entry: AdaptedNorm | Kind | None = kinds[part]
        elif part not in inside and next(part.children(), None) is None and next(part.parameters(), None) is not None:
            entry = as_norm(part)
        else:
            continue
        described = f"{name} ({type(part).__name__})"
        handles.append(part.register_forward_pre_hook(lambda *_, item=(described, entry): order.append(item)))
    try:
        block(x, **call.context)
    finally:
        for handle in handles:
            handle.remove()
    return order


def _assignments(order: Sequence[tuple[str, AdaptedNorm | Kind | None]]) -> Iterator[tuple[Roles, Roles]]:
    """Every way to give the norms their roles that keeps the order in which they act."""
    acting = [entry for _, entry in order]
    if acting.count("attention") != 1 or acting.count("ffn") != 1 or None in acting:
        return
    first, second = acting.index("attention"), acting.index("ffn")
    before, between, after = acting[:first], acting[first + 1 : second], acting[second + 1 :]
    for own in combinations(PLACES[:1], len(before)):
        for middle in combinations(PLACES[1:4], len(between)):
            for last in combinations(PLACES[4:], len(after)):
                roles: tuple[Roles, Roles] = ({}, {})
                for (sublayer, role), norm in zip([*own, *middle, *last], [*before, *between, *after], strict=True):
                    roles[sublayer][role] = norm
                yield roles


def _placement(sublayer: Sublayer) -> str:
    """The placement's name, or the norms' where no placement has them, as with norms that nothing but a foreign block has."""
    try:
        return sublayer.placement.name
    except ConfigError:
        return "+".join(role for role in ROLES if getattr(sublayer, role) is not None)

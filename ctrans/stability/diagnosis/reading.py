"""A figure with its place, as findings are made of, and the part of a batch that it is of."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from torch import Tensor

from ctrans.depth import Depth

WORDS = {"attention": "attention", "ffn": "FFN", "parallel": "attention and FFN"}
NAMED = 4
"""So many channels or heads are named, and the rest counted."""


@dataclasses.dataclass(frozen=True)
class Reading:
    """A value at a place, and what it is in words. `segment` is where along the depth, None for what is in none."""

    value: float
    place: str
    said: str
    segment: int | None = None


def place_of(depth: Depth, k: int) -> str:
    """Segment k in words: "block 5, FFN (segment 11)". Blocks and segments are counted from 0, as everywhere here."""
    kind = depth.sublayers[k].kind
    return f"block {k // depth.per_block}, {WORDS.get(kind, kind)} (segment {k})"


def named(each: Sequence[str]) -> str:
    """The first few, and how many more there are."""
    more = f" and {len(each) - NAMED} more" if len(each) > NAMED else ""
    return ", ".join(each[:NAMED]) + more


def at_entry(x: Tensor, place: int) -> tuple[int, int, int]:
    """Sequence, token and channel of an entry of a state by its place in the flattened whole."""
    tokens, width = x.shape[-2:]
    row, channel = divmod(place, width)
    return (*divmod(row, tokens), channel)


def cut(x: Tensor, sequences: int, tokens: int) -> Tensor:
    """The first sequences, and of token ids the first tokens of each; images and features are left whole."""
    return x[:sequences, :tokens] if x.dim() == 2 and not x.is_floating_point() else x[:sequences]

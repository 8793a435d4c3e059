"""How a model encodes the positions of tokens. A new encoding is an entry of `POSITIONS` made of
these parts.
"""

from __future__ import annotations

import dataclasses
import math

import torch
from jaxtyping import Bool, Float
from torch import Tensor


@dataclasses.dataclass(frozen=True)
class Positions:
    """Which parts an encoding uses.

    - `embedding`: X_0 has a learned vector for each position
    - `turned`: queries and keys are rotated by their positions
    - `sloped`: scores decrease with distance
    """

    embedding: bool = False
    turned: bool = False
    sloped: bool = False


POSITIONS: dict[str, Positions] = {
    "learned": Positions(embedding=True),
    "rotary": Positions(turned=True),
    "alibi": Positions(sloped=True),
    "none": Positions(),
}


def turned_entries(head: int, fraction: float) -> int:
    """The number of rotated entries of a head: an even number, `fraction` of the head's width
    rounded down.
    """
    return 2 * int(head * fraction / 2)


Turns = tuple[Float[Tensor, "tokens entries"], Float[Tensor, "tokens entries"]]
"""For each token the cosines of its angles, twice, and the sines, first negated."""


def turns(tokens: int, entries: int, base: float, like: Tensor) -> Turns:
    """The cosines and sines of the angles i base^(-2 m/e), for tokens i = 0, 1, .. and pairs m <
    e/2, e = `entries`, in the dtype of `like`.
    """
    if like.dtype == torch.float64:
        exact = torch.float64
    else:
        exact = torch.float32
    positions = torch.arange(tokens, dtype=exact, device=like.device)
    rates = base ** (-torch.arange(0, entries, 2, dtype=exact, device=like.device) / entries)
    angles = positions.unsqueeze(-1) * rates
    cosine = angles.cos().to(like.dtype)
    sine = angles.sin().to(like.dtype)
    return torch.cat([cosine, cosine], -1), torch.cat([-sine, sine], -1)


def turn(x: Float[Tensor, "*batch tokens head"], by: Turns) -> Float[Tensor, "*batch tokens head"]:
    """R_i x_i: rotates the pair (x_m, x_(m + e/2)) of each token by its angle; e entries in all.

    With the angles of `turns`, <R_i q, R_j k> depends only on i - j, and |R_i x| = |x|. Entries
    from e on do not change (Su et al. 2021, RoFormer; pairs as in GPT-NeoX and Llama).
    """
    cosine, sine = by
    entries = cosine.shape[-1]
    if entries < x.shape[-1]:
        return torch.cat([turn(x[..., :entries], by), x[..., entries:]], dim=-1)
    return torch.addcmul(x * cosine, x.roll(entries // 2, -1), sine)


def slopes(heads: int) -> list[float]:
    """m_h = 2^(-8 h/H), h = 1 .. H, for a power of two H. For other numbers, those of the next
    lower power, then every other one of the next higher power (Press et al. 2022, ALiBi).
    """
    power = 2 ** math.floor(math.log2(heads))
    of_power = [2 ** (-8 * h / power) for h in range(1, power + 1)]
    between = [2 ** (-4 * h / power) for h in range(1, 2 * power + 1, 2)]
    return [*of_power, *between[: heads - power]]


def falling_scores(heads: int, tokens: int, like: Tensor) -> Float[Tensor, "heads tokens tokens"]:
    """-m_h abs(i - j), which ALiBi adds to the scores, in the dtype and on the device of `like`."""
    positions = torch.arange(tokens, device=like.device)
    distance = (positions.unsqueeze(-1) - positions).abs()
    by_head = torch.tensor(slopes(heads), dtype=like.dtype, device=like.device).view(-1, 1, 1)
    return -by_head * distance


def later_tokens(rows: Tensor) -> Bool[Tensor, "tokens tokens"]:
    """True where token j is later than token i, for as many tokens as the last axis has entries."""
    tokens = rows.shape[-1]
    return torch.ones(tokens, tokens, dtype=torch.bool, device=rows.device).triu(1)

"""How a token's place in its sequence is known to a model; a new way is an entry of `POSITIONS` that uses what is here."""

from __future__ import annotations

import dataclasses
import math

import torch
from jaxtyping import Float
from torch import Tensor


@dataclasses.dataclass(frozen=True)
class Positions:
    """Whether X_0 has a learned vector for each place, queries and keys are turned by their places, and scores fall with distance."""

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
    """How many entries of a head of that width are turned, in pairs: an even number, `fraction` of them rounded down."""
    return 2 * int(head * fraction / 2)


def turn(x: Float[Tensor, "*batch tokens head"], entries: int, base: float) -> Float[Tensor, "*batch tokens head"]:
    """R_i x_i: in token i = 0, 1, .. the pair (x_m, x_(m + e/2)) is turned by the angle i base^(-2 m/e), m < e/2, e = `entries`.

    <R_i q, R_j k> depends on i - j alone, and |R_i x| = |x|. Entries from e on stay as they are (Su et al. 2021, RoFormer; pairs as
    in GPT-NeoX and Llama).
    """
    exact = torch.float64 if x.dtype == torch.float64 else torch.float32
    places = torch.arange(x.shape[-2], dtype=exact, device=x.device)
    rates = base ** (-torch.arange(0, entries, 2, dtype=exact, device=x.device) / entries)
    angles = places.unsqueeze(-1) * rates
    cosine, sine = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    first, second, rest = x.tensor_split([entries // 2, entries], dim=-1)
    return torch.cat([first * cosine - second * sine, second * cosine + first * sine, rest], dim=-1)


def slopes(heads: int) -> list[float]:
    """m_h = 2^(-8 h/H), h = 1 .. H, for a power of two H; for other numbers those of the next power below, then every other one of
    the next above (Press et al. 2022, ALiBi).
    """
    power = 2 ** math.floor(math.log2(heads))
    own = [2 ** (-8 * h / power) for h in range(1, power + 1)]
    between = [2 ** (-4 * h / power) for h in range(1, 2 * power + 1, 2)]
    return [*own, *between[: heads - power]]


def falling_scores(heads: int, tokens: int, like: Tensor) -> Float[Tensor, "heads tokens tokens"]:
    """-m_h abs(i - j), what ALiBi adds to the scores, in the dtype and on the device of `like`."""
    place = torch.arange(tokens, device=like.device)
    distance = (place.unsqueeze(-1) - place).abs()
    return -torch.tensor(slopes(heads), dtype=like.dtype, device=like.device).view(-1, 1, 1) * distance

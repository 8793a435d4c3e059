"""Which parts of a coarse model make the most of its difference from a fine one, and which few of
the fine one, in their place, bring it down most.

Let X'_k be the states of the coarse model, and Z_k the last state that the fine one makes of X'_k.
Part k's *contribution* is Z_{k+1} - Z_k: what its rounding makes of the last state. The
contributions add up to the difference of the two models' last states. To first order a model with
the fine one's parts at S has the sum of the other contributions. So sets of parts are chosen by the
products of contributions, and then such models run.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from ctrans.examine.comparison.parts import ModelParts

MOST_KEPT = 3
CANDIDATES = 3
"""So many sets of each size run, the best to first order."""


@dataclass(frozen=True)
class KeptParts:
    """The fine model's parts of these names in the coarse one, and the difference that is left: |X
    - X_fine|/|X_fine| of the last states. Without parts, that of the two models. `of_second` says
    that the second model is the fine one.
    """

    names: tuple[str, ...]
    difference: float
    of_second: bool


def fine_and_coarse(
    a: ModelParts, b: ModelParts, states_a: Sequence[Tensor], states_b: Sequence[Tensor]
) -> tuple[ModelParts, ModelParts, Sequence[Tensor], Sequence[Tensor]]:
    """The model of more digits first, with its states; the first one, if both have as many."""
    if torch.finfo(states_a[0].dtype).eps <= torch.finfo(states_b[0].dtype).eps:
        return a, b, states_a, states_b
    return b, a, states_b, states_a


@torch.no_grad()
def contributions_of(
    fine: ModelParts, last: Tensor, states_of_coarse: Sequence[Tensor]
) -> list[Tensor]:
    """Z_{k+1} - Z_k for the embedding and each part of sublayers, in float64. `last` is Z_0."""
    lasts = [last, *fine.lasts_from([x.to(last.dtype) for x in states_of_coarse])]
    return [following.double() - own.double() for own, following in pairwise(lasts)]


def differences_of(last_states: Sequence[Tensor]) -> list[Tensor]:
    """The contributions to first order, for two models of one dtype: the differences of the last
    states that the coarse model makes of the states of the fine one. They add up to the same.
    """
    return [own.double() - following.double() for own, following in pairwise(last_states)]


def left_to_first_order(products: Tensor, kept: Sequence[int]) -> float:
    """|sum of the contributions of the other parts|, from the products of contributions."""
    others = torch.ones(len(products), dtype=torch.bool)
    others[list(kept)] = False
    return float(products[others][:, others].sum().clamp(min=0).sqrt())


@torch.no_grad()
def kept_parts(
    fine: ModelParts,
    coarse: ModelParts,
    tokens: Any,
    contributions: Sequence[Tensor],
    last: Tensor,
    states_of_coarse: Sequence[Tensor],
    *,
    of_second: bool,
) -> Iterator[KeptParts]:
    """No part, and then for each number up to `MOST_KEPT` those of the embedding and the sublayers
    that bring the difference down most. Each set has the one before it. None follows one that
    leaves nothing.
    """
    size = float(last.double().norm()) or 1.0
    rows = torch.stack([each.flatten() for each in contributions])
    products = rows @ rows.t()
    yield KeptParts((), float(rows.sum(0).norm()) / size, of_second)
    chosen: list[int] = []
    pair = (fine, coarse, tokens, states_of_coarse)
    for _ in range(min(MOST_KEPT, len(contributions) - 1)):
        others = [k for k in range(len(contributions)) if k not in chosen]
        others.sort(key=lambda k: left_to_first_order(products, [*chosen, k]))
        candidates = others[:CANDIDATES]
        lasts = mixed(*pair, [{*chosen, k} for k in candidates])
        measured = {
            k: float((x.double() - last.double()).norm())
            for k, x in zip(candidates, lasts, strict=True)
        }
        best = min(measured, key=lambda k: measured[k])
        chosen.append(best)
        names = tuple(fine.names[k] for k in sorted(chosen))
        yield KeptParts(names, measured[best] / size, of_second)
        if measured[best] == 0:
            return


def mixed(
    fine: ModelParts,
    coarse: ModelParts,
    tokens: Any,
    states_of_coarse: Sequence[Tensor],
    sets: Sequence[set[int]],
) -> list[Tensor]:
    """For each of these sets of parts, the last state of the coarse model with those of the fine
    one. Up to the first of them its states are its own. All go through a part together.
    """
    start = fine.model.embed(tokens)
    states = [start if 0 in kept else states_of_coarse[min(kept) - 1] for kept in sets]
    for part in range(1, len(fine) - 1):
        for i, kept in enumerate(sets):
            if part < min(kept):
                continue
            if part in kept:
                states[i] = fine.through(part, states[i].to(start.dtype))
            else:
                states[i] = coarse.through(part, states[i].to(states_of_coarse[0].dtype))
    return states

"""Transport of uncertainty: distances between samples of inputs and of their terminal states, with
bounds.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from ctrans.depth import Depth
from ctrans.stability.forward.carried import carried
from ctrans.stability.transport.bounds import printed_transport_bound, token_spreads, transport_bound
from ctrans.stability.transport.perturbations import SIZE, perturbed
from ctrans.stability.transport.wasserstein import ORDERS, wasserstein
from ctrans.walk import Model
from solvers.run import finite


@dataclasses.dataclass(frozen=True)
class Transport:
    """W_p between inputs and perturbed inputs (`before`) and between their terminal states
    (`after`), with bounds on `after`.

    `amplification` is after/before. It and `after` are None if a state is not finite. A bound is
    None if there is none.
    """

    perturbation: str
    p: int
    before: float
    after: float | None
    bound: float | None
    printed_bound: float | None

    @property
    def amplification(self) -> float | None:
        return None if self.after is None or self.before == 0 else self.after / self.before


def transport(
    model: Model,
    tokens: Tensor,
    perturbation: str,
    *,
    size: float = SIZE,
    other: Tensor | None = None,
    orders: Sequence[int] = ORDERS,
    generator: torch.Generator | None = None,
) -> list[Transport]:
    """W_p(mu_0, nu_0) and W_p(mu_D, nu_D) of the discrete model, for mu the sequences of `tokens`
    and nu the same perturbed.

    Perturbations and errors are those of `perturbed`. For several perturbations, carry all through
    the depth at once with `ctrans.stability.forward.carried` and compare with `distances`.
    """
    x = model.embed(tokens).detach()
    y = perturbed(model, tokens, perturbation, size=size, other=other, generator=generator)
    end, other_end = carried(model.depth, [(1.0, x), (1.0, y)])
    return distances(model.depth, perturbation, (x, y), (end, other_end), orders=orders)


Pair = tuple[Float[Tensor, "batch tokens width"], Float[Tensor, "batch tokens width"]]


def distances(
    depth: Depth,
    perturbation: str,
    inputs: Pair,
    ends: Pair,
    *,
    orders: Sequence[int] = ORDERS,
    spreads: Sequence[float | None] | None = None,
) -> list[Transport]:
    """W_p between two samples of inputs and between their terminal states, with bounds, for each p
    of `orders`.

    `spreads` are the depth's `token_spreads`, computed if None.
    """
    spreads = token_spreads(depth) if spreads is None else spreads
    reached, tokens = all(map(finite, ends)), inputs[0].shape[1]
    results = []
    for p in orders:
        before = wasserstein(*inputs, p)
        bounds = transport_bound(depth, tokens, before, p, spreads), printed_transport_bound(depth, tokens, before, p)
        results.append(Transport(perturbation, p, before, wasserstein(*ends, p) if reached else None, *bounds))
    return results

"""The value of a model's own loss along its trajectory: the least loss that is still within reach.

With velocities free at each token the value of a state is, by Hopf and Lax,

    Phi(X, t) = min of L(z) over the states z within reach of X in the time T - t,

because the admissible velocities do not depend on the state (`ctrans.control.reach`). No weights
of the remaining segments can do better from X while the norms' gains, the residual's and the ends
of the model stay as they are. Along any admissible trajectory Phi never falls (the verification
theorem), and along an optimal one it is constant. So the loss of a model is a sum over its
segments,

    L = Phi(X_0, 0) + sum_k [Phi(X_(k+1), t_(k+1)) - Phi(X_k, t_k)],

in which each term is at least 0: what the segments after k can no longer gain. Together they are
the optimality gap of the model.

Without an output norm a token reaches every state, so Phi is inf L at every t < T and jumps to L at
T: theorem 2 of Kan, on the model itself. A norm around the state does the same on its image, though
the Hamiltonian of its step is finite.

**The search.** At a state z within reach the costate is P = dL/dz. It is constant in time, as H
does not depend on the state. So the maximum principle asks for velocities that end in the extreme
point z* = X + sum_k h_k v_k*(P). A sweep moves z towards it (`ctrans.control.sweeps`). <P, z - z*>
>= 0 is the gap of the maximum principle, in nats. Where it is 0, z satisfies the principle. The
loss is not convex in z. So a search finds a value that is attained within reach and may lie above
the least.

`ctrans.control.convex_head` proves from below what the value is at least.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float
from numpy.typing import NDArray
from scipy.optimize import minimize
from torch import Tensor

from ctrans.base.as_found import leaving_as_found
from ctrans.base.shapes import TokenRows
from ctrans.control.admissible import length, ratio
from ctrans.control.convex_head import ConvexHead, convex_head
from ctrans.control.reach import ReachableSet, reaches
from ctrans.control.sweeps import CLOSE, LEAST, SWEEPS, LossTerms, Swept, sweep, value_and_slope
from ctrans.measure.missing import tried
from ctrans.measure.walk import (
    Model,
    SegmentCallback,
    check_targets,
    own_loss,
    states_of,
    terminal_loss,
)
from ctrans.model.gpt import counted
from solvers import ConfigError

FAR = 100.0
"""How far from the centre, in lengths of X_T, states begin that are anywhere."""
QUASI_NEWTON_STEPS = 100
"""Steps of L-BFGS in a search everywhere."""
PROVEN = "proven least loss"
"""The measure that the reason is filed under if nothing is proven."""


@dataclass(frozen=True)
class LeastLoss:
    """The least loss within reach along a model's trajectory, in nats.

    - `times`: 0 and the end of each segment, up to T
    - `found`: Phi at each state of the trajectory, as searches found it; the last one is the
      model's loss
    - `proven`: what it is at least; None where nothing is proven
    - `left`: the gap of the maximum principle at the end of each search, 0 at the last state
    - `bounded`: whether the velocities of all segments that are left are bounded
    - `by_token`: what each token of the batch adds to `found`; None if the loss is no sum over
      tokens
    - `end`: a state within reach of X_0 that attains the first of `found`
    - `missing`: why nothing was proven
    """

    times: tuple[float, ...]
    found: tuple[float, ...]
    proven: tuple[float | None, ...]
    left: tuple[float, ...]
    bounded: tuple[bool, ...]
    by_token: Float[Tensor, "states batch tokens"] | None
    end: TokenRows
    missing: dict[str, str] = field(default_factory=dict)

    @property
    def gaps(self) -> list[float]:
        """The optimality gap of each segment: the rise of the least loss within reach over it."""
        return [after - before for before, after in zip(self.found, self.found[1:], strict=False)]


@torch.no_grad()
@leaving_as_found
def least_loss(
    model: Model,
    tokens: Tensor,
    targets: Any,
    *,
    sweeps: int = SWEEPS,
    progress: SegmentCallback | None = None,
) -> LeastLoss:
    """Phi(X_k, t_k) = min of L over the states within reach of X_k, along the discrete model's own
    trajectory.

    - `tokens`, `targets`: the input, and the targets of the loss
    - `sweeps`: the most sweeps of each search
    - `progress(k)`: called after the search of state k, from the last to the first

    Raises ConfigError for a model whose reach has no closed form (`reaches`) and for wrong
    targets.

    >>> least_loss(model, tokens[:, :-1], tokens[:, 1:]).found
    """
    if sweeps < 1:
        raise ConfigError(f"sweeps = {sweeps!r}: give at least 1")
    check_targets(model, tokens, targets)
    within = reaches(model.depth)
    states = states_of(model.depth, model.embed(tokens))
    losses = losses_of(model, targets)
    missing: dict[str, str] = {}
    head = tried(missing, PROVEN, convex_head, model, cross_entropies(targets))
    z = states[-1]
    if not torch.isfinite(losses(z)).all():
        raise ConfigError(
            "the model's loss is not finite: give weights and inputs with a finite one"
        )
    searches = [Search(z, losses(z), 0.0, float(losses(z).sum()))]
    anywhere = _search_everywhere(losses, ReachableSet((), everywhere=True), z, head)
    for k in reversed(range(len(within) - 1)):
        reach = within[k]
        if within[k + 1].everywhere:
            search = searches[0]
        elif reach.image is not None:
            search = _search_everywhere(losses, reach, searches[0].z, head)
        elif reach.everywhere:
            search = anywhere
        else:
            starts = (searches[0].z, reach.extreme(states[k], -anywhere.z))
            search = _search_within(losses, reach, states[k], starts, head, sweeps)
        searches.insert(0, search)
        if progress is not None:
            progress(k)
    by_token: Tensor | None = None
    if own_loss(model) is None:
        by_token = torch.stack([search.values for search in searches])
    return LeastLoss(
        times=tuple(model.depth.times),
        found=tuple(float(search.values.sum()) for search in searches),
        proven=_rising(search.proven for search in searches),
        left=tuple(search.gap for search in searches),
        bounded=tuple(not reach.everywhere for reach in within),
        by_token=by_token,
        end=searches[0].z,
        missing=missing,
    )


class Search(NamedTuple):
    """A state within reach, its losses, its gap, and what the loss is proven to be at least."""

    z: TokenRows
    values: LossTerms
    gap: float
    proven: float | None


def _rising(bounds: Iterable[float | None]) -> tuple[float | None, ...]:
    """Each bound, or an earlier one that is larger: the value never falls along the depth."""
    rising: list[float | None] = []
    largest: float | None = None
    for bound in bounds:
        if bound is not None and (largest is None or bound > largest):
            largest = bound
        rising.append(None if bound is None else largest)
    return tuple(rising)


def losses_of(model: Model, targets: Any) -> Callable[[Tensor], LossTerms]:
    """From X_T to what each token adds to the loss. A loss of the model's own is one entry."""
    if own_loss(model) is not None:
        return lambda x: terminal_loss(model, x, targets).reshape(1, 1)
    of_logits = cross_entropies(targets)
    return lambda x: of_logits(model.head(x))


def cross_entropies(targets: Any) -> Callable[[Tensor], LossTerms]:
    """From logits to the cross-entropy of each token, by the number of targets that count."""

    def by_token(logits: Tensor) -> LossTerms:
        counting = counted(targets)
        terms = F.cross_entropy(
            logits.flatten(0, -2), counting.flatten(), ignore_index=-1, reduction="none"
        )
        return (terms / (counting != -1).sum()).reshape(counting.shape)

    return by_token


def _search_within(
    losses: Callable[[Tensor], LossTerms],
    reach: ReachableSet,
    x: TokenRows,
    starts: Sequence[TokenRows],
    head: ConvexHead | None,
    sweeps: int,
) -> Search:
    """The best z found within reach of x, from several within reach."""
    proven: float | None = None
    floor = -math.inf
    if head is not None:
        centre, radius = reach.ball(x)
        proven = float(head.proven(centre, radius, starts[0]).sum())
        floor = proven
    best: Swept | None = None
    for z in starts:
        swept = sweep(
            losses,
            lambda _, P: reach.extreme(x, P),
            z,
            sweeps=sweeps,
            close=CLOSE,
            least=LEAST,
            floor=floor,
        )
        if best is not None:
            swept = swept.or_better(best, losses)
        best = swept
        total = float(best.values.sum())
        if total - floor <= CLOSE * max(total, LEAST):
            break
    assert best is not None, "there is a start"
    return Search(best.z, best.values, float(best.gap.sum()), proven)


def _search_everywhere(
    losses: Callable[[Tensor], LossTerms],
    reach: ReachableSet,
    z: TokenRows,
    head: ConvexHead | None,
) -> Search:
    """The best z found anywhere, or on the image of the norm around the state, by L-BFGS."""

    def state(y: Tensor) -> Tensor:
        if reach.image is not None:
            y = reach.image(y)
        return y

    size = max(float(length(z).mean()), 1e-3)
    if reach.image is None:
        size = FAR * size

    # in units of the size, so that steps are of the order of 1
    def value(flat: NDArray[np.float64]) -> tuple[float, NDArray[np.float64]]:
        free = torch.from_numpy(flat).reshape(z.shape).to(z)
        values, slope = value_and_slope(lambda y: losses(state(size * y)), free)
        return float(values.sum()), slope.double().flatten().cpu().numpy()

    start = ratio(z, length(z).unsqueeze(-1)).double().flatten().cpu().numpy()
    options = {"maxiter": QUASI_NEWTON_STEPS, "gtol": 1e-10, "ftol": 1e-12}
    search = minimize(value, start, jac=True, method="L-BFGS-B", options=options)
    best = state(size * torch.from_numpy(search.x).reshape(z.shape).to(z))
    if float(losses(best).sum()) > float(losses(z).sum()):
        best = z
    proven: float | None = None
    if head is not None and reach.image is None:
        proven = float(head.proven(best, math.inf, best).sum())
    return Search(best, losses(best), 0.0, proven)

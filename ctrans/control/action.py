"""The action of a model's path, how straight the path is, and which sublayers undo each other.

The path has straight pieces: from X_k to X_{k+1} at constant velocity in a time h_k. Without a norm
around the state and without streams it is the discrete model's own, as X_{k+1} - X_k = h_k v_k. A
norm around the state moves the state once more within a step, and streams are mixed on entering. A
piece then includes that move, so the action is that of the states' path and not of v.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor

from ctrans.base.shapes import TokenMask, TokenRows
from ctrans.dynamics.depth import Depth
from ctrans.measure.transport.wasserstein import wasserstein
from ctrans.measure.walk import Instrument, StepContext
from ctrans.measure.walk.instrument import of_text
from solvers import ConfigError

MOST_TOKENS = 2048
"""The largest number of tokens between which W_2 is measured: an optimal assignment takes time like
its cube.
"""
ROWS = 256
"""Tokens whose paths are in memory together in float64."""
ROUNDING = 1e-9
"""Two displacements whose cosine is above minus this do not undo each other."""


@dataclass(frozen=True)
class Action:
    """A = T sum_k |X_{k+1} - X_k|^2/h_k >= |X_T - X_0|^2, with equality if and only if the token
    moves straight at constant speed (Cauchy-Schwarz). The mean of A over tokens is at least W_2^2
    between the tokens at 0 and at T (Benamou and Brenier 2000). In squared length of a state.

    - `action`, `displacement`: means of A and of |X_T - X_0|^2 over tokens
    - `straightness`: the ratio of these means, in [0, 1]; `least_straight`: the least ratio of a
      token's own. None where nothing moves
    - `transport`: W_2^2, min over permutations s of the mean of |X_T[s(i)] - X_0[i]|^2
    - `shares`: by sublayer, <X_{k+1} - X_k, X_T - X_0>/|X_T - X_0|^2 with sums over tokens. They
      sum to 1; a sublayer with a negative one undoes what the others do
    - `opposed`: the two sublayers with the most negative product of their displacements, and
      `cosine` of these; None if no product is negative
    - `names`: of the sublayers
    - `missing`: why a figure is None
    """

    names: list[str]
    action: float | None = None
    displacement: float | None = None
    straightness: float | None = None
    least_straight: float | None = None
    transport: float | None = None
    shares: list[float] = field(default_factory=list)
    opposed: list[int] | None = None
    cosine: float | None = None
    missing: dict[str, str] = field(default_factory=dict)


class ActionByDepth(Instrument):
    """`Action` of the states of a walk. It keeps all of them."""

    def begin(self, depth: Depth, x0: TokenRows) -> None:
        self._depth = depth
        self._states = [x0]

    def forward(self, at: StepContext) -> None:
        self._states.append(at.y)

    def figures(self) -> Action:
        names = [f"{k} {part.kind}" for k, part in enumerate(self._depth.sublayers)]
        reached = len(self._states) - 1
        if reached < len(names):
            return Action(
                names, missing={"action": f"the path ends at segment {reached} of {len(names)}"}
            )
        return action_of(self._states, self._depth.lengths, names=names, kept=self.kept)


@torch.no_grad()
def action_of(
    states: Sequence[TokenRows],
    lengths: Sequence[float],
    *,
    names: Sequence[str] | None = None,
    kept: TokenMask | None = None,
) -> Action:
    """`Action` of the path through these states, K + 1 of them at the ends of K segments of these
    lengths.

    `kept` has the tokens that are text; None if all are. Raises ConfigError if the numbers of
    states and lengths do not fit.
    """
    if not lengths or len(states) != len(lengths) + 1:
        raise ConfigError(
            f"{len(states)} states and {len(lengths)} lengths: give K + 1 states of K segments"
        )
    if names is None:
        names = [str(k) for k in range(len(lengths))]
    rows = [of_text(x, kept).flatten(0, -2) for x in states]
    if not all(bool(torch.isfinite(x).all()) for x in rows):
        return Action(list(names), missing={"action": "a state has entries that are not finite"})
    products = torch.zeros(len(lengths), len(lengths), dtype=torch.float64)
    actions = []
    displacements = []
    for start in range(0, len(rows[0]), ROWS):
        path = torch.stack([x[start : start + ROWS].detach().cpu().double() for x in rows])
        moves = path.diff(dim=0).flatten(2)
        products += torch.einsum("ktd,ltd->kl", moves, moves)
        actions.append(path_action(path, lengths))
        displacements.append((path[-1] - path[0]).square().sum(-1))
    action = torch.cat(actions)
    displacement = torch.cat(displacements)
    missing: dict[str, str] = {}
    transport: float | None = None
    if len(action) > MOST_TOKENS:
        missing["W_2^2 of the tokens"] = (
            f"the optimal assignment of {len(action)} tokens takes too long: at most {MOST_TOKENS}"
            " tokens, so take a smaller batch"
        )
    else:
        transport = wasserstein(rows[0], rows[-1]) ** 2
    straightness: float | None = None
    least_straight: float | None = None
    shares: list[float] = []
    total = float(products.sum())
    moved = action > 0
    if moved.any():
        straightness = float(displacement.mean() / action.mean())
        least_straight = float((displacement[moved] / action[moved]).min())
    else:
        missing["straightness"] = "no token moves"
    if total > 0:
        shares = (products.sum(1) / total).tolist()
    else:
        missing["share of the displacement"] = "the tokens end where they began"
    opposed, cosine = _opposed(products)
    return Action(
        list(names),
        float(action.mean()),
        float(displacement.mean()),
        straightness,
        least_straight,
        transport,
        shares,
        opposed,
        cosine,
        missing,
    )


def path_action(
    path: Float[Tensor, "states *batch width"], lengths: Sequence[float]
) -> Float[Tensor, "*batch"]:
    """T sum_k |X_{k+1} - X_k|^2/h_k of each token, T = sum_k h_k."""
    h = torch.tensor(lengths, dtype=path.dtype, device=path.device)
    squares = path.diff(dim=0).square().sum(-1)
    action: Tensor = h.sum() * torch.tensordot(1 / h, squares, dims=1)
    return action


def _opposed(
    products: Float[Tensor, "sublayers sublayers"],
) -> tuple[list[int] | None, float | None]:
    """The pair j < k with the most negative product, and its cosine."""
    above = products.triu(1)
    place = int(above.argmin())
    j, k = divmod(place, len(products))
    sizes = math.sqrt(float(products[j, j]) * float(products[k, k]))
    product = float(above[j, k])
    if product >= -ROUNDING * sizes or sizes == 0:
        return None, None
    return [j, k], product / sizes

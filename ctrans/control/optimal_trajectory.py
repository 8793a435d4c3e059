"""The optimal trajectory from a model's own embedding, by sweeps of the maximum principle.

The controls are the velocities v_k of the segments, free at each token within their admissible
sets, and

    J = L(X_T) + kinetic/2 sum_k h_k |v_k|^2,    X_T = X_0 + sum_k h_k v_k.

At the costate P = dL/dX_T the maximum principle asks for v_k* = argmax -<P, v> - kinetic/2 |v|^2,
which has a closed form. A sweep moves the velocities towards v*. Their loss never rises, and it
falls to the value of Hopf and Lax, Phi(X_0, 0) (`ctrans.control.least_loss`), which is computed
without trajectories.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ctrans.base.as_found import leaving_as_found
from ctrans.base.shapes import TokenRows
from ctrans.control.least_loss import losses_of
from ctrans.control.set_of_placement import admissible_set
from ctrans.control.sweeps import CLOSE, LEAST, SWEEPS, sweep
from ctrans.dynamics.sublayer import Sublayer
from ctrans.measure.walk import Model, check_targets, states_of
from solvers import ConfigError


@dataclass(frozen=True)
class OptimalTrajectory:
    """An optimal trajectory, up to the gap that is left.

    - `times`, `states`: X at 0 and at the end of each segment
    - `velocities`: of each segment
    - `loss`: L at its end; `cost`: its kinetic cost
    - `model_loss`, `model_cost`: the same of the model's own trajectory
    - `gap`: what the maximum principle leaves of L + cost, to first order
    - `history`: L + cost after each sweep, from that of the model's own velocities
    """

    times: tuple[float, ...]
    states: tuple[TokenRows, ...]
    velocities: tuple[TokenRows, ...]
    loss: float
    cost: float
    model_loss: float
    model_cost: float
    gap: float
    history: tuple[float, ...]


@torch.no_grad()
@leaving_as_found
def optimal_trajectory(
    model: Model,
    tokens: Tensor,
    targets: Any,
    *,
    kinetic: float | None = None,
    sweeps: int = SWEEPS,
) -> OptimalTrajectory:
    """The velocities with the least J from X_0, by sweeps that begin at the model's own.

    - `tokens`, `targets`: the input, and the targets of the loss
    - `kinetic`: the weight of a running cost kinetic/2 |v|^2; None for none
    - `sweeps`: the most sweeps

    Raises ConfigError where no velocity is optimal: without an output norm and without a kinetic
    cost, larger velocities are always better. Raises it also for a norm around the state, whose
    velocities depend on the state, and for a residual that is not the identity.

    >>> optimal_trajectory(model, tokens[:, :-1], tokens[:, 1:]).loss
    """
    check_targets(model, tokens, targets)
    sublayers = list(model.depth.sublayers)
    for sublayer in sublayers:
        _check(sublayer, kinetic)
    lengths = torch.as_tensor(model.depth.lengths)
    own = _own_velocities(model, tokens)
    h = lengths.to(own)[(...,) + (None,) * (own.dim() - 1)]
    x0 = model.embed(tokens)
    losses = losses_of(model, targets)
    weight = 0.0 if kinetic is None else kinetic

    def total(v: Tensor) -> Tensor:
        of_state = losses(x0 + (h * v).sum(0))
        cost = weight / 2 * (h * v.square()).sum((0, -1))
        if of_state.shape != cost.shape:
            cost = cost.sum().reshape(of_state.shape)
        return of_state + cost

    def best(v: Tensor, slope: Tensor) -> Tensor:
        # dJ/dv = h (P + kinetic v)
        P = slope / h - weight * v
        return torch.stack(
            [
                _maximizer(sublayer, of_segment, kinetic)
                for sublayer, of_segment in zip(sublayers, P, strict=True)
            ]
        )

    swept = sweep(total, best, own, sweeps=sweeps, close=CLOSE, least=LEAST)
    states = [x0, *(x0 + (h * swept.z).cumsum(0))]
    loss = float(losses(states[-1]).sum())
    model_loss = float(losses(x0 + (h * own).sum(0)).sum())
    return OptimalTrajectory(
        times=tuple(model.depth.times),
        states=tuple(states),
        velocities=tuple(swept.z),
        loss=loss,
        cost=float(swept.values.sum()) - loss,
        model_loss=model_loss,
        model_cost=swept.history[0] - model_loss,
        gap=float(swept.gap.sum()),
        history=tuple(swept.history),
    )


def _check(sublayer: Sublayer, kinetic: float | None) -> None:
    """Raises ConfigError if the segment's velocities have no closed-form maximiser that serves all
    states.
    """
    if sublayer.state_norm is not None:
        raise ConfigError(
            "a norm around the state makes the admissible velocities depend on the state: sweeps"
            " with a closed-form maximiser need one set for all states"
        )
    if not sublayer.residual.is_identity:
        raise ConfigError(
            f"the residual {type(sublayer.residual).__name__} changes velocities: sweeps are for"
            " plain residual connections"
        )
    if sublayer.output_norm is None and kinetic is None:
        raise ConfigError(
            f"placement {sublayer.placement.name!r} has no output norm, so that no velocity is"
            " optimal: a larger one is always better. Give a kinetic cost"
        )


def _maximizer(sublayer: Sublayer, P: TokenRows, kinetic: float | None) -> TokenRows:
    """argmax -<P, v> - kinetic/2 |v|^2 over the velocities of the segment."""
    admissible = admissible_set(sublayer.output_norm, sublayer.placement, kinetic=kinetic)
    return admissible.maximizer(P)


def _own_velocities(model: Model, tokens: Tensor) -> Tensor:
    """The velocities of the model's own trajectory, one for each segment."""
    states = states_of(model.depth, model.embed(tokens))
    return torch.stack(
        [sublayer(x) for sublayer, x in zip(model.depth.sublayers, states, strict=False)]
    )

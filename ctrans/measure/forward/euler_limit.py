"""The Euler limit: the discrete model as the first of a sequence of Euler solutions that converges
to the ODE.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from ctrans.base.shapes import TokenRows
from ctrans.measure.walk import DescribedModel
from ctrans.model.gpt import GPT
from ctrans.model.orders import fitted_order
from solvers import Solution

FEWEST = 8
"""The largest number of steps that is measured even if the reference took fewer evaluations."""
MOST = 1024
"""The largest number of steps at all."""
FITTED = 4
"""The slope is fitted to the errors of the last so many numbers of steps."""
LEAST_FITTED = 3
"""The fit has three unknowns."""


ERROR = "error of more Euler steps"
SLOPE = "slope of the Euler limit"
"""The measures, as `missing` names them."""


@dataclass(frozen=True)
class EulerLimit:
    """Errors |X_n - X_ODE|/|X_ODE| at the end of the depth, with n = `steps` Euler steps in each
    segment.

    - `errors`: the first, n = 1, is the error of the discrete model itself. With a norm around the
      state that is an Euler step and then the norm, and from n = 2 on Euler steps of the ODE on the
      norm's image
    - `slope`: p of errors ~ n^-p (`ctrans.model.orders.fitted_order`), 1 in theory; None if unknown
    - `fitted`: the numbers of steps to which it is fitted
    - `first_point`: what n = 1 is, in words: "this GPT, bit for bit" if the states agree
    - `apart`: the largest difference between an entry of the model's last state and of the one-step
      Euler solution's
    - `missing`: why there is no slope
    """

    steps: list[int]
    errors: list[float]
    slope: float | None
    fitted: list[int]
    first_point: str
    apart: float
    missing: dict[str, str] = field(default_factory=dict)


@torch.no_grad()
def euler_limit(
    model: DescribedModel,
    twin: DescribedModel,
    tokens: Tensor,
    *,
    one_step: Solution,
    reference: Solution,
    tolerance: float,
) -> EulerLimit:
    """Errors for n = 1, 2, 4, ..., as long as all together take no more evaluations than the
    reference, but at least to `FEWEST` and at most to `MOST`.

    - `twin`: the model in float64
    - `one_step`: the solution of the model by one Euler step in each segment
    - `reference`: the accurate solution of the ODE, and `tolerance` that of its errors

    It ends early at an error below the tolerance, which may be the reference's own. The slope is
    fitted to larger ones. Raises SolveError if an Euler solution is not finite.
    """
    exact = reference.x1
    state: TokenRows = model.depth(model.embed(tokens))
    difference = state.double() - one_step.x1.double()
    agrees = torch.equal(state, one_step.x1)
    allowed = reference.stats.evaluations / len(model.depth.sublayers)
    steps = [1]
    errors = [_error(one_step.x1, exact)]
    while errors[-1] > tolerance:
        following = 2 * steps[-1]
        spent = sum(steps) + following
        if following > MOST or (following > FEWEST and spent > allowed):
            break
        steps.append(following)
        errors.append(_error(twin.trajectory(tokens, method="euler", steps=following).x1, exact))
    first = 0
    if any(sublayer.state_norm is not None for sublayer in model.depth.sublayers):
        first = 1  # the norm's own step is another method than those that follow
    points = [
        (n, error)
        for n, error in zip(steps[first:], errors[first:], strict=True)
        if error > tolerance
    ][-FITTED:]
    slope: float | None = None
    missing: dict[str, str] = {}
    if len(points) < LEAST_FITTED:
        missing[SLOPE] = (
            f"only {len(points)} errors are above {tolerance:g}, the tolerance of the ODE's"
            " solution: the discrete model is too close to its ODE"
        )
    else:
        slope = fitted_order([n for n, _ in points], [error for _, error in points])
    return EulerLimit(
        steps,
        errors,
        slope,
        [n for n, _ in points],
        _first_point(model, agrees=agrees, apart=float(difference.abs().max())),
        float(difference.abs().max()),
        missing,
    )


def _first_point(model: DescribedModel, *, agrees: bool, apart: float) -> str:
    subject = "this model"
    if isinstance(model, GPT):
        subject = "this GPT"
    if agrees:
        return f"{subject}, bit for bit"
    return f"{subject}, to {apart:.1g} in an entry"


def _error(x: TokenRows, exact: TokenRows) -> float:
    return float(torch.linalg.vector_norm(x.double() - exact) / torch.linalg.vector_norm(exact))

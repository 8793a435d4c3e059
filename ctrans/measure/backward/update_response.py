"""How far one optimiser step on one sublayer's weights moves the last state."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils import parametrize

from ctrans.dynamics.depth import Depth
from ctrans.dynamics.fields import reference_kernels
from ctrans.measure.backward.parameter_gradients import requiring_gradients, used_weights
from ctrans.measure.backward.sensitivity import ALL_AT_ONCE, StepGraphs
from ctrans.measure.backward.singular_values import jacobian_products
from ctrans.measure.walk import Instrument, StepContextBack, Turn
from solvers import ConfigError, SolveError


@dataclass(frozen=True)
class Update:
    """The first step of an optimiser: dW = -lr direction(dL/dW). Responses are proportional to
    lr.
    """

    learning_rate: float
    direction: Callable[[Tensor], Tensor]


UPDATES: dict[str, Update] = {
    "adam": Update(1e-3, torch.sign),
    "sgd": Update(0.1, lambda gradient: gradient),
}
"""Adam's first step is -lr g/(|g| + eps), the sign of the gradient wherever it is not tiny (Kingma
and Ba 2015).
"""


@dataclass(frozen=True)
class Responses:
    """r_k of the measured segments, for one optimiser at one learning rate."""

    learning_rate: float
    segments: list[int]
    values: list[float]

    @property
    def spread(self) -> float:
        """The largest r_k over the smallest: 1 if all layers move the output equally, inf if some
        cannot move it, nan if none can.
        """
        least = min(self.values)
        largest = max(self.values)
        if least > 0:
            return largest / least
        if largest > 0:
            return math.inf
        return math.nan


class UpdateResponse(Instrument):
    """r_k = |dX_D/dW_k dW_k|_F/|X_D|_F, dW_k = -lr u(dL/dW_k) one step of the optimiser on all
    weights of segment k, norms too.

    dL/dW_k = (dX_{k+1}/dW_k)' P_{k+1}. One product with the same Jacobian gives the step's effect
    on X_{k+1}, and one product with each later segment takes it to the end. r_k is a derivative: it
    is proportional to lr, and the true change differs by O(lr^2). Weights that are functions of
    depth count as free weights. `graphs` must come before it in the same lane. Raises ConfigError
    if weights are made on demand, because the products need all segments at once.
    """

    def __init__(
        self,
        graphs: StepGraphs,
        segments: Collection[int] | None = None,
        updates: Mapping[str, Update] | None = None,
    ):
        self.graphs = graphs
        self.segments = segments
        self.updates = dict(updates or UPDATES)

    def begin(self, depth: Depth, x0: Tensor) -> None:
        if depth.streamed:
            raise ConfigError(f"the response to an update is {ALL_AT_ONCE}")
        self._found: dict[str, list[tuple[int, float]]] = {name: [] for name in self.updates}

    def head(self, model: object, at: Turn) -> None:
        self._steps = self.graphs.finite_steps("the response to an update is not known")
        self._size = float(torch.linalg.vector_norm(at.x.double()))
        if not math.isfinite(self._size):
            raise SolveError(
                "the state at the end is not finite: the response to an update is not known"
            )

    def backward(self, at: StepContextBack) -> None:
        if self.segments is not None and at.k not in self.segments:
            return
        for name, change in effects(at, self.updates).items():
            for step in self._steps[at.k + 1 :]:
                change = step.push(change)
            moved = float(torch.linalg.vector_norm(change.double()))
            response = math.inf
            if self._size:
                response = moved / self._size
            self._found[name].insert(0, (at.k, response))

    def figures(self) -> dict[str, Responses]:
        if not all(self._found.values()):
            raise ConfigError(
                "no segment has weights of its own: the response to an update is not known"
            )
        return {
            name: Responses(
                self.updates[name].learning_rate,
                [k for k, _ in responses],
                [response for _, response in responses],
            )
            for name, responses in self._found.items()
        }


def effects(at: StepContextBack, updates: Mapping[str, Update]) -> dict[str, Tensor]:
    """dX_{k+1}/dW_k dW_k for each optimiser's dW_k = -lr u(dL/dW_k); empty without weights."""
    sublayer = at.sublayer
    with parametrize.cached(), reference_kernels(sublayer):
        with torch.no_grad():
            weights = list(used_weights(sublayer).values())
        if not weights:
            return {}
        with requiring_gradients(weights), torch.enable_grad():
            y = sublayer.step(at.x.detach().requires_grad_(), at.h)
            push, pull = jacobian_products(y, weights)
            gradients = pull(at.p)
            return {
                name: push(
                    [-update.learning_rate * update.direction(gradient) for gradient in gradients]
                )
                for name, update in updates.items()
            }

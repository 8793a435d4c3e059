"""How far one optimiser step on one sublayer's weights moves the last state."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Mapping, Sequence

import torch
from torch import Tensor
from torch.nn.utils import parametrize

from ctrans.depth import Depth
from ctrans.fields import reference_kernels
from ctrans.stability.backward.parameter_gradients import requiring_gradients, used_weights
from ctrans.stability.backward.sensitivity import ALL_AT_ONCE, StepGraphs
from ctrans.stability.backward.singular_values import Linearisation, second_derivatives
from ctrans.walk import Instrument, StepContext, StepContextBack, Turn
from solvers import ConfigError, SolveError


@dataclasses.dataclass(frozen=True)
class Update:
    """The first step of an optimiser: dW = -lr direction(dL/dW). Responses are proportional to lr."""

    learning_rate: float
    direction: Callable[[Tensor], Tensor]


UPDATES: dict[str, Update] = {"adam": Update(1e-3, torch.sign), "sgd": Update(0.1, lambda gradient: gradient)}
"""Adam's first step is -lr g/(|g| + eps), the sign of the gradient wherever it is not tiny (Kingma
and Ba 2015).
"""


@dataclasses.dataclass(frozen=True)
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
        least, largest = min(self.values), max(self.values)
        return largest / least if least > 0 else math.inf if largest > 0 else math.nan


class UpdateResponse(Instrument):
    """r_k = |dX_D/dW_k dW_k|_F/|X_D|_F, dW_k = -lr u(dL/dW_k) one step of the optimiser on all
    weights of segment k, norms too.

    dL/dW_k = (dX_{k+1}/dW_k)' P_{k+1}. One product with the same Jacobian gives the step's effect
    on X_{k+1}, and one product with each later segment takes it to the end. r_k is a derivative: it
    is proportional to lr, and the true change differs by O(lr^2). Weights that are functions of
    depth count as free weights. `graphs` must come before it in the same lane. Raises ConfigError
    if weights are made on demand, because the products need all segments at once.
    """

    def __init__(self, graphs: StepGraphs, segments: Collection[int] | None = None, updates: Mapping[str, Update] | None = None):
        self.graphs, self.segments, self.updates = graphs, segments, dict(updates or UPDATES)

    def begin(self, depth: Depth, x0: Tensor) -> None:
        if depth.streamed:
            raise ConfigError(f"the response to an update is {ALL_AT_ONCE}")
        self._found: dict[int, dict[str, float]] = {}

    def forward(self, at: StepContext) -> None:
        self.graphs.of(at)

    def head(self, model: object, at: Turn) -> None:
        self._size = float(torch.linalg.vector_norm(at.x.double()))

    def backward(self, at: StepContextBack) -> None:
        if self.segments is not None and at.k not in self.segments:
            return
        later = self.graphs.figures()[at.k + 1 :]
        steps = [step for step in later if step is not None]
        if len(steps) < len(later) or not math.isfinite(self._size):
            raise SolveError("the states are not finite, so the response to an update is not known")
        moved = {name: self._pushed(change, steps) for name, change in effects(at, self.updates).items()}
        self._found[at.k] = {name: size / self._size if self._size else math.inf for name, size in moved.items()}

    def figures(self) -> dict[str, Responses]:
        segments = sorted(self._found)
        return {
            name: Responses(update.learning_rate, segments, [self._found[k][name] for k in segments])
            for name, update in self.updates.items()
        }

    @staticmethod
    def _pushed(change: Tensor, later: Sequence[Linearisation]) -> float:
        for step in later:
            change = step.push(change)
        return float(torch.linalg.vector_norm(change.double()))


def effects(at: StepContextBack, updates: Mapping[str, Update]) -> dict[str, Tensor]:
    """dX_{k+1}/dW_k dW_k for each optimiser's dW_k = -lr u(dL/dW_k)."""
    sublayer = at.sublayer
    with parametrize.cached(), reference_kernels(sublayer), second_derivatives():
        with torch.no_grad():
            weights = list(used_weights(sublayer).values())
        with requiring_gradients(weights), torch.enable_grad():
            y = sublayer.step(at.x.detach(), at.h)
            gradients = torch.autograd.grad(y, weights, at.p, retain_graph=True, materialize_grads=True)
            # the product with dX/dW is the derivative of the linear map u -> (dX/dW)' u
            u = torch.zeros_like(y, requires_grad=True)
            pulled = torch.autograd.grad(y, weights, u, create_graph=True, materialize_grads=True)
            found = {}
            for name, update in updates.items():
                along = [-update.learning_rate * update.direction(gradient) for gradient in gradients]
                total = sum(((p * d).sum() for p, d in zip(pulled, along, strict=True)), 0.0 * u.sum())
                (found[name],) = torch.autograd.grad(total, u, retain_graph=True, materialize_grads=True)
    return found

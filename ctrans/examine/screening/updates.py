"""The screening's step on training: the effect of one optimiser step on the function."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

from torch import nn

from ctrans.dynamics.depth import spread
from ctrans.examine.screening.case import NOT_IN_QUICK, Case, StepPlan, StepVerdict, three
from ctrans.examine.screening.screening_checks import judged
from ctrans.measure.backward.curvature import Curvature, GaussNewton
from ctrans.measure.backward.update_response import Responses, UpdateResponse
from ctrans.measure.measured import Value
from ctrans.measure.walk import Attempt

MEASURES_BY_OPTIMISER = {"adam": "one step of Adam", "sgd": "one step of gradient descent"}
"""The measure of each optimiser's responses."""


@dataclasses.dataclass(frozen=True)
class UpdateStep:
    """The responses r_k by optimiser, and the curvature if measured."""

    updates: dict[str, Responses]
    curvature: Curvature | None

    def values(self, model: str) -> Iterator[Value]:
        """The rows of the responses by segment."""
        for optimiser, measure in MEASURES_BY_OPTIMISER.items():
            responses = self.updates[optimiser]
            for segment, response in zip(responses.segments, responses.values, strict=True):
                yield Value(model, measure, response, depth=segment)


def plan_updates(case: Case) -> StepPlan:
    """Responses r_k = |dX_D/dW_k dW_k|/|X_D| to one step of Adam and one of gradient descent; in a
    full screening also curvature.

    Quantities: the least and the largest r_k and their ratio; the size of the weights; learning
    rates at the edge of stability; the effective rank of the tangent kernel. None is gauge-free,
    because an optimiser is not.
    """
    chosen = spread(len(case.model.depth.sublayers), case.effort.updates)
    response = UpdateResponse(case.graphs, chosen)
    missing: dict[str, str] = {}
    measured = Attempt(GaussNewton(), missing, "curvature")
    if not case.effort.curvature:
        measured.leave_out(
            NOT_IN_QUICK.format("curvature, with the learning rates that it allows,")
        )

    def conclude() -> StepVerdict:
        notes: list[str] = []
        curvature: Curvature | None = measured.figures()
        updates = response.figures()
        adam = updates["adam"]
        sgd = updates["sgd"]
        quantities = {
            "Adam, least": min(adam.values),
            "Adam, largest": max(adam.values),
            "Adam, spread": adam.spread,
            "SGD, least": min(sgd.values),
            "SGD, spread": sgd.spread,
            "weight size": weight_size(case.model.depth),
        }
        if not max(adam.values):
            notes.append(
                "no segment's step moves the state, because the loss has no gradient in their"
                " weights: check for a head of zeros"
            )
        errors: dict[str, float] = {}
        why = (
            f"one step of Adam at lr {adam.learning_rate:g} on one segment's weights moves the"
            f" state at the end by {three(min(adam.values))} to {three(max(adam.values))} of"
            " itself, to first order"
        )
        if curvature is not None:
            spectra = {"lr of SGD": curvature.plain, "lr of Adam": curvature.adam}
            for name, spectrum in spectra.items():
                quantities[name] = spectrum.learning_rate
                if math.isfinite(spectrum.learning_rate):
                    errors[name] = spectrum.learning_rate * spectrum.largest_error
                else:
                    errors[name] = 0.0
            quantities["kernel rank"] = curvature.kernel_rank
            why += (
                f"; curvature lets gradient descent take lr {three(curvature.plain.learning_rate)}"
                f" and Adam {three(curvature.adam.learning_rate)}, if the loss were quadratic"
            )
        figure = f"r = {three(min(adam.values))} to {three(max(adam.values))}"
        return StepVerdict(
            judged(quantities, "moves"),
            figure,
            why,
            quantities,
            notes,
            UpdateStep(updates, curvature),
            errors,
            missing,
        )

    return StepPlan({"part": [response, measured]}, conclude)


def weight_size(depth: nn.Module) -> float:
    """The root mean square of all entries of the depth's matrices; nan if there are none."""
    matrices = [weight for weight in depth.parameters() if weight.dim() >= 2]
    count = sum(weight.numel() for weight in matrices)
    if not count:
        return math.nan
    squares = sum(weight.detach().double().square().sum().item() for weight in matrices)
    return math.sqrt(squares / count)

"""The screening's last two steps: how do gradients pass, and how far does uncertainty travel?"""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import Tensor

from ctrans.depth import Depth
from ctrans.stability.backward.lyapunov import Lyapunov, lyapunov
from ctrans.stability.backward.parameter_gradients import Gradients, gradient_norms
from ctrans.stability.backward.sensitivity import WHOLE, Backward, backward_sensitivity
from ctrans.stability.screening.case import Case, Finding, attempt, exponent, largest, three
from ctrans.stability.screening.forward import run_away, weights_verdict
from ctrans.stability.screening.score import decades
from ctrans.stability.transport.generalisation import GeneralisationRadius, generalisation_radius
from ctrans.stability.transport.wasserstein import (
    PERTURBATIONS,
    SIZE,
    Transport,
    distances,
    perturbed,
    token_spreads,
    wasserstein,
)
from ctrans.stability.weight_scaling import Slope, carried, log_slope, sensitivity_slope
from solvers.run import finite

SCALED = {"attention": "W", "ffn": "W2"}
"""Which weights are scaled in a sublayer of each kind: with any of the exact scalings f becomes c f, so one stands for all."""
LARGE = (100.0, 1000.0)
"""Factors of the weights between which an exponent of the transport is taken."""
AMPLIFIES = 2.0
"""Decades from which a condition number is called an amplification."""


@dataclasses.dataclass(frozen=True)
class BackwardStep:
    """Sensitivities by depth, Lyapunov exponents, gradient norms, and slopes against activation scale in the middle block.

    `condition` is that of `sensitivity`. `spread` is the largest over the smallest gradient norm of all sublayers of a kind, the
    worse kind.
    """

    sensitivity: Backward
    condition: list[float | None]
    lyapunov: Lyapunov | None
    gradients: Gradients | None
    spread: float
    slopes: list[Slope]


def screen_backward(case: Case) -> Finding:
    """Kan's step 3: Jacobians, Lyapunov exponents and gradients by depth, slopes against activation scale (theory, section 7).

    Ingredients: the mean slope of log |dv/dX| against log c; decades of the largest condition number of the blocks looked
    at; decades between the largest and the smallest gradient of sublayers of a kind.
    """
    depth, notes = case.model.depth, [] if case.broken is None else [f"states are finite up to segment {case.broken}"]
    notes += [f"|J_i:D| is {WHOLE}"] if depth.streamed else []
    x = case.part(case.states[0])
    found = backward_sensitivity(depth, x, tolerance=case.effort.tolerance, starts=case.effort.starts)
    generator = torch.Generator().manual_seed(case.seed)
    rates = attempt(notes, lyapunov, depth, x, count=case.effort.vectors, generator=generator)
    gradients = attempt(notes, gradient_norms, case.model, case.tokens, case.targets, states=case.states)
    slopes = [slope for slope in _slopes(case, notes) if slope is not None]
    condition = found.condition
    result = BackwardStep(found, condition, rates, gradients, _gradient_spread(gradients), slopes)
    exponents = [slope.slope for slope in slopes if not math.isnan(slope.slope)]
    slope, worst = (sum(exponents) / len(exponents) if exponents else math.nan), largest(condition)
    ingredients = {
        "|dv/dX| in weights": slope,
        "condition": math.nan if math.isnan(worst) else decades(worst),
        "gradients": math.nan if math.isnan(result.spread) else decades(result.spread),
    }
    verdict = "amplifies" if ingredients["condition"] >= AMPLIFIES else weights_verdict(slope)
    first = found.products[0].value
    figure = "|J| unknown" if first is None else f"|J| = {first:.3g}"
    return Finding(verdict, figure, _why_backward(result, slope, worst), ingredients, notes, result)


def _why_backward(result: BackwardStep, slope: float, worst: float) -> str:
    rates = result.lyapunov
    rate = three(rates.exponents[0] if rates is not None and rates.exponents else math.nan)
    grown = "" if math.isnan(worst) else f"relative changes grow up to {three(worst)} times from the blocks looked at, "
    return (
        f"{grown}the leading Lyapunov exponent is {rate} per unit of depth-time, gradients of layers differ "
        f"{three(result.spread)} times, and sensitivities follow larger weights like c^{exponent(slope)}"
    )


def _slopes(case: Case, notes: list[str]) -> list[Slope | None]:
    """In the sublayers of each kind nearest to the middle of those reached."""
    slopes = []
    reached = len(case.reached) if case.broken is not None else len(case.states) - 1
    for kind, name in SCALED.items():
        own = [k for k, sublayer in enumerate(case.model.depth.sublayers) if sublayer.kind == kind and k < reached]
        if own:
            k = own[len(own) // 2]
            sublayer, x = case.model.depth.sublayers[k], case.part(case.states[k])
            slopes.append(attempt(notes, sensitivity_slope, sublayer, x, name, tolerance=case.effort.tolerance))
            if slopes[-1] is not None and math.isnan(slopes[-1].slope):
                notes.append(f"the slope with {name} of segment {k} is unknown: its Jacobian is zero, not finite or undefined")
    return slopes


def _gradient_spread(gradients: Gradients | None) -> float:
    if gradients is None:
        return math.nan
    kinds: dict[str, list[float]] = {}
    for sublayer in gradients.sublayers:
        kinds.setdefault(sublayer.kind, []).append(sublayer.total)
    return max(max(totals) / min(totals) if min(totals) else math.inf for totals in kinds.values())


@dataclasses.dataclass(frozen=True)
class TransportStep:
    """Wasserstein distances for every perturbation and order, and the largest distance out over in, both relative to the states.

    `relative` by perturbation is (W_2 out/|X_D|)/(W_2 in/|X_0|). `scaled[i]` is W_2 out for substituted tokens with all last
    maps times `factors[i]`, and `slope` its exponent. `radius` is Kan's generalisation radius for these sequences.
    """

    size: float
    distances: list[Transport]
    relative: dict[str, float]
    factors: list[float]
    scaled: list[float]
    slope: float
    radius: GeneralisationRadius


@torch.no_grad()
def screen_transport(case: Case) -> Finding:
    """Kan's step 4: W_p between terminal states of perturbed inputs, over that between the inputs (theory, section 8).

    Ingredients: the exponent of the distance in the weights, and decades of the largest relative growth of a distance.
    """
    tokens, depth = case.tokens[:, : case.effort.tokens], case.model.depth
    notes: list[str] = []
    x, inputs = case.model.embed(tokens), _perturbed(case, tokens, notes)
    end, ends, scaled = _carried(depth, x, inputs)
    spreads = token_spreads(depth)
    found = [
        attempt(notes, distances, depth, name, (x, inputs[name]), (end, after), spreads=spreads) for name, after in ends.items()
    ]
    measured = [each for several in found if several is not None for each in several]
    before, after = (float(torch.linalg.vector_norm(state.double())) for state in (x, end))
    relative = {
        each.perturbation: each.amplification * before / after if after else math.inf
        for each in measured
        if each.p == 2 and each.amplification is not None
    }
    slope = run_away(log_slope(LARGE, scaled), scaled)
    sequences, length = tokens.shape
    radius = generalisation_radius(sequences, length, case.model.config.width)
    result = TransportStep(SIZE, measured, relative, list(LARGE), scaled, slope, radius)
    worst = max(relative, key=lambda name: relative[name], default=None)
    # where the worst direction is left out growth would look smaller than it does for a model in memory
    unknown = worst is None or depth.streamed
    ingredients = {"W_2 in weights": slope, "W_2 in depth": math.nan if unknown else decades(max(relative.values()))}
    if worst is None:
        why = "no distance between terminal states is known, as inputs do not differ or states are not finite"
        return Finding("unknown", "–", why, ingredients, notes, result)
    top = next(each for each in measured if each.p == 2 and each.perturbation == worst)
    assert top.after is not None, "its amplification is known"
    bound = "no bound" if top.bound is None else f"{top.after / top.bound:.1%} of its bound"
    why = (
        f"W_2 goes from {top.before:.3g} to {top.after:.3g} for the {worst} perturbation, {relative[worst]:.3g} times as much as "
        f"the state and {bound}; it follows larger weights like c^{exponent(slope)}; Kan's generalisation radius is {radius.verdict}"
    )
    return Finding(weights_verdict(slope), f"W_2 x {top.amplification:.3g}", why, ingredients, notes, result)


def _perturbed(case: Case, tokens: Tensor, notes: list[str]) -> dict[str, Tensor]:
    """X_0 by perturbation, where it can be had."""
    other = None if case.other is None else case.other[:, : case.effort.tokens]
    names = [name for name in PERTURBATIONS if name != "text" or other is not None]

    def one(name: str) -> Tensor | None:
        generator = torch.Generator().manual_seed(case.seed)
        return attempt(notes, perturbed, case.model, tokens, name, other=other, generator=generator)

    return {name: y for name in names if (y := one(name)) is not None}


def _carried(depth: Depth, x: Tensor, inputs: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor], list[float]]:
    """X_D of the text and of every perturbation of it; and W_2 between those of the text and of substituted tokens for all last
    maps times c, by c: inf where a state overflows. One pass through the depth.
    """
    pairs = [(c, state) for c in LARGE for state in (x, inputs["substitution"])]
    end, *ends = carried(depth, [(1.0, x), *((1.0, y) for y in inputs.values()), *pairs])
    own, scaled = ends[: len(inputs)], ends[len(inputs) :]
    far = [wasserstein(*pair) if all(map(finite, pair)) else math.inf for pair in zip(scaled[::2], scaled[1::2], strict=True)]
    return end, dict(zip(inputs, own, strict=True)), far

"""The screening's steps on gradients through depth, and on transport of uncertainty."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ctrans.examine.diagnosis.reading import cut
from ctrans.examine.screening.case import (
    NOT_IN_QUICK,
    Case,
    StepPlan,
    StepVerdict,
    exponent,
    largest,
    three,
)
from ctrans.examine.screening.forward import run_away, weights_verdict
from ctrans.examine.screening.screening_checks import judged
from ctrans.measure.backward.log_singular_values import LogSingularValues, depth_spectrum
from ctrans.measure.backward.lyapunov import Lyapunov, LyapunovExponents
from ctrans.measure.backward.parameter_gradients import Gradients, ParameterGradients
from ctrans.measure.backward.sensitivity import ALL_AT_ONCE, SensitivityByDepth
from ctrans.measure.backward.weight_slope import Slope, SlopeAt
from ctrans.measure.forward.carried import CarriedStates
from ctrans.measure.forward.weight_scaling import log_slope, maps_are_known
from ctrans.measure.measured import Value, along_depth
from ctrans.measure.missing import tried
from ctrans.measure.transport.generalisation import GeneralisationRadius, generalisation_radius
from ctrans.measure.transport.perturbations import PERTURBATIONS, SIZE, perturbed
from ctrans.measure.transport.transport import Transport, distances
from ctrans.measure.transport.wasserstein import wasserstein
from ctrans.measure.walk import Attempt
from solvers.run import finite

SCALED = {"attention": "W", "ffn": "W2"}
"""The scaling for each kind of sublayer. All exact scalings turn f into c f, so one is enough."""
LARGE = (100.0, 1000.0)
"""Factors of the weights that give the transport's exponent."""


@dataclass(frozen=True)
class BackwardStep:
    """Sensitivities by depth, Lyapunov exponents, gradient norms, and slopes against activation
    scale in the middle block.

    `condition` is `sensitivity.condition`, of the worst sequence. `spectrum` is of J_{0:D}. Fields
    are None if not measured.
    """

    sensitivity: SensitivityByDepth
    condition: list[float | None]
    lyapunov: Lyapunov | None
    gradients: Gradients | None
    slopes: list[Slope]
    spectrum: LogSingularValues | None

    def values(self, model: str) -> Iterator[Value]:
        """The rows of the figures by depth. The gain up to the end is by block."""
        sensitivities = [sublayer.value for sublayer in self.sensitivity.sublayers]
        yield from along_depth(model, "velocity's sensitivity", sensitivities)
        if self.gradients is not None:
            totals = [gradient.total for gradient in self.gradients.sublayers]
            yield from along_depth(model, "gradient of a sublayer", totals)
        for block, gain in enumerate(self.condition):
            if gain is not None:
                yield Value(model, "gain up to the end", gain, step=block)


def plan_backward(case: Case) -> StepPlan:
    """Kan's step 3: Jacobians, Lyapunov exponents and gradients by depth, slopes against activation
    scale (theory, section 7).

    Quantities: the largest condition number of the measured blocks over several sequences; mean and
    deviation of log sigma of J_{0:D}, with sigma relative to |X_D|/|X_0|; the mean slope of log
    |dv/dX| against log c.
    """
    effort = case.effort
    jacobians = case.jacobians
    generator = torch.Generator().manual_seed(case.seed)
    missing: dict[str, str] = {}
    rates = Attempt(
        LyapunovExponents(count=effort.vectors, generator=generator, graphs=case.shared_graphs),
        missing,
        "Lyapunov exponents",
    )
    gradients = Attempt(ParameterGradients(), missing, "gradient of a sublayer")
    slopes = _slopes(case, missing)

    def conclude() -> StepVerdict:
        notes: list[str] = []
        if case.broken is not None:
            notes.append(f"states are finite up to segment {case.broken}")
        if case.model.depth.streamed:
            missing["gain up to the end"] = f"|J_i:D| is {ALL_AT_ONCE}"
        sensitivity = jacobians.figures()
        exponents_in_time: Lyapunov | None = rates.figures()
        norms: Gradients | None = gradients.figures()
        singular: LogSingularValues | None = None
        if effort.lanczos:
            singular = tried(
                missing,
                "log stretch",
                depth_spectrum,
                case.model.depth,
                case.graphs,
                steps=effort.lanczos,
            )
        else:
            missing["log stretch"] = NOT_IN_QUICK.format("the spectrum of J_0:D")
        known_slopes: list[Slope] = []
        for k, instrument in slopes:
            slope: Slope | None = instrument.figures()
            if slope is not None:
                known_slopes.append(slope)
                if math.isnan(slope.slope):
                    why = "its Jacobian is zero, not finite or undefined"
                    missing[instrument.name] = (
                        f"the slope with {slope.scaling} of segment {k} is unknown: {why}"
                    )
        condition = sensitivity.condition
        result = BackwardStep(
            sensitivity, condition, exponents_in_time, norms, known_slopes, singular
        )
        exponents = [slope.slope for slope in known_slopes if not math.isnan(slope.slope)]
        mean = math.nan
        if exponents:
            mean = sum(exponents) / len(exponents)
        worst = largest(condition)
        quantities = {"condition": worst}
        errors: dict[str, float] = {}
        if singular is not None:
            start, end = _ends(case)
            if start and end:
                quantities["log stretch"] = singular.mean + math.log(start / end)
            else:
                quantities["log stretch"] = math.nan
            quantities["log stretch, deviation"] = singular.deviation
            errors = {
                "log stretch": singular.mean_error,
                "log stretch, deviation": singular.deviation_error,
            }
        quantities["|dv/dX| in weights"] = mean
        first = sensitivity.products[0].value
        if first is None:
            figure = "|J| unknown"
        else:
            figure = f"|J| = {first:.3g}"
        verdict = judged(quantities, weights_verdict(mean))
        return StepVerdict(
            verdict,
            figure,
            _why_backward(result, mean, worst),
            quantities,
            notes,
            result,
            errors,
            missing,
        )

    part = [rates, *(slope for _, slope in slopes)]
    return StepPlan({"text": [gradients], "several": [jacobians], "part": part}, conclude)


def _ends(case: Case) -> tuple[float, float]:
    """|X_0| and |X_D| of the states of `graphs`."""
    steps = [step for step in case.graphs.figures() if step is not None]
    start = torch.linalg.vector_norm(steps[0].x.double())
    end = torch.linalg.vector_norm(steps[-1].y.double())
    return float(start), float(end)


def _why_backward(result: BackwardStep, slope: float, worst: float) -> str:
    rates = result.lyapunov
    rate = math.nan
    if rates is not None and rates.exponents:
        rate = rates.exponents[0]
    grown = ""
    if not math.isnan(worst):
        grown = f"{_grown(result.sensitivity)}, "
    return (
        f"{grown}the leading Lyapunov exponent is {three(rate)} per unit of depth-time, and"
        f" sensitivities follow larger weights like c^{exponent(slope)}"
    )


def _grown(sensitivity: SensitivityByDepth) -> str:
    """A clause with the largest growth of relative changes, and its range over sequences."""
    by_block = [conditions for conditions in sensitivity.conditions if conditions]
    by_sequence = [max(conditions) for conditions in zip(*by_block, strict=True)]
    if len(by_sequence) > 1:
        among = (
            f" in the worst of {len(by_sequence)} sequences and {three(min(by_sequence))} times in"
            " the least"
        )
    else:
        among = " in the first sequence"
    most = three(max(by_sequence))
    return f"relative changes grow up to {most} times from the measured blocks{among}"


def _slopes(case: Case, missing: dict[str, str]) -> list[tuple[int, Attempt]]:
    """`SlopeAt` of the middle sublayer of each kind, with its segment."""
    slopes = []
    for kind, name in SCALED.items():
        segments = [
            k for k, sublayer in enumerate(case.model.depth.sublayers) if sublayer.kind == kind
        ]
        if segments:
            k = segments[len(segments) // 2]
            instrument = SlopeAt(k, name, tolerance=case.effort.tolerance)
            of_segment = f"|dv/dX| in weights, segment {k}"
            slopes.append((k, Attempt(instrument, missing, of_segment)))
    return slopes


@dataclass(frozen=True)
class TransportStep:
    """Wasserstein distances for each perturbation and order, and their growth relative to the
    states.

    `relative` is (W_2 out/|X_D|)/(W_2 in/|X_0|) by perturbation. `scaled[i]` is W_2 out for
    substituted tokens (for inputs without tokens, noise) with all last maps times `factors[i]`, and
    `slope` is its exponent. `radius` is Kan's generalisation radius for these sequences.
    """

    size: float
    distances: list[Transport]
    relative: dict[str, float]
    factors: list[float]
    scaled: list[float]
    slope: float
    radius: GeneralisationRadius


@torch.no_grad()
def plan_transport(case: Case) -> StepPlan:
    """Kan's step 4: W_p between terminal states of perturbed inputs, relative to that between the
    inputs (theory, section 8).

    Quantities: the largest relative growth of a distance, and the exponent of the distance in the
    weights.
    """
    tokens = cut(case.tokens, len(case.tokens), case.effort.tokens)
    missing: dict[str, str] = {}
    x = case.model.embed(tokens)
    inputs = _perturbed(case, tokens, missing)
    if "substitution" in inputs:
        away = inputs["substitution"]
    else:
        away = inputs["noise"]
    factors: tuple[float, ...] = ()
    if maps_are_known(case.model.depth):
        factors = LARGE
    far = [(c, state) for c in factors for state in (x, away)]
    ends = CarriedStates([(1.0, x), *((1.0, y) for y in inputs.values()), *far])

    def conclude() -> StepVerdict:
        depth = case.model.depth
        carried = ends.figures()
        end = carried[0]
        ends_of_inputs = carried[1 : 1 + len(inputs)]
        large = carried[1 + len(inputs) :]
        scaled = []
        for first, second in zip(large[::2], large[1::2], strict=True):
            if finite(first) and finite(second):
                scaled.append(wasserstein(first, second))
            else:
                scaled.append(math.inf)  # a state overflowed
        spreads = case.bounds.spreads()
        by_perturbation = [
            tried(
                missing,
                _perturbation(name),
                distances,
                depth,
                name,
                (x, inputs[name]),
                (end, after),
                spreads=spreads,
            )
            for name, after in zip(inputs, ends_of_inputs, strict=True)
        ]
        measured = [
            transport
            for transports in by_perturbation
            if transports is not None
            for transport in transports
        ]
        before = float(torch.linalg.vector_norm(x.double()))
        after = float(torch.linalg.vector_norm(end.double()))
        relative = {}
        for transport in measured:
            if transport.p != 2 or transport.amplification is None:
                continue
            if after:
                relative[transport.perturbation] = transport.amplification * before / after
            else:
                relative[transport.perturbation] = math.inf
        slope = run_away(log_slope(factors, scaled), scaled)
        sequences, length = x.shape[:-1]
        radius = generalisation_radius(sequences, length, case.model.config.width)
        result = TransportStep(SIZE, measured, relative, list(factors), scaled, slope, radius)
        worst = max(relative, key=lambda name: relative[name], default=None)
        # without the worst direction (weights on demand) growth would look smaller
        growth = math.nan
        if worst is not None and not depth.streamed:
            growth = max(relative.values())
        quantities = {"W_2 growth": growth, "W_2 in weights": slope}
        if worst is None:
            why = (
                "no distance between terminal states is known, because inputs do not differ or"
                " states are not finite"
            )
            return StepVerdict("unknown", "–", why, quantities, result=result, missing=missing)
        top = next(
            transport
            for transport in measured
            if transport.p == 2 and transport.perturbation == worst
        )
        assert top.after is not None, "its amplification is known"
        if top.bound is None:
            bound = "no bound"
        elif top.bound == 0:
            bound = "its bound is 0"
        else:
            bound = f"{top.after / top.bound:.2g} times its bound"
        why = (
            f"W_2 goes from {top.before:.3g} to {top.after:.3g} for the {worst} perturbation,"
            f" {relative[worst]:.3g} times as much as the state and {bound}; it follows larger"
            f" weights like c^{exponent(slope)}; Kan's generalisation radius is {radius.verdict}"
        )
        verdict = judged(quantities, weights_verdict(slope))
        return StepVerdict(
            verdict,
            f"W_2 x {top.amplification:.3g}",
            why,
            quantities,
            result=result,
            missing=missing,
        )

    return StepPlan({"text": [ends]}, conclude)


def _perturbed(case: Case, tokens: Tensor, missing: dict[str, str]) -> dict[str, Tensor]:
    """Perturbed X_0 by perturbation, without those that fail."""
    other_text: Tensor | None = None
    if case.other is not None:
        other_text = cut(case.other, len(case.other), case.effort.tokens)
    states: dict[str, Tensor] = {}
    for name in PERTURBATIONS:
        if name == "text" and other_text is None:
            continue
        state = tried(
            missing,
            _perturbation(name),
            perturbed,
            case.model,
            tokens,
            name,
            other=other_text,
            generator=torch.Generator().manual_seed(case.seed),
            worst=case.worst_directions,
        )
        if state is not None:
            states[name] = state
    return states


def _perturbation(name: str) -> str:
    """What `missing` calls a perturbation that failed."""
    return f"{name} perturbation"

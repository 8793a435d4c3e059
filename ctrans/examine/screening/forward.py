"""The screening's first two steps: well-posedness of training, and growth of hidden states."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence

from torch import Tensor

from ctrans.control.costate import ZERO_GRADIENT
from ctrans.control.model_check import ModelCheck
from ctrans.control.regularization import Regularization
from ctrans.control.segment_check import SegmentCheck, check_segment
from ctrans.dynamics.depth import Depth, spread
from ctrans.examine.screening.case import (
    Case,
    Reach,
    StepPlan,
    StepVerdict,
    exponent,
)
from ctrans.examine.screening.screening_checks import judged
from ctrans.measure.forward.bounds import ForwardBounds
from ctrans.measure.forward.carried import GrowthWithWeights, WeightGrowth
from ctrans.measure.forward.depth_share import DepthShare, DepthShares
from ctrans.measure.forward.growth_law import GrowthLaw, growth_law
from ctrans.measure.forward.moments import moments
from ctrans.measure.forward.single_entries import (
    DataVariance,
    Massive,
    data_variance,
    largest_entry,
    massive_activations,
    variance_over_inputs,
)
from ctrans.measure.measured import Value, along_depth
from ctrans.measure.missing import tried
from ctrans.measure.walk import Attempt, Instrument, Model, States, StepContextBack, Turn, own_loss
from solvers import ADVICE, ConfigError, SolveError, Status
from solvers.run import finite

FOLLOWS = 0.25
"""An exponent in the weights above this means "follows weights", one above 1 + this "outruns
weights".
"""
RESOLVED = 1e-6
"""A log ratio below this is rounding, not growth."""
LAW_POINTS = 8
"""Fewest points for a comparison of laws. With fewer, AIC's small-sample correction decides instead
of the fit.
"""


class Certificates(Reach):
    """Certificates of the Hamiltonian of some segments, at the discrete model's costates (theory,
    section 4).
    """

    def __init__(self, segments: Sequence[int], tokens: int):
        self._chosen = segments
        self._tokens = tokens

    def begin(self, depth: Depth, x0: Tensor) -> None:
        super().begin(depth, x0)
        self._depth = depth
        self._loss = math.nan
        self._found: list[SegmentCheck] = []
        self._missing: dict[str, str] = {}
        self._refused: ConfigError | SolveError | None = None

    def head(self, model: Model, at: Turn) -> None:
        self._loss = at.loss

    def backward(self, at: StepContextBack) -> None:
        if self.broken is not None:
            raise SolveError(
                f"the hidden state became non-finite in segment {max(self.broken, 0)}:"
                f" {ADVICE[Status.NON_FINITE]}"
            )
        if not finite(at.before):
            raise SolveError(
                f"the costate became non-finite in segment {at.k}: take a smaller dt, smaller"
                " weights or a wider dtype"
            )
        if at.k in self._chosen:
            try:
                check = check_segment(
                    at.sublayer,
                    (at.x, at.p),
                    at.met,
                    continuous=False,
                    segment=at.k,
                    time=at.time,
                    dt=at.h,
                    regularization=Regularization(),
                )
            except (ConfigError, SolveError) as error:
                self._missing[f"segment {at.k} ({at.sublayer.kind})"] = str(error)
                self._refused = error
            else:
                self._found.insert(0, check)

    def figures(self) -> ModelCheck:
        """Raises the first segment's error if no segment could be certified, and ConfigError if
        none was chosen.
        """
        if not self._found and self._refused is not None:
            raise self._refused
        if not self._found:
            raise ConfigError("no segment was chosen to be certified")
        names = sorted({sublayer.placement.name for sublayer in self._depth.sublayers})
        return ModelCheck(
            ", ".join(names),
            self._loss,
            self._tokens,
            tuple(self._found),
            "discrete",
            missing=dict(reversed(self._missing.items())),
        )


def plan_well_posedness(case: Case) -> StepPlan:
    """Kan's step 1: whether the Hamiltonian is finite. The quantity is the share of certified
    segments where it is infinite.
    """
    count = len(case.model.depth.sublayers)
    chosen = spread(count, case.effort.certified)
    certificates = Certificates(chosen, case.batch("certified")[0].numel())

    def conclude() -> StepVerdict:
        check = certificates.figures()
        exponents = [_exponent(segment) for segment in check.segments]
        k = max(exponents)
        top = check.largest.certificate
        gaps = [
            abs(segment.certificate.velocities.gap)
            for segment in check.segments
            if segment.certificate.velocities is not None
        ]
        if check.finite:
            size = f"H is finite, ascents come within {max(gaps):.0e} of it"
        else:
            size = "H is infinite"
        why = (
            f"velocities: {top.words}; {size}, and the best value grows like R^{exponent(k)} with a"
            f" bound R on the weights, as certified on {len(check.segments)} of {count} segments,"
            f" which {_infinite(check.segments)}"
        )
        notes = [f"the evidence disagrees: {failure}" for failure in check.failures]
        if not check.largest.costate_norm:
            notes.append(f"{ZERO_GRADIENT}; the verdict holds for any other costate")
        if not check.has_ode:
            notes.append(
                "there is no ODE with such a norm around the state, so the certificates are of the"
                " discrete step"
            )
        unbounded = sum(not segment.certificate.finite for segment in check.segments)
        infinite = unbounded / len(check.segments)
        return StepVerdict(
            check.verdict,
            f"H ~ R^{exponent(k)}",
            why,
            {"segments with infinite H": infinite},
            notes,
            check,
            missing=dict(check.missing),
        )

    return StepPlan({"certified": [certificates]}, conclude)


def _infinite(segments: Sequence[SegmentCheck]) -> str:
    """A clause that names the certified segments, and those with an infinite H."""
    certified = ", ".join(str(segment.segment) for segment in segments)
    infinite = [str(segment.segment) for segment in segments if not segment.certificate.finite]
    if not infinite:
        infinite_in = "none"
    elif len(infinite) == len(segments):
        infinite_in = "each"
    else:
        infinite_in = ", ".join(infinite)
    return f"are {certified}: it is infinite in {infinite_in}"


def _exponent(segment: SegmentCheck) -> float:
    """The measured exponent if there was an ascent over weights, else 0 or 1 by the verdict."""
    grown = segment.certificate.growth
    if grown is not None:
        return max(grown.exponent, 0.0)
    if segment.certificate.finite:
        return 0.0
    return 1.0


class InitialLoss(Instrument):
    """(L, log V): the loss in nats, and that of equal probabilities for V outputs; log V is None
    for a model's own loss.
    """

    def head(self, model: Model, at: Turn) -> None:
        if own_loss(model) is not None:
            self.found: tuple[float, float | None] = at.loss, None
            return
        try:
            logits = model.head(at.x[..., :1, :])
        except ConfigError:
            # a model that knows its other arguments, such as a mask, at full length only
            logits = model.head(at.x[:1])
        self.found = at.loss, math.log(logits.shape[-1])


@dataclasses.dataclass(frozen=True)
class ForwardStep:
    """Moments by depth-time up to the last finite state, their bounds and growth laws, single
    entries, and weight scaling.

    `used` is the mean absolute value over its sharper bound at the last time. `loss` and `guessing`
    are in nats, `guessing` for equal probabilities. `share` is the effect of the depth on its
    input. Fields are None if unknown.
    """

    times: list[float]
    mean_abs: list[float]
    variance: list[float]
    rms: list[float]
    bounds: ForwardBounds | None
    used: float | None
    mean_abs_law: GrowthLaw | None
    variance_law: GrowthLaw | None
    massive: Massive
    data: DataVariance | None
    scaling: WeightGrowth | None
    loss: float | None
    guessing: float | None
    share: DepthShare

    def values(self, model: str) -> Iterator[Value]:
        """The rows of the figures by depth."""
        series = {
            "times": self.times,
            "mean_abs": self.mean_abs,
            "bound": [],
            "variance": self.variance,
            "rms": self.rms,
            "added along the depth": self.share.added,
            "tokens apart": [1 - similarity for similarity in self.share.similarity],
        }
        if self.bounds is not None:
            series["bound"] = self.bounds.mean_abs[: len(self.mean_abs)]
        for measure, figures in series.items():
            yield from along_depth(model, measure, figures)


def plan_forward(case: Case) -> StepPlan:
    """Kan's step 2: moments, bounds and growth laws by depth, growth under scaled weights (theory,
    section 6), and the effect of the depth.

    Quantities: the depth's contribution, its growth exponent, the final similarity of tokens, the
    loss above guessing, and the exponent of mean|X_D| in the weights.
    """
    sizes = States(moments)
    massive = States(largest_entry)
    varied = States(variance_over_inputs)
    missing: dict[str, str] = {}
    scaled = Attempt(GrowthWithWeights(), missing, "|x| in weights")
    initial = Attempt(InitialLoss(), missing, "loss over guessing")
    shares = DepthShares(similarity=lambda: _similarities(case))

    def conclude() -> StepVerdict:
        if case.broken is None:
            reached = len(case.model.depth.times)
        else:
            reached = case.broken + 1
        if not reached:
            return StepVerdict(
                "non-finite",
                "t = 0",
                "the embedded text itself is not finite",
                {"growth exponent": math.inf},
                missing=missing,
            )
        by_depth = sizes.figures()[:reached]
        times = list(case.model.depth.times[:reached])
        mean_abs = [moment.mean_abs for moment in by_depth]
        variance = [moment.variance for moment in by_depth]
        rms = [moment.rms for moment in by_depth]
        bounds = tried(missing, "bound", case.bounds.figures)
        scaling: WeightGrowth | None = scaled.figures()
        loss, guessing = initial.figures() or (None, None)
        share = shares.figures()
        share = DepthShare(share.added[:reached], share.growth, share.similarity[:reached])
        used: float | None = None
        if bounds is not None and bounds.mean_abs[reached - 1]:
            used = mean_abs[-1] / bounds.mean_abs[reached - 1]
        mean_abs_law = _law(times, mean_abs)
        variance_law = _law(times, variance)
        largest_entries = massive_activations(massive.figures()[:reached])
        over_data: DataVariance | None = None
        if bounds is not None:
            x0 = case.model.embed(case.tokens).detach()
            over_data = data_variance(case.model.depth, x0, varied.figures(), bounds)
        result = ForwardStep(
            times=times,
            mean_abs=mean_abs,
            variance=variance,
            rms=rms,
            bounds=bounds,
            used=used,
            mean_abs_law=mean_abs_law,
            variance_law=variance_law,
            massive=largest_entries,
            data=over_data,
            scaling=scaling,
            loss=loss,
            guessing=guessing,
            share=share,
        )
        slope = math.nan
        if scaling is not None:
            slope = run_away(scaling.slope, scaling.mean_abs)
        if case.broken is not None:
            start = f"which starts at t = {times[-1]:.3g} with mean|x| = {mean_abs[-1]:.3g}"
            why = f"activations become non-finite in segment {case.broken}, {start}"
            quantities = {"growth exponent": math.inf, "|x| in weights": slope}
            return StepVerdict(
                "non-finite",
                f"t = {times[-1]:.3g}",
                why,
                quantities,
                result=result,
                missing=missing,
            )
        decades = math.nan
        if rms[0] and rms[-1]:
            decades = math.log10(rms[-1] / rms[0])
        excess = math.nan
        if loss is not None and guessing is not None:
            excess = loss - guessing
        quantities = {
            "added by depth": share.added[-1],
            "decades of growth": decades,
            "growth exponent": share.growth,
            "token similarity": share.similarity[-1],
            "loss over guessing": excess,
            "|x| in weights": slope,
        }
        figure = f"|x| {mean_abs[0]:.2g} to {mean_abs[-1]:.2g}"
        verdict = judged(quantities, weights_verdict(slope))
        why = _why_forward(result, slope)
        return StepVerdict(verdict, figure, why, quantities, result=result, missing=missing)

    return StepPlan({"text": [sizes, massive, varied, initial, shares], "part": [scaled]}, conclude)


def _similarities(case: Case) -> dict[int | None, float]:
    """The similarity of tokens by segment, which the diagnosis of the same walk measures."""
    readings = case.examination.whole["states"].figures() or {}
    return {reading.segment: reading.value for reading in readings.get("token similarity", [])}


def _why_forward(result: ForwardStep, slope: float) -> str:
    if result.mean_abs_law is None:
        law = "no law"
    else:
        law = f"{result.mean_abs_law.law} by AIC"
    if result.used is None:
        used = "without a bound"
    else:
        used = f"{result.used:.2g} times its bound"
    massive = result.massive.ratio[-1]
    added = (
        f"what the depth adds is {result.share.added[-1]:.2g} times as long as the state at its end"
    )
    return (
        f"{added}; mean|x| goes from {result.mean_abs[0]:.3g} to {result.mean_abs[-1]:.3g} ({law}),"
        f" {used}; it follows weights a hundred times as large and more like c^{exponent(slope)},"
        f" and the largest entry is {massive:.1f} times the median"
    )


def _law(times: Sequence[float], values: Sequence[float]) -> GrowthLaw | None:
    """The growth law; None for few points or a constant moment."""
    positive = [value for value in values if value > 0]
    if (
        len(positive) < max(len(values), LAW_POINTS)
        or math.log(max(positive) / min(positive)) < RESOLVED
    ):
        return None
    return growth_law(times, values)


def run_away(slope: float, values: Sequence[float | None]) -> float:
    """The slope, or inf if it is unknown because values overflowed."""
    overflowed = any(value is not None and not math.isfinite(value) for value in values)
    if math.isnan(slope) and overflowed:
        return math.inf
    return slope


def weights_verdict(exponent: float) -> str:
    """The verdict in a word for a figure that grows like c^exponent with weights times c."""
    if math.isnan(exponent):
        return "unknown"
    if exponent < FOLLOWS:
        return "held"
    if exponent < 1 + FOLLOWS:
        return "follows weights"
    return "outruns weights"

"""The certificates of a model's segments, one after the other, and why some have none."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace

from ctrans.control.certificate import Certificate, SearchedFor
from ctrans.control.costate import Costate
from ctrans.control.regularization import Regularization
from ctrans.control.segment_check import (
    SegmentCheck,
    check_segment,
    check_step,
    step_threshold_at,
    with_further_factor,
)
from ctrans.control.shown_factors import Factors
from ctrans.dynamics.depth import Depth
from ctrans.dynamics.sublayer import Sublayer
from ctrans.measure.walk import SegmentCallback
from solvers import ConfigError, SolveError


class CheckedSegments:
    """The segments of a model that have a certificate, and why the others have none. `lost` are
    those whose costate has no digits, with the reason.
    """

    def __init__(
        self,
        depth: Depth,
        costates: Costate,
        of_steps: Costate,
        regularization: Regularization,
        factors: Factors,
        lost: Mapping[int, str],
    ):
        self.depth = depth
        self.costates = costates
        self.of_steps = of_steps
        self.regularization = regularization
        self.factors = factors
        self.lost = lost
        self.unsure: list[int] = []
        self._found: dict[int, SegmentCheck] = {}
        self._failed: dict[int, ConfigError | SolveError] = {}

    def check_all(self, *, thorough: bool, progress: SegmentCallback | None) -> None:
        """Certifies each segment, that with the largest costate first: only there are weights
        searched, unless `thorough`. Raises the first segment's error if none has a certificate.
        """
        sizes = [float(p.norm()) for _, p in self.costates.starts]
        for k in sorted(range(len(sizes)), key=lambda k: -sizes[k]):
            search: SearchedFor = "velocities"
            if thorough:
                search = "gains"
            elif not self._found:
                search = "weights"
            try:
                self._found[k] = self._certified(k, search)
            except (ConfigError, SolveError) as error:
                self._failed[k] = error
            if progress is not None:
                progress(k)
        if not self._found:
            raise self._failed[0]

    def _certified(self, k: int, search: SearchedFor) -> SegmentCheck:
        if k in self.lost:
            raise ConfigError(self.lost[k])
        segment = checked_segment(
            self.depth, k, self.costates, self.of_steps, self.regularization, search=search
        )
        reason = _why_unsure(segment, self.factors) or _why_no_evidence(segment)
        if reason:
            self.unsure.append(k)
            raise ConfigError(reason)
        return segment

    @property
    def segments(self) -> list[SegmentCheck]:
        return [
            with_further_factor(self._found[k], has_more=k in self.factors.further)
            for k in sorted(self._found)
        ]

    @property
    def skipped(self) -> dict[str, str]:
        """Why segments have no certificate."""
        sublayers = list(self.depth.sublayers)
        return {
            f"segment {k} ({sublayers[k].kind})": str(error)
            for k, error in sorted(self._failed.items())
        }


def weakest(certificates: Iterable[Certificate]) -> dict[str, float | None]:
    """The weakest evidence of several certificates; None where it does not apply.

    - `gap`: (H - best)/`scale` of the ascent over velocities; `weights`: of that over the last
      map's weights
    - `kkt`: the residual of the closed form's maximiser
    - `uniqueness`: the distance between maximisers from different starts
    - `exponent`: the k of value ~ R^k that is farthest from the verdict's; `gained`: the same with
      trained gains
    """
    certificates = list(certificates)
    velocities = [c.velocities for c in certificates if c.velocities is not None]
    weights = [c.weights for c in certificates if c.weights is not None]
    residuals = [c.kkt for c in certificates if c.kkt is not None]
    exponents = [
        (c.growth.exponent, c.expected_exponent) for c in certificates if c.growth is not None
    ]
    gained = [c.gained.exponent for c in certificates if c.gained is not None]
    farthest, _ = max(exponents, key=lambda pair: abs(pair[0] - pair[1]), default=(None, None))
    return {
        "gap": max((ascent.gap for ascent in velocities), key=abs, default=None),
        "weights": max((ascent.gap for ascent in weights), key=abs, default=None),
        "kkt": max(residuals, default=None),
        "uniqueness": max((ascent.uniqueness for ascent in velocities), default=None),
        "exponent": farthest,
        "gained": max(gained, key=lambda k: abs(k - 1), default=None),
    }


def _why_unsure(segment: SegmentCheck, factors: Factors) -> str:
    """Why the verdict of a segment does not hold at large weights; "" if it does."""
    k = segment.segment
    if k in factors.untested:
        return factors.untested[k]
    is_infinite = segment.certificate.verdict == "degenerate"
    if is_infinite and k in factors.bounded:
        reasons = ("its output does not grow with its weights", factors.unlike.get(k, ""))
        return "; ".join(filter(None, reasons))
    has_finite_verdict = not is_infinite or segment.step is not None
    if has_finite_verdict and k in factors.otherwise:
        return factors.otherwise[k]
    return ""


def _why_no_evidence(segment: SegmentCheck) -> str:
    """Why a search has no value because numbers overflowed; "" if none did."""
    certificates = [segment.certificate]
    if segment.step is not None:
        certificates.append(segment.step)
    figures = weakest(certificates).values()
    if any(figure is not None and math.isnan(figure) for figure in figures):
        return "numbers overflow in its searches: take a smaller dt, smaller states or float64"
    return ""


def checked_segment(
    depth: Depth,
    k: int,
    costates: Costate,
    of_steps: Costate,
    regularization: Regularization,
    *,
    search: SearchedFor,
) -> SegmentCheck:
    """The check of segment k of the ODE, with what its step has of its own: a set inside a norm
    around the state, else a penalty where nothing bounds H.
    """
    sublayer = list(depth.sublayers)[k]
    dt = depth.lengths[k]
    continuous = costates.form == "continuous"
    segment = check_segment(
        sublayer,
        (costates.states[k], costates.costates[k + 1]),
        costates.starts[k],
        segment=k,
        time=costates.times[k],
        dt=dt,
        regularization=regularization,
        continuous=continuous,
        search=search,
    )
    x = of_steps.states[k]
    p = of_steps.costates[k + 1]
    if _has_own_step(sublayer):
        step = check_step(sublayer, x, p, dt, regularization, search=search)
        return replace(segment, step=step)
    if segment.certificate.verdict != "degenerate":
        return segment
    threshold = step_threshold_at(sublayer, x, p, dt)
    if not continuous:
        # there is no ODE's costate, and the step's is the one after the step
        segment = replace(segment, training_threshold=threshold)
    return replace(segment, step_threshold=threshold)


def _has_own_step(sublayer: Sublayer) -> bool:
    """Whether the discrete step has a set of its own, next to that of the ODE."""
    norm = sublayer.state_norm
    return norm is not None and norm.has_tangent and sublayer.image is None

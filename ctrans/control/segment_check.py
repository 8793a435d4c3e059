"""The certificate of one segment of a model, at a state and its costate."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from ctrans.base.shapes import TokenRows
from ctrans.control.admissible import Posedness, Supremum, verdict_of
from ctrans.control.certificate import Certificate, SearchedFor, certify
from ctrans.control.costate import Point
from ctrans.control.decay_paths import UnitsPath
from ctrans.control.decay_threshold import DecayThreshold, decay_threshold
from ctrans.control.ellipsoids import EllipsoidSlice, ellipsoid_value
from ctrans.control.evidence import decayed_growth
from ctrans.control.last_map import LastMapDecay, check_last_decay, last_features
from ctrans.control.regularization import KineticCost, Regularization
from ctrans.control.residual_pullback import (
    active_channels,
    assuming_bounded_gains,
    certify_towards_image,
    check_gain_decay,
    cost_factor,
    costate_of_map,
    factor_formula,
    has_zero_gain,
    raw_costate,
    reachable_set,
    trains_gains,
)
from ctrans.control.scales import at_unit_size, product, total_length
from ctrans.control.set_of_placement import admissible_set
from ctrans.control.shown_factors import has_bias, has_output_bias, path_of
from ctrans.control.step_image import StepImage
from ctrans.control.tangent import LinearSpace
from ctrans.dynamics.norm import Norm
from ctrans.dynamics.placement import Placement
from ctrans.dynamics.sublayer import Sublayer
from solvers import ConfigError


@dataclass(frozen=True)
class SegmentCheck:
    """The certificate of one segment at its start. Norms and sums run over all tokens of the batch.

    - `slope`: |h'T'P|_F, if the placement makes a velocity T(h W') of weights W by a linear T
      without running cost. The best value with |W|_F <= R is then slope * R
    - `blind`: whether h'T'P = 0, so the last map has no effect. `slope` is then |T'P|, and R bounds
      the raw output
    - `ellipsoid`: Kan's printed value of H, for LayerNorm's image only: an upper bound of H
    - `training_threshold`: dt lam*, the penalty of both factors in a training loss at which H turns
      from infinite to zero, for the ODE; for a linear T and a map that shows its factors. It may be
      left out where there is a `step_threshold` and no `weight_decay`
    - `step_threshold`: the same for the Transformer's step, at its own state and at the costate
      after the step; None where a norm around the state bounds the step
    - `weight_decay`: the requested one, which the certificate does not include
    - `step`: the certificate of the discrete step, if that has a set of its own
    - `ode`: False if the segment has no ODE; `certificate` is then the discrete step's
    """

    segment: int
    kind: str
    time: float
    costate_norm: float
    certificate: Certificate
    slope: float | None
    ellipsoid: float | None
    blind: bool = False
    training_threshold: DecayThreshold | None = None
    weight_decay: float | None = None
    step: Certificate | None = None
    ode: bool = True
    step_threshold: DecayThreshold | None = None

    @property
    def needs_penalty(self) -> bool:
        """Whether nothing but a bound or a penalty limits the Transformer's step."""
        return self.certificate.verdict == "degenerate" and self.step is None

    @property
    def threshold(self) -> DecayThreshold | None:
        """The penalty that is needed: the Transformer's, or the ODE's where the Transformer needs
        none.
        """
        return self.step_threshold or self.training_threshold

    @property
    def verdict(self) -> Posedness:
        """The certificate's verdict, or the one under weight decay. A bounded set needs no weight
        decay. It is open where H is infinite at other costates and 0 at this one, as at P = 0.
        """
        if _is_zero_by_chance(self.certificate):
            return verdict_of(finite=None)
        if self.weight_decay is None or self.certificate.verdict != "degenerate":
            return self.certificate.verdict
        if self.training_threshold is None:
            return verdict_of(finite=None)
        return self.training_threshold.verdict(self.weight_decay)

    @property
    def decayed(self) -> bool:
        """Whether the requested weight decay changes the verdict, of the ODE or of the step. The
        certificate, without decay, is then no evidence for it.
        """
        if self.verdict != self.certificate.verdict:
            return True
        return self.step is None and self.step_verdict != self.certificate.verdict

    @property
    def hamiltonian(self) -> float | None:
        """H under the verdict's assumption; None if it is open, or finite by a threshold that does
        not give its value.
        """
        if self.verdict == self.certificate.verdict or _is_zero_by_chance(self.certificate):
            return self.certificate.hamiltonian
        if self.training_threshold is None or self.verdict == "open":
            return None
        if self.training_threshold.homogeneous:
            return 0.0
        return None

    @property
    def step_verdict(self) -> Posedness:
        """The verdict for the discrete step."""
        if self.step is not None:
            if _is_zero_by_chance(self.step):
                return verdict_of(finite=None)
            return self.step.verdict
        if self.step_threshold is None or self.weight_decay is None:
            return self.verdict
        return self.step_threshold.verdict(self.weight_decay)

    @property
    def failures(self) -> list[str]:
        """The findings that contradict the verdicts, each with its segment; empty if all agree."""
        parts = {"": self.certificate.findings}
        if self.step is not None:
            parts[", step"] = self.step.findings
        if self.threshold is not None:
            parts[", decay"] = self.threshold.findings
        return [
            f"segment {self.segment} ({self.kind}{part}): does not hold: {finding}"
            for part, findings in parts.items()
            for finding, holds in findings.items()
            if not holds
        ]


@torch.no_grad()
def check_segment(
    sublayer: Sublayer,
    ends: Point,
    start: Point,
    *,
    segment: int,
    time: float,
    dt: float,
    regularization: Regularization,
    continuous: bool,
    search: SearchedFor = "gains",
) -> SegmentCheck:
    """The certificate of one segment of the ODE, of length dt.

    A residual W makes the velocity W v of a velocity v that the norms allow. So H(P) is the norms'
    own H at W'P (`ctrans.control.residual_pullback`).

    `ends` are (X_k, P_{k+1}), the state before the segment and the costate after it. `start` is (X,
    P) at the field's input. A norm around the state needs an X on its image; the X of a discrete
    model (`continuous` false) is retracted to it. If the image of that norm has no tangent spaces
    there is no ODE, and the certificate is the discrete step's (`check_step`).

    `search` is how far searches go for evidence (see `certify`). If only over velocities, the ODE's
    threshold is left out where the Transformer's is enough.
    """
    known = partial(SegmentCheck, segment=segment, kind=sublayer.kind, time=time)
    if sublayer.state_norm is not None and not sublayer.state_norm.has_tangent:
        x, p = ends
        return known(
            costate_norm=total_length(p),
            certificate=check_step(sublayer, x, p, dt, regularization, search=search),
            slope=None,
            ellipsoid=None,
            weight_decay=regularization.weight_decay,
            ode=False,
        )
    state, p = at_field(sublayer, start, continuous=continuous)
    costate_norm = total_length(p)
    check_gain_decay(sublayer, regularization)
    h = last_features(sublayer, state).flatten(0, -2)
    check_last_decay(sublayer, state, regularization)
    if h.dtype != p.dtype:
        raise ConfigError(
            f"its last map computes in {_name(h.dtype)}, and the state is of {_name(p.dtype)}:"
            " convert the model to one dtype"
        )
    x = state.flatten(0, -2)
    p = p.flatten(0, -2)
    if sublayer.image is not None:
        certificate = certify_towards_image(sublayer, x, p, h, regularization, search=search)
        return known(
            costate_norm=costate_norm,
            certificate=assuming_bounded_gains(sublayer, certificate),
            slope=None,
            ellipsoid=None,
        )
    p = costate_of_map(sublayer, p)
    admissible = _velocities(sublayer, x, h, regularization)
    pulled: Tensor | None = None
    slope: float | None = None
    blind = False
    if isinstance(admissible, LinearSpace):
        pulled = raw_costate(sublayer, admissible, p)
        slope, blind = _slope(h, pulled, p)
    searches_weights = search != "velocities"
    certificate = _certificate(sublayer, admissible, p, None if blind else h, search=search)
    ellipsoid: float | None = None
    if isinstance(admissible, EllipsoidSlice):
        ellipsoid = float(ellipsoid_value(admissible.norm, p))
    training_threshold: DecayThreshold | None = None
    needs_threshold = (
        searches_weights
        or regularization.weight_decay is not None
        or sublayer.state_norm is not None
    )
    if pulled is not None and needs_threshold and not has_zero_gain(sublayer):
        training_threshold = threshold_at(sublayer, state, sublayer.gain * pulled, dt)
    return known(
        costate_norm=costate_norm,
        certificate=certificate,
        slope=slope,
        ellipsoid=ellipsoid,
        blind=blind,
        training_threshold=training_threshold,
        weight_decay=regularization.weight_decay,
    )


def _velocities(
    sublayer: Sublayer, x: Tensor, h: Tensor, regularization: Regularization
) -> Supremum:
    """The velocities that the field's norms allow at this state."""
    if regularization.kinetic is not None:
        kinetic = regularization.kinetic * cost_factor(sublayer)
        regularization = replace(regularization, kinetic=kinetic)
    norm = sublayer.state_norm
    if sublayer.output_norm is not None:
        norm = sublayer.output_norm
    channels = active_channels(sublayer)
    return admissible_at(norm, sublayer.placement, x, h, regularization, channels)


def _certificate(
    sublayer: Sublayer,
    admissible: Supremum,
    p: Tensor,
    features: Tensor | None,
    *,
    search: SearchedFor,
) -> Certificate:
    """The certificate of that set, with the growth that decayed weights attain and the factors of
    the residual in words.
    """
    certificate = certify(admissible, p, features=features, search=search)
    searches_weights = search != "velocities"
    if isinstance(admissible, LastMapDecay) and certificate.hamiltonian > 0 and searches_weights:
        certificate = replace(certificate, growth=decayed_growth(admissible, p))
    certificate = assuming_bounded_gains(sublayer, certificate)
    factor = factor_formula(sublayer)
    if factor is not None:
        certificate = replace(certificate, words=f"{factor}, {certificate.words}")
    return certificate


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _slope(h: Tensor, pulled: Tensor, p: Tensor) -> tuple[float, bool]:
    """`slope` of a segment and whether it is `blind`, of the features, the costate of the raw
    output and that of the velocity.
    """
    features, features_size = at_unit_size(h)
    raw, raw_size = at_unit_size(pulled)
    slope = product(total_length(features.mT @ raw), features_size, raw_size)
    rounding = torch.finfo(p.dtype).eps * len(p)
    blind = slope <= product(rounding, total_length(h), total_length(p))
    if blind:
        slope = total_length(pulled)
    return slope, blind


def at_field(sublayer: Sublayer, start: Point, *, continuous: bool) -> Point:
    """The state and costate at which a segment is certified. The X of a discrete model is retracted
    to the image of a norm around the state.
    """
    x, p = start
    if sublayer.state_norm is not None and not continuous:
        x = sublayer.state_norm.retract(x)
    return x, p


@torch.no_grad()
def check_step(
    sublayer: Sublayer,
    x: TokenRows,
    p: TokenRows,
    dt: float,
    regularization: Regularization,
    *,
    search: SearchedFor = "gains",
) -> Certificate:
    """The certificate of a discrete step N(X + dt r) at X and the costate P of the step's end."""
    norm = sublayer.state_norm
    assert norm is not None, "a step has a set of its own where a norm stands around the state"
    h = last_features(sublayer, x)
    state = x.flatten(0, -2)
    p = p.flatten(0, -2)
    kinetic = regularization.kinetic
    next_states = reachable_set(sublayer, state, kinetic=kinetic is not None)
    admissible: Supremum
    if kinetic is None:
        admissible = StepImage(next_states, state, dt)
    else:
        admissible = KineticCost(StepImage(next_states, state, dt), kinetic)
    return certify(admissible, p, features=h.flatten(0, -2), search=search)


def threshold_at(
    sublayer: Sublayer, x: Tensor, raw_costate: Tensor, dt: float = 1.0
) -> DecayThreshold | None:
    """dt lam* at the costate of the raw output; None for a map that does not show two factors."""
    try:
        path = path_of(sublayer.field, sublayer.given(x))
    except ConfigError:
        return None
    bounded = isinstance(path, UnitsPath) and path.activation.at_infinity == 0
    if bounded:
        bias = has_output_bias(sublayer.field)  # that of the units stays within the activation
    else:
        bias = has_bias(sublayer.field)
    gains = trains_gains(sublayer) and not bounded
    return decay_threshold(path, raw_costate, bias=bias, gains=gains).times(dt)


@torch.no_grad()
def step_threshold_at(
    sublayer: Sublayer, x: TokenRows, p: TokenRows, dt: float
) -> DecayThreshold | None:
    """dt lam* of the Transformer's step X + dt r at its state X and the costate P after the step:
    the loss changes by dt <P, r>, to first order.
    """
    if has_zero_gain(sublayer):
        return None
    raw = sublayer.gain * sublayer.residual.pull(p)
    return threshold_at(sublayer, sublayer.enter(x), raw.flatten(0, -2), dt)


def admissible_at(
    norm: Norm | None,
    placement: Placement,
    x: Tensor,
    h: Tensor | None,
    regularization: Regularization,
    active: Tensor | None = None,
) -> Supremum:
    """The set of a placement at the state X and the features h, with a regularization."""
    state: Tensor | None = None
    if placement.state_norm:
        state = x
    features: Tensor | None = None
    no_norm = not placement.output_norm and not placement.state_norm
    if no_norm and regularization.last_map_decay is not None:
        features = h
    return admissible_set(
        norm,
        placement,
        state=state,
        active_channels=active,
        features=features,
        last_map_decay=regularization.last_map_decay,
        gain_decay=regularization.gain_decay,
        kinetic=regularization.kinetic,
    )


def with_further_factor(segment: SegmentCheck, *, has_more: bool) -> SegmentCheck:
    """The segment, whose thresholds hold gains fixed if its block has parameters outside of its
    linear maps. Its verdict then assumes bounded gains: they may multiply what the block adds.
    """
    if not has_more:
        return segment
    certificate = segment.certificate
    if certificate.verdict == "well-posed":
        verdict = verdict_of(finite=True, bounded_gains=True)
        certificate = replace(certificate, verdict=verdict)

    def holding_gains(threshold: DecayThreshold | None) -> DecayThreshold | None:
        return None if threshold is None else replace(threshold, gains=True)

    return replace(
        segment,
        certificate=certificate,
        training_threshold=holding_gains(segment.training_threshold),
        step_threshold=holding_gains(segment.step_threshold),
    )


def _is_zero_by_chance(certificate: Certificate) -> bool:
    """Whether H is 0 at this costate although it is infinite at others."""
    return not certificate.finite and certificate.hamiltonian == 0

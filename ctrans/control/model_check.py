"""Is training this model a well-posed control problem? Every segment's supremum, certified at the costates of a real text."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ctrans.control.admissible import AdmissibleSet, Verdict, check_positive
from ctrans.control.ascent import Chart, unchanged
from ctrans.control.bounded_growth import Growth, growth
from ctrans.control.certificate import Certificate, certify
from ctrans.control.costate import Costate, costate
from ctrans.control.ellipsoids import EllipsoidSlice, ellipsoid_value
from ctrans.control.last_map import WeightDecay
from ctrans.control.linear_spaces import LinearSpace
from ctrans.control.set_of_placement import admissible_set
from ctrans.fields import EndsLinear
from ctrans.norm import Norm, RMSNorm
from ctrans.placement import Placement
from ctrans.sublayer import Sublayer
from ctrans.walk import Model
from solvers import ConfigError


@dataclasses.dataclass(frozen=True)
class Remedy:
    """A running cost that makes H finite: lam/2 |W|_F^2 of the last linear map, or lam/2 |f|^2 of the velocity; or none."""

    weight_decay: float | None = None
    kinetic: float | None = None

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value is not None:
                check_positive(name, value)


@dataclasses.dataclass(frozen=True)
class SegmentCheck:
    """The certificate of one segment at its start; norms and sums run over all tokens of the batch.

    `slope` is |h'T'P|_F where the placement makes a velocity T(h W') of weights W by a linear T, without running cost: the best
    value with |W|_F <= R is then slope * R. `ellipsoid` is Kan's printed value of H, for LayerNorm's image only: H there is at most that.
    """

    segment: int
    kind: str
    time: float
    costate_norm: float
    certificate: Certificate
    slope: float | None
    ellipsoid: float | None


@dataclasses.dataclass(frozen=True)
class ModelCheck:
    """The certificates of all segments of a model; `placement` names those of its sublayers. Every field suits JSON."""

    placement: str
    loss: float
    tokens: int
    segments: tuple[SegmentCheck, ...]

    @property
    def largest(self) -> SegmentCheck:
        """The segment with the largest costate."""
        return max(self.segments, key=lambda segment: segment.costate_norm)

    @property
    def verdict(self) -> Verdict:
        """`well-posed` where it is so on every segment: one velocity that may run away is enough to degenerate training."""
        verdicts = {segment.certificate.verdict for segment in self.segments}
        return "well-posed" if verdicts == {"well-posed"} else "degenerate"

    @property
    def failures(self) -> list[str]:
        """The findings that do not support the verdict, each with its segment; empty where all agree."""
        return [
            f"segment {segment.segment} ({segment.kind}): does not hold: {finding}"
            for segment in self.segments
            for finding, holds in segment.certificate.findings.items()
            if not holds
        ]

    @property
    def agrees(self) -> bool:
        """Whether the evidence on every segment supports its verdict."""
        return not self.failures

    @property
    def evidence(self) -> dict[str, float | None]:
        """The weakest evidence over all segments; None where it does not apply.

        `gap` is (H - best)/|H| of the ascent over velocities, `weights` of that over the last map's weights, `kkt` the residual
        of the closed form's maximiser, `uniqueness` the distance between maximisers from different starts, `exponent` the k of
        value ~ R^k that is farthest from what its segment's verdict says: 1 where H is infinite, else 0.
        """
        certificates = [segment.certificate for segment in self.segments]
        grown = [(c.growth.exponent, float(c.verdict == "degenerate")) for c in certificates if c.growth is not None]
        return {
            "gap": max((c.velocities.gap for c in certificates if c.velocities is not None), key=abs, default=None),
            "weights": max((c.weights.gap for c in certificates if c.weights is not None), key=abs, default=None),
            "kkt": max((c.kkt for c in certificates if c.kkt is not None), default=None),
            "uniqueness": max((c.velocities.uniqueness for c in certificates if c.velocities is not None), default=None),
            "exponent": max(grown, key=lambda each: abs(each[0] - each[1]), default=(None, 0.0))[0],
        }


def refusal(placement: Placement, remedy: Remedy) -> str | None:
    """Why a placement's admissible set takes no such remedy, before there is a model; None where it does."""
    one = torch.ones(1, 2)
    try:
        _admissible(RMSNorm(2), placement, one, one, remedy)
    except ConfigError as error:
        return str(error)
    return None


def check_model(
    model: Model,
    tokens: Int[Tensor, "batch tokens"],
    targets: Int[Tensor, "batch tokens"],
    remedy: Remedy | None = None,
    *,
    progress: Callable[[int], None] | None = None,
) -> ModelCheck:
    """H(P) = sup of -<P, f> over what each segment's placement allows, with its certificate, P the continuous costate there.

    P and X are taken at the segment's start, the text's sequences side by side: one set of weights serves them all. The last
    linear map acts on its features of X, with a column of ones where it has a bias. `progress(k)` follows the segments.
    Raises ConfigError for a remedy that a placement does not take (see `refusal`), and as `costate` does.

    >>> check_model(model, tokens[:, :-1], tokens[:, 1:]).verdict
    """
    found = costate(model, tokens, targets, form="continuous")
    remedy = Remedy() if remedy is None else remedy
    segments = []
    for k, sublayer in enumerate(model.depth.sublayers):
        segments.append(check_segment(sublayer, found, k, remedy))
        if progress is not None:
            progress(k)
    names = {sublayer.placement.name for sublayer in model.depth.sublayers}
    return ModelCheck(", ".join(sorted(names)), found.loss, tokens.numel(), tuple(segments))


@torch.no_grad()
def check_segment(sublayer: Sublayer, found: Costate, k: int, remedy: Remedy) -> SegmentCheck:
    """The certificate of segment k, whose sublayer is given, at the costate found there."""
    return check_at(sublayer, *found.starts[k], segment=k, time=found.times[k], remedy=remedy)


@torch.no_grad()
def check_at(
    sublayer: Sublayer,
    x: Float[Tensor, "*batch tokens width"],
    p: Float[Tensor, "*batch tokens width"],
    *,
    segment: int,
    time: float,
    remedy: Remedy,
) -> SegmentCheck:
    """The certificate of a sublayer at a state and its costate, which segment `segment` meets at depth-time `time`."""
    h = last_features(sublayer, x).flatten(0, -2)
    x, p = x.flatten(0, -2), p.flatten(0, -2)
    norm = sublayer.state_norm if sublayer.output_norm is None else sublayer.output_norm
    admissible = _admissible(norm, sublayer.placement, x, h, remedy)
    certificate = certify(admissible, p, features=h)
    if isinstance(admissible, WeightDecay) and certificate.hamiltonian > 0:
        certificate = dataclasses.replace(certificate, growth=decayed_growth(admissible, p))
    slope = float((h.mT @ pulled_back(admissible, p)).norm()) if isinstance(admissible, LinearSpace) else None
    printed = float(ellipsoid_value(admissible.norm, p)) if isinstance(admissible, EllipsoidSlice) else None
    return SegmentCheck(segment, sublayer.kind, time, float(p.norm()), certificate, slope, printed)


def last_features(sublayer: Sublayer, x: Tensor) -> Tensor:
    """h with r(X) = gain * N_out(h W'): the last linear map's input, and a column of ones where W holds a bias."""
    field = sublayer.field
    if not isinstance(field, EndsLinear):
        raise ConfigError(
            f"the {sublayer.kind} sublayer's {type(field).__name__} does not name its last linear map: give it `features(x)` and "
            "`last`, with field(x) = last(features(x))"
        )
    h = field.features(x if sublayer.input_norm is None else sublayer.input_norm(x))
    if field.last.bias is not None:
        h = torch.cat([h, torch.ones_like(h[..., :1])], -1)
    return sublayer.gain * h


def pulled_back(space: LinearSpace, P: Float[Tensor, "tokens width"]) -> Float[Tensor, "tokens width"]:
    """T'P, T being what the placement does to a raw output: the identity, or the (oblique) projection of `Norm.tangent`."""
    pulled: Tensor = torch.func.vjp(space.chart(P).velocity, P)[1](P)[0]
    return pulled


def decayed_growth(decay: WeightDecay, P: Float[Tensor, "tokens width"]) -> Growth:
    """max of -<P, h W'> - lam/2 |W|_F^2 over |W|_F <= R for growing R, by ascent: it saturates once R lets W* in."""
    u, _, inverse, _ = decay.map.svd

    def cost(raw: Tensor, f: Tensor) -> Tensor:
        """lam/2 <f_j, ((h h')^+ f)_j>: token j's part of lam/2 |W|^2, W the least weights with h W' = f."""
        return decay.weight_decay / 2 * (f * (u @ (inverse * decay.map.coordinates(f)))).sum(-1)

    chart = Chart(P, P.shape, axes=(-1,), degree=1, velocity=unchanged, cost=cost)
    return growth(chart, decay.map, decay.maximizer(P), torch.Generator().manual_seed(0))


def _admissible(norm: Norm | None, placement: Placement, x: Tensor, h: Tensor, remedy: Remedy) -> AdmissibleSet:
    free = not (placement.output_norm or placement.state_norm)
    return admissible_set(
        norm,
        placement,
        state=x if placement.state_norm else None,
        features=h if free and remedy.weight_decay is not None else None,
        weight_decay=remedy.weight_decay,
        kinetic=remedy.kinetic,
    )

"""Certificates of a verdict: the closed form and its KKT residual, compared with ascents through
the model's own modules.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from ctrans.base.option import Count, Seed
from ctrans.base.shapes import UnbatchedRows
from ctrans.control.admissible import (
    ROUNDING,
    GainSlope,
    Posedness,
    Supremum,
    VelocitySet,
    check_costate,
)
from ctrans.control.ascent import STEPS
from ctrans.control.ellipsoids import SphereImage
from ctrans.control.evidence import (
    PAIRS,
    Growth,
    VelocityAscent,
    WeightAscent,
    Witness,
    climb_velocities,
    climb_weights,
    gained_growth,
    growth,
    share_of,
    witness,
)
from ctrans.control.last_map import Features, gap_of_rank
from ctrans.control.norm_image import NormImage
from ctrans.control.regularization import KineticCost
from ctrans.control.scaled_evidence import scaled_evidence
from ctrans.control.scales import near_one, times_power, times_powers
from ctrans.control.set_of_placement import admissible_set
from ctrans.control.tangent import LinearSpace
from ctrans.dynamics.norm import NORMS, Norm
from solvers import ConfigError, look_up

LINEAR = 0.01
"""Allowed error of a growth exponent of 1: H is infinite, or gains are trained too."""
ROOM = 1e6
"""How far the largest velocity must be below the root of the dtype's largest number."""
SATURATED = 0.05
"""Allowed error of a growth exponent of 0: H is finite."""

SearchedFor = Literal["velocities", "weights", "gains"]
"""What searches for evidence go over, each with those before it."""


@dataclass(frozen=True)
class Certificate:
    """A verdict at one costate with its evidence, in plain numbers (`dataclasses.asdict`). H is inf
    if degenerate.

    - `eps`: the machine epsilon of the computation
    - `scale`: the size of the terms of H (`Supremum.scale`)
    - `kkt`: the KKT residual of the closed form's maximiser; `kkt_noise` is the part that rounding
      may cause, where gains are tiny against an offset or a step's state
    - `growth`: growth of the value with a bound on the weights; `gained` with one bound on the
      weights and the norm's gains and offsets together; `gain_slope` is the slope expected of
      `gained`
    - `ceiling`: a proven bound of H, where its maximiser is only the best one found
    - `attained`: whether a velocity of the model attains a finite H, or only approaches it

    Evidence that does not apply to the set is None.
    """

    words: str
    verdict: Posedness
    hamiltonian: float
    ties: int
    eps: float
    scale: float = 0.0
    kkt: float | None = None
    kkt_noise: float = 0.0
    velocities: VelocityAscent | None = None
    weights: WeightAscent | None = None
    growth: Growth | None = None
    witness: Witness | None = None
    ceiling: float | None = None
    gained: Growth | None = None
    gain_slope: GainSlope | None = None
    attained: bool | None = None

    @property
    def finite(self) -> bool:
        """Whether H is finite for every costate, under the verdict's assumption."""
        return self.verdict != "degenerate"

    @property
    def agrees(self) -> bool:
        """Whether all findings support the verdict."""
        return all(self.findings.values())

    @property
    def rank_deficient(self) -> bool:
        """Whether the features have too low a rank for the weights to make every velocity. Ascents
        over weights then have no closed form to compare with.
        """
        return self.weights is not None and self.weights.rank < self.weights.tokens

    @property
    def expected_exponent(self) -> int:
        """The k of value ~ R^k that H implies: 1 if H is infinite, 0 if it is finite."""
        if self.hamiltonian == math.inf:
            return 1
        return 0

    @property
    def findings(self) -> dict[str, bool]:
        """The expected findings in words, each with whether it holds."""
        return (
            self._closed_form_findings()
            | self._velocity_findings()
            | self._weight_findings()
            | self._growth_findings()
            | self._gain_findings()
            | self._witness_findings()
        )

    @property
    def _small(self) -> float:
        """The allowed error of a value."""
        return math.sqrt(self.eps)

    def _closed_form_findings(self) -> dict[str, bool]:
        if self.kkt is None:
            return {}
        statement = (
            f"the closed form's maximiser satisfies the KKT conditions (found: to {self.kkt:.2g})"
        )
        return {statement: self.kkt <= max(self.eps ** (2 / 3), self.kkt_noise)}

    def _velocity_findings(self) -> dict[str, bool]:
        ascent = self.velocities
        if ascent is None:
            return {}
        if self.ceiling is None:
            value_statement = (
                "the best velocity found has the closed form's value (found: a gap of"
                f" {ascent.gap:.2g})"
            )
            value_holds = abs(ascent.gap) <= self._small
        else:
            value_statement = "no velocity found exceeds the proven bound"
            bound = self.ceiling + self._small * abs(self.ceiling)
            value_holds = max(ascent.best, self.hamiltonian) <= bound
        uniqueness_statement = (
            "different starts find one maximiser, ties apart (found:"
            f" {ascent.uniqueness:.2g} apart)"
        )
        uniqueness_holds = ascent.uniqueness <= math.sqrt(self._small)
        return {value_statement: value_holds, uniqueness_statement: uniqueness_holds}

    def _weight_findings(self) -> dict[str, bool]:
        ascent = self.weights
        if ascent is None:
            return {}
        if ascent.rank == ascent.tokens:
            least = -self._small
            most = self._small
        else:
            least = ascent.proven - self._small
            most = math.inf
        statement = (
            "the best weights found have a value that their rank allows (found: a gap of"
            f" {ascent.gap:.2g})"
        )
        return {statement: least <= ascent.gap <= most}

    def _growth_findings(self) -> dict[str, bool]:
        if self.growth is None:
            return {}
        findings = {}
        k = self.expected_exponent
        if k == 1:
            error = LINEAR
        else:
            error = SATURATED
        if not self.rank_deficient:
            statement = (
                f"the value grows like R^{k} with a bound R (found: R^{self.growth.exponent:.3g},"
                f" allowed error {error:g})"
            )
            findings[statement] = abs(self.growth.exponent - k) <= error
        if self.weights is not None:
            findings["no weights within a bound exceed H"] = (
                max(self.growth.values) <= self.growth.limit
            )
        return findings

    def _gain_findings(self) -> dict[str, bool]:
        if self.gained is None or self.gain_slope is None:
            return {}
        findings = {}
        if not self.rank_deficient:
            statement = (
                "with gains trained, the value grows like R^1 (found:"
                f" R^{self.gained.exponent:.3g}, allowed error {LINEAR:g})"
            )
            findings[statement] = abs(self.gained.exponent - 1) <= LINEAR
        share = max(
            (value - self.gained.base) / (radius * self.gain_slope.upper)
            for radius, value in zip(self.gained.radii, self.gained.values, strict=True)
        )
        statement = (
            f"no weights and gains within R exceed the proven slope times R (found: {share:.6g}"
            " of it)"
        )
        findings[statement] = share <= 1 + self._small
        return findings

    def _witness_findings(self) -> dict[str, bool]:
        if self.witness is None:
            return {}
        return {"the witness velocities are admissible": self.witness.residual <= self._small}


@torch.no_grad()
def certify(
    admissible: Supremum | str,
    P: UnbatchedRows,
    *,
    features: Float[Tensor, "tokens features"] | None = None,
    norm: Norm | str | None = None,
    state: UnbatchedRows | None = None,
    pairs: Count = PAIRS,
    seed: Seed = 0,
    search: SearchedFor = "gains",
) -> Certificate:
    """Evidence for an admissible set's verdict at the costate P: H and its maximiser, compared with
    ascents and growth.

    A finite H gets a KKT residual and an ascent over velocities. An infinite one gets its growth
    with a bound, and a witness.

    - `admissible`: a set of velocities, or the name of a placement
    - `P`: the costate, one row per token
    - `features`: the input of the last linear map. They add an ascent over its weights and turn the
      bound into one on these weights. If H is finite for bounded gains, they also add the growth
      with a bound on weights and gains together. certify ignores them if they are zero, if every
      token ties, for sets of weights, and for a kinetic cost on a norm's image: its best velocities
      need inputs near 0, which an ascent over weights finds badly
    - `norm`: for a placement's name, the norm around its velocities: a module, or a name in `NORMS`
      (LayerNorm if None)
    - `state`: X, which a norm around the state also needs
    - `pairs`, `seed`: the number of pairs of random starts, and their seed
    - `search`: how far searches go. "velocities": a finite H gets its KKT residual and the ascent
      over velocities, an infinite one its witness. "weights": also what weights of the last map
      attain, freely and within a bound. "gains": also what weights and gains attain within a bound

    >>> certify("peri", P).agrees
    >>> certify(admissible_set(norm, "peri", kinetic=0.1), P, features=h).agrees

    Raises ConfigError for a P or features that do not fit, and for a norm or state together with a
    set.
    """
    if isinstance(admissible, str):
        admissible = _set_of_placement(admissible, P, norm, state)
    elif norm is not None or state is not None:
        raise ConfigError(
            "norm and state describe a placement's set: leave them out, or give the placement's"
            " name instead of a set"
        )
    exponent = _out_of_range(admissible, P)
    if exponent != 0:
        evidence = certify(
            admissible,
            times_power(P, -exponent),
            features=features,
            pairs=pairs,
            seed=seed,
            search=search,
        )
        scaled: Certificate = scaled_evidence(evidence, exponent)
        return scaled
    chart = admissible.chart(P)
    value = float(admissible.support(P))
    ties = admissible.ties(P)
    summary = Certificate(
        words=admissible.words,
        verdict=admissible.verdict,
        hamiltonian=value,
        ties=int(ties.sum()),
        eps=torch.finfo(P.dtype).eps,
    )
    if value < math.inf:
        summary = replace(summary, attained=admissible.attained)
    if search == "velocities" and isinstance(admissible, LinearSpace) and value == math.inf:
        P, exponent = near_one(P)
        return scaled_evidence(replace(summary, witness=witness(admissible, P)), exponent)  # type: ignore[no-any-return]
    last_map = None
    if features is not None and search != "velocities" and chart.degree is not None:
        check_costate(features, P.dtype, tokens=len(P), what="feature matrix")
        if features.any():
            last_map = Features(features)
    if isinstance(admissible, LinearSpace) and value == math.inf:
        return _of_infinite(summary, admissible, P, last_map, seed)
    return _of_finite(summary, admissible, P, ties, last_map, pairs, seed, search)


def _of_infinite(
    summary: Certificate, space: LinearSpace, P: Tensor, last_map: Features | None, seed: int
) -> Certificate:
    """Adds the growth of the best value with a bound on the weights, or on the velocities, and a
    witness.
    """
    if last_map is None:
        last_map = Features(torch.eye(len(P), dtype=P.dtype, device=P.device))
    generator = torch.Generator().manual_seed(int(seed))
    P, exponent = near_one(P)
    h, exponent_of_features = near_one(last_map.h)
    typical = space.witness(P, math.sqrt(P.numel()))
    grown = growth(space.chart(P), Features(h), typical, generator)
    evidence = replace(summary, growth=grown, witness=witness(space, P))
    scaled: Certificate = scaled_evidence(evidence, exponent)
    assert scaled.growth is not None, "it was given one"
    radii = times_powers(scaled.growth.radii, -exponent_of_features)
    return replace(scaled, growth=replace(scaled.growth, radii=radii))


def _of_finite(
    summary: Certificate,
    admissible: Supremum,
    P: Tensor,
    ties: Tensor,
    last_map: Features | None,
    pairs: int,
    seed: int,
    search: SearchedFor,
) -> Certificate:
    """Adds the maximiser's KKT residual, the ascent over velocities and what weights attain."""
    chart = admissible.chart(P)
    value = summary.hamiltonian
    generator = torch.Generator().manual_seed(int(seed))
    best = admissible.maximizer(P)
    _check_squares(best, value)
    ceiling = admissible.ceiling(P)
    scale = admissible.scale(P)
    if scale == 0:
        # H of velocities that all are 0: their rounding counts against velocities of 1
        scale = float(P.abs().max())
    # if the problem of a token splits, some of its parts may tie and others not
    if chart.parts == 1:
        idle = bool(ties.all())
    else:
        idle = not P.any()
    steps = STEPS
    if idle and not admissible.gains_tie(P).any():
        steps = 0
    velocities, likely = climb_velocities(chart, value, scale, ties, pairs, generator, steps=steps)
    summary = replace(
        summary,
        scale=scale,
        kkt=float(admissible.kkt(P, best)),
        kkt_noise=ROUNDING * summary.eps * admissible.magnification(best),
        velocities=velocities,
    )
    is_value = ceiling <= value + math.sqrt(summary.eps) * scale
    if not is_value:
        summary = replace(summary, ceiling=ceiling)
    if last_map is None or idle:
        return summary
    # the tokens that the last map can move
    moved = last_map.h.any(-1)
    if moved.all() or not undefined_at_zero(admissible):
        return _with_weights(summary, admissible, P, last_map, likely, pairs, generator, search)
    of_moved_tokens = certify(
        admissible, P[moved], features=last_map.h[moved], pairs=pairs, seed=seed, search=search
    )
    return replace(
        summary,
        weights=of_moved_tokens.weights,
        growth=of_moved_tokens.growth,
        gained=of_moved_tokens.gained,
        gain_slope=of_moved_tokens.gain_slope,
    )


def _check_squares(velocities: Tensor, value: float) -> None:
    """Raises ConfigError unless squares of velocities, with room for those of searches, are numbers
    of their dtype.
    """
    fastest = float(velocities.abs().max())
    largest = math.sqrt(torch.finfo(velocities.dtype).max) / ROOM
    if fastest <= largest and math.isfinite(value):
        return
    dtype = str(velocities.dtype).removeprefix("torch.")
    raise ConfigError(
        f"the best velocities reach {fastest:.2g}, and their squares overflow in {dtype}: take a"
        " step dt or a scale of the state (alpha) nearer to 1, or a wider dtype"
    )


def _set_of_placement(
    placement: str, P: Tensor, norm: Norm | str | None, state: Tensor | None
) -> Supremum:
    """The set of a placement's name; its norm is a module, a name, or LayerNorm if None."""
    if norm is None:
        norm = "layernorm"
    if isinstance(norm, str):
        kind = look_up("norm", norm, NORMS)
        norm = kind(P.shape[-1]).to(P).requires_grad_(requires_grad=False)
    return admissible_set(norm, placement, state=state)


def _out_of_range(admissible: Supremum, P: Tensor) -> int:
    """The power of two that brings the terms of H near 1; 0 where their squares neither overflow
    nor lose digits. H of a set without running cost is proportional to P.
    """
    if not isinstance(admissible, VelocitySet) or isinstance(admissible, LinearSpace):
        return 0
    admissible.check(P)
    largest = P.abs().max()
    if largest == 0:
        return 0
    fastest = admissible.maximizer(P / largest).abs().max()
    if fastest == 0:
        return 0
    exponent = math.frexp(float(largest))[1] + math.frexp(float(fastest))[1]
    smallest_exponent = math.frexp(torch.finfo(P.dtype).tiny)[1]
    if 4 * abs(exponent) > -smallest_exponent:
        return exponent
    return 0


def _with_weights(
    summary: Certificate,
    admissible: Supremum,
    P: Tensor,
    last_map: Features,
    likely: Tensor,
    pairs: int,
    generator: torch.Generator,
    search: SearchedFor,
) -> Certificate:
    """Adds to the certificate of a finite H what weights of the last map attain: freely, within a
    bound, and with gains.
    """
    chart = admissible.chart(P)
    value = summary.hamiltonian
    scale = summary.scale
    weights = climb_weights(chart, last_map, value, pairs, generator, likely, scale=scale)
    if isinstance(admissible, SphereImage):
        proven_loss = gap_of_rank(admissible.norm, P, last_map)
        weights = replace(weights, proven=share_of(proven_loss, scale))
    unit = scale
    if unit == 0:
        unit = 1.0
    limit = value + math.sqrt(summary.eps) * unit
    best = admissible.maximizer(P)
    grown = growth(chart, last_map, best, generator, likely=likely, base=admissible.base(P))
    summary = replace(summary, weights=weights)
    if _has_squares(grown.radii, P.dtype):
        summary = replace(summary, growth=replace(grown, limit=limit))
    if not isinstance(admissible, VelocitySet) or search != "gains":
        return summary
    slope = admissible.slope_in_gains(P)
    if slope is None or slope.lower == 0:
        return summary
    gained = gained_growth(chart, last_map, best, generator, likely=likely)
    if not _has_squares(gained.radii, P.dtype):
        return summary
    return replace(summary, gained=gained, gain_slope=slope)


def _has_squares(radii: Sequence[float], dtype: torch.dtype) -> bool:
    """Whether bounds on weights have squares in the dtype. Without them a search is no evidence."""
    return max(radii) <= math.sqrt(torch.finfo(dtype).max) / ROOM


def undefined_at_zero(admissible: Supremum) -> bool:
    """Whether a raw output of 0 has no velocity, as behind a norm with eps = 0. The ascents over
    weights leave such tokens out.
    """
    if isinstance(admissible, KineticCost):
        return undefined_at_zero(admissible.velocities)
    return isinstance(admissible, NormImage) and admissible.norm.undefined_at_zero

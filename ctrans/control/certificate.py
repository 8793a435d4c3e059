"""Certificates of a verdict: the closed form and its KKT residual, compared with ascents through
the model's own modules.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import numpy as np
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
from ctrans.control.set_of_placement import admissible_set
from ctrans.control.tangent import LinearSpace
from ctrans.dynamics.norm import NORMS, Norm
from solvers import ConfigError, checked, look_up

LINEAR, SATURATED = 0.01, 0.05
"""Allowed error of a growth exponent: LINEAR from 1 where H is infinite or gains are trained too,
SATURATED from 0 where H is finite.
"""

VALUES = frozenset(
    {
        "hamiltonian",
        "scale",
        "best",
        "values",
        "base",
        "limit",
        "ceiling",
        "gain",
        "offset",
        "lower",
        "upper",
    }
)
"""The fields of evidence that are proportional to the costate."""


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
    def findings(self) -> dict[str, bool]:
        """The expected findings in words, each with whether it holds."""
        small = math.sqrt(self.eps)
        found: dict[str, bool] = {}
        if self.kkt is not None:
            words = (
                "the closed form's maximiser satisfies the KKT conditions (found: to"
                f" {self.kkt:.2g})"
            )
            found[words] = self.kkt <= max(self.eps ** (2 / 3), self.kkt_noise)
        if self.velocities is not None:
            if self.ceiling is None:
                words = (
                    "the best velocity found has the closed form's value (found: a gap of"
                    f" {self.velocities.gap:.2g})"
                )
                found[words] = abs(self.velocities.gap) <= small
            else:
                above = self.ceiling + small * abs(self.ceiling)
                found["no velocity found exceeds the proven bound"] = (
                    max(self.velocities.best, self.hamiltonian) <= above
                )
            words = (
                "different starts find one maximiser, ties apart (found:"
                f" {self.velocities.uniqueness:.2g} apart)"
            )
            found[words] = self.velocities.uniqueness <= math.sqrt(small)
        if self.weights is not None:
            if self.weights.rank == self.weights.tokens:
                least, most = (-small, small)
            else:
                least, most = (self.weights.proven - small, math.inf)
            words = (
                "the best weights found have a value that their rank allows (found: a gap of"
                f" {self.weights.gap:.2g})"
            )
            found[words] = least <= self.weights.gap <= most
        if self.growth is not None:
            if self.hamiltonian == math.inf:
                k, error = (1, LINEAR)
            else:
                k, error = (0, SATURATED)
            words = (
                f"the value grows like R^{k} with a bound R (found: R^{self.growth.exponent:.3g},"
                f" allowed error {error:g})"
            )
            if not self.rank_deficient:
                found[words] = abs(self.growth.exponent - k) <= error
            if self.weights is not None:
                found["no weights within a bound exceed H"] = (
                    max(self.growth.values) <= self.growth.limit
                )
        if self.gained is not None and self.gain_slope is not None:
            grown = f"found: R^{self.gained.exponent:.3g}, allowed error {LINEAR:g}"
            if not self.rank_deficient:
                found[f"with gains trained, the value grows like R^1 ({grown})"] = (
                    abs(self.gained.exponent - 1) <= LINEAR
                )
            pairs = zip(self.gained.radii, self.gained.values, strict=True)
            share = max(
                (value - self.gained.base) / (radius * self.gain_slope.upper)
                for radius, value in pairs
            )
            words = (
                f"no weights and gains within R exceed the proven slope times R (found: {share:.6g}"
                " of it)"
            )
            found[words] = share <= 1 + small
        if self.witness is not None:
            found["the witness velocities are admissible"] = self.witness.residual <= small
        return found


@torch.no_grad()
@checked
def certify(
    admissible: Supremum | str,
    P: UnbatchedRows,
    *,
    features: Float[Tensor, "tokens features"] | None = None,
    norm: Norm | str | None = None,
    state: UnbatchedRows | None = None,
    pairs: Count = PAIRS,
    seed: Seed = 0,
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

    >>> certify("peri", P).agrees
    >>> certify(admissible_set(norm, "peri", kinetic=0.1), P, features=h).agrees

    Raises ConfigError for a P or features that do not fit, and for a norm or state together with a
    set.
    """
    if isinstance(admissible, str):
        if norm is None or isinstance(norm, str):
            norm = (
                look_up("norm", norm or "layernorm", NORMS)(P.shape[-1]).to(P).requires_grad_(False)
            )
        admissible = admissible_set(norm, admissible, state=state)
    elif norm is not None or state is not None:
        raise ConfigError(
            "norm and state describe a placement's set: leave them out, or give the placement's"
            " name instead of a set"
        )
    if exponent := _out_of_range(admissible, P):
        evidence = certify(
            admissible, _times(P, -exponent), features=features, pairs=pairs, seed=seed
        )
        scaled: Certificate = _scaled(evidence, exponent)
        return scaled
    chart = admissible.chart(P)
    value = float(admissible.support(P))
    ties = admissible.ties(P)
    if value < math.inf:
        attained = admissible.attained
    else:
        attained = None
    eps = torch.finfo(P.dtype).eps
    summary = Certificate(
        admissible.words, admissible.verdict, value, int(ties.sum()), eps, attained=attained
    )
    generator = torch.Generator().manual_seed(int(seed))
    last_map = None
    if features is not None and chart.degree is not None:
        check_costate(features, P.dtype, tokens=len(P), what="feature matrix")
        if features.any():
            last_map = Features(features)
        else:
            last_map = None
    if isinstance(admissible, LinearSpace) and value == math.inf:
        bound = last_map or Features(torch.eye(len(P), dtype=P.dtype, device=P.device))
        grown = growth(chart, bound, admissible.witness(P, math.sqrt(P.numel())), generator)
        return replace(summary, growth=grown, witness=witness(admissible, P))
    best = admissible.maximizer(P)
    ceiling = admissible.ceiling(P)
    # H of velocities that all are 0: their rounding counts against velocities of 1
    scale = admissible.scale(P) or float(P.abs().max())
    # if the problem of a token splits, some of its parts may tie and others not
    if chart.parts == 1:
        idle = bool(ties.all())
    else:
        idle = not P.any()
    still = idle and not admissible.gains_tie(P)
    velocities, likely = climb_velocities(
        chart, value, scale, ties, pairs, generator, steps=0 if still else STEPS
    )
    summary = replace(
        summary,
        scale=scale,
        kkt=float(admissible.kkt(P, best)),
        kkt_noise=ROUNDING * summary.eps * admissible.magnification(best),
        velocities=velocities,
        ceiling=None if ceiling <= value + math.sqrt(summary.eps) * scale else ceiling,
    )
    if last_map is None or idle:
        return summary
    moved = last_map.h.any(-1)
    if moved.all() or not undefined_at_zero(admissible):
        return _with_weights(summary, admissible, P, last_map, likely, pairs, generator)
    rest = certify(admissible, P[moved], features=last_map.h[moved], pairs=pairs, seed=seed)
    names = ("weights", "growth", "gained", "gain_slope")
    return replace(summary, **{name: getattr(rest, name) for name in names})


def _out_of_range(admissible: Supremum, P: Tensor) -> int:
    """The power of two that brings the terms of H near 1; 0 where their squares neither overflow
    nor lose digits. H of a set without running cost is proportional to P.
    """
    if not isinstance(admissible, VelocitySet) or isinstance(admissible, LinearSpace):
        return 0
    admissible.check(P)
    largest = P.abs().max()
    if largest:
        fastest = admissible.maximizer(P / largest).abs().max()
    else:
        fastest = largest
    if fastest:
        exponent = sum(math.frexp(float(factor))[1] for factor in (largest, fastest))
    else:
        exponent = 0
    if 4 * abs(exponent) > -math.frexp(torch.finfo(P.dtype).tiny)[1]:
        return exponent
    return 0


def _times(P: Tensor, exponent: int) -> Tensor:
    """P * 2^exponent. One factor may be no number of P's dtype."""
    return (P.double() * 2.0 ** (exponent // 2) * 2.0 ** (exponent - exponent // 2)).to(P.dtype)


def _scaled(evidence: Any, exponent: int) -> Any:
    """The evidence with each value of H * 2^exponent."""
    scaled = {}
    for field in fields(evidence):
        value = getattr(evidence, field.name)
        if is_dataclass(value):
            scaled[field.name] = _scaled(value, exponent)
        elif field.name in VALUES and value is not None:
            each = [
                number * 2.0 ** (exponent // 2) * 2.0 ** (exponent - exponent // 2)
                for number in np.atleast_1d(value)
            ]
            if isinstance(value, tuple):
                scaled[field.name] = tuple(map(float, each))
            else:
                scaled[field.name] = float(each[0])
    return replace(evidence, **scaled)


def _with_weights(
    summary: Certificate,
    admissible: Supremum,
    P: Tensor,
    last_map: Features,
    likely: Tensor,
    pairs: int,
    generator: torch.Generator,
) -> Certificate:
    """Adds to the certificate of a finite H what weights of the last map attain: freely, within a
    bound, and with gains.
    """
    chart = admissible.chart(P)
    value = summary.hamiltonian
    scale = summary.scale
    weights = climb_weights(chart, last_map, value, pairs, generator, likely, scale=scale)
    if isinstance(admissible, SphereImage):
        weights = replace(
            weights, proven=share_of(gap_of_rank(admissible.norm, P, last_map), scale)
        )
    limit = value + math.sqrt(summary.eps) * (scale or 1.0)
    best = admissible.maximizer(P)
    found = growth(chart, last_map, best, generator, likely=likely, base=admissible.base(P))
    grown = replace(found, limit=limit)
    summary = replace(summary, weights=weights, growth=grown)
    if isinstance(admissible, VelocitySet):
        slope = admissible.slope_in_gains(P)
    else:
        slope = None
    if slope is None or slope.lower == 0:
        return summary
    gained = gained_growth(chart, last_map, best, likely, generator)
    return replace(summary, gained=gained, gain_slope=slope)


def undefined_at_zero(admissible: Supremum) -> bool:
    """Whether a raw output of 0 has no velocity, as behind a norm with eps = 0. The ascents over
    weights leave such tokens out.
    """
    image = admissible.velocities if isinstance(admissible, KineticCost) else admissible
    return isinstance(image, NormImage) and image.norm.undefined_at_zero


def weakest(certificates: Iterable[Certificate]) -> dict[str, float | None]:
    """The weakest evidence of several certificates; None where it does not apply.

    - `gap`: (H - best)/`scale` of the ascent over velocities; `weights`: of that over the last
      map's weights
    - `kkt`: the residual of the closed form's maximiser
    - `uniqueness`: the distance between maximisers from different starts
    - `exponent`: the k of value ~ R^k that is farthest from the verdict's; `gained`: the same with
      trained gains
    """
    given = list(certificates)
    grown = [
        (c.growth.exponent, 0.0 if math.isfinite(c.hamiltonian) else 1.0)
        for c in given
        if c.growth is not None
    ]
    gained = [c.gained.exponent for c in given if c.gained is not None]
    return {
        "gap": max(
            (c.velocities.gap for c in given if c.velocities is not None), key=abs, default=None
        ),
        "weights": max(
            (c.weights.gap for c in given if c.weights is not None), key=abs, default=None
        ),
        "kkt": max((c.kkt for c in given if c.kkt is not None), default=None),
        "uniqueness": max(
            (c.velocities.uniqueness for c in given if c.velocities is not None), default=None
        ),
        "exponent": max(grown, key=lambda pair: abs(pair[0] - pair[1]))[0] if grown else None,
        "gained": max(gained, key=lambda k: abs(k - 1), default=None),
    }

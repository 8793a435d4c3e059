"""Certificates of a verdict: closed form and KKT residual, and ascents through the model's own
modules that know neither.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable

import torch
from jaxtyping import Float
from torch import Tensor

from ctrans.control.admissible import ROUNDING, GainSlope, Posedness, Supremum, VelocitySet, check_costate
from ctrans.control.ascent import STEPS
from ctrans.control.certificate_ascents import PAIRS, VelocityAscent, WeightAscent, climb_velocities, climb_weights, share_of
from ctrans.control.ellipsoid import SphereImage
from ctrans.control.growth import Growth, Witness, gained_growth, growth, witness
from ctrans.control.last_map import Features
from ctrans.control.norm_image import NormImage
from ctrans.control.rank_gap import gap_of_rank
from ctrans.control.regularization import KineticCost
from ctrans.control.set_of_placement import admissible_set
from ctrans.control.shapes import UnbatchedRows
from ctrans.control.tangent import LinearSpace
from ctrans.norm import NORMS, Norm
from solvers import ConfigError
from solvers.errors import look_up

LINEAR, SATURATED = 0.01, 0.05
"""How far a growth exponent may be from 1 where H is infinite or gains are trained too; and from 0
where it is finite.
"""


@dataclasses.dataclass(frozen=True)
class Certificate:
    """A verdict on one costate with its evidence, in plain numbers (`dataclasses.asdict`); H is inf
    where degenerate.

    `eps` is the machine epsilon of the computation, `scale` the size of what H is a sum of,
    `kkt_noise` what rounding alone may make of the KKT residual (where gains are tiny beside an
    offset or a step's state), and `ceiling` what H is proven not to exceed where its maximiser is
    the best that was found. `growth` is that with a bound on the weights, `gained` that with one
    bound on the weights and the norm's gains and offsets together; `gain_slope` is what the latter
    should grow by. Evidence that does not apply to the set is None. `attained` says of a finite H
    whether a velocity of the model has it, or none but comes near.
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
        """Whether H is finite for every costate under what the verdict assumes."""
        return self.verdict != "degenerate"

    @property
    def agrees(self) -> bool:
        """Whether every finding supports the verdict."""
        return all(self.findings.values())

    @property
    def short_of_rank(self) -> bool:
        """Whether weights cannot have every velocity: what ascents over them then find has no
        closed form to agree with.
        """
        return self.weights is not None and self.weights.rank < self.weights.tokens

    @property
    def findings(self) -> dict[str, bool]:
        """What the evidence should show, in words, and whether it does."""
        small = math.sqrt(self.eps)
        found: dict[str, bool] = {}
        if self.kkt is not None:
            words = f"the closed form's maximiser satisfies the KKT conditions (found: to {self.kkt:.2g})"
            found[words] = self.kkt <= max(self.eps ** (2 / 3), self.kkt_noise)
        if self.velocities is not None:
            if self.ceiling is None:
                words = f"the best velocity found has the closed form's value (found: a gap of {self.velocities.gap:.2g})"
                found[words] = abs(self.velocities.gap) <= small
            else:
                above = self.ceiling + small * abs(self.ceiling)
                found["no velocity found exceeds the proven bound"] = max(self.velocities.best, self.hamiltonian) <= above
            words = f"different starts find one maximiser, ties apart (found: {self.velocities.uniqueness:.2g} apart)"
            found[words] = self.velocities.uniqueness <= math.sqrt(small)
        if self.weights is not None:
            least, most = (-small, small) if self.weights.rank == self.weights.tokens else (self.weights.proven - small, math.inf)
            words = f"the best weights found have a value that their rank allows (found: a gap of {self.weights.gap:.2g})"
            found[words] = least <= self.weights.gap <= most
        if self.growth is not None:
            k, error = (1, LINEAR) if self.hamiltonian == math.inf else (0, SATURATED)
            words = f"the value grows like R^{k} with a bound R (found: R^{self.growth.exponent:.3g}, which may be {error:g} off)"
            if not self.short_of_rank:
                found[words] = abs(self.growth.exponent - k) <= error
            if self.weights is not None:
                found["no weights within a bound exceed H"] = max(self.growth.values) <= self.growth.limit
        if self.gained is not None and self.gain_slope is not None:
            grown = f"found: R^{self.gained.exponent:.3g}, which may be {LINEAR:g} off"
            if not self.short_of_rank:
                found[f"with gains trained, the value grows like R^1 ({grown})"] = abs(self.gained.exponent - 1) <= LINEAR
            pairs = zip(self.gained.radii, self.gained.values, strict=True)
            share = max((value - self.gained.base) / (radius * self.gain_slope.upper) for radius, value in pairs)
            words = f"no weights and gains within R exceed the proven slope times R (found: {share:.6g} of it)"
            found[words] = share <= 1 + small
        if self.witness is not None:
            found["the witness velocities are admissible"] = self.witness.residual <= small
        return found


@torch.no_grad()
def certify(
    admissible: Supremum | str,
    P: UnbatchedRows,
    *,
    features: Float[Tensor, "tokens features"] | None = None,
    norm: Norm | str | None = None,
    state: UnbatchedRows | None = None,
    pairs: int = PAIRS,
    seed: int = 0,
) -> Certificate:
    """The evidence for an admissible set's verdict at the costate P: H and its maximiser against
    ascents and growth.

    A finite H gets a KKT residual and an ascent over velocities; an infinite one its growth with a
    bound, and the witness of it.

    - `admissible`: a set of velocities, or the name of a placement, which stands for its set
    - `P`: the costate, one row a token
    - `features`: what the last linear map acts on. They add the ascent over its weights and make
      the bound one on them; and where H is finite for bounded gains, the growth with a bound on
      weights and gains together. They are not used where they are zero or every token ties, for
      sets of weights, which have their own, and for a kinetic cost on a norm's image: its best
      velocities need inputs so near 0 that an ascent over weights finds them badly
    - `norm`: beside a placement's name, the norm around its velocities: a module, or a name in
      `NORMS` of a fresh one (LayerNorm if None)
    - `state`: X, which a norm around the state needs too
    - `pairs`, `seed`: how many pairs of random starts the ascents have, and of which seed

    >>> certify("peri", P).agrees
    >>> certify(admissible_set(norm, "peri", kinetic=0.1), P, features=h).agrees

    Raises ConfigError for a P or features that do not fit, and for a norm or a state beside a set,
    which has its own.
    """
    if isinstance(admissible, str):
        admissible = _set_of(admissible, P, norm, state)
    elif norm is not None or state is not None:
        raise ConfigError("norm and state describe a placement's set, and a set is given: leave them out, or give a name")
    chart = admissible.chart(P)
    value, ties = float(admissible.support(P)), admissible.ties(P)
    attained = admissible.attained if value < math.inf else None
    eps = torch.finfo(P.dtype).eps
    summary = Certificate(admissible.words, admissible.verdict, value, int(ties.sum()), eps, attained=attained)
    generator = torch.Generator().manual_seed(seed)
    last_map = None
    if features is not None and chart.degree is not None:
        check_costate(features, P.dtype, tokens=len(P), what="feature matrix")
        last_map = Features(features) if bool(features.any()) else None
    if isinstance(admissible, LinearSpace) and value == math.inf:
        bound = last_map or Features(torch.eye(len(P), dtype=P.dtype, device=P.device))
        grown = growth(chart, bound, admissible.witness(P, math.sqrt(P.numel())), generator)
        return dataclasses.replace(summary, growth=grown, witness=witness(admissible, P))
    best, ceiling = admissible.maximizer(P), admissible.ceiling(P)
    scale = admissible.scale(P)
    # of a token that falls apart one part may tie, and the others are there to climb
    idle = bool(ties.all()) if chart.parts == 1 else not bool(P.any())
    still = idle and not bool(admissible.gains_tie(P))
    velocities, likely = climb_velocities(chart, value, scale, ties, pairs, generator, steps=0 if still else STEPS)
    summary = dataclasses.replace(
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
    if bool(moved.all()) or not undefined_at_zero(admissible):
        return _with_weights(summary, admissible, P, last_map, likely, pairs, generator)
    rest = certify(admissible, P[moved], features=last_map.h[moved], pairs=pairs, seed=seed)
    names = ("weights", "growth", "gained", "gain_slope")
    return dataclasses.replace(summary, **{name: getattr(rest, name) for name in names})


def _with_weights(
    summary: Certificate,
    admissible: Supremum,
    P: Tensor,
    last_map: Features,
    likely: Tensor,
    pairs: int,
    generator: torch.Generator,
) -> Certificate:
    """The certificate of a finite H with what weights of the last map attain, within a bound on
    them, and with the gains too.
    """
    chart, value, scale = admissible.chart(P), summary.hamiltonian, summary.scale
    weights = climb_weights(chart, last_map, value, pairs, generator, likely, scale=scale)
    if isinstance(admissible, SphereImage):
        weights = dataclasses.replace(weights, proven=share_of(gap_of_rank(admissible.norm, P, last_map), scale))
    limit = value + math.sqrt(summary.eps) * (scale or 1.0)
    best = admissible.maximizer(P)
    found = growth(chart, last_map, best, generator, likely=likely, base=admissible.base(P))
    grown = dataclasses.replace(found, limit=limit)
    summary = dataclasses.replace(summary, weights=weights, growth=grown)
    slope = admissible.slope_in_gains(P) if isinstance(admissible, VelocitySet) else None
    if slope is None or slope.lower == 0:
        return summary
    gained = gained_growth(chart, last_map, best, likely, generator)
    return dataclasses.replace(summary, gained=gained, gain_slope=slope)


def _set_of(placement: str, P: Tensor, norm: Norm | str | None, state: Tensor | None) -> Supremum:
    if norm is None or isinstance(norm, str):
        norm = look_up("norm", norm or "layernorm", NORMS)(P.shape[-1]).to(P).requires_grad_(False)
    return admissible_set(norm, placement, state=state)


def undefined_at_zero(admissible: Supremum) -> bool:
    """Whether a raw output of 0 has no velocity: behind a norm with eps = 0. Such tokens are no
    part of what weights can do.
    """
    image = admissible.velocities if isinstance(admissible, KineticCost) else admissible
    return isinstance(image, NormImage) and image.norm.undefined_at_zero


def weakest(certificates: Iterable[Certificate]) -> dict[str, float | None]:
    """The weakest evidence of some certificates; None where it does not apply.

    `gap` is (H - best)/`scale` of the ascent over velocities, `weights` of that over the last map's
    weights, `kkt` the residual of the closed form's maximiser, `uniqueness` the distance between
    maximisers from different starts, `exponent` the k of value ~ R^k that is farthest from what its
    verdict says, `gained` the same with gains trained too.
    """
    given = list(certificates)
    grown = [(c.growth.exponent, 0.0 if math.isfinite(c.hamiltonian) else 1.0) for c in given if c.growth is not None]
    gained = [c.gained.exponent for c in given if c.gained is not None]
    return {
        "gap": max((c.velocities.gap for c in given if c.velocities is not None), key=abs, default=None),
        "weights": max((c.weights.gap for c in given if c.weights is not None), key=abs, default=None),
        "kkt": max((c.kkt for c in given if c.kkt is not None), default=None),
        "uniqueness": max((c.velocities.uniqueness for c in given if c.velocities is not None), default=None),
        "exponent": max(grown, key=lambda pair: abs(pair[0] - pair[1]))[0] if grown else None,
        "gained": max(gained, key=lambda k: abs(k - 1), default=None),
    }

"""Weight decay lam/2 |W|^2 in the loss acts on both factors of a path: their best gain is then zero
or infinite.

A step of length dt pays lam/2 (|V|^2 + |O|^2) once for its weights, and lowers the loss by -dt <P,
f> to first order. For f = A X V'O' the supremum over both factors of

    -dt <P, f> - lam/2 (|V|^2 + |O|^2)

is 0 if lam >= dt lam* and infinite if lam < dt lam*, because gain and cost are both homogeneous of
degree 2. (As a running cost over the dt of depth-time the same penalty is lam/dt, and its threshold
lam*.) With one bound |V|^2 + |O|^2 <= R^2 the supremum is R^2/2 (dt lam* - lam), or 0.

- Attention at fixed rows A: the least cost of a product M = O V is lam times its nuclear norm, so
  lam* is the dual norm |(A X)'P|_2. Of several heads the largest counts; heads that share their
  values count as one
- Attention: queries and keys make other rows at a finite charge, which does not grow with V and O.
  So lam* is the supremum over all rows that they can make (`ctrans.control.reachable_rows`)
- Units a phi(<w, x>) with a positively homogeneous phi: lam* = max over |w| = 1 of |P'phi(X w)|.
  Any other phi of our table grows like c max(z, 0); its behaviour at small z adds a finite value
- Gated units a phi(<g, x>)<w, x>, and units with phi = max(z, 0)^2, grow like R^3 against a cost of
  R^2: no penalty makes H finite, unless P'h = 0 for all that they compute

This describes a penalty in the loss under gradient descent, not AdamW's decoupled decay. It holds
at the given P and X, and for fixed gains and offsets of the input norm:

- A bias of values or of units with a penalty is one more column of V or W_1: x becomes (x, 1). The
  number that is found is of x, and the proven one of (x, 1), so that both hold for biases that are
  fixed, and for biases with the penalty. A bias of the output adds |sum_j p_j|^2/(2 lam) to H
- A bias of values, units or outputs without decay makes H infinite for every lam unless sum_j p_j =
  0
- Trained input gains and offsets make H infinite too. Without decay gains scale lam*. With decay
  the path has three factors and grows like R^3, against a cost that grows like R^2
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ctrans.base.shapes import UnbatchedRows
from ctrans.control.admissible import Posedness, verdict_of
from ctrans.control.ascent import BoundedAscent, noise
from ctrans.control.decay_paths import Path
from ctrans.control.scales import at_unit_size, is_precise, product, total_length

DECADES = (0.0, 2.0, 3.0)
"""Bounds R, in decades from the size of factors with entries of 1/sqrt(width)."""
STEPS = 40
"""Steps of an ascent over both factors at one bound."""
TRIES = 8
"""Ascents below the threshold, until one ends above zero."""
BELOW = 0.9
ABOVE = 1.1
"""Penalties of the ascents over both factors, in dt lam*."""
GROWS = 80.0
"""The least growth of an infinite value in the last decade of R; in theory it is hundredfold."""
GROWS_OF_THREE = 800.0
"""The same where three factors grow; in theory it is thousandfold."""
TIMES = 10.0
"""The penalty of an ascent over three factors, as a multiple of what balances at the first R."""
FAR = 1e250
"""No ascents are made for a threshold above it or below its inverse: values would overflow."""
VANISHES = 0.01
"""The largest accepted value where it should vanish, as a share of dt lam* R^2/2. GELU's is finite,
because small inputs gain.
"""


@dataclass(frozen=True)
class Climb:
    """The best -<P, f> - decay/2 |factors|^2 found over both factors with |factors| <= R, for
    growing R.
    """

    decay: float
    radii: tuple[float, ...]
    values: tuple[float, ...]

    def times(self, factor: float) -> Climb:
        """The ascents at the costate times a positive number, with the penalty times it."""
        values = tuple(product(value, factor) for value in self.values)
        return Climb(product(self.decay, factor), self.radii, values)

    @property
    def is_finite(self) -> bool:
        return all(map(math.isfinite, (self.decay, *self.radii, *self.values)))


@dataclass(frozen=True)
class DecayThreshold:
    """dt lam* of one or several segments: H is infinite for a penalty below it, and zero (finite if
    not `homogeneous`) above it. It is inf where no penalty makes H finite.

    The penalty is lam of lam/2 |W|^2 in a training loss, over all matrices of a map. Its biases
    have it too, or stay fixed; both numbers hold for either.

    - `lower`: attained by factors that were found; `upper`: proven; inf if nothing is
    - `bias`: dt |sum_j p_j| if the path has a bias, else 0. A bias without decay makes H infinite
      for every lam
    - `gains`: whether an input norm's gains scale the path. If trained, they make H infinite for
      every lam
    - `uncancelled`: an upper bound that adds up the sizes of all terms; errors of the terms are
      shares of it
    - `sure`: the error of the terms, as a share, from which a `lower` of inf may be made of it
    - `below`, `above`: ascents at .9 and 1.1 of `lower`; None if not made, or if they overflow. If
      `lower` is inf, `below` is one at a penalty that balances at a small R, and `above` None
    """

    lower: float
    upper: float
    bias: float
    gains: bool
    homogeneous: bool = True
    below: Climb | None = None
    above: Climb | None = None
    uncancelled: float = 0.0
    sure: float = math.inf

    @property
    def contradicts_itself(self) -> bool:
        """Whether factors were found that need more than what is proven to suffice: the map is then
        not what the proof takes it for.
        """
        return self.lower > self.upper

    def wider(self, share: float, of_terms: float) -> DecayThreshold:
        """The threshold where numbers are known to a share, and the terms of its sums to a share of
        their sizes.
        """
        of_sums = product(of_terms, self.uncancelled)
        lower = self.lower
        if not math.isinf(lower):
            lower = max(0.0, lower * (1 - share) - of_sums)
        elif of_terms >= self.sure:
            lower = 0.0
        return replace(self, lower=lower, upper=self.upper * (1 + share) + of_sums)

    def verdict(self, decay: float) -> Posedness:
        """The verdict under a penalty `decay`, with the input norm's gains and offsets fixed, and
        biases fixed or with the penalty too.
        """
        finite: bool | None = None
        if decay < self.lower:
            finite = False
        elif decay > self.upper or (decay == self.upper and self.homogeneous):
            finite = True
        return verdict_of(finite=finite, rest_fixed=True)

    def times(self, factor: float) -> DecayThreshold:
        """The threshold at the costate times a positive number. Without ascents whose values then
        overflow.
        """
        climbs = [climb.times(factor) for climb in (self.below, self.above) if climb is not None]
        if not all(climb.is_finite for climb in climbs):
            climbs = []
        below, above, *_ = [*climbs, None, None]
        return replace(
            self,
            lower=product(self.lower, factor),
            upper=product(self.upper, factor),
            bias=product(self.bias, factor),
            uncancelled=product(self.uncancelled, factor),
            below=below,
            above=above,
        )

    @property
    def findings(self) -> dict[str, bool]:
        """The expected findings of the ascents in words, each with whether it holds."""
        if self.lower == 0 or self.below is None:
            return {}
        before, last = self.below.values[-2:]
        if self.above is None:
            return {
                f"with a penalty of {self.below.decay:.3g} the value grows like R^3": (
                    before > 0 and last / before >= GROWS_OF_THREE
                )
            }
        radius = self.above.radii[-1]
        share = 2 * self.above.values[-1] / self.lower / radius / radius
        return {
            f"with a penalty of {BELOW} dt lam* the value grows like R^2": (
                before > 0 and last / before >= GROWS
            ),
            f"with a penalty of {ABOVE} dt lam* it vanishes at these rows": share <= VANISHES,
        }


@torch.no_grad()
def decay_threshold(
    path: Path, P: UnbatchedRows, *, bias: bool = False, gains: bool = False
) -> DecayThreshold:
    """dt lam* of a path at P, dt times the costate of its output. lam* is linear in P.

    What is proven is raised by the root of the dtype's rounding, as states and costates are rounded
    too. Nothing is proven of a P that has lost digits because it is too small for its dtype.
    """
    lower, upper = path.threshold(P)
    uncancelled = path.uncancelled(P)
    if upper > 0:
        upper = math.nextafter(upper * (1 + math.sqrt(torch.finfo(P.dtype).eps)), math.inf)
    if not is_precise(P):
        upper = math.inf
    of_bias = 0.0
    if bias:
        P, size = at_unit_size(P)
        of_bias = product(total_length(P.sum(0)), size)
    return DecayThreshold(
        lower,
        upper,
        of_bias,
        gains,
        path.homogeneous and not bias,
        uncancelled=uncancelled,
        sure=path.sure(P),
    )


def largest(thresholds: Sequence[DecayThreshold]) -> DecayThreshold:
    """The threshold for all segments: the largest found and the largest proven, possibly of
    different segments.

    The ascents are those of the segment with the largest `lower`.
    """
    top = max(thresholds, key=lambda threshold: threshold.lower)
    return replace(
        top,
        upper=max(threshold.upper for threshold in thresholds),
        bias=max(threshold.bias for threshold in thresholds),
        gains=any(threshold.gains for threshold in thresholds),
        homogeneous=all(threshold.homogeneous for threshold in thresholds),
    )


def with_evidence(threshold: DecayThreshold, path: Path, P: UnbatchedRows) -> DecayThreshold:
    """The threshold with ascents over the factors below and above it, at the same P. They run in
    float64 and at unit size. Without them if their numbers overflow.
    """
    path, x_size = path.in_double()
    P, p_size = at_unit_size(P.double())
    size = product(x_size, p_size)
    if not 1 / FAR < size < FAR:
        return threshold
    if math.isinf(threshold.lower):
        free = climb_factors(path, P, 0.0)
        decay = TIMES * 2 * free.values[0] / free.radii[0] ** 2
        # the same factors of length R, with the penalty that they cost
        values = tuple(
            value - decay / 2 * radius**2
            for radius, value in zip(free.radii, free.values, strict=True)
        )
        climb = Climb(decay, free.radii, values).times(size)
        return replace(threshold, below=climb if climb.is_finite else None)
    lower = threshold.lower / size
    below = climb_factors(path, P, BELOW * lower)
    above = climb_factors(path, P, ABOVE * lower)
    for seed in range(1, TRIES):
        if below.values[-1] > 0:
            break
        # the gradient at zero is zero: an ascent that ended there is repeated from another start
        below = climb_factors(path, P, BELOW * lower, seed)
    below = below.times(size)
    above = above.times(size)
    if not (below.is_finite and above.is_finite):
        return threshold
    return replace(threshold, below=below, above=above)


@torch.no_grad()
def climb_factors(path: Path, P: UnbatchedRows, decay: float, seed: int = 0) -> Climb:
    """max of -<P, f> - decay/2 |factors|^2 over |factors| <= R by ascent. Each R starts from the
    end of the one before.
    """
    shapes = path.shapes()
    counts = [math.prod(shape) for shape in shapes]
    generator = torch.Generator().manual_seed(seed)
    reached = noise(P, generator, 1, sum(counts), 1) / math.sqrt(P.shape[-1])
    unit = float(reached.norm()) / min(path.input_size, 1.0)

    def payoff(radius: float, z: Tensor) -> Tensor:
        flat = z.flatten()
        first = counts[0]
        inner = flat[:first].reshape(shapes[0])
        outer = flat[first:].reshape(shapes[1])
        gain = -(P * path.velocity(inner, outer)).sum()
        cost = decay / 2 * z.square().sum()
        return (gain - cost).reshape(1)

    ascent = BoundedAscent(payoff, STEPS)
    values = []
    radii = [unit * 10**decade for decade in DECADES]
    for radius in radii:
        stretched = ascent.stretched(radius, reached)
        best, end = ascent.climb(radius, stretched)
        # the gradient at zero is zero: continue from a larger point instead
        if float(best) > 0:
            reached = end
        else:
            reached = stretched
        values.append(max(float(best), 0.0))
    return Climb(decay, tuple(radii), tuple(values))

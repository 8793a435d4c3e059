"""What a supremum over velocities answers: its value, what attains it, what that is worth, and how
a certificate climbs to it.
"""

from __future__ import annotations

import abc
import dataclasses
import math
from typing import Literal, get_args

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from ctrans.control.ascent import Chart
from ctrans.control.shapes import PerBatch, TokenMask, TokenRows, UnbatchedRows
from solvers import ConfigError

Posedness = Literal["well-posed", "well-posed for bounded gains", "well-posed, the rest fixed", "open", "degenerate"]
"""What is known of H(P), each word saying what it assumes; from the strongest to the weakest.

- `well-posed`: finite for every costate, whatever the weights, gains and offsets are trained to
- `well-posed for bounded gains`: finite for the output norm's (of a discrete step: the state
  norm's) gains and offsets, and the residual's gains, as they are; it grows in proportion to them,
  so that where they are trained without decay or bound the supremum over them is infinite
- `well-posed, the rest fixed`: finite where only the maps that pay are free, and what feeds them is
  taken as it is
- `open`: no ascent found it infinite, and no bound proves it finite
- `degenerate`: infinite, for almost all costates or (under weight decay) at this one
"""

VERDICTS: tuple[Posedness, ...] = get_args(Posedness)


def verdict_of(finite: bool | None, *, rest_fixed: bool = False, bounded_gains: bool = False) -> Posedness:
    """The verdict that evidence supports: the only place that decides.

    - `finite`: whether H is finite for every costate; None where nothing is proven
    - `rest_fixed`: whether that assumes that the weights which feed the regularized maps stay fixed
    - `bounded_gains`: whether it assumes that gains and offsets, or a residual's gains, stay
      bounded
    """
    if not finite:
        return "open" if finite is None else "degenerate"
    if rest_fixed:
        return "well-posed, the rest fixed"
    return "well-posed for bounded gains" if bounded_gains else "well-posed"


ROUNDING = 32
"""A quantity counts as zero below ROUNDING machine epsilons times the size of what it was computed
from.
"""


@dataclasses.dataclass(frozen=True)
class GainSlope:
    """max H over |gamma|^2 + |beta|^2 <= R^2, per R, between `lower`, which gains attain, and the
    proven bound `upper`.

    `gain` is kappa, from gains alone, and `offset` |sum_j p_j|, 0 where the norm has no offset:
    lower^2 = gain^2 + offset^2.
    """

    gain: float
    offset: float
    lower: float
    upper: float


@dataclasses.dataclass(frozen=True, eq=False)
class Supremum(abc.ABC):
    """H(P) = sup over what is free of -<P, f> - cost, f the velocity (Kan, eq. 55).

    P is the costate and f a velocity, both of shape (*batch, tokens, width); row j belongs to token
    j. Everything is batched, follows P's dtype and device, and is differentiable in P: the gradient
    of H is -maximizer(P) wherever that is unique. Raises ConfigError for a costate that is not
    finite or does not fit the set.
    """

    @property
    @abc.abstractmethod
    def words(self) -> str:
        """The set, and the running cost where there is one, as a formula for a reader."""

    @property
    @abc.abstractmethod
    def verdict(self) -> Posedness:
        """Whether H is finite, and what is assumed for it. A norm with eps > 0 comes as near to its
        H as one likes, and attains it not.
        """

    @property
    def attained(self) -> bool | None:
        """Whether a velocity that the model can have attains a finite H, or only comes as near as
        one likes; None where it is not said.
        """
        return None

    @abc.abstractmethod
    def check(self, P: Tensor) -> None:
        """ConfigError where the costate P is not finite or does not fit the set."""

    @abc.abstractmethod
    def support(self, P: TokenRows) -> PerBatch:
        """H(P)."""

    @abc.abstractmethod
    def maximizer(self, P: TokenRows) -> TokenRows:
        """A velocity of the closed set that attains H(P); where several do, the one that the set's
        rule picks.
        """

    @abc.abstractmethod
    def ties(self, P: TokenRows) -> TokenMask:
        """For which tokens more than one velocity attains H(P)."""

    def gains_tie(self, P: TokenRows) -> Bool[Tensor, "*batch"]:
        """Whether gains that are free too have more than one optimum: every token's velocity then
        ties, though H is climbed to.
        """
        return torch.zeros(P.shape[:-2], dtype=torch.bool, device=P.device)

    @abc.abstractmethod
    def kkt(self, P: TokenRows, f: TokenRows) -> PerBatch:
        """The larger of feasibility and stationarity at f, with the best multipliers;
        dimensionless, 0 at a maximiser.
        """

    def magnification(self, f: UnbatchedRows) -> float:
        """By how much `kkt` magnifies the rounding of velocities f to read its points off them."""
        return 1.0

    @abc.abstractmethod
    def chart(self, P: UnbatchedRows) -> Chart:
        """The same problem in free coordinates, through the model's own modules: what a certificate
        climbs on.
        """

    def base(self, P: UnbatchedRows) -> float:
        """What H(P) is measured from as a bound on the weights grows: -<P, f> at the set's centre,
        which no choice changes.
        """
        return 0.0

    def scale(self, P: UnbatchedRows) -> float:
        """What gaps are measured by: |H - base| + |base|, as H itself may cancel to nothing,
        against an offset or a step's state.

        It is at least the square root of the machine epsilon times sum_j |p_j||f*_j|, f* the
        maximiser: all are rounding below.
        """
        rounding = float((length(P) * length(self.maximizer(P))).sum()) * math.sqrt(torch.finfo(P.dtype).eps)
        base = self.base(P)
        return max(abs(float(self.support(P)) - base) + abs(base), rounding)

    def ceiling(self, P: UnbatchedRows) -> float:
        """What H(P) is proven not to exceed: H(P) itself, but where that is the best that was
        found.
        """
        return float(self.support(P))


@dataclasses.dataclass(frozen=True, eq=False)
class AdmissibleSet(Supremum):
    """A supremum over a set of velocities."""

    @abc.abstractmethod
    def residual(self, f: TokenRows) -> PerBatch:
        """How far f is from the set, as a dimensionless violation of its equations; 0 on it."""


@dataclasses.dataclass(frozen=True, eq=False)
class VelocitySet(AdmissibleSet):
    """An admissible set without running cost: a set of velocities, with its metric projection."""

    @abc.abstractmethod
    def nearest(self, y: TokenRows) -> TokenRows:
        """argmin over the set of |f - y|."""

    def equidistant(self, y: TokenRows) -> TokenMask:
        """For which tokens more than one point of the set is nearest to y; none where the set is
        convex.
        """
        return nowhere(y)

    @abc.abstractmethod
    def kkt(self, P: TokenRows, f: TokenRows, kinetic: float = 0.0) -> PerBatch:
        """The KKT residual of f for -<P, f> - kinetic/2 |f|^2 over the set."""

    def slope_in_gains(self, P: UnbatchedRows) -> GainSlope | None:
        """How fast H grows with the gains and offsets of the norm that makes the set; None where
        none does.
        """
        return None


def check_costate(
    P: Tensor,
    dtype: torch.dtype | None = None,
    *,
    tokens: int | None = None,
    width: int | None = None,
    what: str = "costate",
) -> None:
    """ConfigError unless P is finite, floating, of shape (..., tokens, width), and of the tokens,
    width and dtype given.
    """
    if P.ndim < 2 or not P.is_floating_point():
        raise ConfigError(
            f"the {what} has shape {tuple(P.shape)} and dtype {P.dtype}: give floats of shape (*batch, tokens, width)"
        )
    for name, have, want in (("tokens", P.shape[-2], tokens), ("width", P.shape[-1], width), ("dtype", P.dtype, dtype)):
        if want is not None and have != want:
            raise ConfigError(
                f"the {what} has {name} {have}, the admissible set {want}: take both from one model and text, in one dtype"
            )
    if not bool(torch.isfinite(P).all()):
        raise ConfigError(
            f"the {what} has entries that are not finite, and H is defined for finite ones: look for the layer that overflowed"
        )


def check_positive(name: str, value: float) -> None:
    """ConfigError unless value is a positive finite number."""
    if not (math.isfinite(value) and value > 0):
        raise ConfigError(f"{name} = {value!r}: give a positive finite number")


def nowhere(y: TokenRows) -> TokenMask:
    """False for each token."""
    return torch.zeros(y.shape[:-1], dtype=torch.bool, device=y.device)


def length(x: Float[Tensor, "*batch width"]) -> PerBatch:
    """|x_j|_2 of each row."""
    lengths: Tensor = torch.linalg.vector_norm(x, dim=-1)
    return lengths


def ratio(part: Float[Tensor, "*shape"], whole: Float[Tensor, "*#shape"]) -> Float[Tensor, "*shape"]:
    """part/whole, and 0 for 0/0."""
    return part / torch.where(whole == 0, 1.0, whole)

"""The interface of a Hamiltonian: the supremum over a set of velocities, its maximiser and its KKT
residual.
"""

from __future__ import annotations

import dataclasses
import math
from abc import ABC, abstractmethod
from typing import Literal, get_args

import torch
from jaxtyping import Float
from torch import Tensor

from ctrans.base.shapes import (
    AnyShape,
    BatchMask,
    PerBatch,
    TokenMask,
    TokenRows,
    UnbatchedRows,
    Vectors,
)
from ctrans.control.ascent import Chart
from ctrans.dynamics.norm.norm import row_length
from solvers import ConfigError, is_dense, shown

Posedness = Literal[
    "well-posed", "well-posed for bounded gains", "well-posed, the rest fixed", "open", "degenerate"
]
"""What is known of H(P), from the strongest verdict to the weakest. Each verdict names its
assumption.

- `well-posed`: finite for every costate, whatever the weights, gains and offsets are trained to
- `well-posed for bounded gains`: finite for the present gains and offsets of the output norm (for a
  discrete step: of the state norm) and the present gains of the residual. H is proportional to
  them. If they are trained without decay or bound, its supremum over them is infinite
- `well-posed, the rest fixed`: finite if only the regularised maps are trained and the weights that
  feed them stay fixed
- `open`: no ascent found H infinite, and no bound proves it finite
- `degenerate`: infinite, for almost all costates or (under weight decay) at this one
"""

VERDICTS: tuple[Posedness, ...] = get_args(Posedness)


def verdict_of(
    *, finite: bool | None, rest_fixed: bool = False, bounded_gains: bool = False
) -> Posedness:
    """The verdict that the evidence supports. No other code names one.

    - `finite`: whether H is finite for every costate; None if nothing is proven. The set of
      velocities decides it: `tangent`, `norm_image`, `last_map`, `residual_pullback`,
      `regularization` and `decay_threshold` have the sets, and `segment_check` asks them
    - `rest_fixed`: whether that assumes that the weights which feed the regularised maps stay fixed
    - `bounded_gains`: whether it assumes that gains and offsets, or a residual's gains, stay
      bounded
    """
    if finite is None:
        return "open"
    if not finite:
        return "degenerate"
    if rest_fixed:
        return "well-posed, the rest fixed"
    if bounded_gains:
        return "well-posed for bounded gains"
    return "well-posed"


ROUNDING = 32
"""A quantity below ROUNDING machine epsilons, relative to the terms that it was computed from,
counts as zero.
"""


@dataclasses.dataclass(frozen=True)
class GainSlope:
    """Bounds on (max H over |gamma|^2 + |beta|^2 <= R^2)/R: gains attain `lower`, and `upper` is
    proven.

    `gain` is kappa, the part of the gains alone. `offset` is |sum_j p_j|, or 0 if the norm has no
    offset: lower^2 = gain^2 + offset^2.
    """

    gain: float
    offset: float
    lower: float
    upper: float


class Supremum(ABC):
    """H(P) = sup of -<P, f> - cost over velocities f (Kan, eq. 55).

    The costate P and the velocity f have shape (*batch, tokens, width); row j belongs to token j.
    All methods are batched, keep P's dtype and device, and are differentiable in P: the gradient of
    H is -maximizer(P) where the maximiser is unique. They raise ConfigError for a costate that is
    not finite or does not fit the set.
    """

    @property
    @abstractmethod
    def words(self) -> str:
        """A formula of the set, and of the running cost if there is one."""

    @property
    @abstractmethod
    def verdict(self) -> Posedness:
        """Whether H is finite, and under which assumption. With eps > 0 a norm approaches its H but
        does not attain it.
        """

    @property
    def attained(self) -> bool | None:
        """Whether a velocity of the model attains a finite H (False: velocities only approach it);
        None if unknown.
        """
        return None

    @abstractmethod
    def check(self, P: Tensor) -> None:
        """Raises ConfigError if the costate P is not finite or does not fit the set."""

    @abstractmethod
    def support(self, P: TokenRows) -> PerBatch:
        """H(P)."""

    @abstractmethod
    def maximizer(self, P: TokenRows) -> TokenRows:
        """A velocity of the closed set that attains H(P). If several do, the set's rule selects
        one.
        """

    @abstractmethod
    def ties(self, P: TokenRows) -> TokenMask:
        """The tokens for which more than one velocity attains H(P)."""

    def gains_tie(self, P: TokenRows) -> BatchMask:
        """Whether trained gains have more than one optimum. Then the velocity of every token ties,
        but ascents still apply.
        """
        return no_ties(P[..., 0])

    @abstractmethod
    def kkt(self, P: TokenRows, f: TokenRows) -> PerBatch:
        """The larger of the feasibility and the stationarity residual at f, with the best
        multipliers; dimensionless, 0 at a maximiser.
        """

    def magnification(self, f: UnbatchedRows) -> float:
        """The factor by which `kkt` magnifies the rounding of velocities f."""
        return 1.0

    @abstractmethod
    def chart(self, P: UnbatchedRows) -> Chart:
        """The same problem in free coordinates, evaluated through the model's own modules.
        Certificates climb on it.
        """

    def base(self, P: UnbatchedRows) -> float:
        """-<P, f> at the set's centre: the growth of H with a bound on the weights is measured from
        here.
        """
        return 0.0

    def scale(self, P: UnbatchedRows) -> float:
        """The unit of gaps: |H - base| + |base|, because H itself may cancel against an offset or a
        step's state.

        It is at least sqrt(eps) sum_j |p_j||f*_j|, with eps the machine epsilon and f* the
        maximiser: smaller differences are rounding.
        """
        sum_of_lengths = float((length(P) * length(self.maximizer(P))).sum())
        rounding = sum_of_lengths * math.sqrt(torch.finfo(P.dtype).eps)
        base = self.base(P)
        return max(abs(float(self.support(P)) - base) + abs(base), rounding)

    def ceiling(self, P: UnbatchedRows) -> float:
        """A proven upper bound of H(P). It equals H(P) unless H(P) is only the best value found."""
        return float(self.support(P))


class AdmissibleSet(Supremum):
    """A supremum over a set of velocities."""

    @abstractmethod
    def residual(self, f: TokenRows) -> PerBatch:
        """The distance of f from the set, as a dimensionless violation of its equations; 0 on the
        set.
        """


class VelocitySet(AdmissibleSet):
    """An admissible set without running cost, with its metric projection."""

    @abstractmethod
    def nearest(self, y: TokenRows) -> TokenRows:
        """argmin over the set of |f - y|."""

    def equidistant(self, y: TokenRows) -> TokenMask:
        """The tokens for which more than one point of the set is nearest to y; none if the set is
        convex.
        """
        return no_ties(y)

    @abstractmethod
    def kkt(self, P: TokenRows, f: TokenRows, kinetic: float = 0.0) -> PerBatch:
        """The KKT residual of f for -<P, f> - kinetic/2 |f|^2 over the set."""

    def slope_in_gains(self, P: UnbatchedRows) -> GainSlope | None:
        """How fast H grows with the gains and offsets of the norm whose image the set is; None if
        there is no such norm.
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
    """Raises ConfigError unless P is finite, floating, of shape (..., tokens, width) and has the
    given tokens, width and dtype.
    """
    check_rows(P, dtype, tokens=tokens, width=width, what=what)
    if not torch.isfinite(P).all():
        raise ConfigError(
            f"the {what} has entries that are not finite, and H is defined for finite ones: look"
            " for the layer that overflowed"
        )


def check_rows(
    P: Tensor,
    dtype: torch.dtype | None = None,
    *,
    tokens: int | None = None,
    width: int | None = None,
    what: str = "costate",
) -> None:
    """As `check_costate`, but entries need not be finite: it reads no number."""
    if not is_dense(P) or P.is_meta:
        raise ConfigError(
            f"the {what} is {shown(P)}: give a dense tensor with numbers of shape (*batch, tokens,"
            " width)"
        )
    if P.ndim < 2 or not P.is_floating_point():
        raise ConfigError(
            f"the {what} has shape {tuple(P.shape)} and dtype {P.dtype}: give floats of shape"
            " (*batch, tokens, width)"
        )
    for name, actual, expected in (
        ("tokens", P.shape[-2], tokens),
        ("width", P.shape[-1], width),
        ("dtype", P.dtype, dtype),
    ):
        if expected is not None and actual != expected:
            raise ConfigError(
                f"the {what} has {name} {actual}, the admissible set {expected}: take both from one"
                " model and text, in one dtype"
            )


def check_positive(name: str, value: float) -> None:
    """Raises ConfigError unless value is a positive finite number."""
    if not (math.isfinite(value) and value > 0):
        raise ConfigError(f"{name} = {shown(value)}: give a positive finite number")


def no_ties(y: Vectors) -> BatchMask:
    """False for each row."""
    return torch.zeros(y.shape[:-1], dtype=torch.bool, device=y.device)


def rounding_of(x: Tensor) -> float:
    """ROUNDING machine epsilons of the dtype of x."""
    return ROUNDING * torch.finfo(x.dtype).eps


def length(x: Vectors) -> PerBatch:
    """|x_j|_2 of each row."""
    return row_length(x)


def ratio(numerator: AnyShape, denominator: Float[Tensor, "*#shape"]) -> AnyShape:
    """numerator/denominator, with 0/0 = 0."""
    return numerator / torch.where(denominator == 0, 1.0, denominator)

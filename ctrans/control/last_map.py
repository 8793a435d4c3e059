"""The last linear map f = h W' at fixed features h: its weights in a Frobenius ball, or with a
decay of their own, and what a low rank of h loses.
"""

from __future__ import annotations

import abc
import math
from dataclasses import dataclass, replace
from functools import cached_property

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor
from torch.nn.utils import parametrize

from ctrans.base.shapes import PerBatch, TokenMask, TokenRows, UnbatchedRows
from ctrans.control.admissible import (
    AdmissibleSet,
    Posedness,
    VelocitySet,
    check_costate,
    check_positive,
    length,
    no_ties,
    ratio,
    rounding_of,
    verdict_of,
)
from ctrans.control.ascent import Chart, frobenius
from ctrans.control.regularization import Regularization
from ctrans.control.trust_region import in_ball
from ctrans.dynamics.fields import HasOutputProjection
from ctrans.dynamics.fields.protocols import why_not
from ctrans.dynamics.fields.scaled_linear import scaled_parts
from ctrans.dynamics.norm import SphereNorm
from ctrans.dynamics.sublayer import Sublayer
from solvers import ConfigError

FeatureRows = Float[Tensor, "*batch tokens features"]
"""h, the input of the last linear map."""

LastWeights = Float[Tensor, "*batch width features"]
"""W of the last linear map, as in `torch.nn.Linear`."""

WeightRows = Float[Tensor, "*batch rank width"]
"""z of weights, see `Features`."""


@dataclass(frozen=True, eq=False)
class Features:
    """h, the input of the last linear map, of shape (*batch, tokens, features), and its
    decomposition h = U S V'.

    Weights W of shape (*batch, width, features), as in `torch.nn.Linear`, have coordinates z = V'W'
    of shape (*batch, rank, width). Their velocity is h W' = U S z, and |z| = |W| for the shortest W
    with that velocity.
    """

    h: FeatureRows

    def __post_init__(self) -> None:
        check_costate(self.h, what="feature matrix")

    @cached_property
    def svd(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """U, S, S^+ and V', with S and S^+ as columns, cut to the largest rank in the batch.
        Entries that are 0 to rounding are 0 in both.
        """
        u, s, vt = torch.linalg.svd(self.h, full_matrices=False)
        largest = s[..., :1]
        nonzero = s > max(self.h.shape[-2:]) * torch.finfo(s.dtype).eps * largest
        inverse = torch.where(nonzero, 1 / torch.where(nonzero, s, 1.0), 0.0).unsqueeze(-1)
        s = torch.where(nonzero, s, 0.0).unsqueeze(-1)
        rank = max(1, int(nonzero.sum(-1).amax()))
        return u[..., :rank], s[..., :rank, :], inverse[..., :rank, :], vt[..., :rank, :]

    @property
    def rank(self) -> int:
        """The largest rank in the batch."""
        return int((self.svd[1] > 0).sum((-2, -1)).amax())

    def coordinates(self, f: TokenRows) -> WeightRows:
        """z = S^+ U'f: the shortest weights whose velocity is closest to f."""
        u, _, inverse, _ = self.svd
        return inverse * (u.mT @ f)

    def velocity(self, z: WeightRows) -> TokenRows:
        """U S z = h W'."""
        u, s, _, _ = self.svd
        return u @ (s * z)

    def pull(self, P: TokenRows) -> WeightRows:
        """S U'P: the gradient of <P, h W'> in the coordinates z; it has the length of h'P."""
        u, s, _, _ = self.svd
        return s * (u.mT @ P)

    def weights(self, z: WeightRows) -> LastWeights:
        """W = z'V'."""
        return z.mT @ self.svd[3]

    def off_range(self, f: TokenRows) -> PerBatch:
        """|f - U S z|/|f|: the share of f that no weights produce."""
        remainder = f - self.velocity(self.coordinates(f))
        return ratio(frobenius(remainder), frobenius(f))[..., 0, 0]

    def chart(self, P: UnbatchedRows) -> Chart:
        """Velocities in the coordinates z of their weights."""
        return Chart(P, (self.svd[1].shape[-2], P.shape[-1]), self.velocity, axes=(-2, -1))


@dataclass(frozen=True, eq=False)
class LastMap(AdmissibleSet):
    """Velocities f = h W' of the last linear map at fixed features h. Each batch element has its
    own weights.

    H is finite only as long as h is fixed: if the features are trained without bound, the best
    velocity grows again.

    To share weights over a batch, flatten it into the tokens. For a map with a bias, append a
    column of ones to h.
    """

    features: FeatureRows

    @cached_property
    def map(self) -> Features:
        """The features with their decomposition."""
        return Features(self.features)

    @property
    def verdict(self) -> Posedness:
        return verdict_of(finite=True, rest_fixed=True)

    @property
    def attained(self) -> bool:
        return True

    @abc.abstractmethod
    def weights(self, P: TokenRows) -> LastWeights:
        """The shortest weights that attain H(P)."""

    def check(self, P: Tensor) -> None:
        check_costate(P, self.features.dtype, tokens=self.features.shape[-2])

    def maximizer(self, P: TokenRows) -> TokenRows:
        return self.features @ self.weights(P).mT


@dataclass(frozen=True, eq=False)
class FrobeniusBall(LastMap, VelocitySet):
    """{h W' : |W|_F <= R}: H(P) = R |h'P|_F, attained by W* = -R P'h/|h'P|_F.

    If h'P = 0 every W ties, and the maximiser is W = 0.
    """

    radius: float

    def __post_init__(self) -> None:
        check_positive("radius", self.radius)

    @property
    def words(self) -> str:
        return f"f = h W', |W|_F <= {self.radius:g}"

    def support(self, P: TokenRows) -> PerBatch:
        self.check(P)
        return self.radius * frobenius(self.features.mT @ P)[..., 0, 0]

    def weights(self, P: TokenRows) -> LastWeights:
        self.check(P)
        slope = P.mT @ self.features
        tie = self.ties(P)[..., :1].unsqueeze(-1)
        size = torch.where(tie, 1.0, frobenius(slope))
        return torch.where(tie, 0.0, -self.radius * slope / size)

    def ties(self, P: TokenRows) -> TokenMask:
        self.check(P)
        terms = frobenius(self.features) * frobenius(P)
        tie = frobenius(self.features.mT @ P) <= rounding_of(P) * terms
        return tie[..., 0].expand(P.shape[:-1])

    def residual(self, f: TokenRows) -> PerBatch:
        size = frobenius(self.map.coordinates(f))[..., 0, 0]
        excess = (size / self.radius - 1).clamp_min(0)
        return torch.maximum(excess, self.map.off_range(f))

    def nearest(self, y: TokenRows) -> TokenRows:
        pull = self.map.pull(y)
        curvature = self.map.svd[1].square().expand(pull.shape)
        z = in_ball(curvature.flatten(-2), -pull.flatten(-2), self.radius)
        return self.map.velocity(z.reshape(pull.shape))

    def kkt(self, P: TokenRows, f: TokenRows, kinetic: float = 0.0) -> PerBatch:
        """Stationarity in W: (P + kinetic f)'h + eta W = 0 with eta >= 0 and eta (R - |W|) = 0;
        relative to |h'P|.
        """
        z = self.map.coordinates(f)
        slope = self.map.pull(P + kinetic * f)
        size = frobenius(z)
        eta = ratio(-(slope * z).sum((-2, -1), keepdim=True), size.square()).clamp_min(0)
        error = torch.maximum(frobenius(slope + eta * z), eta * (self.radius - size).abs())
        relative_error = ratio(error, frobenius(self.map.pull(P)))[..., 0, 0]
        return torch.maximum(relative_error, self.residual(f))

    def chart(self, P: UnbatchedRows) -> Chart:
        self.check(P)
        return replace(self.map.chart(P), project=self._into_ball, spread=self.radius)

    def _into_ball(self, z: Tensor) -> Tensor:
        return z / (frobenius(z) / self.radius).clamp_min(1)


@dataclass(frozen=True, eq=False)
class LastMapDecay(LastMap):
    """{h W' : any W} with running cost lam/2 |W|_F^2: H(P) = |h'P|_F^2/(2 lam), attained by W* =
    -P'h/lam alone.

    The features h are fixed. If the map that makes them decays too, as in training, see
    `decay_threshold`.
    """

    last_map_decay: float

    def __post_init__(self) -> None:
        check_positive("last_map_decay", self.last_map_decay)

    @property
    def words(self) -> str:
        return f"f = h W', any W; running cost {self.last_map_decay:g}/2 |W|_F^2"

    def support(self, P: TokenRows) -> PerBatch:
        self.check(P)
        return (self.features.mT @ P).square().sum((-2, -1)) / (2 * self.last_map_decay)

    def weights(self, P: TokenRows) -> LastWeights:
        self.check(P)
        return P.mT @ self.features / -self.last_map_decay

    def ties(self, P: TokenRows) -> TokenMask:
        self.check(P)
        return no_ties(P)

    def residual(self, f: TokenRows) -> PerBatch:
        return self.map.off_range(f)

    def kkt(self, P: TokenRows, f: TokenRows) -> PerBatch:
        """Stationarity in W, times h: h h'P + lam f = 0, relative to |h h'P|. Without h, small
        singular values of the features would magnify the rounding of f.
        """
        pushed = self.map.velocity(self.map.pull(P))
        error = frobenius(pushed + self.last_map_decay * f)
        relative_error = ratio(error, frobenius(pushed))[..., 0, 0]
        return torch.maximum(relative_error, self.residual(f))

    def chart(self, P: UnbatchedRows) -> Chart:
        self.check(P)
        return replace(self.map.chart(P), cost=self._cost)

    def _cost(self, z: Tensor, f: Tensor) -> Tensor:
        return self.last_map_decay / 2 * z.square().sum((-2, -1))


def projected_field(sublayer: Sublayer) -> HasOutputProjection:
    """The sublayer's field, which names its last linear map. Raises ConfigError for a field that
    does not.
    """
    field = sublayer.field
    if not isinstance(field, HasOutputProjection):
        advice = (
            ": give it `pre_projection(x)` and `output_projection`, with field(x) ="
            " output_projection(pre_projection(x))"
        )
        raise ConfigError(
            f"the {sublayer.kind} sublayer's {type(field).__name__} does not name its last linear"
            f" map{why_not(field) or advice}"
        )
    return field


def last_features(sublayer: Sublayer, x: Tensor) -> Tensor:
    """h with r(X) = h W', or gain * N_out(h W'): the last linear map's input, with a column of ones
    if W holds a bias.

    A gain without a norm behind it is part of h. If a scale by channel follows the map, W includes
    that scale.
    """
    field = projected_field(sublayer)
    zeros = sum(part.zeros for part in scaled_parts(field))
    if zeros:
        raise ConfigError(
            f"the scale by channel behind the {sublayer.kind} sublayer's last linear map is 0 in"
            f" {zeros} of its entries, so no weights change these channels: prune them, or give"
            " them a small scale"
        )
    h = field.pre_projection(sublayer.given(x))
    if field.output_projection.bias is not None:
        h = torch.cat([h, torch.ones_like(h[..., :1])], -1)
    if sublayer.output_norm is not None:
        return h
    return sublayer.gain * h


@torch.no_grad()
def check_last_decay(sublayer: Sublayer, x: Tensor, regularization: Regularization) -> None:
    """Raises ConfigError for a decay of the last map's weights at the state x if a scale by channel
    follows them, or if the map computes anything but h W' + b.

    A cost of |W|_F^2 is no cost of |s * W|_F^2, and the set's weights are the scaled ones. Nor is
    it one of W where W is made of other weights.
    """
    if regularization.last_map_decay is None:
        return
    field = projected_field(sublayer)
    given = sublayer.given(x)
    linear = field.output_projection
    plain = F.linear(field.pre_projection(given), linear.weight, linear.bias)
    apart = float((sublayer.field(given) - plain).norm())
    tolerance = math.sqrt(torch.finfo(plain.dtype).eps)
    is_made = parametrize.is_parametrized(linear) or any(
        name.endswith("_orig") for name, _ in linear.named_parameters()
    )
    if is_made or apart > tolerance * float(plain.norm()):
        raise ConfigError(
            f"the {sublayer.kind} sublayer's last linear map does not compute W h + b with weights"
            " W of its own, so a decay of W is not known: leave --last-map-decay out"
        )
    if sublayer.output_norm is not None:
        return
    if scaled_parts(sublayer.field):
        raise ConfigError(
            f"the {sublayer.kind} sublayer's last linear map is followed by a scale by channel, so"
            " a decay of that map's weights is none of the scaled ones: leave --last-map-decay"
            " out, or fold the scale into the weights"
        )


SUBSETS = 8
"""Number of thresholds on |w_j|. More tokens lack more features, but the smallest |w_j| decides."""


@torch.no_grad()
def gap_of_rank(norm: SphereNorm, P: UnbatchedRows, features: Features) -> float:
    """A lower bound of H(P) less the value of any weights W of the last linear map in norm(h W'); 0
    if none is proven. It is positive only if the features have fewer dimensions than there are
    tokens.

    Let w_j = C(gamma * p_j), u*_j = -w_j/|w_j| the best direction of token j, u_j the direction
    that weights give it, e_j = u_j - u*_j. The value lost is sqrt(d) sum_j |w_j|(1 - <u_j, u*_j>)
    >= sqrt(d)/2 sum_j |w_j||e_j|^2 (eps shortens u_j, and >= still holds). The raw output has rows
    t_j u_j with some t_j >= 0 and columns in the range of h, so with M the projection off that
    range M diag(t) (U* + E) = 0. With G = M * (U* U*') entry by entry, t'G t = |M diag(t) U*|^2 <=
    max_j(t_j^2/|w_j|) sum_j |w_j||e_j|^2, hence

        sum_j |w_j||e_j|^2 >= min over j of min over t with t_j^2 = |w_j| of t'G t
                            = min_j |w_j|/(G^-1)_jj.

    Other tokens can only increase the loss. So the bound also holds for any subset of the tokens
    with its own rows of h, and the best one counts.
    """
    w = norm.centre(norm.gamma * P)
    lengths = length(w)
    has_length = lengths > rounding_of(P) * length(norm.gamma * P)
    order = lengths.argsort(descending=True)
    order = order[has_length[order]]
    u, s, _, _ = features.svd
    basis = (u * (s > 0).mT)[order]
    first = features.rank + 1
    last = len(order)
    if first > last:
        return 0.0
    counts = sorted({round(first + (last - first) * k / SUBSETS) for k in range(1, SUBSETS + 1)})
    losses = [_least_loss(w[order[:n]], lengths[order[:n]], basis[:n]) for n in counts]
    return math.sqrt(norm.width) / 2 * max(losses)


def _least_loss(w: Tensor, lengths: Tensor, basis: Tensor) -> float:
    """min_j |w_j|/(G^-1)_jj of these tokens; 0 if G is singular to rounding."""
    n = len(w)
    eye = torch.eye(n, dtype=w.dtype, device=w.device)
    if basis.shape[-1] <= n:
        inside = torch.linalg.qr(basis).Q
    else:
        inside = eye
    off_range = eye - inside @ inside.mT
    best = w / lengths.unsqueeze(-1)
    values, vectors = torch.linalg.eigh(off_range * (best @ best.mT))
    if float(values[0]) <= n * rounding_of(w):
        return 0.0
    return float((lengths / (vectors.square() / values).sum(-1)).amin())

"""How far uncertainty travels: Wasserstein distances between samples of inputs and of their terminal states, and their bounds."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
from jaxtyping import Float, Int
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from ctrans.depth import Depth
from ctrans.fields import HasBound
from ctrans.norm import Norm
from ctrans.stability.backward.sensitivity import TOLERANCE, lengths, step_linearisations, trajectory
from ctrans.stability.backward.singular_values import compose, leading_singular
from ctrans.stability.weight_scaling import carried
from ctrans.sublayer import Sublayer
from ctrans.walk import Model
from solvers import ConfigError, SolveError
from solvers.errors import look_up
from solvers.run import finite

ORDERS = (1, 2)
SIZE = 0.05
"""Default size of a perturbation: the share of tokens, or the length relative to the input's."""
AT_ONCE = 2**18
"""Entries of hidden states linearised together when an adversarial direction is sought: about 1.5 GB for GPT-2's depth."""


def wasserstein(a: Float[Tensor, "samples *state"], b: Float[Tensor, "samples *state"], p: int = 2) -> float:
    """W_p = min over permutations s of (1/N sum_i sum_entries |a_i - b_s(i)|^p)^(1/p), exactly, p = 1 or 2, in float64.

    The distance between the two samples' empirical measures, with the entry-wise p-norm of Kan's theorem 6: between equally
    many points of equal weight an optimal plan is an assignment. Raises ConfigError for samples of unequal size or shape, none,
    or with entries that are not finite, and for another p.
    """
    _check_order(p)
    if a.shape != b.shape or not a.numel():
        raise ConfigError(
            f"the samples have shapes {tuple(a.shape)} and {tuple(b.shape)}: give equally many states of one shape, at least one"
        )
    if not (finite(a) and finite(b)):
        raise ConfigError("the samples have entries that are not finite: leave those states out")
    first, second = (x.detach().cpu().double().reshape(len(x), -1) for x in (a, b))
    # a matrix product would be faster and lose half the digits of small distances
    cost = (torch.cdist(first, second, p=p, compute_mode="donot_use_mm_for_euclid_dist") ** p).numpy()
    rows, columns = linear_sum_assignment(cost)
    return float(np.mean(cost[rows, columns]) ** (1 / p))


def transport_bound(
    depth: Depth, tokens: int, distance: float, p: int = 2, spreads: Sequence[float | None] | None = None
) -> float | None:
    """W_p(mu_D, nu_D) <= W_p(mu_0, nu_0) + m_p sqrt(n) sum_k h_k s_k, m_p = (nd)^max(0, 1/p - 1/2); None where there is no bound.

    s_k bounds how far apart two tokens of segment k's velocity can be, see `token_spreads`, which are computed if they are not
    given (theory, section 8; Kan, theorem 6, corrected by m_p). A norm around the state forgets what was before: there the
    distance is at most m_p sqrt(n) s_k, with s_k of two tokens behind that norm.
    """
    _check_order(p)
    spreads = token_spreads(depth) if spreads is None else spreads
    for sublayer, h, spread in zip(depth.sublayers, lengths(depth), spreads, strict=True):
        norm = sublayer.state_norm or sublayer.output_norm or sublayer.input_norm
        if norm is None or spread is None:
            return None
        factor = (tokens * norm.width) ** max(0.0, 1 / p - 1 / 2) * math.sqrt(tokens)
        distance = factor * spread if sublayer.state_norm is not None else distance + factor * h * spread
    return distance


def token_spreads(depth: Depth) -> list[float | None]:
    """s_k, the largest distance between two tokens of segment k's velocity, or of its state behind a norm around it.

    2 sqrt(d) g behind an output norm or one around the state; behind an input norm alone twice the bound of `forward_bounds` on a
    token's length. None without norms, and behind an input norm alone for a map of which no bound is known. They depend on the
    weights alone, and reading off bounds of maps needs all of these: compute them once.
    """
    return [_spread(sublayer) for sublayer in depth.sublayers]


def printed_transport_bound(depth: Depth, tokens: int, distance: float, p: int = 2) -> float | None:
    """2^((p-1)/p) (C_hat W_p(mu_0, nu_0) + 4 dt D sqrt(nd) g_max): Kan, theorem 6 as printed (eq. 17); None but for output norms.

    C_hat(p), which the paper leaves open, is 1 for p in {1, 2}: no entry-wise p-norm with p <= 2 is below the Frobenius norm.
    False at p = 1, where the entry-wise norm can be sqrt(nd) times Frobenius (theory, section 8).
    """
    _check_order(p)
    norms = [sublayer.output_norm for sublayer in depth.sublayers if sublayer.state_norm is None]
    outputs = [norm for norm in norms if norm is not None]
    if len(outputs) < len(depth.sublayers):
        return None
    constant = 2 * depth.times[-1] * math.sqrt(tokens * outputs[0].width) * max(map(_gain, outputs))
    return 2 ** ((p - 1) / p) * (distance + constant)


def _spread(sublayer: Sublayer) -> float | None:
    if sublayer.state_norm is not None:
        return 2 * math.sqrt(sublayer.state_norm.width) * _gain(sublayer.state_norm)
    if sublayer.output_norm is not None:
        return 2 * sublayer.gain * _gain(sublayer.output_norm) * math.sqrt(sublayer.output_norm.width)
    if sublayer.input_norm is None or not isinstance(sublayer.field, HasBound):
        return None
    norm = sublayer.input_norm
    longest = (_gain(norm) + float(norm.beta.detach().abs().max())) * math.sqrt(norm.width)
    return 2 * sublayer.gain * sublayer.field.bound().at(longest)


def _gain(norm: Norm) -> float:
    return float(norm.gamma.detach().abs().max())


def _check_order(p: int) -> None:
    if p not in ORDERS:
        raise ConfigError(f"p = {p!r}: choose 1 or 2")


def adversarial_direction(
    depth: Depth, x0: Float[Tensor, "batch tokens width"], *, tolerance: float = TOLERANCE
) -> Float[Tensor, "batch tokens width"]:
    """The unit right singular vector of J_{0:D} of each sequence: the small perturbation of X_0 that moves X_D the most.

    Raises SolveError where a state is not finite, ConfigError where weights are made on demand: it needs them all at once.
    """
    if depth.streamed:
        raise ConfigError(
            "the worst direction needs all weights at once, and these are made on demand: choose noise or substitution"
        )
    at_once = max(1, AT_ONCE // x0[0].numel())
    return torch.cat([_adversarial(depth, part, tolerance) for part in x0.split(at_once)])


def _adversarial(depth: Depth, x0: Tensor, tolerance: float) -> Tensor:
    steps = step_linearisations(depth, trajectory(depth, x0))
    known = [step for step in steps if step is not None]
    if len(known) < len(steps):
        raise SolveError(f"the state is not finite at the start of segment {steps.index(None)}: there is no worst direction")
    return leading_singular(compose(known), each=True, tolerance=tolerance).right.squeeze(-3)


@dataclasses.dataclass(frozen=True)
class Sample:
    """What is perturbed: a model and its tokens, by how much, and another text where one is given."""

    model: Model
    tokens: Int[Tensor, "batch tokens"]
    size: float
    other: Int[Tensor, "..."] | None
    generator: torch.Generator

    def embed(self) -> Float[Tensor, "batch tokens width"]:
        return self.model.embed(self.tokens).detach()

    def scale(self) -> float:
        """The size in units of one entry."""
        return self.size * float(self.embed().square().mean().sqrt())


def _substitution(sample: Sample) -> Tensor:
    """A share of the tokens of every sequence, at least one, replaced by tokens drawn from all of them."""
    tokens = sample.tokens
    count = min(max(1, round(sample.size * tokens.shape[1])), tokens.shape[1])
    where = torch.rand(tokens.shape, generator=sample.generator).argsort(-1)[:, :count].to(tokens.device)
    drawn = torch.randint(tokens.numel(), where.shape, generator=sample.generator).to(tokens.device)
    return sample.model.embed(tokens.scatter(-1, where, tokens.flatten()[drawn])).detach()


def _noise(sample: Sample) -> Tensor:
    x = sample.embed()
    return x + sample.scale() * torch.randn(x.shape, generator=sample.generator, dtype=x.dtype).to(x.device)


def _adversary(sample: Sample) -> Tensor:
    """As long as the noise is on average, in the worst direction."""
    x = sample.embed()
    return x + sample.scale() * math.sqrt(x[0].numel()) * adversarial_direction(sample.model.depth, x)


def _text(sample: Sample) -> Tensor:
    if sample.other is None or sample.other.shape != sample.tokens.shape:
        shape = None if sample.other is None else tuple(sample.other.shape)
        raise ConfigError(f"the other text has shape {shape}: give as many tokens as the first, {tuple(sample.tokens.shape)}")
    return sample.model.embed(sample.other).detach()


PERTURBATIONS: dict[str, Callable[[Sample], Tensor]] = {
    "substitution": _substitution,
    "noise": _noise,
    "adversarial": _adversary,
    "text": _text,
}


@dataclasses.dataclass(frozen=True)
class Transport:
    """W_p between inputs and perturbed inputs (`before`) and between their terminal states (`after`), and what bounds `after`.

    `amplification` is after/before and `used` after/bound. None where a state is not finite or no bound exists.
    """

    perturbation: str
    p: int
    before: float
    after: float | None
    bound: float | None
    printed_bound: float | None

    @property
    def amplification(self) -> float | None:
        return None if self.after is None or self.before == 0 else self.after / self.before

    @property
    def used(self) -> float | None:
        return None if self.after is None or not self.bound else self.after / self.bound


def transport(
    model: Model,
    tokens: Int[Tensor, "batch tokens"],
    perturbation: str,
    *,
    size: float = SIZE,
    other: Int[Tensor, "..."] | None = None,
    orders: Sequence[int] = ORDERS,
    generator: torch.Generator | None = None,
) -> list[Transport]:
    """W_p(mu_0, nu_0) and W_p(mu_D, nu_D) for mu the sequences of `tokens`, nu the same perturbed, through the discrete model.

    Perturbations are those of `perturbed`, whose errors it has. For several, carry all of them through the depth together
    (`ctrans.stability.weight_scaling.carried`) and compare with `distances`.
    """
    x = model.embed(tokens).detach()
    y = perturbed(model, tokens, perturbation, size=size, other=other, generator=generator)
    end, other_end = carried(model.depth, [(1.0, x), (1.0, y)])
    return distances(model.depth, perturbation, (x, y), (end, other_end), orders=orders)


@torch.no_grad()
def perturbed(
    model: Model,
    tokens: Int[Tensor, "batch tokens"],
    perturbation: str,
    *,
    size: float = SIZE,
    other: Int[Tensor, "..."] | None = None,
    generator: torch.Generator | None = None,
) -> Float[Tensor, "batch tokens width"]:
    """X_0 of the sequences perturbed.

    "substitution" replaces that share of each sequence's tokens; "noise" adds Gaussian noise of that length relative to X_0;
    "adversarial" as much in the top singular direction of each sequence's J_{0:D}; "text" takes the sequences of `other`.
    Raises ConfigError for an unknown perturbation, a size that is not positive, or another text that does not fit.
    """
    perturb = look_up("perturbation", perturbation, PERTURBATIONS)
    if not 0 < size < math.inf:
        raise ConfigError(f"size = {size!r}: give a positive finite number, such as {SIZE}")
    return perturb(Sample(model, tokens, size, other, generator or torch.Generator().manual_seed(0)))


Pair = tuple[Float[Tensor, "batch tokens width"], Float[Tensor, "batch tokens width"]]


def distances(
    depth: Depth,
    perturbation: str,
    inputs: Pair,
    ends: Pair,
    *,
    orders: Sequence[int] = ORDERS,
    spreads: Sequence[float | None] | None = None,
) -> list[Transport]:
    """W_p between two samples of inputs and between their terminal states, with the bounds, for every p of `orders`.

    `spreads` are the depth's `token_spreads` where these are known.
    """
    spreads = token_spreads(depth) if spreads is None else spreads
    reached, tokens = all(map(finite, ends)), inputs[0].shape[1]
    results = []
    for p in orders:
        before = wasserstein(*inputs, p)
        bounds = transport_bound(depth, tokens, before, p, spreads), printed_transport_bound(depth, tokens, before, p)
        results.append(Transport(perturbation, p, before, wasserstein(*ends, p) if reached else None, *bounds))
    return results

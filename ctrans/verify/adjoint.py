"""Section 7: how far gradients can grow on their way back behind an output norm, and section 8: rates in the data's dimension."""

from __future__ import annotations

import math

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from ctrans.control.costate import costate
from ctrans.model.gpt import GPT
from ctrans.norm import Norm
from ctrans.stability.transport.wasserstein import wasserstein
from ctrans.verify.draws import below, between, described, model, noise, one_of, size, text
from ctrans.verify.statement import Check, Statement, Trial, at_most, worst


def adjoint_growth(generator: torch.Generator) -> Trial:
    """|P_i| against the product from i on, L_f the dense spectral norm of the map's Jacobian where it acts."""
    made = model(generator, one_of(generator, ("peri", "output")), width=4, ffn_width=6, depth=2)
    found = costate(made, text(generator, 1, 3), text(generator, 1, 3))
    factors = [_factor(made, k, x) for k, x in enumerate(found.states[:-1])]
    end = float(found.costates[-1].norm())
    return worst(
        *(
            at_most(float(p.norm()), end * math.prod(factors[i:]), f"{described(made)}: |P_{i}| against |P_D| times the product")
            for i, p in enumerate(found.costates)
        )
    )


def _factor(made: GPT, k: int, x: Tensor) -> float:
    """1 + h g_out L_f g_in/(sigma_out sigma_in) of one sublayer."""
    slope, sigma = _slopes(made, k, x)
    return 1 + slope / sigma


def _slopes(made: GPT, k: int, x: Tensor) -> tuple[float, float]:
    """h g_out L_f g_in/sigma_out of one sublayer, and sigma_in, the least of the tokens' (1 without an input norm)."""
    sublayer, slope, sigma = made.depth.sublayers[k], made.depth.lengths[k], 1.0
    u = x if sublayer.input_norm is None else sublayer.input_norm(x)
    if isinstance(sublayer.input_norm, Norm):
        slope, sigma = slope * float(sublayer.input_norm.gamma.abs().max()), float(sublayer.input_norm.sigma(x).min())
    if isinstance(sublayer.output_norm, Norm):
        slope *= float(sublayer.output_norm.gamma.abs().max() / sublayer.output_norm.sigma(sublayer.field(u)).min())
    with torch.enable_grad():
        dense = torch.autograd.functional.jacobian(sublayer.field, u)  # type: ignore[no-untyped-call, unused-ignore]  # torch gives it no types
    return slope * float(torch.linalg.matrix_norm(dense.reshape(u.numel(), u.numel()), 2)), sigma


def power_law(generator: torch.Generator) -> Trial:
    """prod_k (1 + c/(s + b k)), k = 0 to D - 1, against (1 + c/s)(1 + b (D-1)/s)^(c/b): numbers up to D = 10^5, and a model.

    The model's c is the largest of its sublayers' measured g_out L_f g_in dt/sigma_out, and s + b k lies below every sigma_in.
    """
    c, b, s, steps = size(generator, -2, 1), size(generator, -2, 1), size(generator, -1, 1), int(size(generator, 0, 5))
    log = float(torch.log1p(c / (s + b * torch.arange(steps, dtype=torch.float64))).sum())
    numbers = at_most(log, _power_law(c, s, b, steps), f"c = {c:.3g}, b = {b:.3g}, s = {s:.3g}, D = {steps}: log of the product")
    made = model(generator, "peri", width=4, ffn_width=6, depth=2)
    found = costate(made, text(generator, 1, 3), text(generator, 1, 3))
    slopes, sigmas = zip(*(_slopes(made, k, x) for k, x in enumerate(found.states[:-1])), strict=True)
    s = min(sigmas) / 2
    b = min((sigma - s) / k for k, sigma in enumerate(sigmas) if k)
    grown = math.log(float(found.costates[0].norm() / found.costates[-1].norm()))
    bound = _power_law(max(slopes), s, b, len(sigmas))
    # of logarithms: the growth itself may be below 1
    return worst(numbers, Trial((grown - bound) / bound, f"{described(made)}: log |P_0|/|P_D| = {grown:.3g} against {bound:.3g}"))


def _power_law(c: float, s: float, b: float, steps: int) -> float:
    """log of (1 + c/s)(1 + b (D-1)/s)^(c/b)."""
    return math.log1p(c / s) + c / b * math.log1p(b * (steps - 1) / s)


def constant_sigma(generator: torch.Generator) -> Trial:
    """The same with sigma_in that does not grow: exponential in D, so that a power of D that holds at D = 10 fails at 1000."""
    c = between(generator, 0.5, 2)
    log = {blocks: blocks * math.log1p(c) for blocks in (10, 1000)}
    exponent = log[10] / math.log(10)
    return at_most(log[1000], exponent * math.log(1000), f"sigma_in constant, c = {c:.3g}: log of the product at D = 1000")


def dyadic(generator: torch.Generator) -> Trial:
    """W_1 of two samples of N points in a cube of k dimensions of R^m against the sum over its dyadic cells."""
    dimensions, count = 1 + below(generator, 3), 8 + below(generator, 40)
    ambient = dimensions + below(generator, 30)
    x, y = (torch.rand(count, dimensions, generator=generator, dtype=torch.float64) for _ in range(2))
    frame = torch.linalg.qr(noise(generator, ambient, dimensions)).Q
    # in the Euclidean distance, in which a cell's diameter is total/2^level
    cost = torch.cdist(x @ frame.mT, y @ frame.mT, compute_mode="donot_use_mm_for_euclid_dist").numpy()
    measured = float(cost[linear_sum_assignment(cost)].mean())
    bound, levels, total = 0.0, 6, math.sqrt(dimensions)
    for level in range(1, levels + 1):
        cells = [(2**level * points).floor().clamp(max=2**level - 1).long() for points in (x, y)]
        codes = [(part * (2**level) ** torch.arange(dimensions)).sum(-1) for part in cells]
        counts = torch.zeros(2 ** (level * dimensions), dtype=torch.float64)
        counts.index_add_(0, codes[0], torch.ones(count, dtype=torch.float64))
        counts.index_add_(0, codes[1], -torch.ones(count, dtype=torch.float64))
        # what differs between sibling cells moves within their parent
        bound += 2.0 ** (1 - level) * total * float(counts.abs().sum()) / count
    bound += total * 2.0**-levels
    return at_most(measured, bound, f"{count} points of a {dimensions}-cube in {ambient} dimensions: W_1")


def intrinsic_rate(generator: torch.Generator) -> Trial:
    """The slope of log W_1 against log N of points of a k-cube in m dimensions: how far from -1/k, and from that of m = k."""
    k, ambient = 3 + below(generator, 2), one_of(generator, (8, 16, 64, 128))
    seed, words = below(generator, 2**31), f"a {k}-cube in {ambient} dimensions"
    inside, outside = (_slope(torch.Generator().manual_seed(seed), k, m, pairs=6) for m in (k, ambient))
    return worst(
        Trial(abs(outside + 1 / k) * k, f"{words}: W_1 ~ N^{outside:.3f}"),
        Trial(abs(outside - inside) * k, f"{words}: W_1 ~ N^{outside:.3f}, and N^{inside:.3f} in {k}"),
    )


def ambient_rate(generator: torch.Generator) -> Trial:
    """The same slope of a 3-cube in 64 dimensions against -1/64."""
    slope = _slope(generator, 3, 64)
    return Trial(abs(slope + 1 / 64) / (1 / 64), f"a 3-cube in 64 dimensions: W_1 ~ N^{slope:.3f}, not N^-0.016")


def _slope(generator: torch.Generator, dimensions: int, ambient: int, pairs: int = 2) -> float:
    """Between 32 and 512 points, from the mean of so many pairs of 512, and 16 times as many of 32; the same points for any ambient."""
    counts = (32, 512)
    means = []
    for count in counts:
        found = []
        points = [torch.rand(2, count, dimensions, generator=generator, dtype=torch.float64) for _ in range(512 // count * pairs)]
        frame = torch.linalg.qr(noise(torch.Generator().manual_seed(ambient), ambient, dimensions)).Q
        for x, y in points:
            found.append(wasserstein(x @ frame.mT, y @ frame.mT, 1))
        means.append(sum(found) / len(found))
    return math.log(means[-1] / means[0]) / math.log(counts[-1] / counts[0])


STATEMENTS: tuple[Statement, ...] = (
    Statement(
        "adjoint-growth",
        7,
        "ctrans, on Kan, prop. 8",
        "peri, output: |P_i| <= |P_D| prod over k >= i of (1 + dt g_out L_f g_in/(sigma_out sigma_in))",
        Check(adjoint_growth, 1e-9, 0.25),
    ),
    Statement(
        "adjoint-power-law",
        7,
        "ctrans",
        "sigma_out bounded below and sigma_in >= s + b k, k = 0 .. D-1: the product is at most (1 + c/s)(1 + b (D-1)/s)^(c/b)",
        Check(power_law, 1e-9, 0.5),
        Check(constant_sigma, 1e-9, 0.02),
        "the product is polynomial in depth however sigma_in behaves",
    ),
    Statement(
        "dyadic-wasserstein",
        8,
        "Weed and Bach 2019, proposition 1",
        "W_1 of two samples is at most the sum over dyadic levels of diameter times the mass that cells differ by, in k dimensions",
        Check(dyadic, 1e-9, 0.5),
    ),
    Statement(
        "intrinsic-rate",
        8,
        "Weed and Bach 2019; Kan, eq. 128",
        "r(N) ~ N^(-1/k) for data of intrinsic dimension k > 2, whatever nd is: slopes from N = 32 to 512",
        Check(intrinsic_rate, 0.15, 0.04),
        Check(ambient_rate, 0.25, 0.01),
        "r(N) ~ N^(-1/(nd))",
    ),
)

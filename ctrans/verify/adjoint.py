"""Section 7: how far gradients can grow on their way back behind an output norm, and section 8: rates in the data's dimension."""

from __future__ import annotations

import math

import torch
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
    sublayer, slope = made.depth.sublayers[k], 1.0
    u = x if sublayer.input_norm is None else sublayer.input_norm(x)
    for chosen, at in ((sublayer.input_norm, x), (sublayer.output_norm, sublayer.field(u))):
        if isinstance(chosen, Norm):
            slope *= float(chosen.gamma.abs().max() / chosen.sigma(at).min())
    with torch.enable_grad():
        dense = torch.autograd.functional.jacobian(sublayer.field, u)  # type: ignore[no-untyped-call, unused-ignore]
    return 1 + made.depth.lengths[k] * slope * float(torch.linalg.matrix_norm(dense.reshape(u.numel(), u.numel()), 2))


def power_law(generator: torch.Generator) -> Trial:
    """prod_k (1 + c/(s + b k)), k = 1 to D, against (1 + b D/s)^(c/b), for D up to 10^5."""
    c, b, s, blocks = size(generator, -2, 1), size(generator, -2, 1), size(generator, -1, 1), int(size(generator, 1, 5))
    k = torch.arange(1, blocks + 1, dtype=torch.float64)
    log = float(torch.log1p(c / (s + b * k)).sum())
    return at_most(log, c / b * math.log1p(b * blocks / s), f"c = {c:.3g}, b = {b:.3g}, D = {blocks}: log of the product")


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
    measured = wasserstein(x @ frame.mT, y @ frame.mT, 1)
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
    """The slope of log W_1 against log N of points of a 3-cube in 64 dimensions: how far it is from -1/3."""
    slope = _slope(generator, 3, 64)
    return Trial(abs(slope + 1 / 3) / (1 / 3), f"a 3-cube in 64 dimensions: W_1 ~ N^{slope:.3f}")


def ambient_rate(generator: torch.Generator) -> Trial:
    """The same slope against -1/64."""
    slope = _slope(generator, 3, 64)
    return Trial(abs(slope + 1 / 64) / (1 / 64), f"a 3-cube in 64 dimensions: W_1 ~ N^{slope:.3f}, not N^-0.016")


def _slope(generator: torch.Generator, dimensions: int, ambient: int) -> float:
    frame = torch.linalg.qr(noise(generator, ambient, dimensions)).Q
    counts = (32, 128, 512)
    means = []
    for count in counts:
        found = []
        for _ in range(512 // count * 2):
            x, y = (torch.rand(count, dimensions, generator=generator, dtype=torch.float64) @ frame.mT for _ in range(2))
            found.append(wasserstein(x, y, 1))
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
        "where sigma_in grows like s + b k the product of the 1 + c/(s + b k) is at most (1 + b D/s)^(c/b), a power of D",
        Check(power_law, 1e-9),
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
        "r(N) ~ N^(-1/k) for data of intrinsic dimension k > 2, whatever nd is",
        Check(intrinsic_rate, 0.25, 0.01),
        Check(ambient_rate, 0.25, 0.01),
        "r(N) ~ N^(-1/(nd))",
    ),
)

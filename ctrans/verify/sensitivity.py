"""Section 7: the Jacobians through which gradients pass."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ctrans.fields import Attention
from ctrans.placement import PLACEMENTS
from ctrans.stability.backward.lyapunov import lyapunov
from ctrans.stability.backward.sensitivity import backward_sensitivity, sublayer_sensitivity
from ctrans.stability.backward.weight_slope import sensitivity_slope
from ctrans.stability.forward.weight_scaling import SCALINGS
from ctrans.verify.draws import between, described, model, noise, one_of, size
from ctrans.verify.jacobians import attention_jacobian, step_jacobian
from ctrans.verify.statement import Check, Statement, Trial, as_printed, equal, worst
from ctrans.walk import states_of
from solvers.segment import Map

SLOPE = 0.02
"""How far a measured slope may be from theory's."""


def _slope(generator: torch.Generator, placements: tuple[str, ...], expected: float) -> Trial:
    scaling = one_of(generator, [name for name, rule in SCALINGS.items() if rule.exact])
    made = model(generator, one_of(generator, placements), depth=1, activation=one_of(generator, ("gelu", "silu", "tanh")))
    sublayer = made.depth.sublayers[("attention", "ffn").index(SCALINGS[scaling].kind)]
    found = sensitivity_slope(sublayer, noise(generator, 1, 5, made.config.width), scaling, tolerance=1e-5).slope
    return Trial(abs(found - expected), f"{described(made)}: S ~ c^{found:.4f}, {scaling} scaled")


def pre_slope(generator: torch.Generator) -> Trial:
    """|s - 1| of S ~ c^s under pre or none with W, V, both or W2 scaled by c = 1 to 1000, eps = 0."""
    return _slope(generator, ("pre", "none"), 1.0)


def peri_slope(generator: torch.Generator) -> Trial:
    """|s| of S ~ c^s under peri or output with W, V, both or W2 scaled by c = 1 to 1000, eps = 0."""
    return _slope(generator, ("peri", "output"), 0.0)


def _w1(generator: torch.Generator, activation: str) -> tuple[list[float], float]:
    made = model(generator, "peri", depth=1, activation=activation, bias=False)
    found = sensitivity_slope(made.depth.sublayers[1], noise(generator, 1, 5, 8), "W1", tolerance=1e-6)
    return [value or math.nan for value in found.values], found.slope


def first_weights(generator: torch.Generator) -> Trial:
    """GELU: S(10 c) = S(c)?"""
    values, _ = _w1(generator, "gelu")
    return Trial(
        abs(values[1] / values[0] - 1), f"GELU, W1 scaled by 1, 10, 100, 1000: S = {', '.join(f'{v:.4g}' for v in values)}"
    )


def first_weights_relu(generator: torch.Generator) -> Trial:
    """|s| of S ~ c^s under peri as W1 grows by c = 1 to 1000 (ReLU, no bias); |S(1000 W1)/S(100 W1) - 1| - 0.1 for GELU."""
    _, slope = _w1(generator, "relu")
    gelu, _ = _w1(generator, "gelu")
    return worst(
        Trial(abs(slope), f"ReLU without bias, W1 scaled: S ~ c^{slope:.4f}"),
        Trial(abs(gelu[3] / gelu[2] - 1) - 0.1, f"GELU: S = {', '.join(f'{v:.4g}' for v in gelu)}, which settles"),
    )


def eps_breaks(generator: torch.Generator) -> Trial:
    """|s - 1| of S ~ c^s under peri, eps = 0.01, W2 scaled by c = 1e-5 and 1e-4: activations far below sqrt(eps)."""
    return _far_below_eps(generator, 1.0)


def eps_is_harmless(generator: torch.Generator) -> Trial:
    """|s| of S ~ c^s under peri, eps = 0.01, W2 scaled by c = 1e-5 and 1e-4: activations far below sqrt(eps)."""
    return _far_below_eps(generator, 0.0)


def _far_below_eps(generator: torch.Generator, expected: float) -> Trial:
    """The slope where activations are far below sqrt(eps)."""
    made = model(generator, "peri", depth=1, eps=1e-2, spread=0)
    x = noise(generator, 1, 5, 8)
    found = sensitivity_slope(made.depth.sublayers[1], x, "W2", factors=(1e-5, 1e-4), eps=None, tolerance=1e-6).slope
    return Trial(abs(found - expected), f"eps = 0.01, small activations: S ~ c^{found:.4f}")


def _dense(function: Map, x: Tensor) -> Tensor:
    dense: Tensor = torch.autograd.functional.jacobian(function, x)  # type: ignore[no-untyped-call, unused-ignore]  # torch gives it no types
    return dense.reshape(x.numel(), x.numel())


def products(generator: torch.Generator) -> Trial:
    """|J_{i:D}|_2 without forming it, against singular values of the product of the closed forms."""
    made = model(generator, one_of(generator, PLACEMENTS), width=4)
    x0 = size(generator, -0.5, 0.5) * noise(generator, 3, 4)
    found = backward_sensitivity(made.depth, x0).products
    dense = torch.eye(12, dtype=torch.float64)
    cases = []
    steps = list(zip(made.depth.sublayers, states_of(made.depth, x0), strict=False))
    for k in reversed(range(len(steps))):
        sublayer, x = steps[k]
        dense = dense @ step_jacobian(sublayer, x, made.config.dt).reshape(12, 12)
        if k % 2 == 0:
            exact = float(torch.linalg.matrix_norm(dense, 2))
            cases.append(equal(found[k // 2].value or math.nan, exact, f"|J_{k // 2}:D|, {described(made)}"))
    return worst(*cases)


def sublayers(generator: torch.Generator) -> Trial:
    """S = |dv/dX|_2 without forming dv/dX, against the dense Jacobian's largest singular value, any placement."""
    made = model(generator, one_of(generator, PLACEMENTS), width=6)
    sublayer, x = one_of(generator, made.depth.sublayers), noise(generator, 4, 6)
    exact = float(torch.linalg.matrix_norm(_dense(sublayer.velocity, x), 2))
    return equal(sublayer_sensitivity(sublayer, x).value or math.nan, exact, f"|dv/dX|, {described(made)}")


def exponents(generator: torch.Generator) -> Trial:
    """T times the sum of all exponents is log|det J|."""
    made = model(generator, one_of(generator, ("none", "pre", "peri", "output")), width=4)
    x0 = noise(generator, 3, 4)
    found = lyapunov(made.depth, x0, count=12, generator=generator)
    exact = float(torch.linalg.slogdet(_dense(made.depth, x0)).logabsdet)
    return equal(
        sum(found.exponents) * found.time, exact, f"T sum of exponents against log|det J|, {described(made)}", abs(exact) + 1
    )


def _attention(generator: torch.Generator) -> tuple[Attention, Tensor]:
    attention = Attention(
        6,
        one_of(generator, (1, 2, 3)),
        causal=bool(one_of(generator, (0, 1))),
        temperature=between(generator, 0.5, 2),
        qk_norm=bool(one_of(generator, (0, 1))),
    ).double()
    for parameter in attention.parameters():
        parameter.copy_(noise(generator, *parameter.shape) / 2)
    return attention.requires_grad_(False), noise(generator, 4, 6)


def proposition_11(generator: torch.Generator) -> Trial:
    """d f(X)/dX in closed form against autograd, entry by entry: 1 to 3 heads, causal or not, queries and keys normalised or not."""
    attention, x = _attention(generator)
    exact: Tensor = torch.autograd.functional.jacobian(attention, x)  # type: ignore[no-untyped-call, unused-ignore]  # torch gives it no types
    return equal(attention_jacobian(attention, x), exact, f"the closed form against autograd, {attention.heads} heads")


def proposition_11_linear(generator: torch.Generator) -> Trial:
    """J = 15 J_0 after W -> 3 W and V -> 5 V with its bias, both by the closed form."""
    attention, x = _attention(generator)
    before = attention_jacobian(attention, x)
    attention.out.weight.mul_(3)
    for part in (attention.qkv.weight, attention.qkv.bias):
        part.chunk(3)[2].mul_(5)
    return equal(attention_jacobian(attention, x), 15 * before, "W -> 3 W, V -> 5 V: J -> 15 J")


STATEMENTS: tuple[Statement, ...] = (
    as_printed(
        "prop-7",
        7,
        "Kan, prop. 7",
        "under pre S = |dv/dX| grows like the activations: slope 1 (V, W, W2 scaled)",
        Check(pre_slope, SLOPE, 0.05),
    ),
    as_printed(
        "prop-8",
        7,
        "Kan, prop. 8",
        "under peri and output S does not depend on the activations' size: slope 0 (V, W, W2 scaled, eps = 0)",
        Check(peri_slope, SLOPE, 0.05),
    ),
    Statement(
        "prop-8-w1",
        7,
        "Kan, prop. 8",
        "scaling W1 leaves S only for a positively homogeneous phi without biases (ReLU); for GELU S changes, and stays bounded",
        Check(first_weights_relu, 1e-3, 0.02),
        Check(first_weights, 1e-3, 0.02),
        "S is invariant to the size of the activation, however that comes about",
    ),
    Statement(
        "prop-8-eps",
        7,
        "Kan, prop. 8",
        "with eps > 0 invariance fails for activations below sqrt(eps): there the slope is 1",
        Check(eps_breaks, SLOPE, 0.02),
        Check(eps_is_harmless, SLOPE, 0.02),
        "S is invariant to the size of the activation, with eps too",
    ),
    Statement(
        "product-jacobian",
        7,
        "ctrans, on Kan, eq. 16 and 18",
        "J_{i:D} is the product of the steps' Jacobians; its largest singular value is found without forming it",
        Check(products, 1e-3, 0.05),
    ),
    Statement(
        "sublayer-sensitivity",
        7,
        "ctrans",
        "S_k = |dv_k/dX| without forming it, against the dense singular value",
        Check(sublayers, 1e-3, 0.1),
    ),
    Statement(
        "lyapunov",
        7,
        "ctrans",
        "T times the sum of all Lyapunov exponents by QR is log|det J_{0:D}|",
        Check(exponents, 1e-8, 0.1),
    ),
    as_printed(
        "prop-11",
        7,
        "Kan, prop. 11",
        "attention's Jacobian in closed form, entry by entry",
        Check(proposition_11, 1e-10, 0.5),
    ),
    as_printed("prop-11-linear", 7, "Kan, prop. 11", "it is linear in W and in V", Check(proposition_11_linear, 1e-11)),
)

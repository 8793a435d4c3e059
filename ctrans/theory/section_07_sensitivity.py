"""Section 7: the Jacobians that gradients pass through."""

from __future__ import annotations

import math
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor

from ctrans.base.draw import Draw
from ctrans.dynamics.fields import Attention
from ctrans.dynamics.norm import Norm
from ctrans.dynamics.placement import PLACEMENTS
from ctrans.measure.backward.lyapunov import lyapunov
from ctrans.measure.backward.sensitivity import backward_sensitivity, sublayer_sensitivity
from ctrans.measure.backward.weight_slope import sensitivity_slope
from ctrans.measure.forward.weight_scaling import SCALINGS
from ctrans.measure.walk import states_of
from ctrans.theory.random_models import described, random_model
from ctrans.theory.statement import Trial, Trials, dense_jacobian, dense_matrix, equal, statement

SECTION = 7

SLOPE = 0.02
"""Largest difference between a measured slope and theory's."""


def _slope(draw: Draw, placements: tuple[str, ...], expected: float) -> Trial:
    scaling = draw.choice([name for name, rule in SCALINGS.items() if rule.exact])
    made = random_model(
        draw, draw.choice(placements), depth=1, activation=draw.choice(("gelu", "silu", "tanh"))
    )
    sublayer = made.depth.sublayers[("attention", "ffn").index(SCALINGS[scaling].kind)]
    found = sensitivity_slope(
        sublayer, draw.normal(1, 5, made.config.width), scaling, tolerance=1e-5
    ).slope
    return Trial(abs(found - expected), f"{described(made)}: S ~ c^{found:.4f}, {scaling} scaled")


@statement(
    "prop-7",
    "Kan, prop. 7",
    "under pre S = |dv/dX| grows like the activations: slope 1 (V, W, W2 scaled)",
    SLOPE,
    0.05,
    as_printed=True,
)
def pre_slope(draw: Draw) -> Trial:
    """Error |s - 1| of S ~ c^s under pre or none with W, V, both or W2 scaled by c = 1 to 1000, eps
    = 0.
    """
    return _slope(draw, ("pre", "none"), 1.0)


@statement(
    "prop-8",
    "Kan, prop. 8",
    "under peri and output S does not depend on the activations' size: slope 0 (V, W, W2 scaled,"
    " eps = 0)",
    SLOPE,
    0.05,
    as_printed=True,
)
def peri_slope(draw: Draw) -> Trial:
    """Error |s| of S ~ c^s under peri or output with W, V, both or W2 scaled by c = 1 to 1000, eps
    = 0.
    """
    return _slope(draw, ("peri", "output"), 0.0)


@statement(
    "prop-8-w1",
    "Kan, prop. 8",
    "scaling W1 leaves S only for a positively homogeneous phi without biases (ReLU); for GELU S"
    " changes, and stays bounded",
    1e-3,
    0.02,
    printed="S is invariant to the size of the activation, whatever changes it",
)
def first_weights(draw: Draw, printed: bool) -> Trials:
    """Error |s| of S ~ c^s under peri as W1 grows by c = 1 to 1000 (ReLU, no bias); |S(1000
    W1)/S(100 W1) - 1| - 0.1 for GELU.

    Printed: |S(10 W1)/S(W1) - 1| for GELU.
    """
    found = {}
    for activation in ("gelu",) if printed else ("relu", "gelu"):
        made = random_model(draw, "peri", depth=1, activation=activation, bias=False)
        found[activation] = sensitivity_slope(
            made.depth.sublayers[1], draw.normal(1, 5, 8), "W1", tolerance=1e-6
        )
    gelu = [value or math.nan for value in found["gelu"].values]
    listed = f"S = {', '.join(f'{v:.4g}' for v in gelu)}"
    if printed:
        return Trial(abs(gelu[1] / gelu[0] - 1), f"GELU, W1 scaled by 1, 10, 100, 1000: {listed}")
    slope = found["relu"].slope
    return [
        Trial(abs(slope), f"ReLU without bias, W1 scaled: S ~ c^{slope:.4f}"),
        Trial(abs(gelu[3] / gelu[2] - 1) - 0.1, f"GELU: {listed}, which settles"),
    ]


@statement(
    "prop-8-eps",
    "Kan, prop. 8",
    "with eps > 0 invariance fails for activations below sqrt(eps): there the slope is 1",
    SLOPE,
    0.02,
    printed="S is invariant to the size of the activation, with eps too",
)
def far_below_eps(draw: Draw, printed: bool) -> Trial:
    """|s - 1| of S ~ c^s under peri, eps = 0.01, W2 scaled by c = 1e-5 and 1e-4: activations far
    below sqrt(eps). Printed: |s|.
    """
    made = random_model(draw, "peri", depth=1, eps=1e-2, spread=0)
    x = draw.normal(1, 5, 8)
    found = sensitivity_slope(
        made.depth.sublayers[1], x, "W2", factors=(1e-5, 1e-4), eps=None, tolerance=1e-6
    ).slope
    return Trial(
        abs(found - (0 if printed else 1)), f"eps = 0.01, small activations: S ~ c^{found:.4f}"
    )


@statement(
    "product-jacobian",
    "ctrans, on Kan, eq. 16 and 18",
    "J_{i:D} is the product of the steps' Jacobians; its largest singular value is found without"
    " forming it",
    1e-3,
    0.05,
)
def products(draw: Draw) -> Trials:
    """|J_{i:D}|_2 without forming it, against singular values of the product of the steps' dense
    Jacobians.
    """
    made = random_model(draw, draw.choice(PLACEMENTS), width=4)
    x0 = draw.log_uniform(-0.5, 0.5) * draw.normal(3, 4)
    found = backward_sensitivity(made.depth, x0).products
    steps = zip(made.depth.sublayers, states_of(made.depth, x0), strict=False)
    factors = [dense_matrix(partial(sublayer.step, dt=made.config.dt), x) for sublayer, x in steps]
    cases = []
    product = torch.eye(12, dtype=torch.float64)
    for i in reversed(range(made.config.depth)):
        product = product @ factors[2 * i + 1] @ factors[2 * i]
        exact = torch.linalg.matrix_norm(product, 2)
        cases.append(equal(found[i].value or math.nan, exact, f"|J_{i}:D|, {described(made)}"))
    return cases


@statement(
    "sublayer-sensitivity",
    "ctrans",
    "S_k = |dv_k/dX| without forming it, against the dense singular value",
    1e-3,
    0.1,
)
def sublayers(draw: Draw) -> Trial:
    """S = |dv/dX|_2 without forming dv/dX, against the dense Jacobian's largest singular value, any
    placement.
    """
    made = random_model(draw, draw.choice(PLACEMENTS), width=6)
    sublayer = draw.choice(made.depth.sublayers)
    x = draw.normal(4, 6)
    exact = torch.linalg.matrix_norm(dense_matrix(sublayer.velocity, x), 2)
    return equal(
        sublayer_sensitivity(sublayer, x).value or math.nan, exact, f"|dv/dX|, {described(made)}"
    )


@statement(
    "lyapunov",
    "ctrans",
    "T times the sum of all Lyapunov exponents by QR is log|det J_{0:D}|",
    1e-8,
    0.1,
)
def exponents(draw: Draw) -> Trial:
    """T times the sum of all exponents is log|det J|."""
    made = random_model(draw, draw.choice(("none", "pre", "peri", "output")), width=4)
    x0 = draw.normal(3, 4)
    found = lyapunov(made.depth, x0, count=12, generator=draw.generator)
    exact = torch.linalg.slogdet(dense_matrix(made.depth, x0)).logabsdet
    words = described(made)
    return equal(
        sum(found.exponents) * found.time,
        exact,
        f"T sum of exponents against log|det J|, {words}",
        abs(exact) + 1,
    )


def attention_jacobian(
    attention: Attention, x: Float[Tensor, "tokens width"]
) -> Float[Tensor, "tokens width tokens width"]:
    """df_j/dx_i = sum_h W_h (a_ji V_h + c sum_l a_jl (v_l - m_j) (ds_jl/dx_i)'), m_j = sum_l a_jl
    v_l, entry [j, :, i, :].

    Scores s_jl = q_j . k_l, c = 1/(tau sqrt(d_h)), ds_jl/dx_i = [l = i] K_h' q_j + [i = j] Q_h' k_l
    (Kan, Prop. 11, there for tau = 1 without biases). With `qk_norm`, the Jacobian of their norm at
    that token precedes Q_h and K_h. `attention` has no `AttentionOptions`.
    """
    tokens, width = x.shape
    q, k, v = (
        part.unflatten(-1, (attention.heads, -1)).transpose(0, 1)
        for part in attention.qkv(x).chunk(3, dim=-1)
    )
    parts = attention.qkv.weight.chunk(3)
    to_q, to_k, to_v = (part.reshape(attention.heads, -1, part.shape[-1]) for part in parts)
    weight = attention.out.weight
    out = weight.reshape(len(weight), attention.heads, -1)  # width, heads, head
    a = attention.probabilities(x)
    # heads, tokens, head, width
    dq = _after_norm(attention.query_norm, q, to_q)
    dk = _after_norm(attention.key_norm, k, to_k)
    q = attention.query_norm(q)
    k = attention.key_norm(k)
    scale = 1 / (attention.temperature * (width // attention.heads) ** 0.5)
    centred = v.unsqueeze(1) - (a @ v).unsqueeze(2)  # heads, j, l, head
    through_keys = torch.einsum("hji,hjik,hjm,himw->jhkiw", a, centred, q, dk)
    through_queries = torch.einsum("hjl,hjlk,hlm,hjmw->jhkw", a, centred, k, dq)
    values = torch.einsum("hji,hkw->jhkiw", a, to_v)
    diagonal = torch.eye(tokens, dtype=x.dtype, device=x.device)
    inner = values + scale * (
        through_keys + torch.einsum("jhkw,ji->jhkiw", through_queries, diagonal)
    )
    return torch.einsum("dhk,jhkiw->jdiw", out, inner)


def _after_norm(norm: torch.nn.Module, z: Tensor, weight: Tensor) -> Tensor:
    """d norm(z_i)/dx_i = J_norm(z_i) W for each head and token."""
    weight = weight.unsqueeze(1).expand(-1, z.shape[1], -1, -1)
    if isinstance(norm, Norm):
        return norm.jacobian(z) @ weight
    return weight


def _attention(draw: Draw) -> tuple[Attention, Tensor]:
    heads = draw.choice((1, 2, 3))
    causal = draw.flag()
    temperature = draw.uniform(0.5, 2)
    qk_norm = draw.flag()
    attention = Attention(
        6, heads, causal=causal, temperature=temperature, qk_norm=qk_norm
    ).double()
    for parameter in attention.parameters():
        parameter.copy_(draw.normal(*parameter.shape) / 2)
    return attention.requires_grad_(False), draw.normal(4, 6)


@statement(
    "prop-11",
    "Kan, prop. 11",
    "attention's Jacobian in closed form, entry by entry",
    1e-10,
    0.5,
    as_printed=True,
)
def proposition_11(draw: Draw) -> Trial:
    """d f(X)/dX in closed form against autograd, entry by entry: 1 to 3 heads, causal or not,
    queries and keys normalised or not.
    """
    attention, x = _attention(draw)
    exact = dense_jacobian(attention, x)
    return equal(
        attention_jacobian(attention, x),
        exact,
        f"the closed form against autograd, {attention.heads} heads",
    )


@statement("prop-11-linear", "Kan, prop. 11", "it is linear in W and in V", 1e-11, as_printed=True)
def proposition_11_linear(draw: Draw) -> Trial:
    """J = 15 J_0 after W -> 3 W and V -> 5 V with its bias, both by the closed form."""
    attention, x = _attention(draw)
    before = attention_jacobian(attention, x)
    attention.out.weight.mul_(3)
    for part in (attention.qkv.weight, attention.qkv.bias):
        part.chunk(3)[2].mul_(5)
    return equal(attention_jacobian(attention, x), 15 * before, "W -> 3 W, V -> 5 V: J -> 15 J")

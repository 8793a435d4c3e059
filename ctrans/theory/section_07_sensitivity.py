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
from ctrans.measure.backward.weight_slope import Slope, sensitivity_slope
from ctrans.measure.forward.weight_scaling import SCALINGS
from ctrans.measure.walk import states_of
from ctrans.theory.random_models import describe_model, random_model
from ctrans.theory.statement import Trial, Trials, dense_jacobian, dense_matrix, equal, statement

SECTION = 7

SLOPE = 0.02
"""Largest difference between a measured slope and theory's."""


def _slope(draw: Draw, placements: tuple[str, ...], expected: float) -> Trial:
    scaling = draw.choice([name for name, rule in SCALINGS.items() if rule.exact])
    model = random_model(
        draw, draw.choice(placements), depth=1, activation=draw.choice(("gelu", "silu", "tanh"))
    )
    sublayer = model.depth.sublayers[("attention", "ffn").index(SCALINGS[scaling].kind)]
    x = draw.normal(1, 5, model.config.width)
    slope = sensitivity_slope(sublayer, x, scaling, tolerance=1e-5).slope
    case = f"{describe_model(model)}: S ~ c^{slope:.4f}, {scaling} scaled"
    return Trial(abs(slope - expected), case)


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
def first_weights(draw: Draw, *, printed: bool) -> Trials:
    """Error |s| of S ~ c^s under peri as W1 grows by c = 1 to 1000 (ReLU, no bias); |S(1000
    W1)/S(100 W1) - 1| - 0.1 for GELU.

    Printed: |S(10 W1)/S(W1) - 1| for GELU.
    """

    def growth(activation: str) -> Slope:
        model = random_model(draw, "peri", depth=1, activation=activation, bias=False)
        x = draw.normal(1, 5, 8)
        return sensitivity_slope(model.depth.sublayers[1], x, "W1", tolerance=1e-6)

    if printed:
        gelu = [value or math.nan for value in growth("gelu").values]
        listed = f"S = {', '.join(f'{v:.4g}' for v in gelu)}"
        return Trial(abs(gelu[1] / gelu[0] - 1), f"GELU, W1 scaled by 1, 10, 100, 1000: {listed}")
    slope = growth("relu").slope
    gelu = [value or math.nan for value in growth("gelu").values]
    listed = f"S = {', '.join(f'{v:.4g}' for v in gelu)}"
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
def far_below_eps(draw: Draw, *, printed: bool) -> Trial:
    """|s - 1| of S ~ c^s under peri, eps = 0.01, W2 scaled by c = 1e-5 and 1e-4: activations far
    below sqrt(eps). Printed: |s|.
    """
    model = random_model(draw, "peri", depth=1, eps=1e-2, spread=0)
    x = draw.normal(1, 5, 8)
    slope = sensitivity_slope(
        model.depth.sublayers[1], x, "W2", factors=(1e-5, 1e-4), eps=None, tolerance=1e-6
    ).slope
    case = f"eps = 0.01, small activations: S ~ c^{slope:.4f}"
    if printed:
        return Trial(abs(slope), case)
    return Trial(abs(slope - 1), case)


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
    model = random_model(draw, draw.choice(PLACEMENTS), width=4)
    x0 = draw.log_uniform(-0.5, 0.5) * draw.normal(3, 4)
    norms = backward_sensitivity(model.depth, x0).products
    steps = zip(model.depth.sublayers, states_of(model.depth, x0), strict=False)
    factors = [dense_matrix(partial(sublayer.step, dt=model.config.dt), x) for sublayer, x in steps]
    cases = []
    product = torch.eye(12, dtype=torch.float64)
    for i in reversed(range(model.config.depth)):
        product = product @ factors[2 * i + 1] @ factors[2 * i]
        exact = torch.linalg.matrix_norm(product, 2)
        measured = norms[i].value or math.nan
        cases.append(equal(measured, exact, f"|J_{i}:D|, {describe_model(model)}"))
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
    model = random_model(draw, draw.choice(PLACEMENTS), width=6)
    sublayer = draw.choice(model.depth.sublayers)
    x = draw.normal(4, 6)
    exact = torch.linalg.matrix_norm(dense_matrix(sublayer.velocity, x), 2)
    measured = sublayer_sensitivity(sublayer, x).value or math.nan
    return equal(measured, exact, f"|dv/dX|, {describe_model(model)}")


@statement(
    "lyapunov",
    "ctrans",
    "T times the sum of all Lyapunov exponents by QR is log|det J_{0:D}|",
    1e-8,
    0.1,
)
def exponents(draw: Draw) -> Trial:
    """T times the sum of all exponents is log|det J|."""
    model = random_model(draw, draw.choice(("none", "pre", "peri", "output")), width=4)
    x0 = draw.normal(3, 4)
    measured = lyapunov(model.depth, x0, count=12, generator=draw.generator)
    exact = torch.linalg.slogdet(dense_matrix(model.depth, x0)).logabsdet
    case = describe_model(model)
    return equal(
        sum(measured.exponents) * measured.time,
        exact,
        f"T sum of exponents against log|det J|, {case}",
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

    def by_head(part: Tensor) -> Float[Tensor, "heads tokens head"]:
        heads: Tensor = part.unflatten(-1, (attention.heads, -1))
        return heads.transpose(0, 1)

    q, k, v = map(by_head, attention.qkv(x).chunk(3, dim=-1))
    matrices = attention.qkv.weight.reshape(3, attention.heads, -1, width)
    to_q, to_k, to_v = matrices  # heads, head, width
    out = attention.out.weight.reshape(width, attention.heads, -1)  # width, heads, head
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
    return attention.requires_grad_(requires_grad=False), draw.normal(4, 6)


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

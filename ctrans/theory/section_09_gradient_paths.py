"""Section 9: products of Jacobians over depth, with and without an identity in each factor, and how
weights must shrink with depth (Emadi, sections 5.3 and 6).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn

from ctrans.base.draw import Draw
from ctrans.dynamics.depth import Depth
from ctrans.dynamics.fields import Attention
from ctrans.dynamics.norm import LayerNorm, Norm, RMSNorm
from ctrans.dynamics.sublayer import Sublayer
from ctrans.measure.walk import states_of
from ctrans.theory.random_models import describe_model, random_model
from ctrans.theory.statement import (
    Printed,
    Trial,
    Trials,
    at_most,
    dense_matrix,
    equal,
    not_none,
    statement,
)

SECTION = 9

KINDS: tuple[Literal["attention"], Literal["ffn"]] = ("attention", "ffn")
"""The kinds of sublayers, in turn."""
CONSTRUCTED = 4
"""One case in this many attains the bound; the others are random models."""

Comparison = Callable[[float | Tensor, float | Tensor, str], Trial]


def _steps(depth: Depth, x: Tensor) -> list[tuple[Sublayer, float, Tensor]]:
    return list(zip(depth.sublayers, depth.lengths, states_of(depth, x), strict=False))


def _factors(depth: Depth, x: Tensor) -> list[Tensor]:
    """The dense Jacobian of each discrete step, in order."""
    return [
        dense_matrix(partial(sublayer.step, dt=h), state) for sublayer, h, state in _steps(depth, x)
    ]


def _across(draw: Draw, gains: Sequence[float], d: int = 5) -> tuple[Depth, Tensor]:
    """A pre depth and a state x with I + dt J_k = I + c_k (I - ee'), c_k the gains, e = x/|x|: the
    fields W_k = c_k sigma (I - ee') move no part of x, so that every segment meets the same state.
    """
    x = draw.normal(1, 1, d)
    e = x.flatten() / x.norm()
    across = torch.eye(d, dtype=x.dtype) - torch.outer(e, e)
    sigma = float(x.norm()) / math.sqrt(d)
    parts = []
    for k, c in enumerate(gains):
        field = nn.Linear(d, d, bias=False)
        field.weight = nn.Parameter(c * sigma * across)
        parts.append(Sublayer(field, KINDS[k % 2], input_norm=RMSNorm(d, 0.0).double()))
    return Depth(parts, 1.0).requires_grad_(requires_grad=False), x


@statement(
    "theorem-5.4",
    "Emadi, theorem 5.4",
    "pre: J = prod (I + dt J_k), c_k = dt |J_f| slope(N): |J - I - sum dt J_k| <= prod (1 + c_k) -"
    " 1 - sum c_k, and all singular values are between prod max(0, 1 - c_k) and prod (1 + c_k);"
    " attained",
    share=0.25,
    printed=Printed(
        "read as a bound: the identity term keeps gradients from decaying exponentially with depth,"
        " in any direction",
        0.0,
        0.02,
    ),
)
def identity_path(draw: Draw, *, printed: bool) -> Trials:
    """The dense Jacobian of the whole depth against its expansion, and its extreme singular values
    against products over segments; c_k from the dense Jacobian of the map and the norm's slope.

    In one case of 4 all dt J_k are multiples of one projection, which attains all three bounds.
    Printed: J_k = -(I - ee')/2 leaves 2^-N of N segments, less than 1/N. The theorem's three items
    hold. What fails is the end of its proof, that the identity avoids compounding contraction.
    """
    if printed:
        segments = 20 + 2 * draw.integer(11)
        depth, x = _across(draw, [-0.5] * segments)
        least = torch.linalg.svdvals(dense_matrix(depth, x))[-1]
        return at_most(
            1 / segments,
            least,
            f"pre, dt J_k = -(I - ee')/2, {segments} segments: 1/N against the least singular"
            " value",
        )
    above: Comparison = at_most
    below: Comparison = at_most
    if draw.integer(CONSTRUCTED):
        model = random_model(draw, "pre", width=4)
        depth = model.depth
        x = draw.log_uniform(-0.5, 1) * draw.normal(3, 4)
        case = describe_model(model)
    else:
        sign = draw.choice((-1, 1))
        segments = 2 + 2 * draw.integer(3)
        depth, x = _across(draw, [sign * draw.uniform(0.05, 0.9) for _ in range(segments)])
        case = "multiples of one projection"
        if sign > 0:
            above = equal
        else:
            below = equal
    c = []
    eye = torch.eye(x.numel(), dtype=x.dtype)
    for sublayer, h, state in _steps(depth, x):
        of_map = torch.linalg.matrix_norm(dense_matrix(sublayer.field, sublayer.given(state)), 2)
        assert isinstance(sublayer.input_norm, Norm), "pre has one"
        c.append(h * float(of_map * sublayer.input_norm.slope(state).max()))
    jacobian = dense_matrix(depth, x)
    parts = [factor - eye for factor in _factors(depth, x)]
    singular_values = torch.linalg.svdvals(jacobian)
    most = math.prod(1 + c_k for c_k in c)
    least = math.prod(max(0.0, 1 - c_k) for c_k in c)
    higher_terms = torch.linalg.matrix_norm(jacobian - eye - torch.stack(parts).sum(0), 2)
    trials = [
        at_most(torch.linalg.matrix_norm(part, 2), c_k, f"dt |J_k|, {case}")
        for part, c_k in zip(parts, c, strict=True)
    ]
    return [
        *trials,
        above(higher_terms, most - 1 - sum(c), f"|J - I - sum dt J_k|, {case}"),
        above(singular_values[0], most, f"the largest singular value, {case}"),
        below(
            least,
            singular_values[-1],
            f"the least value allowed against the least singular value, {case}",
        ),
    ]


def _turning(
    draw: Draw, c: float, segments: int, norm: type[LayerNorm | RMSNorm], free: int
) -> tuple[Depth, Tensor]:
    """A post depth of constant fields b_k, |b_k| = c sqrt(d), each at right angles to the state in
    one plane: sigma(X + b_k)^2 = 1 + c^2. With the state. The norm leaves `free` directions at
    right angles to that plane; LayerNorm's plane has mean 0.
    """
    lost = int(norm is LayerNorm)
    d = lost + 2 + free
    first, second = torch.linalg.qr(
        torch.cat([torch.ones(d, lost, dtype=torch.float64), draw.normal(d, 2)], 1)
    ).Q.T[lost:]
    angle = 0.0
    parts = []
    for k in range(segments):
        field = nn.Linear(d, d)
        direction = math.cos(angle) * second - math.sin(angle) * first
        field.weight = nn.Parameter(torch.zeros(d, d, dtype=torch.float64))
        field.bias = nn.Parameter(c * math.sqrt(d) * direction)
        parts.append(Sublayer(field, KINDS[k % 2], state_norm=norm(d, 0.0).double()))
        angle += math.atan(c)
    state = math.sqrt(d) * first.reshape(1, 1, d)
    return Depth(parts, 1.0).requires_grad_(requires_grad=False), state


@statement(
    "theorem-5.5",
    "Emadi, theorem 5.5",
    "post, eps = 0: J = prod J_N(Y_k)(I + dt J_k) has rank n (d - 2) at most (RMSNorm: d - 1) from"
    " the first norm on, and |J| <= prod g/sigma(Y_k) |I + dt J_k|; constant vectors dt f_k of"
    " length c sqrt(d) at right angles to the state (LayerNorm: of mean 0, as the direction) attain"
    " it at g = 1, (1 + c^2)^(-N/2), if a direction is at right angles to all Y_k; in one plane |J|"
    " is (1 + c^2)^(1/2 - N)",
    share=0.25,
    printed=Printed(
        "the norms' Jacobians are like projections: their product decays exponentially with depth"
        " (along certain directions)",
        0.0,
        0.02,
    ),
)
def no_identity_path(draw: Draw, *, printed: bool) -> Trials:
    """The dense Jacobian of a post depth: its rank, its norm against the product over segments, and
    its norm for constant fields. Without a direction that all norms keep (RMSNorm of width 2,
    LayerNorm of 3) N - 1 projections by the angle atan c follow one another.

    Fields that are not constant may undo it: c R x, R a quarter turn, leaves |J| = 1 of RMSNorm.

    Printed: without a field N(N(x)) = N(x), so that singular values are 0 or 1, after 2 norms as
    after 40; exponential decay would leave less than half. "Along certain directions" holds for
    eps > 0: each norm multiplies x_hat by eps/sigma^3.
    """
    if printed:
        least = []
        for segments in (2, 40):
            depth, x = _turning(draw, 0.0, segments, LayerNorm, 3)
            least.append(float(torch.linalg.svdvals(dense_matrix(depth, x))[x.numel() - 3]))
        return at_most(
            least[1],
            least[0] / 2,
            "no field: the least positive singular value of 40 norms against half of that of 2",
        )
    model = random_model(draw, "post", width=4, eps=0.0)
    x = draw.normal(3, 4)
    bound = 1.0
    for sublayer, h, state in _steps(model.depth, x):
        before = partial(_before_norm, sublayer, h)
        bound *= float(
            torch.linalg.matrix_norm(dense_matrix(before, state), 2)
            * not_none(sublayer.state_norm).slope(before(state)).max()
        )
    values = torch.linalg.svdvals(dense_matrix(model.depth, x))
    lost = 1
    if model.config.norm == "layernorm":
        lost = 2
    c = draw.uniform(0.2, 2)
    segments = 2 * (1 + draw.integer(5))
    norm: type[LayerNorm | RMSNorm] = LayerNorm
    if draw.integer(2):
        norm = RMSNorm
    free = draw.integer(3)
    depth, state = _turning(draw, c, segments, norm, free)
    if free:
        factors = segments / 2
    else:
        factors = segments - 1 / 2
    rank = 3 * (4 - lost)
    return [
        Trial(
            float(values[rank] / values[0]),
            f"the singular value {rank + 1} of 12, {describe_model(model)}",
        ),
        at_most(values[0], bound, f"|J|, {describe_model(model)}"),
        equal(
            torch.linalg.matrix_norm(dense_matrix(depth, state), 2),
            (1 + c * c) ** -factors,
            f"|J| of constant fields, c = {c:.3g}, N = {segments}, {norm.__name__} of width"
            f" {state.shape[-1]}",
        ),
    ]


def _before_norm(sublayer: Sublayer, h: float, x: Tensor) -> Tensor:
    moved: Tensor = x + h * sublayer(x)
    return moved


@statement(
    "theorem-6.1",
    "Emadi, theorem 6.1",
    "values pass two of the four maps: for one token N^(-1/2) each keeps |J| of N layers below e^c,"
    " c = |W_O W_V|/sigma of unscaled maps, sigma the least of all layers",
    1e-9,
    0.1,
    printed=Printed(
        "N^(-1/4) each of the four maps keeps the product over N layers bounded (by e^c)", 0.0, 0.02
    ),
)
def values_path(draw: Draw, *, printed: bool) -> Trials:
    """One token, whose attention is W_O W_V: J_k = W_O W_V J_N(x), here c b^2 (I - ee') with b =
    N^(-1/2), so that |J| = (1 + c/N)^N is at most e^c, and at least e^(c - c^2/(2 N)). Where n
    tokens attend to one, |A| = sqrt(n) is another factor of c.

    Printed: b = N^(-1/4) gives (1 + c N^(-1/2))^N, about e^(c sqrt(N)).
    """
    layers = 100 + 2 * draw.integer(50)
    c = draw.uniform(0.2, 2)
    power = -1.0
    if printed:
        power = -0.5
    depth, x = _across(draw, [c * layers**power] * layers)
    grown = torch.linalg.matrix_norm(dense_matrix(depth, x), 2)
    case = f"one token, N = {layers}, c = {c:.3g}: |J|"
    above = at_most(grown, math.exp(c), f"{case} against e^c")
    if printed:
        return above
    return [
        above,
        at_most(math.exp(c - c * c / (2 * layers)), grown, f"e^(c - c^2/(2 N)) against {case}"),
    ]


@statement(
    "theorem-6.2-shared",
    "ctrans, on Emadi, theorem 6.2",
    "W_Q = W_K = W stands twice in the attention's path: it scales like b^4, and N^(-1/4) is the"
    " exponent as without sharing",
    0.02,
    0.1,
    printed=Printed(
        "shared W_Q = W_K have m = 3 maps, which scale like b^3 and need N^(-1/3)", share=0.02
    ),
)
def shared_queries(draw: Draw, *, printed: bool) -> Trial:
    """|s - 4| of |J(b) - b^2 J(values)| ~ b^s, b = 0.01 to 0.02 the common scale of the maps, J
    dense, J(values) that of uniform rows. Printed: |s - 3|.
    """
    module = Attention(6, 2, causal=False, bias=False).double()
    module.requires_grad_(requires_grad=False)
    x = draw.normal(4, 6)
    query = draw.normal(6, 6)
    value = draw.normal(6, 6)
    out = draw.normal(6, 6)
    paths = []
    plain = torch.kron(torch.full((4, 4), 0.25, dtype=x.dtype), out @ value)
    for b in (0.01, 0.02):
        module.qkv.weight.copy_(b * torch.cat([query, query, value]))
        module.out.weight.copy_(b * out)
        paths.append(float(torch.linalg.matrix_norm(dense_matrix(module, x) - b * b * plain, 2)))
    slope = math.log2(paths[1] / paths[0])
    maps = 4
    if printed:
        maps = 3
    return Trial(abs(slope - maps), f"the attention's path ~ b^{slope:.4f}")

"""Section 3: the image of a norm, its Jacobian, its tangent velocities and the retraction."""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor

from ctrans.base.draw import Draw
from ctrans.dynamics.norm import LayerNorm, SphereNorm
from ctrans.theory.random_norms import EPSILONS, PAPERS, norm_words, random_norm
from ctrans.theory.statement import (
    Printed,
    Trial,
    Trials,
    at_most,
    dense_jacobian,
    equal,
    statement,
)
from solvers import Segment
from solvers.solve import solve

SECTION = 3


def _on_sphere(x: Tensor) -> Tensor:
    """x scaled to |x|^2 = d."""
    on_sphere: Tensor = x * (
        math.sqrt(x.shape[-1]) / torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    )
    return on_sphere


@statement(
    "lemma-1",
    "Kan, lemmas 1 and 10",
    "for eps = 0 a norm's output lies on the ellipsoid |Gamma^-1 (z - beta)|^2 = d",
    1e-8,
    as_printed=True,
)
def on_ellipsoid(draw: Draw) -> Trial:
    """|Gamma^-1 (z - beta)|^2 = d for 20 outputs z of a drawn norm with eps = 0."""
    chosen = random_norm(draw)
    z = chosen(draw.log_uniform(-3, 3) * draw.normal(20, chosen.width))
    square = chosen.coordinates(z).square().sum(-1)
    return equal(
        square,
        torch.full_like(square, chosen.width),
        f"|Gamma^-1 (z - beta)|^2 against d, {norm_words(chosen)}",
    )


@statement(
    "layernorm-image",
    "Kan, lemma 1 and appendix H",
    "LayerNorm's image is the slice of the ellipsoid with 1'Gamma^-1 (z - beta) = 0, all of it",
    1e-8,
    printed=Printed(
        "LayerNorm's outputs are the ellipsoid (as the supremum over it takes them to be)", 1e-10
    ),
)
def fills_slice(draw: Draw, printed: bool) -> Trials:
    """1'Gamma^-1 (z - beta)/d = 0 for 20 outputs z of LayerNorm, and N(u) = beta + Gamma u at a
    random u, |u|^2 = d, 1'u = 0.

    Printed: Of every point of the ellipsoid, some input is sent to it: the point's own coordinates,
    if any.
    """
    if printed:
        return _fills(draw, random_norm(draw, "layernorm"), centre=False)
    chosen = random_norm(draw, "layernorm")
    z = chosen(draw.normal(20, chosen.width))
    flat = equal(
        chosen.coordinates(z).sum(-1) / chosen.width, 0.0 * z[:, 0], "1'Gamma^-1 (z - beta)/d"
    )
    return [flat, _fills(draw, chosen, centre=True)]


@statement(
    "rmsnorm-image",
    "Kan, lemma 10",
    "RMSNorm's image is the whole ellipsoid",
    1e-10,
    as_printed=True,
)
def rmsnorm_fills_ellipsoid(draw: Draw) -> Trial:
    """N(u) = beta + Gamma u under RMSNorm at a random u with |u|^2 = d: that point of the ellipsoid
    is an output.
    """
    return _fills(draw, random_norm(draw, "rmsnorm"), centre=False)


def _fills(draw: Draw, chosen: SphereNorm, centre: bool) -> Trial:
    u = draw.normal(chosen.width)
    u = _on_sphere(u - u.mean() if centre else u)
    z = chosen.beta + chosen.gamma * u
    return equal(
        chosen(u), z, f"the image point nearest to a point of the set, {norm_words(chosen)}"
    )


@statement(
    "image-with-eps",
    "ctrans",
    "with eps > 0 the image is strictly inside: |x_hat|^2 = d v/(v + eps) < d, v the token's"
    " variance",
    1e-10,
)
def inside_with_eps(draw: Draw) -> Trials:
    """|x_hat|^2 = d v/(v + eps) <= d, v = mean((C x)^2), for 20 inputs and eps from 1e-8 to 1."""
    eps = draw.log_uniform(-8, 0)
    chosen = random_norm(draw, eps=eps)
    x = draw.log_uniform(-2, 1) * draw.normal(20, chosen.width)
    variance = chosen.centre(x).square().mean(-1)
    square = chosen.coordinates(chosen(x)).square().sum(-1)
    share = equal(
        square,
        chosen.width * variance / (variance + eps),
        f"|x_hat|^2 against d v/(v + eps), eps = {eps:.2g}",
    )
    return [share, at_most(square.max(), chosen.width, f"|x_hat|^2 against d, eps = {eps:.2g}")]


@statement(
    "lemma-9",
    "Kan, lemma 9; Emadi, lemma A.1",
    "the Jacobian of a norm is diag(gamma)/sigma (C - x_hat x_hat'/d)",
    1e-11,
    printed="diag(gamma)/sigma (I - x_hat x_hat'/d), without 11'/d",
)
def jacobian(draw: Draw, printed: bool) -> Trial:
    """`Norm.jacobian` against autograd, relative to max|gamma|/sigma, for either norm and eps 0,
    1e-5 or 0.1. Printed: eps = 0.
    """
    if printed:
        return _printed_jacobian(draw, None)
    chosen = random_norm(draw, eps=draw.choice(EPSILONS))
    x = draw.of_any_size(chosen.width)
    words = f"closed form against autograd, {norm_words(chosen)}"
    return equal(chosen.jacobian(x), dense_jacobian(chosen, x), words, _steepness(chosen, x))


def _printed_jacobian(draw: Draw, name: str | None) -> Trial:
    """diag(gamma)/sigma - gamma * (x - mu) (x - mu)'/(d sigma^3)."""
    chosen = random_norm(draw, name)
    x = draw.normal(chosen.width)
    away = chosen.centre(x)
    sigma = chosen.sigma(x)
    found = torch.diag(chosen.gamma) / sigma - torch.outer(chosen.gamma * away, away) / (
        chosen.width * sigma**3
    )
    return equal(
        found,
        dense_jacobian(chosen, x),
        f"printed against autograd, {norm_words(chosen)}",
        _steepness(chosen, x),
    )


@statement(
    "lemma-9-rmsnorm",
    "Kan, lemma 9 read for RMSNorm",
    "for RMSNorm the form with I instead of C is exact",
    1e-11,
    as_printed=True,
)
def printed_jacobian_rmsnorm(draw: Draw) -> Trial:
    """J = diag(gamma)/sigma (I - x_hat x_hat'/d) against autograd, for RMSNorm alone, relative to
    max|gamma|/sigma.
    """
    return _printed_jacobian(draw, "rmsnorm")


def _steepness(chosen: SphereNorm, x: Tensor) -> Tensor:
    """max|gamma|/sigma, which bounds |J|; in two dimensions LayerNorm's J itself is 0."""
    return chosen.gamma.abs().max() / chosen.sigma(x).squeeze(-1)


@statement(
    "lemma-9-scale", "Kan, lemma 9", "J(c x) = J(x)/c for c > 0 and eps = 0", 1e-9, as_printed=True
)
def jacobian_of_scaled(draw: Draw) -> Trial:
    """c J(c x) = J(x), both by autograd, for eps = 0 and c from 1e-3 to 1e3, relative to
    max|gamma|/sigma(x).
    """
    chosen = random_norm(draw)
    c = draw.log_uniform(-3, 3)
    x = draw.normal(chosen.width)
    found = c * dense_jacobian(chosen, c * x)
    expected = dense_jacobian(chosen, x)
    return equal(found, expected, f"c J(c x) against J(x), c = {c:.3g}", _steepness(chosen, x))


@statement(
    "xiong-lemma-3",
    "Xiong, lemma 3",
    "|J_N(x)|_2 <= max|gamma|/sigma, which is sqrt(d)/|C x| for gamma = 1",
    printed="|J_LN(x)|_2 = O(sqrt(d)/|x|): no constant holds it where x is nearly constant",
)
def jacobian_norm(draw: Draw, printed: bool) -> Trial:
    """|J|_2 <= max|gamma|/sigma, J by autograd at noise plus an offset of 0.1 to 100, for either
    norm and eps 0, 1e-5 or 0.1.

    Printed: Xiong's form with the constant 1 of gamma = 1, sqrt(d)/|x|, for LayerNorm.
    """
    if printed:
        chosen: SphereNorm = LayerNorm(2 + draw.integer(11), 0.0).double()
        offset = draw.log_uniform(-1, 2)
        x = draw.normal(chosen.width) + offset
        bound = math.sqrt(chosen.width) / torch.linalg.vector_norm(x)
        words = f"|J|_2 of x = {offset:.3g} + noise, d = {chosen.width}, against sqrt(d)/|x|"
    else:
        chosen = random_norm(draw, eps=draw.choice(EPSILONS))
        x = draw.of_any_size(chosen.width) + draw.log_uniform(-1, 2)
        bound = _steepness(chosen, x)
        words = f"|J|_2, {norm_words(chosen)}"
    return at_most(torch.linalg.matrix_norm(dense_jacobian(chosen, x), 2), bound, words)


def printed_tangent(chosen: SphereNorm, x: Tensor, f: Tensor) -> Tensor:
    """f - (x - beta)'Sigma f/((x - beta)'Sigma (x - beta)) (x - beta), Sigma = Gamma^-2 (Kan, eq.
    132).
    """
    away = x - chosen.beta
    weighted = away / chosen.gamma.square()
    return f - away * (weighted * f).sum(-1, keepdim=True) / (weighted * away).sum(-1, keepdim=True)


@statement(
    "tangent-part",
    "Kan, eq. 132",
    "with u = Gamma^-1 (x - beta), q = C Gamma^-1 f, v = Gamma (q - u (u.q)/(u.u)) is tangent to"
    " the norm's image",
    1e-12,
    printed="the same without C, which leaves LayerNorm's slice",
)
def tangent_is_tangent(draw: Draw, printed: bool) -> Trials:
    """u.(v/gamma) = 0, for LayerNorm 1'(v/gamma) = 0, and tangent(x, v) = v: v = tangent(x, f),
    with C, at image points.

    The rates at which v leaves the image are relative to sqrt(d)|f/gamma|. Printed: v by eq. 132,
    without C.
    """
    chosen = random_norm(draw, draw.choice(PAPERS), width=3 + draw.integer(10))
    f = draw.normal(4, chosen.width)
    x = chosen(draw.normal(4, chosen.width))
    if printed:
        v = printed_tangent(chosen, x, f)
    else:
        v = chosen.tangent(x, f)
    rate = v / chosen.gamma
    scale = math.sqrt(chosen.width) * (f / chosen.gamma).norm()
    off = float((chosen.coordinates(x) * rate).sum(-1).abs().max() / scale)
    if chosen.centred:
        tilt = float(rate.sum(-1).abs().max() / scale)
    else:
        tilt = 0.0
    leaves = Trial(
        max(off, tilt),
        f"{norm_words(chosen)}: leaves |u|^2 = d at rate {off:.2g}, 1'u = 0 at {tilt:.2g}",
    )
    if printed:
        return leaves
    return [leaves, equal(chosen.tangent(x, v), v, "the tangent part of a tangent velocity")]


@statement(
    "prop-12",
    "Kan, prop. 12",
    "moved by eq. 132 a state stays on the ellipsoid for all t",
    1e-7,
    0.05,
    as_printed=True,
)
def stays_on_ellipsoid(draw: Draw) -> Trial:
    """|u|^2 = d at t = 1, moved by eq. 132's part of a constant field from three image points of a
    drawn norm.
    """
    chosen, end = _moved(draw, None, printed=True)
    square = chosen.coordinates(end).square().sum(-1)
    return equal(
        square, torch.full_like(square, chosen.width), f"|u|^2 at t = 1, {norm_words(chosen)}"
    )


@statement(
    "prop-12-image",
    "Kan, prop. 12 and the remark before it",
    "moved by the tangent part with C a state stays on the norm's image, so that it is Post-LN's"
    " continuous form",
    1e-7,
    0.05,
    printed="eq. 132 is the continuous form of Post-LN, whose states are outputs of LayerNorm",
)
def stays_on_image(draw: Draw, printed: bool) -> Trial:
    """`Norm.constraint_violation` at t = 1, moved by the tangent part, with C, of a constant field
    from three outputs of a drawn norm.

    Printed: by eq. 132's part, without C, from outputs of LayerNorm.
    """
    chosen, end = _moved(draw, "layernorm" if printed else None, printed)
    off = float(chosen.constraint_violation(end).max())
    return Trial(off, f"off the image at t = 1, {norm_words(chosen)}: {off:.2g}")


def _moved(draw: Draw, name: str | None, printed: bool) -> tuple[SphereNorm, Tensor]:
    """A norm, and three points of its image moved for t = 1 by the tangent part of a constant
    field: that of eq. 132 if `printed`, else with C.
    """
    chosen = random_norm(draw, name, width=3 + draw.integer(6))
    x0 = chosen(draw.normal(3, chosen.width))
    f = draw.normal(3, chosen.width)
    tangent = partial(printed_tangent, chosen) if printed else chosen.tangent
    segment = Segment(0, 1, lambda t, x: tangent(x, f))
    return chosen, solve([segment], x0, method="tsit5", rtol=1e-10, atol=1e-12).x1


@statement(
    "retraction",
    "ctrans",
    "R(y) = beta + Gamma w sqrt(d)/|w|, w = C Gamma^-1 (y - beta), is on the image, and the"
    " identity there",
    1e-8,
)
def retraction(draw: Draw) -> Trials:
    """R(z) = z at five image points, and `Norm.constraint_violation` of R(y) at five random y."""
    chosen = random_norm(draw)
    z = chosen(draw.normal(5, chosen.width))
    y = 3 * draw.normal(5, chosen.width)
    return [
        equal(chosen.retract(z), z, f"R is the identity on the image, {norm_words(chosen)}"),
        Trial(
            float(chosen.constraint_violation(chosen.retract(y)).max()),
            f"R(y) is on the image, {norm_words(chosen)}",
        ),
    ]

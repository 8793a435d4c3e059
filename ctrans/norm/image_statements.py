"""Section 3: the image of a norm and its Jacobian."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ctrans.norm import LayerNorm, SphereNorm
from ctrans.norm.random_norms import norm_words, random_norm
from ctrans.statement import Draw, Printed, Trial, at_most, dense_jacobian, equal, statement, worst


def _on_sphere(x: Tensor) -> Tensor:
    """x scaled to |x|^2 = d."""
    on_sphere: Tensor = x * (math.sqrt(x.shape[-1]) / torch.linalg.vector_norm(x, dim=-1, keepdim=True))
    return on_sphere


@statement(
    "lemma-1",
    3,
    "Kan, lemmas 1 and 10",
    "for eps = 0 a norm's output lies on the ellipsoid |Gamma^-1 (z - beta)|^2 = d",
    1e-8,
    as_printed=True,
)
def on_ellipsoid(draw: Draw) -> Trial:
    """|Gamma^-1 (z - beta)|^2 = d for 20 outputs z of a drawn norm with eps = 0."""
    chosen = random_norm(draw)
    z = chosen(draw.log_uniform(-3, 3) * draw.normal(20, chosen.width))
    square = ((z - chosen.beta) / chosen.gamma).square().sum(-1)
    return equal(square, torch.full_like(square, chosen.width), f"|Gamma^-1 (z - beta)|^2 against d, {norm_words(chosen)}")


@statement(
    "layernorm-image",
    3,
    "Kan, lemma 1 and appendix H",
    "LayerNorm's image is the slice of the ellipsoid with 1'Gamma^-1 (z - beta) = 0, all of it",
    1e-8,
    printed=Printed("LayerNorm's outputs are the ellipsoid (as the supremum over it takes them to be)", 1e-10),
)
def fills_slice(draw: Draw, printed: bool) -> Trial:
    """1'Gamma^-1 (z - beta)/d = 0 for 20 outputs z of LayerNorm, and N(u) = beta + Gamma u at a random u, |u|^2 = d, 1'u = 0.

    Printed: Of every point of the ellipsoid, some input is sent to it: the point's own coordinates, if any.
    """
    if printed:
        return _fills(draw, random_norm(draw, "layernorm"), centre=False)
    chosen = random_norm(draw, "layernorm")
    z = chosen(draw.normal(20, chosen.width))
    flat = equal(((z - chosen.beta) / chosen.gamma).sum(-1) / chosen.width, 0.0 * z[:, 0], "1'Gamma^-1 (z - beta)/d")
    return worst(flat, _fills(draw, chosen, centre=True))


@statement("rmsnorm-image", 3, "Kan, lemma 10", "RMSNorm's image is the whole ellipsoid", 1e-10, as_printed=True)
def rmsnorm_fills_ellipsoid(draw: Draw) -> Trial:
    """N(u) = beta + Gamma u under RMSNorm at a random u with |u|^2 = d: that point of the ellipsoid is an output."""
    return _fills(draw, random_norm(draw, "rmsnorm"), centre=False)


def _fills(draw: Draw, chosen: SphereNorm, centre: bool) -> Trial:
    u = draw.normal(chosen.width)
    u = _on_sphere(u - u.mean() if centre else u)
    z = chosen.beta + chosen.gamma * u
    return equal(chosen(u), z, f"the image point nearest to a point of the set, {norm_words(chosen)}")


@statement(
    "image-with-eps",
    3,
    "ctrans",
    "with eps > 0 the image is strictly inside: |x_hat|^2 = d v/(v + eps) < d, v the token's variance",
    1e-10,
)
def inside_with_eps(draw: Draw) -> Trial:
    """|x_hat|^2 = d v/(v + eps) <= d, v = mean((C x)^2), for 20 inputs and eps from 1e-8 to 1."""
    eps = draw.log_uniform(-8, 0)
    chosen = random_norm(draw, eps=eps)
    x = draw.log_uniform(-2, 1) * draw.normal(20, chosen.width)
    variance = chosen.centre(x).square().mean(-1)
    square = chosen.coordinates(chosen(x)).square().sum(-1)
    share = equal(square, chosen.width * variance / (variance + eps), f"|x_hat|^2 against d v/(v + eps), eps = {eps:.2g}")
    return worst(share, at_most(square.max(), chosen.width, f"|x_hat|^2 against d, eps = {eps:.2g}"))


@statement(
    "lemma-9",
    3,
    "Kan, lemma 9; Emadi, lemma A.1",
    "the Jacobian of a norm is diag(gamma)/sigma (C - x_hat x_hat'/d)",
    1e-11,
    printed=Printed("diag(gamma)/sigma (I - x_hat x_hat'/d), without 11'/d", 1e-11),
)
def jacobian(draw: Draw, printed: bool) -> Trial:
    """`Norm.jacobian` against autograd, relative to max|gamma|/sigma, for either norm and eps 0, 1e-5 or 0.1. Printed: eps = 0."""
    if printed:
        return _printed_jacobian(draw, None)
    chosen = random_norm(draw, eps=draw.choice((0.0, 1e-5, 0.1)))
    x = draw.log_uniform(-1, 1) * draw.normal(chosen.width)
    words = f"closed form against autograd, {norm_words(chosen)}"
    return equal(chosen.jacobian(x), dense_jacobian(chosen, x), words, _steepness(chosen, x))


def _printed_jacobian(draw: Draw, name: str | None) -> Trial:
    """diag(gamma)/sigma - gamma * (x - mu) (x - mu)'/(d sigma^3)."""
    chosen = random_norm(draw, name)
    x = draw.normal(chosen.width)
    away, sigma = chosen.centre(x), chosen.sigma(x)
    found = torch.diag(chosen.gamma) / sigma - torch.outer(chosen.gamma * away, away) / (chosen.width * sigma**3)
    return equal(found, dense_jacobian(chosen, x), f"printed against autograd, {norm_words(chosen)}", _steepness(chosen, x))


@statement(
    "lemma-9-rmsnorm",
    3,
    "Kan, lemma 9 read for RMSNorm",
    "for RMSNorm the form with I instead of C is exact",
    1e-11,
    as_printed=True,
)
def printed_jacobian_rmsnorm(draw: Draw) -> Trial:
    """J = diag(gamma)/sigma (I - x_hat x_hat'/d) against autograd, for RMSNorm alone, relative to max|gamma|/sigma."""
    return _printed_jacobian(draw, "rmsnorm")


def _steepness(chosen: SphereNorm, x: Tensor) -> Tensor:
    """max|gamma|/sigma, which bounds |J|; in two dimensions LayerNorm's J itself is 0."""
    return chosen.gamma.abs().max() / chosen.sigma(x).squeeze(-1)


@statement("lemma-9-scale", 3, "Kan, lemma 9", "J(c x) = J(x)/c for c > 0 and eps = 0", 1e-9, as_printed=True)
def jacobian_of_scaled(draw: Draw) -> Trial:
    """c J(c x) = J(x), both by autograd, for eps = 0 and c from 1e-3 to 1e3, relative to max|gamma|/sigma(x)."""
    chosen, c = random_norm(draw), draw.log_uniform(-3, 3)
    x = draw.normal(chosen.width)
    found, expected = c * dense_jacobian(chosen, c * x), dense_jacobian(chosen, x)
    return equal(found, expected, f"c J(c x) against J(x), c = {c:.3g}", _steepness(chosen, x))


@statement(
    "xiong-lemma-3",
    3,
    "Xiong, lemma 3",
    "|J_N(x)|_2 <= max|gamma|/sigma, which is sqrt(d)/|C x| for gamma = 1",
    printed=Printed("|J_LN(x)|_2 = O(sqrt(d)/|x|): no constant holds it where x is nearly constant"),
)
def jacobian_norm(draw: Draw, printed: bool) -> Trial:
    """|J|_2 <= max|gamma|/sigma, J by autograd at noise plus an offset of 0.1 to 100, for either norm and eps 0, 1e-5 or 0.1.

    Printed: Xiong's form with the constant 1 of gamma = 1, sqrt(d)/|x|, for LayerNorm.
    """
    if printed:
        chosen: SphereNorm = LayerNorm(2 + draw.integer(11), 0.0).double()
        offset = draw.log_uniform(-1, 2)
        x = draw.normal(chosen.width) + offset
        bound = math.sqrt(chosen.width) / torch.linalg.vector_norm(x)
        words = f"|J|_2 of x = {offset:.3g} + noise, d = {chosen.width}, against sqrt(d)/|x|"
    else:
        chosen = random_norm(draw, eps=draw.choice((0.0, 1e-5, 0.1)))
        x = draw.log_uniform(-1, 1) * draw.normal(chosen.width) + draw.log_uniform(-1, 2)
        bound, words = _steepness(chosen, x), f"|J|_2, {norm_words(chosen)}"
    return at_most(torch.linalg.matrix_norm(dense_jacobian(chosen, x), 2), bound, words)

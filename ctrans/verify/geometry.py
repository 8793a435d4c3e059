"""Section 3: the image of a norm and its Jacobian."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ctrans.fields import spectral_norm
from ctrans.norm import LayerNorm, SphereNorm
from ctrans.verify.draws import below, noise, norm, norm_words, one_of, size
from ctrans.verify.statement import Check, Statement, Trial, as_printed, at_most, equal, worst


def _on_sphere(x: Tensor) -> Tensor:
    """x scaled to |x|^2 = d."""
    on_sphere: Tensor = x * (math.sqrt(x.shape[-1]) / torch.linalg.vector_norm(x, dim=-1, keepdim=True))
    return on_sphere


def on_ellipsoid(generator: torch.Generator) -> Trial:
    """|Gamma^-1 (z - beta)|^2 = d for 20 outputs z of a drawn norm with eps = 0."""
    chosen = norm(generator)
    z = chosen(size(generator, -3, 3) * noise(generator, 20, chosen.width))
    square = ((z - chosen.beta) / chosen.gamma).square().sum(-1)
    return equal(square, torch.full_like(square, chosen.width), f"|Gamma^-1 (z - beta)|^2 against d, {norm_words(chosen)}")


def fills_ellipsoid(generator: torch.Generator) -> Trial:
    """Of every point of the ellipsoid, some input is sent to it: the point's own coordinates, if any."""
    return _fills(generator, norm(generator, "layernorm"), centre=False)


def fills_slice(generator: torch.Generator) -> Trial:
    """1'Gamma^-1 (z - beta)/d = 0 for 20 outputs z of LayerNorm, and N(u) = beta + Gamma u at a random u, |u|^2 = d, 1'u = 0."""
    chosen = norm(generator, "layernorm")
    z = chosen(noise(generator, 20, chosen.width))
    flat = equal(((z - chosen.beta) / chosen.gamma).sum(-1) / chosen.width, 0.0 * z[:, 0], "1'Gamma^-1 (z - beta)/d")
    return worst(flat, _fills(generator, chosen, centre=True))


def rmsnorm_fills_ellipsoid(generator: torch.Generator) -> Trial:
    """N(u) = beta + Gamma u under RMSNorm at a random u with |u|^2 = d: that point of the ellipsoid is an output."""
    return _fills(generator, norm(generator, "rmsnorm"), centre=False)


def _fills(generator: torch.Generator, chosen: SphereNorm, centre: bool) -> Trial:
    u = noise(generator, chosen.width)
    u = _on_sphere(u - u.mean() if centre else u)
    z = chosen.beta + chosen.gamma * u
    return equal(chosen(u), z, f"the image point nearest to a point of the set, {norm_words(chosen)}")


def inside_with_eps(generator: torch.Generator) -> Trial:
    """|x_hat|^2 = d v/(v + eps) <= d, v = mean((C x)^2), for 20 inputs and eps from 1e-8 to 1."""
    eps = size(generator, -8, 0)
    chosen = norm(generator, eps=eps)
    x = size(generator, -2, 1) * noise(generator, 20, chosen.width)
    variance = chosen.centre(x).square().mean(-1)
    square = chosen.coordinates(chosen(x)).square().sum(-1)
    share = equal(square, chosen.width * variance / (variance + eps), f"|x_hat|^2 against d v/(v + eps), eps = {eps:.2g}")
    return worst(share, at_most(square.max(), chosen.width, f"|x_hat|^2 against d, eps = {eps:.2g}"))


def printed_jacobian(generator: torch.Generator) -> Trial:
    """J = diag(gamma)/sigma (I - x_hat x_hat'/d) against autograd, for LayerNorm or RMSNorm, relative to max|gamma|/sigma."""
    return _printed_jacobian(generator, norm(generator))


def printed_jacobian_rmsnorm(generator: torch.Generator) -> Trial:
    """J = diag(gamma)/sigma (I - x_hat x_hat'/d) against autograd, for RMSNorm alone, relative to max|gamma|/sigma."""
    return _printed_jacobian(generator, norm(generator, "rmsnorm"))


def _printed_jacobian(generator: torch.Generator, chosen: SphereNorm) -> Trial:
    """diag(gamma)/sigma - gamma * (x - mu) (x - mu)'/(d sigma^3)."""
    x = noise(generator, chosen.width)
    away, sigma = chosen.centre(x), chosen.sigma(x)
    found = torch.diag(chosen.gamma) / sigma - torch.outer(chosen.gamma * away, away) / (chosen.width * sigma**3)
    return equal(found, _autograd(chosen, x), f"printed against autograd, {norm_words(chosen)}", _steepness(chosen, x))


def jacobian(generator: torch.Generator) -> Trial:
    """`Norm.jacobian` against autograd, relative to max|gamma|/sigma, for either norm and eps 0, 1e-5 or 0.1."""
    chosen = norm(generator, eps=one_of(generator, (0.0, 1e-5, 0.1)))
    x = size(generator, -1, 1) * noise(generator, chosen.width)
    exact = _autograd(chosen, x)
    return equal(chosen.jacobian(x), exact, f"closed form against autograd, {norm_words(chosen)}", _steepness(chosen, x))


def _steepness(chosen: SphereNorm, x: Tensor) -> Tensor:
    """max|gamma|/sigma, which bounds |J|; in two dimensions LayerNorm's J itself is 0."""
    return chosen.gamma.abs().max() / chosen.sigma(x).squeeze(-1)


def _autograd(chosen: SphereNorm, x: Tensor) -> Tensor:
    dense: Tensor = torch.autograd.functional.jacobian(chosen, x)  # type: ignore[no-untyped-call, unused-ignore]  # torch gives it no types
    return dense


def jacobian_of_scaled(generator: torch.Generator) -> Trial:
    """c J(c x) = J(x), both by autograd, for eps = 0 and c from 1e-3 to 1e3, relative to max|gamma|/sigma(x)."""
    chosen, c = norm(generator), size(generator, -3, 3)
    x = noise(generator, chosen.width)
    found, expected = c * _autograd(chosen, c * x), _autograd(chosen, x)
    return equal(found, expected, f"c J(c x) against J(x), c = {c:.3g}", _steepness(chosen, x))


def jacobian_norm(generator: torch.Generator) -> Trial:
    """|J|_2 <= max|gamma|/sigma, J by autograd at noise plus an offset of 0.1 to 100, for either norm and eps 0, 1e-5 or 0.1."""
    chosen = norm(generator, eps=one_of(generator, (0.0, 1e-5, 0.1)))
    x = size(generator, -1, 1) * noise(generator, chosen.width) + size(generator, -1, 2)
    return at_most(
        spectral_norm(_autograd(chosen, x)), chosen.gamma.abs().max() / chosen.sigma(x), f"|J|_2, {norm_words(chosen)}"
    )


def jacobian_norm_by_length(generator: torch.Generator) -> Trial:
    """Xiong's form with the constant 1 of gamma = 1: sqrt(d)/|x|."""
    chosen = LayerNorm(2 + below(generator, 11), 0.0).double()
    offset = size(generator, -1, 2)
    x = noise(generator, chosen.width) + offset
    bound = math.sqrt(chosen.width) / torch.linalg.vector_norm(x)
    return at_most(
        spectral_norm(_autograd(chosen, x)), bound, f"|J|_2 of x = {offset:.3g} + noise, d = {chosen.width}, against sqrt(d)/|x|"
    )


STATEMENTS: tuple[Statement, ...] = (
    as_printed(
        "lemma-1",
        3,
        "Kan, lemmas 1 and 10",
        "for eps = 0 a norm's output lies on the ellipsoid |Gamma^-1 (z - beta)|^2 = d",
        Check(on_ellipsoid, 1e-8),
    ),
    Statement(
        "layernorm-image",
        3,
        "Kan, lemma 1 and appendix H",
        "LayerNorm's image is the slice of the ellipsoid with 1'Gamma^-1 (z - beta) = 0, all of it",
        Check(fills_slice, 1e-8),
        Check(fills_ellipsoid, 1e-10),
        "LayerNorm's outputs are the ellipsoid (as the supremum over it takes them to be)",
    ),
    as_printed(
        "rmsnorm-image",
        3,
        "Kan, lemma 10",
        "RMSNorm's image is the whole ellipsoid",
        Check(rmsnorm_fills_ellipsoid, 1e-10),
    ),
    Statement(
        "image-with-eps",
        3,
        "ctrans",
        "with eps > 0 the image is strictly inside: |x_hat|^2 = d v/(v + eps) < d, v the token's variance",
        Check(inside_with_eps, 1e-10),
    ),
    Statement(
        "lemma-9",
        3,
        "Kan, lemma 9; Emadi, lemma A.1",
        "the Jacobian of a norm is diag(gamma)/sigma (C - x_hat x_hat'/d)",
        Check(jacobian, 1e-11),
        Check(printed_jacobian, 1e-11),
        "diag(gamma)/sigma (I - x_hat x_hat'/d), without 11'/d",
    ),
    as_printed(
        "lemma-9-rmsnorm",
        3,
        "Kan, lemma 9 read for RMSNorm",
        "for RMSNorm the form with I instead of C is exact",
        Check(printed_jacobian_rmsnorm, 1e-11),
    ),
    as_printed("lemma-9-scale", 3, "Kan, lemma 9", "J(c x) = J(x)/c for c > 0 and eps = 0", Check(jacobian_of_scaled, 1e-9)),
    Statement(
        "xiong-lemma-3",
        3,
        "Xiong, lemma 3",
        "|J_N(x)|_2 <= max|gamma|/sigma, which is sqrt(d)/|C x| for gamma = 1",
        Check(jacobian_norm),
        Check(jacobian_norm_by_length),
        "|J_LN(x)|_2 = O(sqrt(d)/|x|): no constant holds it where x is nearly constant",
    ),
)

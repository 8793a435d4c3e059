"""Section 3: velocities tangent to a norm's image, and the retraction."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ctrans.norm import SphereNorm
from ctrans.norm.random_norms import PAPERS, norm_words, random_norm
from ctrans.statement import Draw, Printed, Trial, equal, statement, worst
from solvers import Segment, solve
from solvers.segment import Map


def printed_tangent(chosen: SphereNorm, x: Tensor, f: Tensor) -> Tensor:
    """f - (x - beta)'Sigma f/((x - beta)'Sigma (x - beta)) (x - beta), Sigma = Gamma^-2 (Kan, eq. 132)."""
    away = x - chosen.beta
    weighted = away / chosen.gamma.square()
    return f - away * (weighted * f).sum(-1, keepdim=True) / (weighted * away).sum(-1, keepdim=True)


@statement(
    "tangent-part",
    3,
    "Kan, eq. 132",
    "with u = Gamma^-1 (x - beta), q = C Gamma^-1 f, v = Gamma (q - u (u.q)/(u.u)) is tangent to the norm's image",
    1e-12,
    printed=Printed("the same without C, which leaves LayerNorm's slice", 1e-12),
)
def tangent_is_tangent(draw: Draw, printed: bool) -> Trial:
    """u.(v/gamma) = 0, for LayerNorm 1'(v/gamma) = 0, and tangent(x, v) = v: v = tangent(x, f), with C, at image points.

    The rates at which v leaves the image are relative to sqrt(d)|f/gamma|. Printed: v by eq. 132, without C.
    """
    chosen = random_norm(draw, draw.choice(PAPERS), width=3 + draw.integer(10))
    f = draw.normal(4, chosen.width)
    x = chosen(draw.normal(4, chosen.width))
    v = printed_tangent(chosen, x, f) if printed else chosen.tangent(x, f)
    rate, scale = v / chosen.gamma, math.sqrt(chosen.width) * (f / chosen.gamma).norm()
    off = float((chosen.coordinates(x) * rate).sum(-1).abs().max() / scale)
    tilt = float(rate.sum(-1).abs().max() / scale) if chosen.centred else 0.0
    leaves = Trial(max(off, tilt), f"{norm_words(chosen)}: leaves |u|^2 = d at rate {off:.2g}, 1'u = 0 at {tilt:.2g}")
    return leaves if printed else worst(leaves, equal(chosen.tangent(x, v), v, "the tangent part of a tangent velocity"))


@statement(
    "prop-12", 3, "Kan, prop. 12", "moved by eq. 132 a state stays on the ellipsoid for all t", 1e-7, 0.05, as_printed=True
)
def stays_on_ellipsoid(draw: Draw) -> Trial:
    """|u|^2 = d at t = 1, moved by eq. 132's part of a constant field from three image points of a drawn norm."""
    chosen, x0, f = _motion(draw)
    end = _solve(lambda x: printed_tangent(chosen, x, f), x0)
    square = ((end - chosen.beta) / chosen.gamma).square().sum(-1)
    return equal(square, torch.full_like(square, chosen.width), f"|u|^2 at t = 1, {norm_words(chosen)}")


@statement(
    "prop-12-image",
    3,
    "Kan, prop. 12 and the remark before it",
    "moved by the tangent part with C a state stays on the norm's image, so that it is Post-LN's continuous form",
    1e-7,
    0.05,
    printed=Printed("eq. 132 is the continuous form of Post-LN, whose states are outputs of LayerNorm", 1e-7, 0.05),
)
def stays_on_image(draw: Draw, printed: bool) -> Trial:
    """`Norm.constraint_violation` at t = 1, moved by the tangent part, with C, of a constant field from three outputs of a drawn norm.

    Printed: by eq. 132's part, without C, from outputs of LayerNorm.
    """
    chosen, x0, f = _motion(draw, "layernorm" if printed else None)
    end = _solve(lambda x: printed_tangent(chosen, x, f) if printed else chosen.tangent(x, f), x0)
    off = float(chosen.constraint_violation(end).max())
    return Trial(off, f"off the image at t = 1, {norm_words(chosen)}: {off:.2g}")


def _motion(draw: Draw, name: str | None = None) -> tuple[SphereNorm, Tensor, Tensor]:
    """A norm with a constant field, from points of its image."""
    chosen = random_norm(draw, name, width=3 + draw.integer(6))
    return chosen, chosen(draw.normal(3, chosen.width)), draw.normal(3, chosen.width)


def _solve(velocity: Map, x0: Tensor) -> Tensor:
    return solve([Segment(0, 1, lambda t, x: velocity(x))], x0, method="tsit5", rtol=1e-10, atol=1e-12).x1


@statement(
    "retraction",
    3,
    "ctrans",
    "R(y) = beta + Gamma w sqrt(d)/|w|, w = C Gamma^-1 (y - beta), is on the image, and the identity there",
    1e-8,
)
def retraction(draw: Draw) -> Trial:
    """R(z) = z at five image points, and `Norm.constraint_violation` of R(y) at five random y."""
    chosen = random_norm(draw)
    z, y = chosen(draw.normal(5, chosen.width)), 3 * draw.normal(5, chosen.width)
    return worst(
        equal(chosen.retract(z), z, f"R is the identity on the image, {norm_words(chosen)}"),
        Trial(float(chosen.constraint_violation(chosen.retract(y)).max()), f"R(y) is on the image, {norm_words(chosen)}"),
    )

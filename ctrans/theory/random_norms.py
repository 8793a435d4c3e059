"""Random norms, as after training, for tests of statements."""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import Tensor

from ctrans.base.draw import Draw
from ctrans.dynamics.norm import NORMS, Norm, SphereNorm, SquashNorm

AnyNorm = TypeVar("AnyNorm", bound=Norm)
PAPERS = ("layernorm", "rmsnorm")
"""The norms of the papers' statements."""
EPSILONS = (0.0, 1e-5, 0.1)
"""None, a usual one and a large one."""
SQUASHING = sorted(name for name, kind in NORMS.items() if isinstance(kind(2), SquashNorm))


def random_norm(
    draw: Draw,
    name: str | None = None,
    *,
    width: int | None = None,
    eps: float = 0.0,
    signed: bool = True,
) -> SphereNorm:
    """A norm of the papers with gains from 1/4 to 4 of either sign, and offsets N(0, 1/4) if it has
    them.
    """
    norm = NORMS[name or draw.choice(PAPERS)](width or 2 + draw.integer(11), eps).double()
    assert isinstance(norm, SphereNorm), "the papers' norms divide a token by its size"
    return learned(draw, norm, 0.5, signed=signed).requires_grad_(requires_grad=False)


@torch.no_grad()
def learned(draw: Draw, norm: AnyNorm, spread: float, *, signed: bool = True) -> AnyNorm:
    """The norm with gains +-e^(spread N(0, 1)), clipped to e^(+-3 spread), and offsets spread N(0,
    1).
    """
    if norm.gains == "one":
        for parameter in norm.parameters():
            parameter.mul_((spread * draw.normal(1).clamp(-3, 3)).exp())
        return norm
    gains = (spread * draw.normal(norm.width).clamp(-3, 3)).exp()
    if signed:
        gains = gains * draw.signs(norm.width)
    norm.gamma.copy_(gains)
    norm.beta.copy_(spread * draw.normal(norm.width))  # without offsets, beta is a new tensor
    return norm


def any_norm(draw: Draw, names: list[str] | None = None, *, eps: float = 0.0) -> Norm:
    """A norm of the table as after training: gains of either sign, offsets, and its inner
    parameters.
    """
    norm = (
        NORMS[draw.choice(names or sorted(NORMS))](2 + draw.integer(11), eps)
        .double()
        .requires_grad_(requires_grad=False)
    )
    for parameter in norm.parameters():
        parameter.mul_(
            draw.signs(*parameter.shape) * (0.5 * draw.normal(*parameter.shape).clamp(-3, 3)).exp()
        )
        if not parameter.any():
            parameter.add_(0.5 * draw.normal(*parameter.shape))
    return norm


def norm_and_costate(draw: Draw, tokens: int | None = None) -> tuple[SphereNorm, Tensor]:
    """A norm of the papers, and a costate of up to 6 tokens, or of as many as given."""
    norm = random_norm(draw, width=3 + draw.integer(6))
    return norm, draw.normal(tokens or 1 + draw.integer(6), norm.width)


def describe_norm(norm: Norm) -> str:
    """A short description of the norm, for a test case."""
    return f"{type(norm).__name__}, d = {norm.width}"

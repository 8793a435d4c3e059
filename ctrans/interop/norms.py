"""Other libraries' norms as geometry: an adapter that holds the model's own module, told by what it computes."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from itertools import product
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ctrans.interop.rounding import unit
from ctrans.norm import SphereNorm, check_norm

EPS_NAMES = ("eps", "variance_epsilon")
"""Attributes under which norms keep eps."""
UNSAID_EPS = 1e-5
"""What torch's layer_norm is called with where a module keeps no eps, as nanoGPT's."""


@dataclasses.dataclass(frozen=True)
class Form:
    """Which norm a module is: whether it centres, and what is added to its weight to make gamma (Gemma: 1 + weight)."""

    centred: bool
    shift: float
    eps: float


class AdaptedNorm(SphereNorm):
    """z = (shift + weight) * x_hat + bias, computed by another library's module, whose parameters it shares."""

    centred = False  # each object has its own
    module: Any  # of any library, with a weight

    def __init__(self, module: nn.Module, form: Form):
        super().__init__()
        self.module, self.form, self.shift = module, form, form.shift
        self.width, self.eps = check_norm(_width(module) or 0, form.eps)
        self.centred = form.centred
        if getattr(module, "weight", None) is None:
            self.register_buffer("one", torch.ones(self.width), persistent=False)

    @property
    def gamma(self) -> Float[Tensor, " width"]:
        weight: Tensor | None = getattr(self.module, "weight", None)
        if weight is None:
            one: Tensor = self.get_buffer("one")
            return one
        return weight if self.shift == 0 else self.shift + weight

    @property
    def beta(self) -> Float[Tensor, " width"]:
        bias = getattr(self.module, "bias", None)
        return torch.zeros_like(self.gamma) if bias is None else bias

    def forward(self, x: Float[Tensor, "*batch width"]) -> Float[Tensor, "*batch width"]:
        # the modules of many models round to float32 on the way: theory's float64 must not
        return self.gamma * self.standardize(x) + self.beta if x.dtype == torch.float64 else self.module(x)


def as_norm(module: nn.Module) -> AdaptedNorm | None:
    """The module as a `Norm`, or None if it is none that the geometry knows: it must compute gamma * x_hat + beta, which is tried
    on numbers of unit size and on some so small that eps shows.
    """
    weight, width = getattr(module, "weight", None), _width(module)
    if width is None or width < 2:
        return None
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4, width, generator=generator) * torch.tensor([[1.0], [1.0], [1e-2], [1e-3]])
    x = x + 0.3 * x.abs().amax(-1, keepdim=True)  # a mean, which only centring removes
    x = x if weight is None else x.to(weight)
    with torch.no_grad():
        z = module(x)
        if not isinstance(z, Tensor) or z.shape != x.shape:
            return None
        norms = [AdaptedNorm(module, form) for form in _forms(module)]
        nearest = min(norms, key=lambda norm: _miss(norm, x, z))
        return nearest if _miss(nearest, x, z) <= 64 * unit(z.dtype) else None


def _width(module: nn.Module) -> int | None:
    """Of how many numbers the module may be a norm: by its weight, or what it says where it has none; None where it is none."""
    weight, shape = getattr(module, "weight", None), getattr(module, "normalized_shape", None)
    if isinstance(weight, Tensor):
        return weight.numel() if weight.dim() == 1 and weight.is_floating_point() else None
    return int(shape[0]) if weight is None and isinstance(shape, tuple) and len(shape) == 1 else None


def _forms(module: nn.Module) -> Iterator[Form]:
    known = [value for name in EPS_NAMES if isinstance(value := getattr(module, name, None), float)]
    for centred, shift in product((True, False), (0.0, 1.0)):
        yield Form(centred, shift, known[0] if known else UNSAID_EPS)


def _miss(norm: AdaptedNorm, x: Tensor, z: Tensor) -> float:
    """How far z is from the norm's formula, relative to 1 + abs(z)."""
    expected = norm.gamma * norm.standardize(x) + norm.beta
    return float(((z - expected).abs() / (1 + z.abs())).max())

"""Foreign blocks of attention and FFN at once with a norm for each (GPT-NeoX, Falcon), X <- X + attention(N_1 X) + ffn(N_2 X).

x_hat is the input norm of both and gains and offsets belong to the maps: N_i X = gamma_i x_hat + beta_i.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from ctrans.fields import BranchGains
from ctrans.interop.norms import AdaptedNorm
from ctrans.norm import SphereNorm


class WithoutGain(SphereNorm):
    """x_hat of another library's norm: gamma = 1, beta = 0."""

    centred = False  # each object has its own

    def __init__(self, norm: AdaptedNorm):
        super().__init__()
        self.width, self.eps, self.centred = norm.width, norm.eps, norm.centred
        self.module, self.shift = norm.module, 0.0
        self.register_buffer("one", torch.ones_like(norm.gamma.detach()), persistent=False)

    @property
    def gamma(self) -> Float[Tensor, " width"]:
        return self.get_buffer("one")

    @property
    def beta(self) -> Float[Tensor, " width"]:
        return torch.zeros_like(self.gamma)

    def forward(self, x: Float[Tensor, "*batch width"]) -> Float[Tensor, "*batch width"]:
        return self.standardize(x)


class GainsOf(BranchGains):
    """The gain and offset of a norm of the model, which it shares."""

    def __init__(self, norm: AdaptedNorm):
        super().__init__()
        self.norm = norm

    @property
    def gamma(self) -> Float[Tensor, " width"]:
        return self.norm.gamma

    @property
    def beta(self) -> Float[Tensor, " width"]:
        return self.norm.beta

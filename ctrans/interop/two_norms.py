"""Foreign blocks of attention and FFN at once with a norm for each (GPT-NeoX, Falcon), X <- X + attention(N_1 X) + ffn(N_2 X).

x_hat is the input norm of both and gains and offsets belong to the maps: N_i X = gamma_i x_hat + beta_i.
"""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor

from ctrans.fields import BranchGains
from ctrans.interop.norms import AdaptedNorm, UnitGains


class WithoutGain(UnitGains):
    """x_hat of another library's norm."""

    def __init__(self, norm: AdaptedNorm):
        super().__init__(norm.width, norm.eps, norm.centred, norm.added)
        self.to(norm.gamma.detach())
        self.module = norm.module


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

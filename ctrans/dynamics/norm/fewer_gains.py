"""Sphere norms with fewer trained gains: none, or one number that all channels share."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from ctrans.base.shapes import PerChannel, Vectors
from ctrans.dynamics.norm.norm import ConstantGain, check_bias, check_norm
from ctrans.dynamics.norm.spheres import SphereNorm


class PlainNorm(ConstantGain, SphereNorm):
    """z = c x_hat without parameters: gamma = c in every channel, beta = 0."""

    def __init__(self, width: int, eps: float = 1e-5, *, bias: bool = False):
        super().__init__()
        check_bias(type(self).__name__, bias=bias)
        self.width, self.eps = check_norm(width, eps)
        self.make_constant(self.width, self.constant_at(width))

    @staticmethod
    def constant_at(width: int) -> float:
        """c for that width."""
        return 1.0

    def forward(self, x: Vectors) -> Vectors:
        if self.centred:
            x_hat = F.layer_norm(x, (self.width,), eps=self.eps)
        else:
            x_hat = F.rms_norm(x, (self.width,), eps=self.eps)
        if self.constant == 1:
            return x_hat
        return x_hat * self.constant


class PlainLayerNorm(PlainNorm):
    """z = (x - mean(x))/sqrt(var(x) + eps): H(P) = sqrt(d) sum_j |C p_j|, that of LayerNorm at
    gamma = 1, beta = 0 (OLMo 1).
    """

    centred = True


class PlainRMSNorm(PlainNorm):
    """z = x/sqrt(mean(x^2) + eps), onto the sphere of radius sqrt(d): H(P) = sqrt(d) sum_j |p_j|,
    that of RMSNorm at gamma = 1.
    """


class L2Norm(PlainNorm):
    """z = x/sqrt(|x|^2 + d eps), onto the unit sphere: H(P) = sum_j |p_j| (Cauchy-Schwarz), that of
    RMSNorm at gamma = 1/sqrt(d).
    """

    @staticmethod
    def constant_at(width: int) -> float:
        return 1 / math.sqrt(width)


class ScaleNorm(SphereNorm):
    """z = g x/sqrt(|x|^2 + d eps), g one number, initialised at sqrt(d): H(P) = abs(g) sum_j |p_j|
    (Cauchy-Schwarz; Nguyen and Salazar 2019).
    """

    gains = "one"

    def __init__(self, width: int, eps: float = 1e-5, *, bias: bool = False):
        super().__init__()
        check_bias("ScaleNorm", bias=bias)
        self.width, self.eps = check_norm(width, eps)
        self.scale = nn.Parameter(torch.full((1,), math.sqrt(width)))

    @property
    def gamma(self) -> PerChannel:
        """g/sqrt(d) in every channel, so that |gamma| = abs(g)."""
        return (self.scale / math.sqrt(self.width)).expand(self.width)

    def linear_parameters(self) -> dict[str, Float[Tensor, "..."]]:
        return {name: self.scale for name, _ in self.named_parameters()}

    def forward(self, x: Vectors) -> Vectors:
        return F.rms_norm(x, (self.width,), None, self.eps) * (self.scale / math.sqrt(self.width))

"""The image of a norm: where an output norm puts every velocity. Bounded, so H is finite; whether it is attained the norm says."""

from __future__ import annotations

import abc
import dataclasses
import math

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from ctrans.control.admissible import Posedness, VelocitySet, check_costate
from ctrans.control.ascent import Chart, Gains, Map, unchanged
from ctrans.control.gains import has_offset
from ctrans.norm import Norm


@dataclasses.dataclass(frozen=True, eq=False)
class NormImage(VelocitySet):
    """{f : each f_j in the closure of the norm's image}: H(P) = sum_j support(-p_j) and its maximiser are `Norm`'s own."""

    norm: Norm

    @property
    def trained(self) -> bool:
        """Whether the norm has gains or offsets to train, in proportion to which H grows."""
        return bool(self.norm.linear_parameters())

    @property
    def verdict(self) -> Posedness:
        return "well-posed for bounded gains" if self.trained else "well-posed"

    @property
    def attained(self) -> bool:
        return self.norm.attained

    def check(self, P: Tensor) -> None:
        check_costate(P, self.norm.gamma.dtype, width=self.norm.width)

    def support(self, P: Float[Tensor, "*batch tokens width"]) -> Float[Tensor, "*batch"]:
        self.check(P)
        return self.norm.support(-P).sum(-1)

    def maximizer(self, P: Float[Tensor, "*batch tokens width"]) -> Float[Tensor, "*batch tokens width"]:
        self.check(P)
        return self.norm.maximizer(-P)

    def ties(self, P: Float[Tensor, "*batch tokens width"]) -> Bool[Tensor, "*batch tokens"]:
        self.check(P)
        return self.norm.ties(P)

    def residual(self, f: Float[Tensor, "*batch tokens width"]) -> Float[Tensor, "*batch"]:
        return self.norm.constraint_violation(f).amax(-1)

    def base(self, P: Float[Tensor, "tokens width"]) -> float:
        return -float((P @ self.norm.beta).sum())

    def magnification(self, f: Float[Tensor, "tokens width"]) -> float:
        """The largest (|f_i| + |beta_i|)/|gamma_i|: u is read off f - beta over gamma, relative to its entries of about 1."""
        seen = self.norm.gamma != 0
        return float(((f.abs() + self.norm.beta.abs()) / self.norm.gamma.abs())[..., seen].max()) if bool(seen.any()) else 1.0

    def chart(self, P: Float[Tensor, "tokens width"]) -> Chart:
        """Raw outputs x, through the module itself."""
        self.check(P)
        return Chart(
            P,
            P.shape,
            axes=(-1,),
            degree=0,
            velocity=self.norm,
            project=self.inside,
            spread=self.spread,
            raw=self.input,
            gains=self._gains if self.trained else None,
            parts=self.parts,
        )

    @property
    def parts(self) -> int:
        """In how many problems of consecutive entries that of a token falls apart."""
        return 1

    @property
    def inside(self) -> Map:
        """Returns inputs of an ascent to where the norm has a slope."""
        return unchanged

    @property
    @abc.abstractmethod
    def spread(self) -> float:
        """The standard deviation of inputs from which ascents begin."""

    @abc.abstractmethod
    def input(self, f: Float[Tensor, "tokens width"]) -> Float[Tensor, "tokens width"]:
        """x with norm(x) = f, nearly where nothing has exactly that, and so large that no eps shows."""

    @property
    def _gains(self) -> Gains:
        norm = self.norm
        if norm.gains == "each":
            return Gains(norm.gamma, norm.beta, has_offset(norm), self._with_gains)
        number = torch.linalg.vector_norm(norm.gamma).reshape(1)
        return Gains(number, torch.zeros_like(number), False, self._with_number)

    def _with_gains(self, x: Tensor, gamma: Tensor, beta: Tensor) -> Tensor:
        return gamma * self.norm.standardize(x) + beta

    def _with_number(self, x: Tensor, g: Tensor, beta: Tensor) -> Tensor:
        return g / math.sqrt(self.norm.width) * self.norm.standardize(x) + beta

"""What our maps share that end in a linear one."""

from __future__ import annotations

from typing import ClassVar

from jaxtyping import Float
from torch import Tensor, nn

from solvers.deprecated import old_member


class ProjectedMap(nn.Module):
    """f(x) = W h(x) + b: a subclass computes h and names the module that has W and b."""

    projection: ClassVar[str]
    features = old_member("features", "pre_projection")
    last = old_member("last", "output_projection")

    def pre_projection(self, x: Float[Tensor, "*batch tokens width"]) -> Float[Tensor, "*batch tokens hidden"]:
        """h(x), what the last linear map is applied to."""
        raise NotImplementedError

    @property
    def output_projection(self) -> nn.Linear:
        """The last linear map: f(x) = output_projection(pre_projection(x))."""
        linear: nn.Linear = getattr(self, self.projection)
        return linear

    def forward(self, x: Float[Tensor, "*batch tokens width"]) -> Float[Tensor, "*batch tokens width"]:
        y: Tensor = getattr(self, self.projection)(self.pre_projection(x))
        return y

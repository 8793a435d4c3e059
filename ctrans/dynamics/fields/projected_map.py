"""The base class of maps that end in a linear one."""

from __future__ import annotations

from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ctrans.base.memory import check_matrices_fit
from ctrans.base.shapes import TokenRows


class ProjectedMap(nn.Module):
    """f(x) = W h(x) + b. A subclass computes h and names the module with W and b.

    `entries` is the number of entries of its matrices. Raises ConfigError if they exceed this
    machine's memory, before they are allocated.
    """

    projection: ClassVar[str]

    def __init__(self, entries: int = 0):
        super().__init__()
        check_matrices_fit(entries)

    def pre_projection(self, x: TokenRows) -> Float[Tensor, "*batch tokens hidden"]:
        """h(x), the input of the output projection."""
        raise NotImplementedError

    @property
    def output_projection(self) -> nn.Linear:
        """The last linear map: f(x) = output_projection(pre_projection(x))."""
        linear: nn.Linear = getattr(self, self.projection)
        return linear

    def forward(self, x: TokenRows) -> TokenRows:
        y: Tensor = getattr(self, self.projection)(self.pre_projection(x))
        return y


@torch.no_grad()
def scale_linear(linear: nn.Module, c: float) -> None:
    """W -> c W and b -> c b, in place, for all linear maps in the module."""
    for parameter in linear.parameters():
        parameter.mul_(c)

"""A part of a residual stream that is none of the known parts: the module itself, from state to
state.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import nn

from ctrans.base.shapes import TokenRows
from ctrans.interop.attention_in_model import reference_kernel

if TYPE_CHECKING:
    from ctrans.interop.stream_adapter import StreamAdapter


class StreamMap(nn.Module):
    """f_k(x) = x_{k+1} - x, where x takes the place of the k-th state. `weights` are those that the
    module reads between these states.
    """

    label = "sum"
    scale_path = None
    use_reference_kernel = False

    def __init__(
        self, adapter: StreamAdapter, k: int, weights: Sequence[nn.Parameter], why_not: str
    ):
        super().__init__()
        self.adapter = adapter
        self.k = k
        self.weights = nn.ParameterList(weights)
        self.mixes_tokens = True
        self.stages = (self,)
        self.why_not = why_not

    def forward(self, x: TokenRows) -> TokenRows:
        flat = x.reshape(-1, *x.shape[-2:])
        with reference_kernel(self):
            _, after = self.adapter.passed(self.adapter.shaped(flat), {self.k: flat}, self.k + 1)
        return (after - flat).reshape(x.shape)

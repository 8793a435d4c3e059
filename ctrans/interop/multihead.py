"""torch's `nn.MultiheadAttention` as linear maps around softmax attention, on the module's own
weights.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from ctrans.interop.recorded_calls import STATE, Template
from solvers import ConfigError

SIGNATURE = inspect.signature(nn.MultiheadAttention.forward)


class UnfoldedAttention(nn.Module):
    """f(x)_i = W_O [sum_j a_hij V_h x_j]_h + b_O: the module's self-attention with its linear maps
    called as modules.

    It shares the module's parameters. torch calls the linear maps as functions, where hooks cannot
    record them.
    """

    label = nn.MultiheadAttention.__name__

    def __init__(self, module: nn.MultiheadAttention, *, tokens_first: bool):
        super().__init__()
        self.heads = module.num_heads
        self.tokens_first = tokens_first
        self.qkv = nn.Linear(1, 1, bias=False, device="meta")
        self.qkv.weight = module.in_proj_weight
        self.qkv.bias = module.in_proj_bias
        self.out = module.out_proj

    def forward(self, x: Tensor, call: Template | None = None) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in self.qkv(x).chunk(3, dim=-1)
        )
        if call is None:
            mask = None
        else:
            mask = self._mask(call, x)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        out: Tensor = self.out(y.transpose(1, 2).flatten(-2))
        return out

    def _mask(self, call: Template, x: Tensor) -> Tensor | None:
        """The mask to add to scores, or that shows tokens. In a boolean mask of
        `nn.MultiheadAttention`, True hides a token.
        """
        named = arguments(call)
        if named.get("key_padding_mask") is not None:
            raise ConfigError(
                "padding masks are not supported: give sequences of one length, without a padding"
                " mask"
            )
        mask: Tensor | None = named.get("attn_mask")
        if mask is None:
            return None
        if mask.dtype.is_floating_point:
            mask = mask.to(x.dtype)
        else:
            mask = ~mask
        if mask.dim() == 3:
            mask = mask.unflatten(0, (-1, self.heads))
        return mask


def unfolds(module: nn.Module, call: Template) -> bool:
    """Whether the module is torch's attention, called on one state, with weights of one size."""
    if type(module) is not nn.MultiheadAttention:
        return False
    named = arguments(call)
    of_one_state = all(named.get(name) is STATE for name in ("query", "key", "value"))
    return (
        of_one_state
        and module.in_proj_weight is not None
        and module.bias_k is None
        and not module.add_zero_attn
    )


def arguments(call: Template) -> dict[str, Any]:
    """The arguments of a call of torch's attention, by name."""
    bound = SIGNATURE.bind(None, *call.args, **call.kwargs)
    return dict(bound.arguments)

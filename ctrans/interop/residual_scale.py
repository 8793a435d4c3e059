"""How much of a map a foreign block adds to its state: s in X + s f(N X), one number for each
sublayer or one for each channel; and how much of the state it keeps within a norm: a in N(a X +
s f(X)).

A number s > 0 is a length of depth-time, the dt of that segment. A number s <= 0, or one for each
channel (LayerScale), is not a time and becomes part of the map's output.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from ctrans.dynamics.sublayer import Sublayer
from ctrans.interop.norms import AdaptedNorm
from ctrans.interop.tolerances import difference, likely_number, tolerance

DIGITS = 15
"""A fitted number is rounded to the fewest digits, at most this many, that stay within the error of
the fit.
"""


class ScaledOutput(nn.Module):
    """s * x as the last stage of a map, s a number or one for each channel."""

    def __init__(self, scale: Tensor | float):
        super().__init__()
        self.scale: Tensor
        if isinstance(scale, nn.Parameter):
            self.scale = scale
        else:
            self.register_buffer("scale", torch.as_tensor(scale), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale.to(x)


def fitted_scale(block: nn.Module, added: Tensor, values: Tensor) -> float | Tensor | None:
    """s with added = s * values: a number, or a vector with one entry for each channel; None if
    there is none.

    If one of the block's own numbers or vectors fits, it is used.
    """
    close = tolerance(values.dtype)
    rounding = torch.finfo(values.dtype).eps
    added = added.double()
    values = values.double()
    if values.any() and not added.any():
        return 0.0
    square = values.square()
    alone = float((added * values).sum() / square.sum())
    missed = difference(alone * values, added)
    if missed <= close:
        return likely_number(alone, _numbers(block), 4 * max(missed, rounding), DIGITS)
    by_channel = (added * values).flatten(0, -2).sum(0) / square.flatten(0, -2).sum(0)
    if not difference(by_channel * values, added) <= close:
        return None
    for parameter in block.parameters():
        if difference(parameter.detach().double(), by_channel) <= close:
            return parameter
    return by_channel


def kept_share(block: nn.Module, sum_: Tensor, state: Tensor, values: Tensor) -> float:
    """a > 0 with sum_ = a * state + s * values, by least squares; 1 if no a > 0 fits. If one of the
    block's own numbers fits, it is used.
    """
    target = sum_.double().flatten()
    parts = torch.stack([state.double().flatten(), values.double().flatten()], -1)
    share, scale = torch.linalg.lstsq(parts, target.unsqueeze(-1)).solution.flatten().tolist()
    rebuilt = share * parts[:, 0] + scale * parts[:, 1]
    missed = difference(rebuilt, target)
    if not missed <= tolerance(values.dtype) or share <= 0:
        return 1.0
    rounding = torch.finfo(values.dtype).eps
    return likely_number(share, [1.0, *_numbers(block)], 4 * max(missed, rounding), DIGITS)


def keeping(sublayer: Sublayer, norm: AdaptedNorm, kept: float) -> Sublayer:
    """The sublayer with N(a (X + s f/a)) in place of N(X + s f), as N(a X + s f) is; N is `norm`
    and a is `kept`.
    """
    return Sublayer(
        sublayer.field,
        sublayer.kind,
        input_norm=sublayer.input_norm,
        output_norm=sublayer.output_norm,
        state_norm=norm.stretched(kept),
        gain=sublayer.gain / kept,
    )


def _numbers(block: nn.Module) -> Iterator[float]:
    for part in block.modules():
        yield from (value for value in vars(part).values() if isinstance(value, float))
        for weight in (*part.parameters(recurse=False), *part.buffers(recurse=False)):
            if weight.numel() == 1 and weight.is_floating_point():
                yield float(weight)

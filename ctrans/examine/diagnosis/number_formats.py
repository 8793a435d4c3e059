"""Number formats of low precision: which number a float becomes, exactly, by
round-to-nearest-even.
"""

from __future__ import annotations

import dataclasses
import re

import torch
from torch import Tensor
from torch.nn.functional import pad

from solvers import ConfigError, look_up


@dataclasses.dataclass(frozen=True)
class Format:
    """Numbers +-m 2^(e - p + 1) with whole m < 2^p and e >= `least`, up to `largest`. Those with m
    < 2^(p-1) are subnormal.

    Round-to-nearest-even has |fl(x) - x| <= 2^-p |x| for every normal fl(x).

    - `digits`: p, the bits of m
    - `least`: the exponent of the smallest normal number
    - `block`: how many entries along the last axis share a scale, max |x|/`largest`; 0 for all of
      the tensor, None for no scale
    """

    digits: int
    least: int
    largest: float
    block: int | None = None

    def rounded(self, x: Tensor) -> Tensor:
        """fl(x) of finite numbers in float64, without a scale. It is inf beyond the largest number
        on both sides, where some hardware and some versions of torch take that number, or nan.
        """
        # the power of 2 at or below |x|
        power = (x.view(torch.int64) & 0x7FF << 52).view(torch.float64)
        step = power.clamp(min=2.0**self.least) * 2.0 ** (1 - self.digits)
        near = (x / step).round() * step
        return near.masked_fill(near.abs() > self.largest, torch.inf)

    def scaled(self, x: Tensor, peak: Tensor) -> tuple[Tensor, Tensor]:
        """x, with zeros behind a last axis that no block fills, and its scales. `peak` is max |x|
        of the whole tensor, or 0 for no scale.
        """
        if self.block:
            block = min(self.block, x.shape[-1])
            x = pad(x, (0, -x.shape[-1] % block)).unflatten(-1, (-1, block))
            peak = x.abs().amax(-1, keepdim=True)
        scale = peak / self.largest
        return x, scale.masked_fill(scale == 0, 1)


FORMATS = {
    "bf16": Format(8, -126, 3.3895313892515355e38),
    "fp16": Format(11, -14, 65504.0),
    "e4m3": Format(4, -6, 448.0),
    "e5m2": Format(3, -14, 57344.0),
}
"""Formats by name: bfloat16, IEEE's half precision, and those of fp8 (Micikevicius et al. 2022,
arXiv 2209.05433).
"""


def format_of(name: str) -> Format:
    """The format of a name in `FORMATS`, or of one with a scale for the tensor or for N entries:
    e4m3:tensor, e4m3:128. Raises ConfigError for another name.
    """
    base, _, scale = name.partition(":")
    unscaled = look_up("format", base, FORMATS)
    if not re.fullmatch("(tensor|[1-9][0-9]{0,6})?", scale):
        raise ConfigError(
            f"format {name!r}: give {base}, {base}:tensor for one scale, or {base}:N for a scale of"
            " each N entries"
        )
    if not scale:
        return dataclasses.replace(unscaled, block=None)
    return dataclasses.replace(unscaled, block=int(scale.replace("tensor", "0")))

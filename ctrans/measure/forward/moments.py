"""Moments of a hidden state."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import torch

from ctrans.base.shapes import PerBatch, TokenMask, TokenRows, Vectors
from ctrans.measure.walk.instrument import of_text

TINY = torch.finfo(torch.float32).tiny


@dataclasses.dataclass(frozen=True)
class Moments:
    """Moments of all entries of a hidden state: mean absolute value, sample variance, root mean
    square |X|/sqrt(nd).

    `common` is |mean over tokens of x|^2 / mean over tokens of |x|^2, the share of the squared size
    that is the same for all tokens: 0 to 1, and 0 for a state of zero.
    """

    mean_abs: float
    variance: float
    rms: float
    common: float


def moments(x: TokenRows, kept: TokenMask | None = None) -> Moments:
    """The moments over all entries, or those of the tokens in `kept`; in float64 if the device has
    it.

    `States(moments)` measures them by depth.
    """
    x = of_text(x.detach(), kept)
    if x.device.type != "mps":
        x = x.double()
    square = x.square().mean()
    variance = 0.0
    if x.numel() > 1:
        variance = float(x.var())
    common = x.reshape(-1, x.shape[-1]).mean(0).square().mean() / square.clamp(min=TINY)
    return Moments(float(x.abs().mean()), variance, float(square.sqrt()), float(common))


def ratios(values: Sequence[float], over: Sequence[float]) -> list[float]:
    """Each value over the other list's; nan where that is 0."""
    quotients = []
    for value, divisor in zip(values, over, strict=True):
        if divisor:
            quotients.append(value / divisor)
        else:
            quotients.append(math.nan)
    return quotients


def token_lengths(x: Vectors) -> PerBatch:
    """|x_i|_2 of each token."""
    lengths: PerBatch = torch.linalg.vector_norm(x, dim=-1)
    return lengths

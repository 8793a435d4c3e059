"""Weights stored as codes of fp8 or of 8 bits, and the scales that turn them into numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor

from ctrans.interop.stored_weights import Stored, read_weight
from solvers import ConfigError

BLOCK = (128, 128)
"""Rows and columns that share a scale of fp8."""
BITSANDBYTES = "SCB"
"""The name of the scales of bitsandbytes, which are the largest entries of rows."""
LARGEST_CODE = 127.0
"""The code of the largest entry of a row with bitsandbytes."""


def scales_of(name: str) -> list[str]:
    """Names of what multiplies the codes of a weight, as fp8 models, compressed-tensors and
    bitsandbytes store it. Fused experts and biases have names that do not end in `weight`.
    """
    scales = [f"{name}_scale_inv", f"{name}_scale"]
    if name.endswith("weight"):
        scales.append(name.removesuffix("weight") + BITSANDBYTES)
    return scales


def dequantised(name: str, codes: Stored, stored: Mapping[str, Stored]) -> Callable[[], Tensor]:
    """A function that multiplies the codes by their scales. Raises ConfigError for scales that are
    missing or do not fit.
    """
    scales = [stored[scale] for scale in scales_of(name) if scale in stored]
    if not scales and codes.dtype == "I8":
        raise ConfigError(
            f"{str(codes.path)!r} holds {name} as I8 without scales: save it unquantised"
        )
    if not scales:
        return partial(read_weight, codes)
    scale = scales[0]
    shape = _aligned(codes.shape, scale.shape)
    repeats = _repeats(codes.shape, shape, BLOCK)
    if repeats is None:
        raise ConfigError(
            f"{str(codes.path)!r} holds {name} {codes.shape} with scales {scale.shape}, which do"
            " not fit: save it unquantised"
        )
    if scale.name.endswith(BITSANDBYTES):
        unit = LARGEST_CODE
    else:
        unit = 1.0
    return partial(_multiplied, codes, scale, shape, repeats, unit)


def _aligned(shape: tuple[int, ...], scales: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of scales with as many axes as the codes have: a scale of each row, or of each
    expert, has no last axes.
    """
    if all(n == 1 for n in scales):
        return (1,) * len(shape)
    return scales + (1,) * (len(shape) - len(scales))


def _repeats(
    shape: tuple[int, ...], scales: tuple[int, ...], block: tuple[int, int]
) -> tuple[int, ...] | None:
    """How many entries along each axis share a scale; None if the shapes do not fit.

    An axis has a scale for each entry, or one for all of them. The last two may have a scale for
    each block, and the last one a scale for each group of a row.
    """
    if len(scales) != len(shape):
        return None
    repeats = [1] * len(shape)
    simple = [scale in (1, n) for n, scale in zip(shape, scales, strict=True)]
    if all(simple):
        return tuple(repeats)
    if len(shape) < 2 or not all(simple[:-2]):
        return None
    blocks = tuple(-(-n // side) for n, side in zip(shape[-2:], block, strict=True))
    columns = shape[-1]
    groups = scales[-1]
    if scales[-2:] == blocks:
        repeats[-2:] = block
    elif scales[-2] == shape[-2] and groups and columns % groups == 0:
        repeats[-1] = columns // groups
    else:
        return None
    return tuple(repeats)


def _multiplied(
    codes: Stored, scale: Stored, shape: tuple[int, ...], repeats: tuple[int, ...], unit: float
) -> Tensor:
    """The codes times scale/unit; `repeats` entries along each axis share a scale."""
    factors = (read_weight(scale).float() / unit).reshape(shape)
    numbers = read_weight(codes).float()
    for axis, (repeat, size) in enumerate(zip(repeats, numbers.shape, strict=True)):
        if repeat > 1 and factors.shape[axis] > 1:
            factors = factors.repeat_interleave(repeat, axis).narrow(axis, 0, size)
    return torch.mul(numbers, factors, out=numbers)

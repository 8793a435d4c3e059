"""Weights stored as codes of fp8 or of 8 bits, and the scales that turn them into numbers."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ctrans.interop.stored_weights import CODES, FLOATS, Stored, read_weight
from solvers import ConfigError, shown

BLOCK = (128, 128)
"""Rows and columns that share a scale of fp8, if no config says otherwise."""
EXPONENTS = ("U8", "uint8", "F8_E8M0", "float8_e8m0fnu")
"""Dtypes of scales that are powers of 2: the byte u means 2^(u-127), and 255 means nan."""
BIAS_OF_EXPONENTS = 127
NO_EXPONENT = 255
NUMBERS = tuple(name for name in FLOATS | CODES if name != "I8")
"""Dtypes of scales that are numbers."""
OF_ACTIVATIONS = re.compile(
    r"(^|_)(input|activation|output|prob|act|[qkv]|kv)_scale(_inv)?$|^scale_(input|output)$"
)
"""Names of scales that multiply no weight: of a layer's input, its output, or cached keys."""
PARAMETERS = re.compile(r"(^|_)(logit|layer)_scale\d*$|^input_scale_ub$")
"""Names of parameters and limits of a model that are no scales of codes."""
OF_QUANTISATION = ("quantization_config", "compression_config")
"""Entries of a model's config that say how it is quantised."""
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


def check_scales(stored: Mapping[str, Stored]) -> None:
    """Raises ConfigError for scales in a module with codes that are none of the scales which ctrans
    knows: without them the codes are no weights.
    """
    coded = {name for name, weight in stored.items() if weight.dtype in CODES}
    known = {scale for name in coded for scale in scales_of(name)}
    with_codes: dict[str, str] = {}
    for name in sorted(coded - known, reverse=True):
        with_codes[name.rpartition(".")[0]] = name
        with_codes[name] = name  # scales may be named as if the weight was their module
    for scale in sorted(stored.keys() - known):
        module, _, last = scale.rpartition(".")
        is_scale = "scale" in last.lower() and not (
            OF_ACTIVATIONS.search(last) or PARAMETERS.search(last)
        )
        # a gain that is called a scale may be stored in codes itself
        is_coded = scale in coded and stored[scale].dtype not in EXPONENTS
        if is_scale and not is_coded and module in with_codes:
            name = with_codes[module]
            raise ConfigError(
                f"{str(stored[scale].path)!r} holds {scale} beside the {stored[name].dtype} codes"
                f" {name}, and ctrans reads scales named {', '.join(scales_of(name))}: save it"
                " unquantised"
            )


def check_none_missing(stored: Mapping[str, Stored], where: str, config: Mapping[str, Any]) -> None:
    """Raises ConfigError for codes without scales where codes have scales: in a model whose config
    says that it is quantised, or if others of the same dtype have scales.
    """
    coded = sorted(name for name, weight in stored.items() if weight.dtype in CODES)
    known = {scale for name in coded for scale in scales_of(name)}
    with_scales = {
        stored[name].dtype: name
        for name in coded
        if any(scale in stored for scale in scales_of(name))
    }
    quantised = next((key for key in OF_QUANTISATION if config.get(key)), None)
    for name in coded:
        dtype = stored[name].dtype
        has_scales = any(scale in stored for scale in scales_of(name))
        if has_scales or name in known:
            continue
        if dtype in with_scales:
            reason = f"{with_scales[dtype]} has some"
        elif quantised is not None:
            reason = f"{where} has a {quantised}"
        else:
            continue
        raise ConfigError(
            f"{str(stored[name].path)!r} holds {name} as {dtype} without scales, and {reason}: save"
            " it again with its scales, or unquantised"
        )


def block_of(where: str, config: Mapping[str, Any]) -> tuple[int, int]:
    """The rows and columns that share a scale, as a model's config says; else `BLOCK`. Raises
    ConfigError for an entry that says something else.
    """
    settings = config.get("quantization_config")
    if settings is None:
        return BLOCK
    if not isinstance(settings, dict):
        raise ConfigError(
            f"{where} says quantization_config = {shown(settings)}: it must be an object"
        )
    sides = settings.get("weight_block_size")
    if sides is None:
        return BLOCK
    are_sizes = isinstance(sides, list) and all(
        isinstance(side, int) and not isinstance(side, bool) and side > 0 for side in sides
    )
    if not are_sizes or len(sides) != 2:
        raise ConfigError(
            f"{where} says weight_block_size = {shown(sides)}: it must be a list of two whole"
            " numbers of at least 1, the rows and columns of a block"
        )
    return sides[0], sides[1]


def dequantised(
    name: str, codes: Stored, stored: Mapping[str, Stored], block: tuple[int, int] = BLOCK
) -> Callable[[], Tensor]:
    """A function that multiplies the codes by their scales, of which blocks of rows and columns
    share one. Raises ConfigError for scales that are missing, are no numbers, or do not fit.
    """
    scales = [stored[scale] for scale in scales_of(name) if scale in stored]
    if not scales and codes.dtype == "I8":
        raise ConfigError(
            f"{str(codes.path)!r} holds {name} as I8 without scales: save it unquantised"
        )
    if not scales:
        return partial(read_weight, codes)
    scale = scales[0]
    if len(scales) > 1:
        raise ConfigError(
            f"{str(codes.path)!r} holds two scales of {name}, {scale.name} and {scales[1].name}:"
            " save it unquantised"
        )
    allowed = NUMBERS
    if codes.dtype != "I8":
        allowed += EXPONENTS
    if scale.dtype not in allowed:
        raise ConfigError(
            f"{str(codes.path)!r} holds {scale.name}, the scales of {name}, as {scale.dtype}, and"
            f" ctrans reads {', '.join(allowed)}: save it unquantised"
        )
    shape = _aligned(codes.shape, scale.shape)
    repeats = _repeats(codes.shape, shape, block)
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
    factors = (_scale_numbers(scale) / unit).reshape(shape)
    numbers = read_weight(codes).float()
    for axis, (repeat, size) in enumerate(zip(repeats, numbers.shape, strict=True)):
        if repeat > 1 and factors.shape[axis] > 1:
            factors = factors.repeat_interleave(repeat, axis).narrow(axis, 0, size)
    return torch.mul(numbers, factors, out=numbers)


def _scale_numbers(scale: Stored) -> Tensor:
    """The numbers of scales, which may be stored as exponents of 2."""
    numbers = read_weight(scale)
    if scale.dtype not in EXPONENTS:
        return numbers.float()
    exponents = numbers.view(torch.uint8).to(torch.int32)
    powers = torch.ldexp(torch.ones(exponents.shape), exponents - BIAS_OF_EXPONENTS)
    return powers.masked_fill(exponents == NO_EXPONENT, torch.nan)

"""Entries of a buffer that make what is computed with them nan."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn

AT_ONCE = 1 << 22
"""How many entries are looked at together."""


def broken_entries(buffer: Tensor) -> int:
    """The number of entries that are nan or inf. An entry of -inf is none of them: in a mask it
    hides a token. Nor is a single inf, as of a range that has seen no numbers. Of a complex number,
    either part may be nan or inf, of any sign.
    """
    readable = buffer.layout == torch.strided and not buffer.is_meta and not buffer.is_quantized
    if not readable:
        return 0
    buffer = buffer.detach()
    if buffer.is_complex():
        parts = torch.view_as_real(buffer.resolve_conj())
        return sum(int((~part.isfinite()).any(-1).sum()) for part in _parts(parts.reshape(-1, 2)))
    if buffer.is_floating_point() and buffer.numel() == 1:
        return int(buffer.float().isnan().sum())
    if buffer.is_floating_point():
        return sum(int((~(part.float() < math.inf)).sum()) for part in _parts(buffer.flatten()))
    return 0


def _parts(rows: Tensor) -> Iterator[Tensor]:
    yield from rows.split(AT_ONCE)


def broken_tensors(module: nn.Module) -> Iterator[tuple[str, str, int, int]]:
    """Of each parameter and buffer with broken entries: its kind, its name, their number, and that
    of all entries.
    """
    kinds = (("weight", module.named_parameters()), ("buffer", module.named_buffers()))
    for kind, named in kinds:
        for name, tensor in named:
            broken = broken_entries(tensor)
            if broken:
                yield kind, name, broken, tensor.numel()

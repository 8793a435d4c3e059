"""The median of a tensor's entries."""

from __future__ import annotations

import math

from torch import Tensor


def median_of(values: Tensor) -> float:
    """The middle entry, or the mean of the two middle ones; nan if there is none, or one is nan.
    `Tensor.median` gives the lower of the two.

    >>> median_of(torch.tensor([1.0, 1.0, 9.0, 9.0]))
    5.0
    """
    flat = values.detach().double().flatten()
    count = flat.numel()
    if not count or flat.isnan().any():
        return math.nan
    low = float(flat.kthvalue((count + 1) // 2).values)
    high = float(flat.kthvalue(count // 2 + 1).values)
    if low == high:  # also where both are infinite
        return low
    return low / 2 + high / 2

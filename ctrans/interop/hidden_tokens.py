"""Which tokens of an example the padding mask among its arguments hides. Means over tokens leave
them out.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ctrans.base.shapes import TokenMask, TokenRows
from ctrans.interop.tolerances import difference, unit
from solvers import Map

ATTENTION_MASK = re.compile(r"att\w*_mask")
"""Names of masks whose smaller value hides, as 0 does in those of `transformers`."""
PADDING_MASK = re.compile(r"mask|(\w+_)?pad(ding)?_mask")
"""Names of masks that hide by either value: true hides in torch.nn, and false in other libraries.
"""

ROUNDING = 8
"""How many roundings the states of tokens may differ by that read no other."""


def text_of(arguments: Mapping[str, Any], depth: Map, x0: TokenRows) -> TokenMask | None:
    """Which tokens of the example with these arguments are text; None if all are, and if it is not
    known.

    A mask (batch, tokens) of two values hides the tokens that no other token reads: those whose
    states X_0 = `x0` the depth can get otherwise without a change of the others.
    """
    for name, mask in arguments.items():
        if not isinstance(mask, Tensor) or mask.shape != x0.shape[:-1]:
            continue
        for hidden in _hidden_by(name, mask.to(x0.device)):
            if _nobody_reads(hidden, depth, x0):
                return ~hidden
    return None


def _hidden_by(name: str, mask: Tensor) -> list[Tensor]:
    """The tokens that the mask may hide, by each of its values that may hide."""
    values = mask.unique()
    if len(values) != 2:
        return []
    smaller = mask == values[0]
    if ATTENTION_MASK.fullmatch(name):
        candidates = [smaller]
    elif PADDING_MASK.fullmatch(name):
        candidates = [smaller, ~smaller]
    else:
        candidates = []
    return [hidden for hidden in candidates if not hidden.all(-1).any()]


def _nobody_reads(hidden: TokenMask, depth: Map, x0: TokenRows) -> bool:
    """Whether the other tokens end in the same states if the hidden ones start in others."""
    moved = torch.where(hidden.unsqueeze(-1), 1 - 2 * x0.flip(-1), x0)
    with torch.no_grad():
        expected = depth(x0)[~hidden]
        found = depth(moved)[~hidden]
    return difference(found, expected) <= ROUNDING * unit(x0.dtype)

"""Which tokens of an example a padding mask hides: one among its arguments, or one that the model
computes. Means over tokens leave them out.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from ctrans.base.shapes import TokenMask, TokenRows
from ctrans.interop.computed_masks import (
    Unread,
    UnreadPairs,
    hidden_from_others,
    hidden_tokens,
)
from ctrans.interop.foreign_errors import FOREIGN_ERRORS
from ctrans.interop.tolerances import difference, unit
from solvers import Map

ATTENTION_MASK = re.compile(r"att\w*_mask")
"""Names of masks whose smaller value hides, as 0 does in those of `transformers`."""
PADDING_MASK = re.compile(r"mask|(\w+_)?pad(ding)?_mask")
"""Names of masks that hide by either value: true hides in torch.nn, and false in other libraries.
"""

ROUNDING = 8
"""How many roundings the states of tokens may differ by that read no other."""

RUN = 3
"""From this many equal ids on, the end of a sequence looks like padding."""


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


def text_of_pass(
    run: Callable[[Tensor], Any], inputs: Tensor, depth: Map, x0: TokenRows, *, alone: bool
) -> tuple[TokenMask | None, int]:
    """Which tokens the masks of `run`, a pass of the model on these inputs, leave: masks of any
    shape, given or computed. None if they leave all, and if it is not known.

    If the model reads these inputs `alone`, a mask that is the same for all sequences, and for
    inputs with other numbers in place of what it hides, may be part of the code, such as that of a
    model from right to left or of a class token: it counts as hiding no padding. Also returns how
    many tokens such a mask hides from all others.
    """
    unread = _unread(run, inputs, x0)
    if unread is None:
        return None, 0
    repeated: Tensor | None = None
    if inputs.shape == x0.shape[:-1] and not inputs.is_floating_point():
        repeated = inputs.cpu().reshape(unread.shape[:2])
    hidden = hidden_tokens(unread, repeated).to(x0.device).reshape(x0.shape[:-1])
    if not hidden.any() or hidden.all(-1).any() or not _nobody_reads(hidden, depth, x0):
        return None, 0
    if alone and torch.equal(unread, unread[:1].expand_as(unread)):
        with suppress(*FOREIGN_ERRORS):  # which tell that the code looks at these numbers
            changed = _unread(run, _with_other_numbers(inputs, hidden), x0)
            if changed is not None and torch.equal(changed, unread):
                return None, int(hidden_from_others(unread).sum())
    return ~hidden, 0


def _with_other_numbers(inputs: Tensor, hidden: TokenMask) -> Tensor:
    """The inputs with those of a token of text in place of those of hidden tokens. Where inputs are
    not token by token: with other numbers in place of their commonest one, such as 0.
    """
    if inputs.shape[: hidden.dim()] == hidden.shape:
        changed = inputs.clone()
        for row, is_hidden in zip(changed, hidden.to(inputs.device), strict=True):
            row[is_hidden] = row[~is_hidden][-1:].expand_as(row[is_hidden])
        return changed
    commonest = inputs.flatten().mode().values
    others = inputs[inputs != commonest]
    return torch.where(inputs == commonest, others[:1], inputs)


def _unread(run: Callable[[Tensor], Any], inputs: Tensor, x0: TokenRows) -> Unread | None:
    """What no head of a pass on these inputs reads, of states of the shape of x0."""
    pairs = UnreadPairs(x0.shape[:-2].numel(), x0.shape[-2])
    with torch.no_grad(), pairs.calls():
        run(inputs)
    return pairs.found


def like_padding(ids: Tensor, depth: Map, x0: TokenRows) -> int:
    """How many tokens look like padding that no mask hides, and are read by no others: runs of one
    id at an end of a sequence, as behind the text of a causal model. 0 if they are read.
    """
    if ids.shape != x0.shape[:-1] or ids.is_floating_point():
        return 0
    ids = ids.to(x0.device)
    run = _first_run(ids) | _first_run(ids.flip(-1)).flip(-1)
    if not run.any() or not _nobody_reads(run, depth, x0):
        return 0
    return int(run.sum())


def _first_run(ids: Tensor) -> Tensor:
    """Where each sequence repeats its first id, if it does so often enough and does not end so."""
    run = (ids == ids[..., :1]).cumprod(-1).bool()
    return run & (run.sum(-1, keepdim=True) >= RUN) & ~run.all(-1, keepdim=True)


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

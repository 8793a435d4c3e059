"""Why a module's code fails on an input, where its parts tell: heads that do not divide its width,
or a mask, table or buffer that is made for another number of tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from ctrans.interop.foreign_errors import FOREIGN_ERRORS

HEADS = ("num_heads", "n_heads", "n_head", "nhead", "heads", "num_attention_heads")
"""Attributes by which modules, and their configs, name the number of heads."""
MOST_TRIALS = 8
"""How many lengths are tried to find the one that a module is made for."""
FEW = 64
SOME_TIMES = 4
"""Lengths that are tried are at most a few tokens, or some times those of the inputs."""


def why_refused(
    model: nn.Module, error: Exception, tokens: int | None, run: Callable[[int], object]
) -> str | None:
    """What the module's parts say of the error, and the fix; None if they say nothing.

    `run` runs the module on its inputs cut or repeated to a number of tokens; they have `tokens`
    now, None if that is not known, as of images.
    """
    heads = _heads_that_divide_no_width(model, error)
    if heads is not None or tokens is None:
        return heads
    return _length(model, tokens, run)


def fix_of(sequences: int, of_example: int, others: Sequence[str]) -> str:
    """What to give where a module does not run on so many sequences, with these arguments beside
    them.
    """
    if others and sequences != of_example:
        return (
            f"its example is of {of_example} sequences, and other numbers of them are needed: give"
            f" arguments whose first axis counts the sequences ({', '.join(others)})"
        )
    return "give an input that it accepts"


def _heads_that_divide_no_width(model: nn.Module, error: Exception) -> str | None:
    names = {part: name for name, part in model.named_modules()}
    for part in _running_modules(error.__traceback__):
        heads = _heads(part)
        width = _width(part)
        if part not in names or heads is None or width is None or width % heads == 0:
            continue
        place = names[part] or type(part).__name__
        allowed = ", ".join(str(count) for count in range(1, width + 1) if width % count == 0)
        return (
            f"{place} has {heads} heads, which do not divide its width of {width}: make it with"
            f" heads that do ({allowed}), or with a width that is a multiple of {heads}"
        )
    return None


def _running_modules(traceback: TracebackType | None) -> list[nn.Module]:
    """The modules whose methods ran when the error was raised, innermost first."""
    found = []
    while traceback is not None:
        owner = traceback.tb_frame.f_locals.get("self")
        if isinstance(owner, nn.Module):
            found.append(owner)
        traceback = traceback.tb_next
    return found[::-1]


def _heads(part: nn.Module) -> int | None:
    for owner in (part, getattr(part, "config", None)):
        for name in HEADS:
            heads = getattr(owner, name, None)
            if isinstance(heads, int) and heads > 0:
                return heads
    return None


def _width(part: nn.Module) -> int | None:
    """The width of the states that its first linear map reads."""
    for child in part.modules():
        if isinstance(child, nn.Linear):
            return child.in_features
    return None


def _length(model: nn.Module, tokens: int, run: Callable[[int], object]) -> str | None:
    """The number of tokens, at most or exactly, that a tensor of the module is made for: with it
    the module runs, and with one more or less it does not.
    """
    by_length: dict[int, list[str]] = {}
    for name, shape in _shapes(model):
        for length in set(shape) - {1, tokens}:
            if length <= max(FEW, SOME_TIMES * tokens):  # trying more may need much memory
                by_length.setdefault(length, []).append(f"{name} {shape}")
    # a mask's or table's length is met in few tensors, and a width in many
    lengths = sorted(by_length, key=lambda length: (len(by_length[length]), length))
    for length in lengths[:MOST_TRIALS]:
        if not _runs(run, length) or _runs(run, length + 1):
            continue
        at_most = length == 2 or _runs(run, length - 1)
        wanted = f"at most {length}" if at_most else f"exactly {length}"
        owners = by_length[length]
        others = f" and {len(owners) - 1} more" if len(owners) > 1 else ""
        return (
            f"the inputs have {tokens} tokens, and it runs on {wanted} ({owners[0]}{others}): give"
            f" sequences of {wanted} tokens, or make the module for longer ones"
        )
    return None


def _shapes(model: nn.Module) -> Iterator[tuple[str, tuple[int, ...]]]:
    for name, tensor in (*model.named_buffers(), *model.named_parameters()):
        if tensor.dim() > 1:
            yield name, tuple(tensor.shape)


def of_length(value: Any, before: int, length: int) -> Any:
    """A tensor cut or repeated to the length along each axis, but the first, that has as many as
    before.
    """
    if not isinstance(value, Tensor):
        return value
    for axis in range(1, value.dim()):
        if value.shape[axis] == before:
            indices = torch.arange(length, device=value.device) % before
            value = value.index_select(axis, indices)
    return value


def _runs(run: Callable[[int], object], tokens: int) -> bool:
    try:
        run(tokens)
    except FOREIGN_ERRORS:
        return False
    return True

"""A block that was run once: the calls of its modules, and which of them mix tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Bool
from torch import Tensor, nn

from ctrans.interop.block_calls import Running, is_state
from ctrans.interop.foreign_errors import FOREIGN_ERRORS
from ctrans.interop.module_chain import is_linear
from ctrans.interop.recorded_calls import RecordedCall, watched
from ctrans.interop.tolerances import unit


@dataclass(frozen=True, eq=False)
class BlockRun:
    """A block that was run on the state x (batch, tokens, width) and returned y. `calls` are all
    calls of its modules that have a state, in the order in which they began.
    """

    running: Running
    x: Tensor
    y: Tensor
    calls: list[RecordedCall]

    @property
    def block(self) -> nn.Module:
        return self.running.block

    @property
    def kind(self) -> str:
        """The name of the block's class."""
        return type(self.block).__name__


def run_of(running: Running, x: Tensor) -> BlockRun:
    """Runs the block on the state x."""
    parts = {
        path: part
        for path, part in running.block.named_modules()
        if path and "parametrizations" not in path
    }
    with watched(parts) as calls:
        y = running(x)
    return BlockRun(running, x, y, [call for call in calls if call.x is not None])


def mixing_calls(run: BlockRun) -> list[RecordedCall]:
    """The smallest modules that mix tokens, each once."""
    modules = {call.module: call for call in run.calls if _mixes(call, run.running)}
    return [
        call
        for module, call in modules.items()
        if not any(inner in modules for inner in list(module.modules())[1:])
    ]


def _mixes(call: RecordedCall, running: Running) -> bool:
    """Whether a change of one token of the module's input changes its output at another token."""
    if is_linear(call.module) or not is_state(call.x) or not is_state(call.y):
        return False
    if call.x.shape[:2] != call.y.shape[:2]:
        return False
    turned = running.form.turned
    if turned(call.x).shape[:2] != running.call.x.shape[:2]:
        return False  # the axes have another order, such as channels first for a convolution
    try:
        return mixes_tokens(lambda x: turned(call.again(turned(x))), turned(call.x))
    except FOREIGN_ERRORS:
        return False


def mixes_tokens(function: Callable[[Tensor], Tensor], x: Tensor) -> bool:
    """Whether function(x) after the first token changes if the first token of x (sequences, tokens,
    ...) changes.
    """
    return bool(_moved_by_the_first(function, x)[1:].any())


def reach_from_the_first(function: Callable[[Tensor], Tensor], x: Tensor) -> int:
    """The last token of function(x) that changes if the first token of x (sequences, tokens, ...)
    changes.
    """
    moved = _moved_by_the_first(function, x)
    return max(moved.nonzero().flatten().tolist(), default=0)


def _moved_by_the_first(function: Callable[[Tensor], Tensor], x: Tensor) -> Bool[Tensor, " tokens"]:
    """The tokens of function(x) that change by more than rounding if the first token of x does.

    64 roundings cover sums of float32. Of bfloat16 they would cover half of a number: there 4 must
    do, and a second, larger change shows what the first one does not.
    """
    expected = function(x)
    is_coarse = unit(expected.dtype) > unit(torch.float32)
    close = (4 if is_coarse else 64) * unit(expected.dtype)
    sizes = expected.flatten(2).norm(dim=-1)
    sizes = sizes + 1e-3 * sizes.mean()  # a token of zeros changes by rounding, too
    moved = torch.zeros(x.shape[1], dtype=torch.bool, device=x.device)
    for factor in (1, 30) if is_coarse else (1,):
        changed = x.clone()
        changed[:, 0] = factor * (1 - changed[:, 0])
        difference = (function(changed) - expected).flatten(2).norm(dim=-1)
        moved |= ~(difference <= close * sizes).all(0)
    return moved

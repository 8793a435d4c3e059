"""A block that was run once: the calls of its modules, and which of them mix tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor, nn

from ctrans.interop.block_calls import Running, is_state
from ctrans.interop.foreign_errors import FOREIGN_ERRORS
from ctrans.interop.module_chain import is_linear
from ctrans.interop.recorded_calls import RecordedCall, watched
from ctrans.interop.tolerances import same


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
    expected = function(x)[:, 1:]
    return not same(function(_with_another_first(x))[:, 1:], expected)


def reach_from_the_first(function: Callable[[Tensor], Tensor], x: Tensor) -> int:
    """The last token of function(x) that changes if the first token of x (sequences, tokens, ...)
    changes.
    """
    expected, changed = function(x), function(_with_another_first(x))
    reached = [t for t in range(x.shape[1]) if not same(changed[:, t], expected[:, t])]
    return max(reached, default=0)


def _with_another_first(x: Tensor) -> Tensor:
    changed = x.clone()
    changed[:, 0] = -changed[:, 0] + 1
    return changed

"""Whether the parts of a model act on its output through the state behind them alone.

A part may keep a tensor that the head reads, or return one besides its state. What it does there
is in no sublayer, and may vanish to first order at the present weights. So the parts get other
weights, and the model must compute the same from the states that they then make.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from ctrans.base.as_found import as_found
from ctrans.control.large_weights import LARGE
from ctrans.control.outer_code import WAY
from ctrans.dynamics.weights.on_demand import has_weights_on_demand
from ctrans.interop.block_calls import Call, intercepted
from ctrans.interop.foreign_errors import FOREIGN_ERRORS, named_error
from ctrans.interop.large_maps import DENSE, MODERATE, large_weights, with_matrices
from ctrans.interop.model_adapter import ModelAdapter
from ctrans.interop.recorded_calls import without_fast_path
from ctrans.interop.stream_adapter import StreamAdapter
from ctrans.interop.tolerances import difference
from ctrans.interop.transformers_adapter import TransformersAdapter
from solvers import ConfigError

SIZES = (1.0, MODERATE, LARGE)
"""How many times as large as the present weights the others are."""
ROUNDINGS = 1e3
"""By how many machine epsilons two passes of one computation may differ."""
AT_ONCE = 2**30
"""The most bytes of weights that are put aside at once."""
PAST = (
    "with other weights of its parts the output is not that of the states which they make: a part"
    " keeps a tensor for code behind it, or other code reads its weights"
)


def past_the_states(adapter: ModelAdapter) -> dict[str, str]:
    """Why the output does not depend on the blocks through their states alone; empty if it does, or
    if their weights are loaded on demand. The weights are put back to the bit.
    """
    if has_weights_on_demand(adapter.model):
        return {}
    if isinstance(adapter, StreamAdapter):
        parts: Sequence[nn.Module] = adapter.sublayers
    else:
        parts = adapter.blocks()
        if len(set(map(id, parts))) < len(parts):
            return {}
    try:
        with as_found(adapter.model), torch.no_grad(), without_fast_path():
            for some in _at_once(parts):
                for times in SIZES:
                    if not _is_of_states(adapter, some, times):
                        return {WAY: PAST}
    except FOREIGN_ERRORS as error:
        return {WAY: f"not tested: it does not run with other weights ({named_error(error)})"}
    return {}


def _at_once(blocks: Sequence[nn.Module]) -> Iterator[list[nn.Module]]:
    """The blocks in order, so many at once as may be put aside."""
    some: list[nn.Module] = []
    size = 0
    for block in blocks:
        size_of_block = sum(weight.nbytes for weight in block.parameters())
        if some and size + size_of_block > AT_ONCE:
            yield some
            some, size = [], 0
        some.append(block)
        size += size_of_block
    yield some


def _is_of_states(adapter: ModelAdapter, changed: Sequence[nn.Module], times: float) -> bool:
    """Whether the output with other weights is the one with the present weights, if each block then
    returns the state that it returned with the others. Numbers that overflow say nothing.
    """
    parts = [part for block in changed for part in with_matrices(block)]
    matrices = [
        weight
        for block in changed
        for weight in block.parameters()
        if weight.dim() > 1 and weight.is_floating_point()
    ]
    with large_weights(parts, bias=1.0, shape=DENSE, times=times, others=matrices):
        states, output = _states_and_output(adapter)
    if output is None or not bool(output.isfinite().all()):
        return True
    # what a block keeps is now that of the present weights
    adapter.tensor(_ran(adapter))

    from_states = _from_states(adapter, states)
    if from_states is None or from_states.shape != output.shape:
        return False
    if torch.equal(from_states, output):
        return True
    return difference(from_states, output) <= ROUNDINGS * torch.finfo(output.dtype).eps


def _states_and_output(adapter: ModelAdapter) -> tuple[list[Tensor], Tensor | None]:
    """The state behind each part, and the model's main output."""
    if isinstance(adapter, StreamAdapter):
        output, (_, *behind) = adapter.walked(adapter.example, {})
        return behind, adapter.tensor(output)
    assert isinstance(adapter, TransformersAdapter), "there are two kinds"
    blocks = adapter.blocks()
    form = adapter.form
    states: dict[int, Tensor] = {}
    with contextlib.ExitStack() as hooks:
        for i, block in enumerate(blocks):

            def note(block: nn.Module, given: object, output: object, i: int = i) -> None:
                states[i] = form.read(output).detach().clone()

            hooks.callback(block.register_forward_hook(note).remove)
        output = adapter.tensor(_ran(adapter))
    if len(states) < len(blocks):
        raise ConfigError("a block is not called as a module")
    return [states[i] for i in range(len(blocks))], output


def _from_states(adapter: ModelAdapter, states: Sequence[Tensor]) -> Tensor | None:
    """The model's main output if these are the states behind its parts."""
    if isinstance(adapter, StreamAdapter):
        output, _ = adapter.walked(adapter.example, dict(enumerate(states, start=1)))
        return adapter.tensor(output)
    assert isinstance(adapter, TransformersAdapter), "there are two kinds"

    def as_before(block: int, call: Call) -> Tensor:
        return states[block]

    with intercepted(adapter.blocks(), as_before, adapter.form):
        return adapter.tensor(_ran(adapter))


def _ran(adapter: ModelAdapter) -> object:
    """What the model returns for its example."""
    if isinstance(adapter, StreamAdapter):
        return adapter.run(adapter.example)
    return adapter.run_like(adapter.like().unsqueeze(0))

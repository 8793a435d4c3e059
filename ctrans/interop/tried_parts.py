"""The parts of a model that are tried at large weights: its blocks, or the parts of its residual
stream.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from torch import Tensor, nn

from ctrans.control.large_weights import moved_by
from ctrans.dynamics.sublayer import Sublayer
from ctrans.dynamics.weights.on_demand import has_weights_on_demand
from ctrans.interop.block_calls import Running
from ctrans.interop.model_adapter import ModelAdapter
from ctrans.interop.outside import all_tracked
from ctrans.interop.stream_adapter import StreamAdapter
from ctrans.interop.transformers_adapter import TransformersAdapter

ON_DEMAND = "its weights are loaded on demand, so that its blocks were not tried with large ones"
REUSED = "a block is used several times in a pass, so that its maps were not tried at large weights"
NO_MAP = "it is none of the known parts, so that it has no maps that could be tried"


@dataclass(frozen=True)
class TriedPart:
    """A part of a model.

    - `module`: has its weights: a block, or the sublayer of a part of a residual stream
    - `run`: what the model's own code makes of a state there
    - `state`: where it is tried
    - `segments`: those of its sublayers
    - `moved`: what the model's own code adds to the state in a segment, and in what follows it
      before the next known part
    - `not_tried`: why its maps cannot be tried; "" if they can
    - `is_a_block`: whether it is a module whose code around its maps is known. That of a stream's
      part is inside of its maps
    - `is_followed`: whether something unknown follows it before the next known part
    """

    module: nn.Module
    run: Callable[[Tensor], Tensor]
    state: Tensor
    segments: Sequence[int]
    moved: Callable[[int], Tensor]
    not_tried: str = ""
    is_a_block: bool = False
    is_followed: bool = False


def tried_parts(
    adapter: ModelAdapter,
    sublayers: Sequence[Sublayer],
    lengths: Sequence[float],
    states: Sequence[Tensor],
) -> list[TriedPart]:
    """The parts of that model. `states` are those before each segment, for a text."""
    if isinstance(adapter, StreamAdapter):
        return [_of_stream(adapter, k, sublayers, states[k]) for k in range(len(sublayers))]
    assert isinstance(adapter, TransformersAdapter), "there are two kinds"
    return _blocks(adapter, sublayers, lengths)


def _of_stream(
    adapter: StreamAdapter, k: int, sublayers: Sequence[Sublayer], state: Tensor
) -> TriedPart:
    """Part k of a residual stream. A norm of the sum that ctrans does not know may follow it."""
    is_followed = k + 1 < len(sublayers) and sublayers[k + 1].kind == "part"

    def run(x: Tensor) -> Tensor:
        return adapter.passed(adapter.shaped(x), {k: x}, last=k + 1)[1]

    def moved(segment: int) -> Tensor:
        last = segment + 2 if is_followed else segment + 1
        _, after = adapter.passed(adapter.shaped(state), {segment: state}, last=last)
        if after.shape != state.shape:
            return after
        return after - state

    not_tried = NO_MAP if sublayers[k].kind == "part" else ""
    return TriedPart(sublayers[k], run, state, [k], moved, not_tried, is_followed=is_followed)


def _blocks(
    adapter: TransformersAdapter, sublayers: Sequence[Sublayer], lengths: Sequence[float]
) -> list[TriedPart]:
    """The blocks of a model that is read by their modules."""
    blocks = adapter.blocks()
    not_tried = ""
    if has_weights_on_demand(adapter.model):
        not_tried = ON_DEMAND
    elif len(set(map(id, blocks))) < len(blocks):
        not_tried = REUSED
    # the graph of the blocks' other arguments shows what they were computed from
    with all_tracked(adapter.model):
        calls = adapter.block_calls()
    per_block = len(sublayers) // len(blocks)
    parts = []
    for i, (block, recorded) in enumerate(zip(blocks, calls, strict=True)):
        call = replace(recorded, x=recorded.x.detach())
        running = Running(block, call, adapter.form)

        def moved(segment: int, running: Running = running, x: Tensor = call.x) -> Tensor:
            if not_tried == ON_DEMAND:
                # the weights of other maps of the block would take the place of the large ones
                return moved_by(sublayers[segment], x, lengths[segment])
            after: Tensor = running(x)
            return after - x

        segments = range(i * per_block, (i + 1) * per_block)
        parts.append(TriedPart(block, running, call.x, segments, moved, not_tried, is_a_block=True))
    return parts

"""Whether a foreign model computes with its matrices what its reading says, at any size of them.

A reading is tested at the present weights. A penalty that is needed is about large ones: a clip, a
weight that is computed from others, or a scale outside of a map would give a wrong number in
silence. So each block's linear maps get large weights and biases, and the block must still compute
what its sublayers do.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn

from ctrans.base.as_found import as_found
from ctrans.control.attention_averages import NO_AVERAGES, row_error, why_no_averages
from ctrans.control.decay_paths import ValuePath
from ctrans.control.large_weights import (
    CLOSE,
    LARGE,
    SAME,
    AtLargeWeights,
    at_large_weights,
    factors_at,
    matrices_of,
    moved_by,
)
from ctrans.control.shown_factors import Factors, largest_share, path_of, shown_velocity
from ctrans.dynamics.fields import ExposesHeads
from ctrans.dynamics.sublayer import Sublayer
from ctrans.dynamics.weights.on_demand import has_weights_on_demand
from ctrans.interop.block_calls import Call, Running
from ctrans.interop.foreign_errors import FOREIGN_ERRORS, named_error
from ctrans.interop.large_maps import (
    DENSE,
    MATRICES,
    MODERATE,
    OFFSETS,
    ONE_SIDED,
    SPIKY,
    large_weights,
    with_matrices,
)
from ctrans.interop.model_adapter import ModelAdapter
from ctrans.interop.module_chain import TransposedLinear, is_linear
from ctrans.interop.outside import all_tracked, outside_of
from ctrans.interop.past_the_states import past_the_states
from ctrans.interop.recorded_calls import without_fast_path
from ctrans.interop.stream_adapter import StreamAdapter
from ctrans.interop.tolerances import difference

ON_DEMAND = "its weights are loaded on demand, so that its blocks were not tried with large ones"
NO_BLOCKS = (
    "it is read by its operations and not by the modules of its blocks, so that its maps were not"
    " tried at large weights"
)
REUSED = "a block is used several times in a pass, so that its maps were not tried at large weights"

READING = 3 * CLOSE
"""How closely a model is read, as a share: its maps, the norms around them and its steps."""
OTHERWISE = (
    "with large weights and biases the block computes something else than its maps do: it limits"
    " large values, or scales what a map reads"
)

OTHER_THAN_SHOWN = "with large weights a map computes something else than its matrices show"


def factors_of(
    adapter: ModelAdapter,
    sublayers: Sequence[Sublayer],
    lengths: Sequence[float],
    states: Sequence[Tensor],
) -> Factors:
    """The test of each block in eval mode. The weights are put back to the bit. `states` are those
    before each segment, for a text.

    A model with weights on demand counts as unlike, and so does one whose blocks are no modules, or
    are one module that is used several times. Their verdicts are tested all the same.
    """
    if isinstance(adapter, StreamAdapter):
        return _factors_of_stream(adapter, sublayers, states)
    blocks = adapter.blocks()
    everything = range(len(sublayers))
    not_tested = ""
    if has_weights_on_demand(adapter.model):
        not_tested = ON_DEMAND
    elif len(set(map(id, blocks))) < len(blocks):
        not_tested = REUSED
    per_block = len(sublayers) // len(blocks)
    unlike: dict[int, str] = {}
    further: set[int] = set()
    tests: dict[int, AtLargeWeights] = {}
    missed: dict[int, float] = {}
    with as_found(adapter.model), torch.no_grad(), without_fast_path():
        try:
            # the graph of the blocks' other arguments shows what they were computed from
            with all_tracked(adapter.model):
                calls = adapter.block_calls()
        except FOREIGN_ERRORS as error:
            reason = f"it does not run with gradients ({named_error(error)})"
            reasons = dict.fromkeys(everything, reason)
            return Factors(reasons, untested=reasons)
        names = {id(weight): name for name, weight in adapter.model.named_parameters()}
        for i, (block, recorded) in enumerate(zip(blocks, calls, strict=True)):
            call = replace(recorded, x=recorded.x.detach())
            segments = range(i * per_block, (i + 1) * per_block)
            steps = [(sublayers[k], lengths[k]) for k in segments]
            running = Running(block, call, adapter.form)
            reason = not_tested
            computes_otherwise = False
            outer: list[Tensor] = []
            if not reason:
                try:
                    with all_tracked(adapter.model):
                        uses = _uses(running, call.x)
                    if _has_other_parameters(block) or uses.of_others(block):
                        further |= set(segments)
                    outer = [x for x in uses.of_others(block) if not _is_vector(x)]
                    reason = _why_otherwise(running, call, steps)
                    computes_otherwise = reason == OTHERWISE
                    unlike_shown, of_maps = _why_unlike(block, steps, [states[k] for k in segments])
                    missed |= dict(zip(segments, of_maps, strict=True))
                    reason = (
                        _outer_matrix(uses, block, names)
                        or _why_not_plain(block)
                        or _read_twice(uses, block)
                        or reason
                        or unlike_shown
                    )
                except FOREIGN_ERRORS as error:
                    reason = f"it does not run with large weights ({named_error(error)})"
            if reason:
                unlike |= dict.fromkeys(segments, reason)
            for k in segments:
                moved: Callable[[], Tensor] = partial(_moved_by_block, running, call.x)
                if not_tested == ON_DEMAND:
                    # the weights of other maps of the block would take the place of the large ones
                    moved = partial(moved_by, sublayers[k], call.x, lengths[k])
                tests[k] = _tested(
                    sublayers[k],
                    call.x,
                    moved,
                    partial(_with_outer, outer, sublayers[k], block),
                    is_plain=not reason,
                )
                if computes_otherwise:
                    tests[k] = replace(tests[k], otherwise=OTHERWISE)
    return replace(
        factors_at(tests, unlike, further),
        tolerance=READING,
        missed=missed,
        outside=outside_of(adapter) | past_the_states(adapter),
    )


def _with_outer(outer: Sequence[Tensor], sublayer: Sublayer, block: nn.Module) -> list[Tensor]:
    """The matrices of a sublayer, and those outside of its block that its output depends on."""
    return [*matrices_of(sublayer, block), *(x.detach() for x in outer)]


def _factors_of_stream(
    adapter: StreamAdapter, sublayers: Sequence[Sublayer], states: Sequence[Tensor]
) -> Factors:
    """The test of a model that is read by its sums x + f(x): only its verdict, as it has no blocks
    whose maps could be compared.
    """
    tests: dict[int, AtLargeWeights] = {}
    with as_found(adapter.model), torch.no_grad(), without_fast_path():
        for k, (sublayer, state) in enumerate(zip(sublayers, states, strict=True)):
            last = k + 1
            if last < len(sublayers) and sublayers[last].kind == "part":
                last += 1  # it may be a norm of the sum that ctrans does not know
            tests[k] = _tested(
                sublayer,
                state,
                partial(_moved_by_stream, adapter, k, state, last),
                partial(matrices_of, sublayer, sublayer.field),
                is_plain=False,
            )
    before_parts = [k for k in range(len(sublayers) - 1) if sublayers[k + 1].kind == "part"]
    if before_parts and all(tests[k].bounded for k in before_parts):
        # what bounds the others counts as the head here
        tests[len(sublayers) - 1] = replace(tests[len(sublayers) - 1], bounded=True)
    unlike = dict.fromkeys(range(len(sublayers)), NO_BLOCKS)
    return replace(factors_at(tests, unlike, ()), tolerance=READING, outside=outside_of(adapter))


def _moved_by_block(running: Running, x: Tensor) -> Tensor:
    """What a block adds to its state."""
    after: Tensor = running(x)
    return after - x


def _moved_by_stream(adapter: StreamAdapter, k: int, state: Tensor, last: int) -> Tensor:
    """What the model's own pass adds to state k up to state `last`."""
    _, after = adapter.passed(adapter.shaped(state), {k: state}, last=last)
    if after.shape != state.shape:
        return after
    return after - state


def _tested(
    sublayer: Sublayer,
    state: Tensor,
    moved: Callable[[], Tensor],
    matrices: Callable[[], Sequence[Tensor]],
    *,
    is_plain: bool,
) -> AtLargeWeights:
    """`at_large_weights`, and that it is not known if the model raises an error."""
    try:
        return at_large_weights(sublayer, state, moved, matrices(), is_plain=is_plain)
    except FOREIGN_ERRORS as error:
        reason = f"it does not run with large weights ({named_error(error)})"
        return AtLargeWeights(untested=reason)


@dataclass(frozen=True)
class Uses:
    """The tensors that a block's output depends on, by id, and by how many operations each is
    read.
    """

    tensors: dict[int, Tensor]
    count: Counter[int]

    def of_others(self, block: nn.Module) -> list[Tensor]:
        """Those that are no parameters of the block."""
        own = set(map(id, block.parameters()))
        return [tensor for number, tensor in self.tensors.items() if number not in own]


def _uses(running: Running, x: Tensor) -> Uses:
    """What the block's output depends on, with what its other arguments were computed from."""
    output = running(x)
    uses = Uses({}, Counter())
    waiting = [output.grad_fn]
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        for following, _ in getattr(node, "next_functions", ()):
            leaf = getattr(following, "variable", None)
            if leaf is not None:
                uses.tensors[id(leaf)] = leaf
                uses.count[id(leaf)] += 1
            elif following is not None and following not in seen:
                seen.add(following)
                waiting.append(following)
    return uses


def _outer_matrix(uses: Uses, block: nn.Module, names: dict[int, str]) -> str:
    """The matrix outside of the block that its output depends on, in words; "" if there is none."""
    for tensor in uses.of_others(block):
        if not _is_vector(tensor):
            name = names.get(id(tensor), "a tensor")
            return (
                f"{name} {tuple(tensor.shape)} is a matrix outside of the block that its output"
                " depends on, and may be one more factor"
            )
    return ""


def _read_twice(uses: Uses, block: nn.Module) -> str:
    """The matrix of a linear map that several operations read, in words; "" if there is none."""
    for path, part in block.named_modules():
        if not (is_linear(part) or isinstance(part, nn.MultiheadAttention)):
            continue
        for name in MATRICES:
            times = uses.count[id(part._parameters.get(name))]
            if times > 1:
                where = ".".join(filter(None, (path, name)))
                return f"{where} is used {times} times in a pass, and a loss pays it once"
    return ""


def _why_not_plain(block: nn.Module) -> str:
    """Why the block's linear maps are not W x + b with matrices of their own; "" if they are."""
    linear = {path: part for path, part in block.named_modules() if is_linear(part)}
    for path, part in linear.items():
        weight = part._parameters.get("weight")
        if weight is None or not weight.is_floating_point():
            return f"the weight of {path} is computed from other parameters, or stored in no floats"
    further = _further_matrix(block)
    if further:
        return f"{further} is a matrix outside of its linear maps, and may be one more factor"
    for shape in (DENSE, SPIKY):
        with large_weights(linear.values(), bias=LARGE, shape=shape):
            for path, part in linear.items():
                if not _is_plain(part):
                    return f"{path} does not compute W x + b with its weight W and bias b"
    return ""


def _why_otherwise(running: Running, call: Call, steps: Sequence[tuple[Sublayer, float]]) -> str:
    """Why the block does not compute its sublayers' steps with large weights; "" if it does."""
    for times in (MODERATE, LARGE):
        with large_weights(with_matrices(running.block), bias=times, shape=DENSE, times=times):
            found = running(call.x)
            expected = _stepped(call.x, steps)
        if _agree(expected, found):
            continue
        moves_further = bool((found - call.x).norm() > SAME * (expected - call.x).norm())
        is_finite = bool(found.isfinite().all() and expected.isfinite().all())
        if times == MODERATE or (is_finite and moves_further):
            return OTHERWISE
        return f"{OTHERWISE}, or numbers overflow in it"
    return ""


def _why_unlike(
    block: nn.Module, steps: Sequence[tuple[Sublayer, float]], states: Sequence[Tensor]
) -> tuple[str, list[float]]:
    """Why the sublayers do not compute with large weights what their matrices show; "" if they do.
    Also how closely each was seen to do so.
    """
    parts = list(with_matrices(block))
    missed = [0.0] * len(steps)
    # at the states of the text: a map may depend on their number or size
    for i, ((sublayer, _), state) in enumerate(zip(steps, states, strict=True)):
        field = sublayer.field
        given = sublayer.given(state)
        if shown_velocity(field, given) is None:
            continue
        if isinstance(field, ExposesHeads):
            missed[i] = row_error(field, given)
        for shape in (DENSE, SPIKY):
            # next to such weights a bias that is only added does not show
            with large_weights(parts, bias=1.0, shape=shape):
                shown = shown_velocity(field, given)
                found = field(given).flatten(0, -2)
                if shown is None or not _agree(shown, found):
                    return OTHER_THAN_SHOWN, missed
                missed[i] = max(missed[i], largest_share(found - shown, shown))
        if isinstance(field, ExposesHeads):
            with large_weights(parts, bias=0.0, shape=ONE_SIDED):
                missed[i] = max(missed[i], row_error(field, given))
            if not missed[i] <= CLOSE:
                return NO_AVERAGES, missed
            path = path_of(field, given)
            assert isinstance(path, ValuePath), "heads have values"
            with large_weights(parts, bias=0.0, shape=DENSE, times=1.0):
                reason, error = why_no_averages(field, path, given, CLOSE)
            missed[i] = max(missed[i], error)
            if reason:
                return reason, missed
    return "", missed


def _stepped(x: Tensor, steps: Sequence[tuple[Sublayer, float]]) -> Tensor:
    """What the sublayers of a block make of its state, at their present weights."""
    for sublayer, length in steps:
        x = sublayer.step(x, length)
    return x


def _further_matrix(block: nn.Module) -> str:
    """The name of a parameter that is neither of a known matrix nor a vector; "" if there is
    none.
    """
    known = {
        id(part._parameters.get(name))
        for part in with_matrices(block)
        for name in (*MATRICES, *OFFSETS)
    }
    for name, parameter in block.named_parameters():
        part = block.get_submodule(name.rpartition(".")[0])
        if id(parameter) not in known and (is_linear(part) or not _is_vector(parameter)):
            return f"{name} {tuple(parameter.shape)}"
    return ""


def _is_vector(tensor: Tensor) -> bool:
    """Whether at most one axis is longer than 1."""
    return tensor.numel() == max(tensor.shape, default=1)


def _is_plain(part: nn.Module) -> bool:
    """Whether a linear map computes W x + b with its own weight and bias."""
    parameter = part._parameters["weight"]
    assert parameter is not None, "it has a weight of its own"
    weight: Tensor = parameter
    if not isinstance(part, TransposedLinear):
        weight = weight.mT
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, 3, len(weight), generator=generator, dtype=torch.float64).to(weight)
    expected = x @ weight
    bias = part._parameters.get("bias")
    if bias is not None:
        expected = expected + bias
    return _agree(part(x), expected)


def _agree(computed: Tensor, expected: Tensor) -> bool:
    if computed.shape != expected.shape:
        return False
    missed = difference(computed, expected)
    return math.isfinite(missed) and missed <= CLOSE


def _has_other_parameters(block: nn.Module) -> bool:
    """Whether the block has trained vectors or numbers outside of its linear maps."""
    of_linear = {
        id(parameter)
        for part in with_matrices(block)
        for parameter in part.parameters(recurse=False)
    }
    return any(id(parameter) not in of_linear for parameter in block.parameters())

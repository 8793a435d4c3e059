"""Whether a foreign model computes with its matrices what its reading says, at any size of them.

A reading is tested at the present weights. A penalty that is needed is about large ones: a clip, a
weight that is computed from others, or a scale outside of a map would give a wrong number in
silence. So the linear maps of each part get large weights and biases, and the model must still
compute what its sublayers do.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
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
)
from ctrans.control.shown_factors import Factors, largest_share, path_of, shown_velocity
from ctrans.dynamics.fields import ExposesHeads
from ctrans.dynamics.sublayer import Sublayer
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
from ctrans.interop.tolerances import difference
from ctrans.interop.tried_parts import TriedPart, tried_parts

Names = Mapping[int, str]
"""The names of a model's parameters, by id."""
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
    """The test of each part in eval mode. The weights are put back to the bit. `states` are those
    before each segment, for a text.

    A model with weights on demand counts as unlike, and so does one whose blocks are one module
    that is used several times. Their verdicts are tested all the same.
    """
    unlike: dict[int, str] = {}
    further: set[int] = set()
    tests: dict[int, AtLargeWeights] = {}
    missed: dict[int, float] = {}
    with as_found(adapter.model), torch.no_grad(), without_fast_path():
        try:
            parts = tried_parts(adapter, sublayers, lengths, states)
        except FOREIGN_ERRORS as error:
            reason = f"it does not run with gradients ({named_error(error)})"
            reasons = dict.fromkeys(range(len(sublayers)), reason)
            return Factors(reasons, untested=reasons)
        names = {id(weight): name for name, weight in adapter.model.named_parameters()}
        for part in parts:
            steps = [(sublayers[k], lengths[k]) for k in part.segments]
            reason = part.not_tried
            computes_otherwise = False
            outer: list[Tensor] = []
            if not reason:
                try:
                    with all_tracked(adapter.model):
                        uses = _uses(part)
                    if _has_other_parameters(part.module) or uses.of_others(part.module):
                        further |= set(part.segments)
                    outer = [x for x in uses.of_others(part.module) if not _is_vector(x)]
                    reason = _why_otherwise(part, steps)
                    computes_otherwise = reason == OTHERWISE
                    of_text = [states[k] for k in part.segments]
                    unlike_shown, of_maps = _why_unlike(part.module, steps, of_text)
                    missed |= dict(zip(part.segments, of_maps, strict=True))
                    reason = (
                        _outer_matrix(uses, part.module, names)
                        or _why_not_plain(part.module, names)
                        or _read_twice(uses, part.module, names)
                        or reason
                        or unlike_shown
                    )
                except FOREIGN_ERRORS as error:
                    reason = f"it does not run with large weights ({named_error(error)})"
            if reason:
                unlike |= dict.fromkeys(part.segments, reason)
            for k in part.segments:
                tests[k] = _tested(
                    sublayers[k],
                    part.state,
                    partial(part.moved, k),
                    partial(_with_outer, outer, sublayers[k], part.module),
                    is_plain=part.is_a_block and not reason,
                )
                if computes_otherwise:
                    tests[k] = replace(tests[k], otherwise=OTHERWISE)
    before_others = [part.segments[-1] for part in parts if part.is_followed]
    if before_others and all(tests[k].bounded for k in before_others):
        # what bounds the others counts as the head here
        last = len(sublayers) - 1
        tests[last] = replace(tests[last], bounded=True)
    return replace(
        factors_at(tests, unlike, further),
        tolerance=READING,
        missed=missed,
        outside=outside_of(adapter) | past_the_states(adapter),
    )


def _with_outer(outer: Sequence[Tensor], sublayer: Sublayer, module: nn.Module) -> list[Tensor]:
    """The matrices of a sublayer, and those outside of its part that its output depends on."""
    return [*matrices_of(sublayer, module), *(x.detach() for x in outer)]


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


def _uses(part: TriedPart) -> Uses:
    """What the part's output depends on, with what else it reads was computed from."""
    output = part.run(part.state)
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


def _outer_matrix(uses: Uses, module: nn.Module, names: Names) -> str:
    """The matrix outside of the part that its output depends on, in words; "" if there is none."""
    for tensor in uses.of_others(module):
        if not _is_vector(tensor):
            name = names.get(id(tensor), "a tensor")
            return (
                f"{name} {tuple(tensor.shape)} is a matrix outside of the block that its output"
                " depends on, and may be one more factor"
            )
    return ""


def _read_twice(uses: Uses, module: nn.Module, names: Names) -> str:
    """The matrix of a linear map that several operations read, in words; "" if there is none."""
    for path, part in module.named_modules():
        if not (is_linear(part) or isinstance(part, nn.MultiheadAttention)):
            continue
        for name in MATRICES:
            times = uses.count[id(part._parameters.get(name))]
            if times > 1:
                where = ".".join(filter(None, (_name_of(part, path, names), name)))
                return f"{where} is used {times} times in a pass, and a loss pays it once"
    return ""


def _name_of(part: nn.Module, path: str, names: Names) -> str:
    """The name of the model's module with the weights of that part, or the part's path."""
    for parameter in part.parameters():
        name = names.get(id(parameter))
        if name is not None:
            return name.rpartition(".")[0]
    return path


def _why_not_plain(module: nn.Module, names: Names) -> str:
    """Why the linear maps are not W x + b with matrices of their own; "" if they are."""
    linear = [part for part in module.modules() if is_linear(part)]
    paths = {part: _name_of(part, path, names) for path, part in module.named_modules()}
    for part in linear:
        weight = part._parameters.get("weight")
        if weight is None or not weight.is_floating_point():
            return (
                f"the weight of {paths[part]} is computed from other parameters, or stored in no"
                " floats"
            )
    further = _further_matrix(module, names)
    if further:
        return f"{further} is a matrix outside of its linear maps, and may be one more factor"
    for shape in (DENSE, SPIKY):
        with large_weights(linear, bias=LARGE, shape=shape):
            for part in linear:
                if not _is_plain(part):
                    return f"{paths[part]} does not compute W x + b with its weight W and bias b"
    return ""


def _why_otherwise(part: TriedPart, steps: Sequence[tuple[Sublayer, float]]) -> str:
    """Why the part does not compute its sublayers' steps with large weights; "" if it does."""
    x = part.state
    for times in (MODERATE, LARGE):
        with large_weights(with_matrices(part.module), bias=times, shape=DENSE, times=times):
            found = part.run(x)
            expected = _stepped(x, steps)
        if _agree(expected, found):
            continue
        moves_further = bool((found - x).norm() > SAME * (expected - x).norm())
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


def _further_matrix(module: nn.Module, names: Names) -> str:
    """The name of a parameter that is neither of a known matrix nor a vector; "" if there is
    none.
    """
    known = {
        id(part._parameters.get(name))
        for part in with_matrices(module)
        for name in (*MATRICES, *OFFSETS)
    }
    for name, parameter in module.named_parameters():
        part = module.get_submodule(name.rpartition(".")[0])
        if id(parameter) not in known and (is_linear(part) or not _is_vector(parameter)):
            return f"{names.get(id(parameter), name)} {tuple(parameter.shape)}"
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

"""Which thresholds of segments are those of a model, and how precise those of its ODE are."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from ctrans.control.costate import costate
from ctrans.control.costate_error import with_error
from ctrans.control.decay_threshold import DecayThreshold
from ctrans.control.evidence import share_of
from ctrans.control.large_weights import own_factors
from ctrans.control.outer_code import outer_code
from ctrans.control.regularization import Regularization
from ctrans.control.residual_pullback import active_channels, costate_of_map, raw_costate
from ctrans.control.segment_check import SegmentCheck, admissible_at, at_field, threshold_at
from ctrans.control.shown_factors import Factors, TestsFactors
from ctrans.control.tangent import LinearSpace
from ctrans.dynamics.depth import Depth
from ctrans.dynamics.sublayer import Sublayer
from ctrans.measure.walk import Model
from solvers import SolveError

RTOL = 1e-4
ATOL = 1e-6
"""Tolerances of the continuous costate where the check is not thorough and no penalty is asked
about. Costates of 112 models were then exact to 3e-4 of their size; of models with weights 25 times
as large some were wrong by a fifth.
"""
SAFETY = 2.0
"""The margin of a threshold of the ODE, as a multiple of its change with the tolerances."""
SAFETY_OF_MISSED = 4.0
"""The error of a map's terms, as a multiple of the largest one that was seen."""


def factors_of_model(model: Model, states: Sequence[Tensor]) -> Factors:
    """What a test of the model at large weights found, at these states before each segment."""
    if isinstance(model, TestsFactors):
        return model.factors(states)
    return replace(own_factors(model.depth, states), outside=outer_code(model))


def why_no_threshold(depth: Depth, factors: Factors) -> str:
    """Why no penalty of the model's weights is known to be needed; "" if thresholds of segments are
    those of the model.
    """
    reason = _why_not_by_segment(depth)
    for k, unlike in factors.unlike.items():
        reason = reason or f"segment {k}: {unlike}"
    return reason


def _why_not_by_segment(depth: Depth) -> str:
    """Why the penalty that a segment needs does not follow from the segment alone; "" if it does.

    A loss pays a shared weight once, while every segment that uses it gains.
    """
    weights: list[tuple[int, Tensor]] = []
    for k, sublayer in enumerate(depth.sublayers):
        names = list(sublayer.field.named_parameters(remove_duplicate=False))
        if _is_own(sublayer.field) and len({id(weight) for _, weight in names}) < len(names):
            return "a map uses a weight twice"
        # in a user's code a module under two names is one module, which may be called once
        weights += [
            (k, parameter)
            for part in sublayer.field.modules()
            for parameter in part.parameters(recurse=False)
        ]
    shared = _sharing_segments(weights)
    if shared is not None and shared[0] == shared[1]:
        return "a map uses a weight twice"
    if shared is not None:
        return "several segments use the same weights, and a loss pays them once"
    if depth.shared:
        return "the weights are functions of others, which several segments share"
    for k, sublayer in enumerate(depth.sublayers):
        if _is_computed(sublayer.field):
            return f"weights of segment {k} are computed from others, which a loss pays instead"
    return ""


def _sharing_segments(weights: Sequence[tuple[int, Tensor]]) -> tuple[int, int] | None:
    """The segments of the first two weights that are the same, or have an entry in common; None if
    none have.
    """
    segment_of: dict[int, int] = {}
    for k, weight in weights:
        if id(weight) in segment_of:
            return segment_of[id(weight)], k
        segment_of[id(weight)] = k
    stored = [(k, weight) for k, weight in weights if weight.data_ptr()]
    stored.sort(key=lambda each: each[1].data_ptr())
    for i, (k, weight) in enumerate(stored):
        end = _end(weight)
        for other, following in stored[i + 1 :]:
            if following.data_ptr() >= end:
                break
            if _share_an_entry(weight, following):
                return k, other
    return None


def _end(weight: Tensor) -> int:
    """Where the memory of a weight ends, with its gaps, such as other columns of its matrix."""
    steps = zip(weight.shape, weight.stride(), strict=True)
    last = sum((size - 1) * stride for size, stride in steps)
    return weight.data_ptr() + (last + 1) * weight.element_size()


def _is_own(field: nn.Module) -> bool:
    """Whether a map is one of ctrans, which calls each of its modules under each name."""
    module = type(field).__module__
    return module.startswith("ctrans.") and not module.startswith("ctrans.interop.")


def _share_an_entry(first: Tensor, second: Tensor) -> bool:
    """Whether two weights, whose memory overlaps but for gaps, have an entry in common."""
    if first.is_contiguous() and second.is_contiguous():
        return True
    are_alike = first.dtype == second.dtype and first.stride() == second.stride()
    if are_alike and first.dim() == 2 and first.stride(1) == 1:
        # columns of one matrix: entry (i, j) of the second is (i + rows, j + columns) of the first
        between = (second.data_ptr() - first.data_ptr()) // first.element_size()
        rows, columns = divmod(between, first.stride(0))
        ways = ((rows, columns), (rows + 1, columns - first.stride(0)))
        return any(
            -len(second) < row < len(first) and -second.shape[1] < column < first.shape[1]
            for row, column in ways
        )
    return bool(torch.isin(_addresses(first), _addresses(second)).any())


def _addresses(weight: Tensor) -> Tensor:
    """The address of each entry."""
    offsets = torch.zeros(1, dtype=torch.long)
    for size, stride in zip(weight.shape, weight.stride(), strict=True):
        offsets = (offsets[:, None] + stride * torch.arange(size)).flatten()
    return weight.data_ptr() + offsets * weight.element_size()


def _is_computed(field: nn.Module) -> bool:
    """Whether weights of a map are computed from other parameters."""
    hooked = any(name.endswith("_orig") for name, _ in field.named_parameters())
    return hooked or any(parametrize.is_parametrized(part) for part in field.modules())


def margins_of(
    segments: Sequence[SegmentCheck], model: Model, tokens: Tensor, targets: Any
) -> dict[int, float]:
    """By how much the threshold of each segment's ODE may be wrong, as a share: SAFETY times its
    change at a costate with coarser tolerances. Infinite if that has no solution.
    """
    of_ode = {
        segment.segment: segment.training_threshold
        for segment in segments
        if segment.training_threshold is not None
    }
    if not of_ode:
        return {}
    try:
        coarse = costate(model, tokens, targets, form="continuous", rtol=RTOL, atol=ATOL)
    except SolveError:
        return dict.fromkeys(of_ode, math.inf)
    sublayers = list(model.depth.sublayers)
    margins = {}
    for k, threshold in of_ode.items():
        x, p = at_field(sublayers[k], coarse.starts[k], continuous=True)
        raw = sublayers[k].gain * costate_of_raw_output(sublayers[k], x, p)
        other = threshold_at(sublayers[k], x, raw, model.depth.lengths[k])
        if other is None:
            margins[k] = math.inf
            continue
        changes = [
            share_of(abs(other.lower - threshold.lower), threshold.lower),
            share_of(abs(other.upper - threshold.upper), threshold.upper),
        ]
        # inf - inf: a threshold that no costate makes finite
        margins[k] = SAFETY * max((change for change in changes if change == change), default=0.0)
    return margins


def lost_in_norm(sublayer: Sublayer, x: Tensor) -> float:
    """inf if a norm around the state squares entries so small that they lose their digits, else
    0.
    """
    if sublayer.state_norm is None:
        return 0.0
    numbers = torch.finfo(x.dtype)
    largest = float(x.abs().amax())
    if 0 < largest < math.sqrt(numbers.tiny / numbers.eps):
        return math.inf
    return 0.0


def with_margins(
    segment: SegmentCheck,
    sublayer: Sublayer,
    state: Tensor,
    factors: Factors,
    *,
    of_costate: float,
    of_solver: float,
) -> SegmentCheck:
    """The segment, whose thresholds are known up to what its map missed, the reading of the model,
    and the errors of its costates, as shares: `of_costate` of the steps', `of_solver` of the ODE's.
    """
    segment = with_missed(segment, factors.missed.get(segment.segment, 0.0))
    segment = with_error(segment, of_costate, factors.tolerance, state.dtype)
    return widened(segment, of_solver + factors.tolerance + lost_in_norm(sublayer, state))


def widened(segment: SegmentCheck, margin: float) -> SegmentCheck:
    """The segment, whose threshold of the ODE is known to a margin. It is a share."""
    threshold = segment.training_threshold
    if threshold is None or not margin:
        return segment
    if math.isfinite(margin):
        widened = threshold.wider(margin, 0.0)
    else:
        upper = 0.0 if threshold.upper == 0 else math.inf
        widened = replace(threshold, lower=0.0, upper=upper)
    return replace(segment, training_threshold=widened)


def with_missed(segment: SegmentCheck, missed: float) -> SegmentCheck:
    """The segment, whose map computes what its matrices show up to a share of its terms."""
    if not missed:
        return segment

    def widened(threshold: DecayThreshold | None) -> DecayThreshold | None:
        return None if threshold is None else threshold.wider(0.0, SAFETY_OF_MISSED * missed)

    return replace(
        segment,
        training_threshold=widened(segment.training_threshold),
        step_threshold=widened(segment.step_threshold),
    )


def why_contradicted(segments: Sequence[SegmentCheck]) -> str:
    """Where factors were found that need more than what is proven to suffice; "" if nowhere."""
    for segment in segments:
        for threshold in (segment.step_threshold, segment.training_threshold):
            if threshold is not None and threshold.contradicts_itself:
                return (
                    f"segment {segment.segment}: factors were found that need a penalty of"
                    f" {threshold.lower:.3g}, and {threshold.upper:.3g} is said to suffice. The two"
                    " contradict each other, so that neither is proven: the map is not what its"
                    " parts show"
                )
    return ""


def costate_of_raw_output(sublayer: Sublayer, x: Tensor, p: Tensor) -> Tensor:
    """P of the raw output behind the tangent projection of a norm around the state."""
    space = admissible_at(
        sublayer.state_norm,
        sublayer.placement,
        x.flatten(0, -2),
        None,
        Regularization(),
        active_channels(sublayer),
    )
    assert isinstance(space, LinearSpace), "a threshold is that of a linear space"
    return raw_costate(sublayer, space, costate_of_map(sublayer, p.flatten(0, -2)))

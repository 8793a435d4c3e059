"""Warnings of steps that the types of the state and of the time do not resolve: the solve reaches
its end, with a result that rounding decided.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from solvers.attempts import SHORTEST
from solvers.run import Run, dtype_name, neighbour, real_type, representable
from solvers.segment import Segment

LOST = 0.1
"""The share of what all steps add from which its loss is worth a warning."""
FEW_TIMES = 64
"""A segment with fewer times in it has no room for an adaptive method's steps."""
FINE = 64
"""Times are rounded by up to half of their distance: in a step with fewer times in it, by more than
1/128 of the step.
"""
NEAR = 1e-5
"""Every type has that many times in steps above this share of the time."""


def rounding_warnings(segments: Sequence[Segment], x1: Tensor, run: Run) -> list[str]:
    """One sentence for each type that does not resolve the steps of a solve."""
    sentences = []
    if run.increments is not None:
        share = run.increments.share_lost(x1)
        if share > LOST:
            sentences.append(
                f"rounding to {dtype_name(x1.dtype)} loses {share:.0%} of what the"
                f" {run.stats.accepted} steps add to the state: keep it in float32 or float64, or"
                " take fewer steps"
            )
    sentence = coarse_clock(segments, x1.dtype, run.stats.accepted)
    if sentence:
        sentences.append(sentence)
    return sentences


def short_segment(segment: Segment) -> str:
    """What to do about a segment that has too few times for steps; "" if it has enough."""
    length = abs(segment.span)
    far = max(abs(segment.start), abs(segment.end))
    spacing = math.ulp(far)
    if length < FEW_TIMES * spacing and far > FEW_TIMES * SHORTEST:
        return (
            f"the segment is {length:.2g} long, and near t = {far:.6g} times are {spacing:.2g}"
            " apart: let t start at 0, and add the rest in the field"
        )
    if length < FEW_TIMES * SHORTEST:
        return (
            f"the segment is {length:.2g} long, and steps below {SHORTEST:g} do not count: measure"
            " the time in another unit"
        )
    return ""


def coarse_clock(segments: Sequence[Segment], dtype: torch.dtype, accepted: int) -> str:
    """One sentence if so many steps are too short for the times of that type of state; else ""."""
    far = max(abs(segments[0].start), abs(segments[-1].end))
    mean_step = sum(abs(segment.span) for segment in segments) / max(1, accepted)
    if mean_step >= NEAR * far:
        return ""
    far = representable(far, dtype)
    spacing = neighbour(far, math.inf, dtype) - far
    if mean_step >= FINE * spacing:
        return ""
    clock = dtype_name(real_type(dtype))
    return (
        f"near t = {far:.6g} the times of {clock} are {spacing:.2g} apart, and the steps"
        f" {mean_step:.2g} long: a field that depends on t gets wrong times; let t start at 0 and"
        " add the rest in the field, or use a float64 state"
    )

"""The first step size of an adaptive method, from the sizes of x, x' and x'', with one evaluation
(Hairer, Norsett, Wanner, II.4).

Theirs is 0.01^(1/order) of this one, which gave first errors near 1e-4 of the allowed error on
switched Transformers.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from solvers.run import Run
from solvers.segment import Segment


@torch.no_grad()
def initial_step(segment: Segment, x: Tensor, slope: Tensor, run: Run, order: int) -> float:
    """The first step size at the segment's start, from the state and dx/dt there."""
    scale = run.atol + run.rtol * run.counted(x).abs()
    size = run.measure(run.counted(x) / scale)
    speed = run.measure(run.counted(slope) / scale)
    span = abs(segment.end - segment.start)
    probe = probe_step(size, speed, span)
    h = math.copysign(probe, segment.end - segment.start)
    probed = run.velocity(segment, segment.start + h, x + h * slope)
    bend = run.counted(probed - slope)
    curvature = run.measure(bend / scale) / probe
    return guessed_step(speed, curvature, probe, span, order)


def probe_step(size: float, speed: float, span: float) -> float:
    """A short step that resolves the second derivative, from the norms of x and x'."""
    if size > 1e-5 and 1e-5 < speed < math.inf:
        return min(span, 0.01 * size / speed)
    return min(span, 1e-6)


def guessed_step(speed: float, curvature: float, probe: float, span: float, order: int) -> float:
    """A first step from the norms of x' and x''."""
    largest = max(speed, curvature)
    if not math.isfinite(largest):
        return probe
    guess: float
    if largest > 1e-15:
        guess = (1 / largest) ** (1 / order)
    else:
        guess = max(1e-6, 1e-3 * probe)
    return min(100 * probe, guess, span)

"""Gradient by recomputation: only the states at the starts of groups of steps are kept."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from solvers.march import Gradient, Progress, march
from solvers.method import Method, Replayable
from solvers.recompute import recomputed
from solvers.run import Run, Stopped
from solvers.segment import Segment
from solvers.solution import Solution, Stats, Status
from solvers.step_control import check_whole
from solvers.transforms import check_no_transform

Record = list[tuple[tuple[float, ...], Stats]]
"""The times and the cost of a group of pieces: of its first pass, then of recomputations."""
Part = tuple[int, Segment]
"""(k, piece): a piece of segment k that is recomputed as a whole."""


@dataclasses.dataclass(frozen=True)
class Checkpoint(Gradient):
    """Backprop in groups of `every` steps, which the backward pass computes again one by one. It
    keeps N/every states and one group's graph.

    The default of `every` is sqrt(N), rounded up, for all N steps of the solve. The gradient equals
    that of `backprop`, for one more forward pass. An adaptive method first finds its steps without
    a graph, which takes another forward pass. torchdiffeq's methods are recomputed by whole
    segments, and `every` counts these.
    """

    every: int | None = None

    def __post_init__(self) -> None:
        if self.every is not None:
            check_whole("every", self.every)

    def integrate(
        self,
        method: Method,
        segments: Sequence[Segment],
        x0: Tensor,
        run: Run,
        progress: Progress | None,
    ) -> Solution:
        check_no_transform("checkpoint")
        try:
            return self._integrate(method, segments, x0, run, progress)
        except Stopped:  # the plain loop without a graph finds how far it got
            with torch.no_grad():
                return march(method, segments, x0, run.again())

    def _integrate(
        self,
        method: Method,
        segments: Sequence[Segment],
        x0: Tensor,
        run: Run,
        progress: Progress | None,
    ) -> Solution:
        single, parts, request = _pieces(method, segments, x0, run)
        every = self.every or math.isqrt(len(parts) - 1) + 1
        x = x0
        run.keep(segments[0].start, x0)
        # the last group is a full one: its gradient comes first, and needs no recomputation until
        # another solve begins
        for end in range((len(parts) - 1) % every + 1, len(parts) + 1, every):
            group = parts[max(0, end - every) : end]
            record: Record = []
            advance = partial(_advance, single, [piece for _, piece in group], request, record)
            # a compiler can trace torch's own
            compiling = torch.compiler.is_compiling()
            if request.steps == 1:
                opening = [i for i, (k, _) in enumerate(group) if i == 0 or group[i - 1][0] != k]
            else:
                opening = [0]
            last = end == len(parts)
            if compiling:
                states = checkpoint(advance, x, use_reentrant=False)
            else:
                states = recomputed(advance, x, last, opening)
            x = states[-1]
            times, stats = record[0]
            run.stats += stats
            if run.save == "steps":
                for t, state in zip(times, states, strict=True):
                    run.keep(t, state)
            for i, (k, piece) in enumerate(group):
                if piece.t1 != segments[k].t1:
                    continue
                if run.save == "segments":
                    run.keep(piece.end, states[i])
                if progress is not None:
                    progress(k)
        if run.save == "ends":
            run.keep(segments[-1].end, x)
        return run.solution(x)


def _advance(
    method: Method, pieces: Sequence[Segment], request: Run, record: Record, x: Tensor
) -> tuple[Tensor, ...]:
    run = request.again()
    part = march(method, pieces, x, run)
    if part.status is not Status.SUCCESS:
        raise Stopped(part.status, part.time or pieces[0].start, part.x1)
    record.append((part.times[1:], run.stats))
    return part.states[1:]


def _pieces(
    method: Method, segments: Sequence[Segment], x0: Tensor, run: Run
) -> tuple[Method, list[Part], Run]:
    """The method for one piece, the pieces to recompute, and the request of each."""
    if not isinstance(method, Replayable):
        whole = list(enumerate(segments))
        return method, whole, run.again(save="steps" if run.save == "steps" else "segments")
    if not method.adaptive:
        parts = [
            (k, piece)
            for k, segment in enumerate(segments)
            for piece in method.pieces(segment, run.steps)
        ]
        return method, parts, run.again(steps=1, save="segments")
    trial = run.again(save="ends")
    with torch.no_grad():
        found = march(method, segments, x0, trial)
    if found.status is not Status.SUCCESS:
        raise Stopped(found.status, found.time or 0.0, found.x1)
    # the accepted steps are counted when they are repeated
    run.stats = dataclasses.replace(trial.stats, accepted=0)
    place = {id(segment): k for k, segment in enumerate(segments)}
    parts = []
    for step in trial.trace:
        segment = step.segment
        first = step.start == segment.start
        last = step.end == segment.end
        if first:
            t0 = segment.t0
        else:
            t0 = step.start
        if last:
            t1 = segment.t1
        else:
            t1 = step.end
        parts.append((place[id(segment)], segment.part(t0, t1, first)))
    return method.fixed(), parts, run.again(steps=1, save="segments")

"""Gradient by recomputation: only the states at the starts of groups of steps are kept."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from solvers.march import Gradient, Progress, march, with_graphs
from solvers.method import Method, Replayable, has_capability
from solvers.recompute import recomputed
from solvers.run import Run, Save, Stopped
from solvers.segment import Segment, Time
from solvers.solution import Solution, Stats, Status
from solvers.step_control import check_whole
from solvers.transforms import check_no_transform

Record = list[tuple[tuple[float, ...], Stats]]
"""The times and the cost of a group of parts: of its first pass, then of recomputations."""
Part = tuple[int, Segment]
"""(k, piece): a piece of segment k, which is recomputed as a whole."""


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
        single, parts, request = _parts(method, segments, x0, run)
        every = self.every or math.isqrt(len(parts) - 1) + 1
        x = x0
        run.keep(segments[0].start, x0)
        # the last group is a full one: its gradient comes first, and needs no recomputation until
        # another solve begins
        for end in range((len(parts) - 1) % every + 1, len(parts) + 1, every):
            group = parts[max(0, end - every) : end]
            record: Record = []
            advance = partial(_advance, single, [piece for _, piece in group], request, record)
            if torch.compiler.is_compiling():
                # a compiler can trace torch's own
                states = checkpoint(advance, x, use_reentrant=False)
            else:
                checked_states = [0]
                if request.steps == 1:
                    checked_states = _starts_of_segments(group)
                is_last = end == len(parts)
                states = recomputed(advance, x, hold=is_last, checked=checked_states)
            x = states[-1]
            times, stats = record[0]
            run.stats += stats
            if run.save == "steps":
                for t, state in zip(times, states, strict=True):
                    run.keep(t, state)
            for i, (k, piece) in enumerate(group):
                if piece.ends[1] != segments[k].ends[1]:
                    continue
                if run.save == "segments":
                    run.keep(piece.end, states[i])
                if progress is not None:
                    progress(k)
        if run.save == "ends":
            run.keep(segments[-1].end, x)
        return run.solution(x)


def _starts_of_segments(group: Sequence[Part]) -> list[int]:
    """The indices of the parts in the group that are the group's first ones of their segments."""
    numbers = [k for k, _ in group]
    return [i for i, k in enumerate(numbers) if i == 0 or numbers[i - 1] != k]


def _advance(
    method: Method, pieces: Sequence[Segment], request: Run, record: Record, x: Tensor
) -> tuple[Tensor, ...]:
    run = request.again()
    part = march(method, pieces, x, run)
    if part.status is not Status.SUCCESS:
        raise Stopped(part.status, part.time or pieces[0].start, part.x1)
    record.append((part.times[1:], run.stats))
    return part.states[1:]


def _parts(
    method: Method, segments: Sequence[Segment], x0: Tensor, run: Run
) -> tuple[Method, list[Part], Run]:
    """The method for one part, the parts to recompute, and the request of each."""
    if not isinstance(method, Replayable):
        save: Save = "segments"
        if run.save == "steps":
            save = "steps"
        return method, list(enumerate(segments)), run.again(save=save)
    if not method.adaptive:
        parts = [
            (k, piece)
            for k, segment in enumerate(segments)
            for piece in method.pieces(segment, run.steps)
        ]
        return method, parts, run.again(steps=1, save="segments")
    trial = run.again(save="ends")
    ahead = segments
    if not has_capability(method, "compiled"):
        ahead = [with_graphs(segment) for segment in segments]
    with torch.no_grad():
        tried = march(method, ahead, x0, trial)
    if tried.status is not Status.SUCCESS:
        raise Stopped(tried.status, tried.time or 0.0, tried.x1)
    # the accepted steps are counted when they are repeated
    run.stats = dataclasses.replace(trial.stats, accepted=0)
    number = {id(segment): k for k, segment in enumerate(ahead)}
    parts = []
    for step in trial.trace:
        k = number[id(step.segment)]
        segment = segments[k]
        first = step.start == segment.start
        # the segment's own ends are exact
        t0: Time = step.start
        if first:
            t0 = segment.ends[0]
        t1: Time = step.end
        if step.end == segment.end:
            t1 = segment.ends[1]
        parts.append((k, segment.part(t0, t1, first=first)))
    return method.fixed(), parts, run.again(steps=1, save="segments")

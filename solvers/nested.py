"""Solves with several tensors, as solves with one flat state: wraps the maps and events, and
restores the structure of the solution.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from torch import Tensor

from solvers.event import Event
from solvers.segment import Segment
from solvers.solution import Solution
from solvers.tree import Tree


def flat_segments(tree: Tree, segments: Sequence[Segment]) -> list[Segment]:
    """The segments for the flat state."""

    def of(segment: Segment) -> Segment:
        maps = {name: getattr(segment, name) for name in ("field", "project", "enter")}
        return segment.with_maps(
            **{
                name: tree.flat_map(f"the {name}", given)
                for name, given in maps.items()
                if given is not None
            }
        )

    return [of(segment) for segment in segments]


def flat_events(tree: Tree, events: Sequence[Event]) -> list[Event]:
    """The events for the flat state."""
    return [dataclasses.replace(event, function=tree.on_parts(event.function)) for event in events]


def in_structure(tree: Tree, solution: Solution) -> Solution:
    """The solution with its states in the structure of the initial one."""
    parts: Callable[[Tensor], Tensor] = tree.parts
    if solution.curve is None:
        curve = None
    else:
        curve = lambda t, flat=solution.curve: parts(flat(t))
    return dataclasses.replace(
        solution,
        x1=parts(solution.x1),
        states=tuple(parts(state) for state in solution.states),
        curve=curve,
    )

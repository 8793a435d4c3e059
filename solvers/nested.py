"""Solves with several tensors, as solves with one flat state: wraps the maps and events, and
restores the structure of the solution.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from solvers.event import Event
from solvers.segment import Segment
from solvers.solution import Solution
from solvers.tree import Tree


def flat_segments(tree: Tree, segments: Sequence[Segment]) -> list[Segment]:
    """The segments for the flat state."""

    flat = []
    for segment in segments:
        flat_maps = {"acting": tree.flat_map("the field", segment.acting)}
        for name, function in (("project", segment.project), ("enter", segment.enter)):
            if function is not None:
                flat_maps[name] = tree.flat_map(f"the {name}", function)
        flat.append(segment.with_maps(**flat_maps))
    return flat


def flat_events(tree: Tree, events: Sequence[Event]) -> list[Event]:
    """The events for the flat state."""
    return [dataclasses.replace(event, function=tree.on_parts(event.function)) for event in events]


def in_structure(tree: Tree, solution: Solution) -> Solution:
    """The solution with its states in the structure of the initial one."""
    curve: Callable[[Any], Any] | None = None
    if solution.curve is not None:
        curve = partial(_parts_of_curve, tree, solution.curve)
    return dataclasses.replace(
        solution,
        x1=tree.parts(solution.x1),
        states=tuple(tree.parts(state) for state in solution.states),
        curve=curve,
    )


def _parts_of_curve(tree: Tree, flat_curve: Callable[[Any], Tensor], t: Any) -> Any:
    return tree.parts(flat_curve(t))

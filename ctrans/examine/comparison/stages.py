"""Inside of a sublayer that changed: which of its stages does."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from ctrans.dynamics.fields import ExposesHeads, ExposesRows
from ctrans.dynamics.sublayer import Sublayer
from ctrans.examine.comparison.output_relations import (
    OutputRelation,
    not_finite,
    output_relation,
    relation_of_rows,
)
from ctrans.examine.comparison.parts import ModelParts
from ctrans.interop.foreign_errors import FOREIGN_ERRORS
from solvers import ConfigError

FEWER_DIGITS = (torch.float16, torch.bfloat16)
"""Dtypes that may have taken digits from a stage, the finer one first."""
FINE = 0.05
COARSE = 1.5
"""From so many times its rounding, and up to so many, a dtype explains a change."""
ROWS = "rows of attention"
MATRICES = {"queries": "query", "keys": "key", "values": "value", "output map": "out"}
"""Stages that are matrices of all heads, and the matrix of a head."""


@dataclass(frozen=True)
class Stage:
    """A stage of a sublayer, on the same input in both models.

    - `defect`: as a share of what the stage makes
    - `ratio`: of the defect to what rounding makes
    - `kind` and `relation`: how the second one's output follows from the first one's, where there
      is a simple way
    """

    name: str
    defect: float
    ratio: float
    changed: bool
    kind: str = ""
    relation: str = ""


Thunk = Callable[[], Tensor]


@runtime_checkable
class Noisy(Protocol):
    """What a computation of the first model makes with random rounding, of its own unit or of a
    dtype with fewer digits.
    """

    def __call__(self, compute: Thunk, dtype: torch.dtype | None = None) -> Tensor: ...


def stages_of(
    a: ModelParts, b: ModelParts, part: int, given: Any, to_b: Any, noisy: Noisy, limit: float
) -> tuple[Stage, ...]:
    """The stages of that part that both models show; of the embedding and the head, the output.
    `given` and `to_b` are what the part reads, for each of the two models.
    """
    if part == 0:
        own = a.outputs(0, given)[0]
        other = b.outputs(0, given)[0]
        return (_of_end("output", own, other),)
    if part == len(a) - 1:
        own = a.outputs(part, given)[0]
        other = b.outputs(part, to_b)[0]
        return (_of_end("logits", own, other),)
    first = a.sublayers[part - 1]
    second = b.sublayers[part - 1]
    found = []
    lengths = (a.lengths[part - 1], b.lengths[part - 1])
    for name, of_first, of_second in _stages(first, second, given, to_b.dtype, lengths):
        try:
            found.append(_stage(name, of_first, of_second(), noisy, limit))
        except (*FOREIGN_ERRORS, ConfigError):
            continue
    return tuple(found)


def _of_end(name: str, own: Tensor, other: Tensor) -> Stage:
    """The output of the embedding or the head, which changed."""
    if own.shape != other.shape:
        return Stage(name, math.inf, math.inf, changed=True)
    kind, words = output_relation(own, other, 0.0) or ("", "")
    size = float(own.double().square().mean().sqrt())
    defect = _distance(own, other) / size if size else math.inf
    return Stage(name, defect, math.inf, changed=True, kind=kind, relation=words)


def _stage(name: str, of_first: Thunk, other: Tensor, noisy: Noisy, limit: float) -> Stage:
    own = of_first()
    if own.shape != other.shape:
        return Stage(name, math.inf, math.inf, changed=True)
    size = float(own.double().square().mean().sqrt())
    defect = _distance(own, other)
    rounding = _distance(own, noisy(of_first))
    ratio = 0.0
    share = 0.0
    if defect:
        ratio = defect / rounding if rounding else math.inf
        share = defect / size if size else math.inf
    changed = not ratio <= limit
    relation = not_finite(own, other)
    if relation is None and changed and name == ROWS:
        relation = relation_of_rows(own, other)
    elif relation is None and changed and name not in MATRICES:
        relation = output_relation(own, other, rounding)
    is_vague = relation is None or relation.kind == "some tokens"
    if changed and is_vague and name not in MATRICES:
        for dtype in FEWER_DIGITS:
            of_dtype = _distance(own, noisy(of_first, dtype))
            if FINE * of_dtype <= defect <= COARSE * of_dtype:
                words = f"no more than rounding to {str(dtype).removeprefix('torch.')} makes of it"
                relation = OutputRelation("fewer digits", words)
                break
    kind, words = relation or ("", "")
    return Stage(name, share, ratio, changed, kind, words)


def _distance(x: Tensor, y: Tensor) -> float:
    return float((x.double() - y.double()).square().mean().sqrt())


def _stages(
    first: Sublayer,
    second: Sublayer,
    given: Tensor,
    dtype: torch.dtype,
    lengths: tuple[float, float],
) -> Iterator[tuple[str, Thunk, Thunk]]:
    """By name, each stage of the two sublayers on inputs of the first one."""
    x = first.enter(given)
    u = first.given(x)
    yield "norm before it", lambda: first.given(x), lambda: second.given(x.to(dtype))
    ours = first.attention
    theirs = second.attention
    if ours is not None and theirs is not None:
        yield from _of_attention(ours.field, theirs.field, u, dtype)
    yield "map", lambda: first.field(u), lambda: second.field(u.to(dtype))
    f = first.field(u)
    dt, other_dt = lengths
    yield (
        "norm and scale behind it",
        lambda: dt * first.raw_velocity(f, x),
        lambda: other_dt * second.raw_velocity(f.to(dtype), x.to(dtype)),
    )
    r = first.raw_velocity(f, x)
    yield (
        "sum with the state",
        lambda: first.moved(x, r, dt),
        lambda: second.moved(x.to(dtype), r.to(dtype), dt),
    )


def _of_attention(
    ours: object, theirs: object, u: Tensor, dtype: torch.dtype
) -> Iterator[tuple[str, Thunk, Thunk]]:
    if isinstance(ours, ExposesHeads) and isinstance(theirs, ExposesHeads):
        for name, role in MATRICES.items():
            yield name, partial(_matrices, ours, role), partial(_matrices, theirs, role)
    if isinstance(ours, ExposesRows) and isinstance(theirs, ExposesRows):
        yield (
            ROWS,
            lambda: ours.probabilities(u),
            lambda: theirs.probabilities(u.to(dtype)),
        )


def _matrices(attention: ExposesHeads, role: str) -> Tensor:
    """The matrices of that role, of all heads."""
    return torch.stack([getattr(head, role).detach() for head in attention.head_matrices()])

"""Wall time of solvers next to torchdiffeq, torchode and diffrax (jitted) on three shapes, at equal
tolerances.
"""

from __future__ import annotations

import importlib.util
import os
import statistics
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torchdiffeq
from torch import Tensor, nn

from benchmarks.bench.measure import Row, best, pairs, row_of_pairs
from benchmarks.bench.shapes import SHAPES, Shape
from solvers import solve, solve_each

RK4_STEPS = {"small": 400, "batch": 100, "transformer": 2}
"""In each segment."""
THEIRS = {"tsit5": "dopri5", "dopri5": "dopri5", "rk4": "rk4"}
"""By method, the one of torchdiffeq of its order."""


class Comparison(NamedTuple):
    """Two solves of one shape, and the number of evaluations of ours."""

    name: str
    ours: Callable[[], Tensor]
    peer: str
    theirs: Callable[[], Tensor]
    evaluations: int


def solving(device: str = "cpu", *, quick: bool) -> Iterator[Row]:
    """Each method of ours next to each peer that has it or one of its order; in short only
    tsit5.
    """
    yield from solves(device, quick=quick)
    if not quick:
        yield adjoint(device)


@torch.no_grad()
def solves(device: str, *, quick: bool) -> Iterator[Row]:
    """Those without gradients."""
    for key, make in SHAPES.items():
        shape = make(device)
        exact = shape.exact()
        starts = [
            torch.tensor(segment.start, dtype=shape.x0.dtype) for segment in shape.segments[:2]
        ]  # attention and FFN
        each = [
            best(partial(segment.field, t, shape.x0))
            for segment, t in zip(shape.segments, starts, strict=False)
        ]
        evaluation = statistics.fmean(each)
        for name, ours, peer, theirs, evaluations in comparisons(
            key, shape, ("tsit5",) if quick else tuple(THEIRS)
        ):
            found = pairs(ours, theirs, 3 if quick else 12)
            errors = [float((x().double() - exact).norm() / exact.norm()) for x in (ours, theirs)]
            more = {
                "limit": evaluations * evaluation,
                "limit_is": "its evaluations of the field alone",
                "aim": 1.0,
            }
            note = f"{evaluations} evaluations; errors {errors[0]:.0e}, peer {errors[1]:.0e}"
            yield row_of_pairs(f"{shape.name}: {name}", peer, found, **more, note=note)


def comparisons(key: str, shape: Shape, methods: Sequence[str]) -> Iterator[Comparison]:
    """Those whose peers are installed."""
    adaptive = {"rtol": shape.tolerance, "atol": shape.tolerance}

    def ours(method: str, *, compiled: bool = False) -> Callable[[], Tensor]:
        how = {"steps": RK4_STEPS[key]} if method == "rk4" else adaptive
        return lambda: solve(shape.segments, shape.x0, method=method, compiled=compiled, **how).x1

    def cost(method: str) -> int:
        how = {"steps": RK4_STEPS[key]} if method == "rk4" else adaptive
        return int(solve(shape.segments, shape.x0, method=method, **how).stats.evaluations)

    for method in methods:
        there = by_torchdiffeq(key, shape, THEIRS[method])
        yield Comparison(method, ours(method), f"torchdiffeq {THEIRS[method]}", there, cost(method))
    adaptives = [method for method in methods if method != "rk4"]
    if importlib.util.find_spec("diffrax"):
        for method in adaptives:
            their = by_diffrax(shape, method, each=False)
            yield Comparison(method, ours(method), f"diffrax {method}, jitted", their, cost(method))
            yield Comparison(
                f"{method}, compiled",
                ours(method, compiled=True),
                f"diffrax {method}, jitted",
                their,
                cost(method),
            )
    if shape.rows:
        (segment,) = shape.segments

        def each(method: str) -> Tensor:
            return solve_each([segment], shape.x0, method=method, **adaptive).x1

        for method in adaptives:
            alone = solve_each([segment], shape.x0, method=method, **adaptive).stats
            evaluations = max(stats.evaluations for stats in alone)
            own = lambda method=method: each(method)  # noqa: E731
            if importlib.util.find_spec("torchode"):
                their = by_torchode(shape, method)
                yield Comparison(
                    f"each row, {method}", own, f"torchode {method}", their, evaluations
                )
            if importlib.util.find_spec("diffrax") and len(shape.x0) > 1:
                their = by_diffrax(shape, method, each=True)
                yield Comparison(
                    f"each row, {method}",
                    own,
                    f"diffrax {method}, vmap, jitted",
                    their,
                    evaluations,
                )


def by_torchdiffeq(key: str, shape: Shape, method: str) -> Callable[[], Tensor]:
    """One call for each segment, so that no step crosses a switch."""

    def run() -> Tensor:
        x = shape.x0
        for segment, times in zip(shape.segments, shape.ends, strict=True):
            if method == "rk4":
                options: dict[str, Any] = {"step_size": float(times[1] - times[0]) / RK4_STEPS[key]}
                x = torchdiffeq.odeint(segment.field, x, times, method=method, options=options)[-1]
            else:
                x = torchdiffeq.odeint(
                    segment.field,
                    x,
                    times,
                    method=method,
                    rtol=shape.tolerance,
                    atol=shape.tolerance,
                )[-1]
        return x

    return run


def by_torchode(shape: Shape, method: str) -> Callable[[], Tensor]:
    """Steps of each row's own, as torchode's users write it, not compiled."""
    import torchode

    (segment,) = shape.segments
    term = torchode.ODETerm(segment.field)
    stepper = {"tsit5": torchode.Tsit5, "dopri5": torchode.Dopri5}[method](term=term)
    control = torchode.IntegralController(atol=shape.tolerance, rtol=shape.tolerance, term=term)
    solver = torchode.AutoDiffAdjoint(stepper, control)
    rows = len(shape.x0)
    start, end = (shape.x0.new_full((rows,), t) for t in (segment.start, segment.end))
    times = torch.stack((start, end), 1)

    def run() -> Tensor:
        return solver.solve(torchode.InitialValueProblem(y0=shape.x0, t_eval=times)).ys[:, -1]

    return run


def by_diffrax(shape: Shape, method: str, *, each: bool) -> Callable[[], Tensor]:
    """Jitted, and compiled before it is timed."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # it would take most of a GPU
    import jax
    import jax.numpy as jnp

    jax.config.update("jax_enable_x64", shape.x0.dtype == torch.float64)
    jax.config.update("jax_default_matmul_precision", "highest")  # on a GPU it would round to TF32
    solved, x0 = shape.jax(method, each=each), jnp.asarray(shape.x0.cpu().numpy())
    return lambda: torch.from_dlpack(solved(x0).block_until_ready())


class Field(nn.Module):
    """A segment as `odeint_adjoint` takes it."""

    def __init__(self, field: nn.Module):
        super().__init__()
        self.own = field

    def forward(self, t: Tensor, x: Tensor) -> Tensor:
        return self.own(x)


def adjoint(device: str = "cpu") -> Row:
    """The continuous adjoint through 48 blocks by rk4: gradients of the first state and of all
    weights.
    """
    shape = SHAPES["transformer"](device)
    assert shape.model is not None
    sublayers = list(shape.model.requires_grad_(requires_grad=True).depth.sublayers)
    fields, steps = [Field(sublayer) for sublayer in sublayers], RK4_STEPS["transformer"]

    def theirs() -> None:
        x = shape.x0
        for field, times in zip(fields, shape.ends, strict=True):
            size = float(times[1] - times[0]) / steps
            x = torchdiffeq.odeint_adjoint(
                field, x, times, method="rk4", options={"step_size": size}
            )[-1]
        x.square().sum().backward()

    def ours() -> None:
        solve(
            shape.segments, shape.x0, method="rk4", steps=steps, gradient="adjoint"
        ).x1.square().sum().backward()

    found = pairs(ours, theirs, 6)
    return row_of_pairs(
        f"{shape.name}: rk4, gradient 'adjoint'", "torchdiffeq odeint_adjoint, rk4", found, aim=1.0
    )

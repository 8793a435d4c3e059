"""Checks of what a user gives to the solvers of this package, before any computation."""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor

from ctrans.base.option import Range
from solvers import ConfigError, is_dense, shown

TYPES = (torch.float32, torch.float64)
MOST_NODES = 2**26
"""Of a grid: half a gigabyte in float64 for each of some 30 tensors of its size."""
MOST_SAVED = 2**28
"""Numbers of a result, 2 gigabytes in float64."""
MOST_STEPS = 100_000
"""Steps of time of a solve, about two minutes on a grid of 21 x 21."""
MOST_NODE_STEPS = 10**10
"""Steps of time times nodes, about 40 minutes on one core."""
WIDTHS = Range(1, 2**14)
"""Widths of a ball: its map has width^2 entries."""
DISTINCT = 4
"""Neighbouring nodes differ by at least so many machine epsilons of the axis's larger end."""


def is_number(value: object) -> bool:
    """Whether the value is a real number, which may be infinite or nan, but no bool."""
    return isinstance(value, Real) and not isinstance(value, bool)


def numbers_of(name: str, values: Any) -> list[float]:
    """The entries of a list or of a tensor of one axis. Raises ConfigError for anything else."""
    listed = values
    if isinstance(values, Tensor) and values.dim() == 1 and not values.is_meta:
        listed = values.detach().tolist()
    elif hasattr(values, "tolist") and getattr(values, "ndim", 0) == 1:
        listed = values.tolist()
    is_list = isinstance(listed, Sequence) and not isinstance(listed, (str, bytes))
    if not is_list or not all(map(is_number, listed)):
        raise ConfigError(f"{name} = {shown(values)}: give a list of numbers")
    try:
        return [float(value) for value in listed]
    except OverflowError:
        raise ConfigError(f"{name} = {shown(values)}: give numbers below 1e308") from None


def check_dtype(dtype: object) -> None:
    """Raises ConfigError unless it is float32 or float64."""
    if dtype not in TYPES:
        raise ConfigError(f"dtype = {shown(str(dtype))}: give torch.float64 or torch.float32")


def check_device(device: Any) -> None:
    """Raises ConfigError for a device that does not exist here, and for one without numbers."""
    try:
        usable = not torch.empty(0, device=torch.device(device)).is_meta
    except (TypeError, RuntimeError, AssertionError):  # AssertionError: a torch without CUDA
        usable = False
    if not usable:
        raise ConfigError(f"device = {shown(str(device))}: give one that is here, such as 'cpu'")


def counts_of(points: Any) -> tuple[int, ...]:
    """The numbers of points. Raises ConfigError for anything but a list of whole numbers, and for
    more than `MOST_NODES` nodes.
    """
    is_list = isinstance(points, Sequence) and not isinstance(points, (str, bytes))
    if not is_list or not all(
        isinstance(count, Integral) and not isinstance(count, bool) for count in points
    ):
        raise ConfigError(
            f"points = {shown(points)}: give a list of whole numbers, one for each dimension"
        )
    counts = tuple(int(count) for count in points)
    nodes = math.prod(counts)
    if nodes > MOST_NODES:
        raise ConfigError(
            f"points = {shown(counts)} have {shown(nodes)} nodes: give fewer points, for at most"
            f" {MOST_NODES:,} nodes"
        )
    return counts


def check_axis(low: float, high: float, count: int, dtype: torch.dtype) -> None:
    """Raises ConfigError unless the axis has at least 3 points, and neighbouring ones differ."""
    if not (math.isfinite(low) and math.isfinite(high) and low < high):
        raise ConfigError(
            f"an axis from {low!r} to {high!r}: give finite ends, the lower one first"
        )
    if count < 3:
        raise ConfigError(f"an axis of {count} points: give at least 3")
    precision = torch.finfo(dtype)
    largest = max(abs(low), abs(high))
    if high - low > precision.max or largest > precision.max:
        raise ConfigError(
            f"an axis from {low!r} to {high!r} is longer than {dtype} can tell: give closer ends"
        )
    spacing = (high - low) / (count - 1)
    if spacing < max(DISTINCT * precision.eps * largest, precision.tiny):
        raise ConfigError(
            f"an axis from {low!r} to {high!r} of {count} points has a spacing of {spacing:.1e},"
            f" which {dtype} does not resolve: give ends further apart, or fewer points"
        )


def check_hamiltonian(hamiltonian: object) -> None:
    """Raises ConfigError unless it has a method `support`."""
    has_support = callable(getattr(hamiltonian, "support", None))
    if isinstance(hamiltonian, type) or not has_support:
        raise ConfigError(
            f"hamiltonian = {shown(hamiltonian)}: give an object with a method support(P), such as"
            " velocity_ball(R, width) or admissible_set(norm, placement)"
        )


def check_values(what: str, values: Any, x: Tensor) -> None:
    """Raises ConfigError unless the values are a tensor with one number for each state x."""
    if not isinstance(values, Tensor):
        raise ConfigError(f"{what} returned {shown(values)}: return a tensor")
    if values.shape != x.shape[:-1]:
        raise ConfigError(
            f"{what} returned shape {tuple(values.shape)} for states {tuple(x.shape)}: it must"
            " reduce the last axis only"
        )
    if values.dtype != x.dtype or values.device != x.device:
        raise ConfigError(
            f"{what} returned {values.dtype} on {values.device} for states of {x.dtype} on"
            f" {x.device}: return values of the states' type, on their device"
        )


def checked_times(times: Any, horizon: Any, nodes: int) -> list[float]:
    """The times as numbers. Raises ConfigError unless they are in [0, T], and not too many."""
    if not is_number(horizon) or not 0 < horizon < math.inf:
        raise ConfigError(f"horizon = {shown(horizon)}: give a finite T > 0")
    if getattr(times, "ndim", 1) == 1 and hasattr(times, "__len__") and len(times) > MOST_STEPS:
        raise ConfigError(f"{len(times):,} times: give at most {MOST_STEPS:,}")
    listed = numbers_of("times", times)
    if not listed or not all(0 <= time <= horizon for time in listed):
        raise ConfigError(
            f"times {shown(tuple(listed))}: give at least one, each in [0, T] = [0, {horizon:g}]"
        )
    if len(listed) * nodes > MOST_SAVED:
        raise ConfigError(
            f"{len(listed):,} times on {nodes:,} nodes are {len(listed) * nodes:,} numbers: give"
            f" fewer times or points, for at most {MOST_SAVED:,}"
        )
    return listed


def check_stepping(cfl: Any, compiled: object, progress: object) -> None:
    """Raises ConfigError for a cfl outside (0, 1], and for options of a wrong type."""
    if not is_number(cfl) or not 0 < cfl <= 1:
        raise ConfigError(
            f"cfl = {shown(cfl)}: give a number in (0, 1]; above 1 the scheme is not monotone"
        )
    if not isinstance(compiled, bool):
        raise ConfigError(f"compiled = {shown(compiled)}: give True or False")
    if progress is not None and not callable(progress):
        raise ConfigError(f"progress = {shown(progress)}: give a function of the time, or None")


def check_ball(centre: Any, map: Any) -> None:
    """Raises ConfigError unless both are finite floats of one type and width."""
    fits = (
        isinstance(centre, Tensor)
        and isinstance(map, Tensor)
        and centre.dtype in TYPES
        and map.dtype == centre.dtype
        and centre.ndim == 1
        and map.ndim == 2
        and len(map) == len(centre)
    )
    if not fits:
        raise ConfigError(
            f"a set of velocities with the centre {shown(centre)} and the map {shown(map)}: give"
            " tensors of shapes (width) and (width, rank), of one type"
        )
    if not bool(centre.isfinite().all() & map.isfinite().all()):
        raise ConfigError(
            "a set of velocities has entries that are not finite: give a finite centre and map"
        )


def check_remaining(remaining: Any) -> None:
    """Raises ConfigError unless T - t is finite and at least 0."""
    if not is_number(remaining) or not 0 <= remaining < math.inf:
        raise ConfigError(
            f"the remaining time T - t = {shown(remaining)} must be finite and at least 0: ask for"
            " times t up to T"
        )


def check_states(x: Any) -> None:
    """Raises ConfigError unless x is a non-empty tensor of floats with an axis for the width."""
    if not is_dense(x) or x.dtype not in TYPES or x.ndim == 0 or x.numel() == 0:
        raise ConfigError(
            f"the states are {shown(x)}: give a non-empty tensor of floats of shape (..., width)"
        )


def check_step_count(steps: float, nodes: int, speeds: Sequence[float], cfl: float) -> None:
    """Raises ConfigError if a solve needs more steps of time than `MOST_STEPS`, or more work than
    `MOST_NODE_STEPS`.
    """
    most = min(MOST_STEPS, MOST_NODE_STEPS // nodes)
    if steps > most:
        raise ConfigError(
            f"this needs {steps:.3g} steps of time on {nodes:,} nodes, with velocities up to"
            f" {max(speeds):.3g} and cfl = {cfl!r}, and at most {most:,} are allowed: give slower"
            " velocities, fewer points, a shorter horizon or a larger cfl"
        )

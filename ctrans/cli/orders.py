"""Measured orders of convergence, of `ctrans simulate --orders`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from ctrans.base.threads import choose_threads
from ctrans.cli.click_options import expand
from ctrans.dynamics.norm import NORMS
from ctrans.dynamics.placement import PLACEMENTS
from ctrans.model.orders import Convergence, depth_convergence, own_methods, substep_convergence
from ctrans.report.progress import progress_bar
from solvers import METHODS, ConfigError, look_up
from solvers.methods import fixed_step

LIMITS = ("substeps", "depth")
OrderJob = tuple[str, Callable[[], Convergence]]
"""A measurement, with a word for the progress bar."""


def plan_orders(
    placements: Sequence[str],
    norm: str,
    seed: int,
    *,
    limits: Sequence[str],
    methods: Sequence[str],
) -> list[OrderJob]:
    """The measurements of the limits for these placements. No methods stand for all own ones.

    Raises ConfigError for names that are unknown, and for what has no order in a limit.
    """
    look_up("norm", norm, NORMS)
    chosen = expand(limits, dict.fromkeys(LIMITS), "limit")
    if methods and "substeps" not in chosen:
        raise ConfigError(
            f"{', '.join(methods)}: the limit depth has methods of its own: choose the limit"
            " substeps too, or leave methods out"
        )
    mixed = [name for name in placements if name not in PLACEMENTS]
    if mixed and "depth" in chosen:
        raise ConfigError(
            f"placement {mixed[0]!r}: the limit depth needs one placement for all sublayers: choose"
            " the limit substeps"
        )
    names = expand(methods, METHODS, "method") or own_methods()
    for name in names:
        fixed_step(name)
    jobs: list[OrderJob] = []
    if "substeps" in chosen:
        jobs += [
            (f"{name}, {placement}", partial(substep_convergence, name, placement, norm, seed))
            for name in names
            for placement in placements
        ]
    if "depth" in chosen:
        jobs += [
            (f"depth, {p}", partial(depth_convergence, p, symmetric=s, norm=norm, seed=seed))
            for s in (False, True)
            for p in placements
        ]
    return jobs


def measure_orders(jobs: Sequence[OrderJob]) -> list[Convergence]:
    """The orders, one by one, with a progress bar."""
    choose_threads(0)  # the models are small
    results: list[Convergence] = []
    with progress_bar("orders", len(jobs)) as advance:
        for word, job in jobs:
            advance(word)
            results.append(job())
    return results

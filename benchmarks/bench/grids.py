"""The HJB equation on a grid next to hj_reachability."""

from __future__ import annotations

import importlib.util
import itertools

import numpy as np

from benchmarks.bench.measure import Row, alone, pairs, row_alone, row_of_pairs
from benchmarks.bench.peaks import bandwidth
from benchmarks.hjb import CFL, PEER, NearestTarget, our_solver, peer_solver, square, velocities
from ctrans.control.hjb import SCHEMES, solve_hjb
from ctrans.control.hjb.hopf_lax import Terminal


def grids(device: str = "cpu", *, quick: bool) -> list[Row]:
    """Each scheme on 201 x 201 points to T = 1; in short 101 x 101 to T = 0.25, and compiled on a
    GPU only. Compiling is not timed.
    """
    points, horizon, rounds = (101, 0.25, 4) if quick else (201, 1.0, 8)
    terminal: Terminal = NearestTarget()
    grid, rows, rate = square(points, device), [], bandwidth(device)
    for (scheme, rule), compiled in itertools.product(
        SCHEMES.items(), (False,) if quick and device == "cpu" else (False, True)
    ):
        own = our_solver(scheme, compiled=compiled)
        # each stage reads and writes the values once, if nothing else leaves the processor
        stages = _steps(scheme, points, horizon) * (3 if rule.order > 1 else 1)
        limit = {
            "limit": stages * 2 * 8 * points**2 / rate,
            "limit_is": "values read and written once a stage at the copy's rate",
        }
        name = f"HJB, {scheme}, {points} x {points} to T = {horizon:g}{', compiled' * compiled}"
        if importlib.util.find_spec(PEER) is None:
            rows.append(
                row_alone(
                    name,
                    alone(lambda own=own: own(terminal, grid, horizon), rounds),
                    **limit,
                    note=f"{PEER} is not installed",
                )
            )
            continue
        their = peer_solver(scheme)
        gap = float(np.abs(own(terminal, grid, horizon) - their(terminal, grid, horizon)).max())
        found = pairs(
            lambda own=own: own(terminal, grid, horizon),
            lambda their=their: their(terminal, grid, horizon),
            rounds,
        )
        rows.append(
            row_of_pairs(
                name, PEER, found, **limit, aim=1.0, note=f"values differ by at most {gap:.0e}"
            )
        )
    return rows


def _steps(scheme: str, points: int, horizon: float) -> int:
    return solve_hjb(
        velocities(),
        NearestTarget(),
        square(points),
        [0.0],
        horizon=horizon,
        scheme=scheme,
        cfl=CFL,
    ).steps

"""Compares the HJB grid scheme with hj_reachability: error against Hopf-Lax, its order, and time.

python benchmarks/hjb.py

hj_reachability is no dependency. Install it to compare: `pip install hj_reachability jax`. Without
it, only our scheme runs.
"""

from __future__ import annotations

import importlib.util
import math
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

# in place of this file's own folder, where `import hjb` would find this file
sys.path[0] = str(Path(__file__).resolve().parents[1])

from ctrans.base.threads import wait_passively

wait_passively()

import torch
from torch import Tensor

from benchmarks.record import keep
from ctrans.control.hjb import SCHEMES, Grid, ValueFunction, solve_hjb
from ctrans.control.hjb.hopf_lax import BallImage, Terminal, hopf_lax, velocity_hull
from ctrans.control.hjb.study import NearestTarget
from ctrans.dynamics.norm import RMSNorm

GAMMA = (1.0, 0.5)
HALF_WIDTH, CFL = 2.0, 0.75
POINTS = (51, 101, 201)
REPEATS = 3
PEER = "hj_reachability"
PEER_ACCURACY = {"upwind": "low", "weno5": "very_high"}
"""Their names for first-order upwind with Euler steps, and WENO-5 with TVD RK3."""

Solver = Callable[[Terminal, Grid, float], np.ndarray]
"""Phi at t = 0 from a terminal cost on a grid and the horizon T."""


def smooth(x: Tensor) -> Tensor:
    """A slope that never vanishes, so that no kink forms."""
    return x[..., 0] + 0.5 * x[..., 1] + 0.2 * torch.sin(2 * x[..., 0]) * torch.cos(1.5 * x[..., 1])


class Case(NamedTuple):
    """A terminal cost and how long it evolves."""

    name: str
    terminal: Terminal
    horizon: float


CASES = (
    Case("smooth data", smooth, 0.25),
    Case("kinks: distance to the nearer of two targets", NearestTarget(), 0.25),
)


def velocities(device: torch.device | str = "cpu") -> BallImage:
    """Peri-LN's with RMSNorm of gain GAMMA."""
    norm = RMSNorm(2).double().requires_grad_(requires_grad=False).to(device)
    norm.weight.copy_(torch.tensor(GAMMA))
    return velocity_hull(norm)


def our_solver(scheme: str, *, compiled: bool = False) -> Solver:
    """ctrans with that scheme."""

    def solve(terminal: Terminal, grid: Grid, horizon: float) -> np.ndarray:
        own = velocities(grid.device)
        found = solve_hjb(
            own, terminal, grid, [0.0], horizon=horizon, scheme=scheme, cfl=CFL, compiled=compiled
        )
        return found.values[0].cpu().numpy()

    return solve


def peer_solver(scheme: str) -> Solver:
    """hj_reachability with the same scheme, CFL number, edges, control set and precision."""
    import hj_reachability as hj
    import jax

    jax.config.update("jax_enable_x64", val=True)

    class Ellipsoid(hj.ControlAndDisturbanceAffineDynamics):
        """dx/dt = sqrt(2) Gamma u, |u| <= 1; the disturbance does nothing."""

        def __init__(self) -> None:
            point = hj.sets.Box(jax.numpy.zeros(1), jax.numpy.zeros(1))
            super().__init__("min", "max", hj.sets.Ball(jax.numpy.zeros(2), 1.0), point)

        def open_loop_dynamics(self, state: object, time: object) -> jax.Array:
            return jax.numpy.zeros(2)

        def control_jacobian(self, state: object, time: object) -> jax.Array:
            return math.sqrt(2) * jax.numpy.diag(jax.numpy.array(GAMMA))

        def disturbance_jacobian(self, state: object, time: object) -> jax.Array:
            return jax.numpy.zeros((2, 1))

    dynamics = Ellipsoid()
    settings = hj.SolverSettings.with_accuracy(PEER_ACCURACY[scheme], CFL_number=CFL)

    def solve(terminal: Terminal, grid: Grid, horizon: float) -> np.ndarray:
        box = hj.sets.Box(jax.numpy.array(grid.low), jax.numpy.array(grid.high))
        edges = (hj.boundary_conditions.extrapolate,) * 2
        lattice = hj.Grid.from_lattice_parameters_and_boundary_conditions(
            box, grid.points, boundary_conditions=edges
        )
        values = jax.numpy.array(terminal(grid.nodes).cpu().numpy())
        return np.asarray(
            hj.step(settings, dynamics, lattice, 0.0, values, -horizon, progress_bar=False)
        )

    return solve


def square(points: int, device: str = "cpu") -> Grid:
    return Grid((-HALF_WIDTH,) * 2, (HALF_WIDTH,) * 2, (points,) * 2, device=device)


def timed(
    solver: Solver, terminal: Terminal, grid: Grid, horizon: float
) -> tuple[np.ndarray, list[float]]:
    """The value, and the seconds of each of REPEATS solves; the first compiles, where there is
    something to compile.
    """
    seconds = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        value = solver(terminal, grid, horizon)
        seconds.append(time.perf_counter() - start)
    return value, seconds


def untouched(grid: Grid, horizon: float) -> Tensor:
    """The nodes whose value the edges cannot change."""
    speeds = tuple(math.sqrt(2) * gamma for gamma in GAMMA)
    return ValueFunction(grid, (), torch.empty(0, *grid.points), horizon, speeds, 0).untouched(0.0)


def accuracy(case: Case, solvers: dict[str, Solver]) -> list[str]:
    """Mean and largest error against Hopf-Lax and time by resolution, and the order of the mean
    over all resolutions.
    """
    lines = [
        f"{case.name}, T = {case.horizon:g}",
        f"{'':24}" + "".join(f"{f'{n} x {n}':>29}" for n in POINTS),
    ]
    lines.append(f"{'':24}" + f"{'mean (largest) error':>22}{'s':>7}" * len(POINTS) + "   order")
    exact = {
        points: hopf_lax(case.terminal, square(points).nodes, case.horizon, velocities()).numpy()
        for points in POINTS
    }
    found: dict[tuple[str, int], np.ndarray] = {}
    for name, solver in solvers.items():
        row, means = f"{name:24}", []
        for points in POINTS:
            grid, mask = square(points), untouched(square(points), case.horizon).numpy()
            found[name, points], seconds = timed(solver, case.terminal, grid, case.horizon)
            error = np.abs(found[name, points] - exact[points])[mask]
            row += f"{error.mean():>14.2e} ({error.max():.0e}){min(seconds):>7.2f}"
            means.append(error.mean())
        order = -np.polyfit(np.log(np.array(POINTS) - 1), np.log(means), 1)[0]
        lines.append(f"{row}{order:>8.2f}")
    for scheme in SCHEMES:
        if (f"{PEER} {scheme}", POINTS[-1]) in found:
            gap = np.abs(
                found[f"{PEER} {scheme}", POINTS[-1]] - found[f"ctrans {scheme}", POINTS[-1]]
            )[mask]
            lines.append(
                f"largest difference between the two at {POINTS[-1]} x {POINTS[-1]}, {scheme}:"
                f" {gap.max():.1e}"
            )
    return [*lines, ""]


def speed(solvers: dict[str, Solver], points: int = 201, horizon: float = 1.0) -> list[str]:
    """Seconds for the first solve to T, which may compile, and for the best; and for Hopf-Lax at
    all nodes.
    """
    lines = [
        f"{points} x {points} to T = {horizon:g}, distance to the nearer of two targets; s, first"
        f" solve and best of {REPEATS}"
    ]
    for name, solver in solvers.items():
        _, seconds = timed(solver, NearestTarget(), square(points), horizon)
        lines.append(f"{name:24}{seconds[0]:8.2f}{min(seconds):8.2f}")
    start = time.perf_counter()
    hopf_lax(NearestTarget(), square(points).nodes, horizon, velocities())
    return [*lines, f"{'Hopf-Lax at every node':24}{time.perf_counter() - start:8.2f}"]


def main() -> None:
    available = importlib.util.find_spec(PEER) is not None
    solvers = {f"ctrans {scheme}": our_solver(scheme) for scheme in SCHEMES}
    if available:
        solvers |= {f"{PEER} {scheme}": peer_solver(scheme) for scheme in SCHEMES}
    lines = [
        f"-dPhi/dt + H(grad Phi) = 0 on [-2, 2]^2, RMSNorm's ellipsoid with gamma = {GAMMA},"
        f" float64, CFL {CFL:g}."
    ]
    lines.append("Errors at t = 0 against Hopf-Lax, at the nodes that the edges cannot influence.")
    if not available:
        lines.append(
            f"{PEER} is not installed here, so ours stands alone: pip install {PEER} jax, and run"
            " again to compare."
        )
    lines.append("")
    for case in CASES:
        lines += accuracy(case, solvers)
    keep("hjb", lines + speed(solvers))


if __name__ == "__main__":
    main()

"""Compares rules for the step size of esdirk4 on stiff problems: work at equal error.

Its error is like work^-4, so work * error^(1/4) does not depend on the tolerance. Work is
evaluations of the field plus products J v. The error is the largest over ten times, relative to the
largest value of each component. The table compares it with that of the rule `cautious`, as a
geometric mean. Rules are chosen on some problems (tuned) and tested on the rest (held out).

python benchmarks/stiff_controllers.py
"""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

# in place of this file's own folder, where `import solvers` would find another file
sys.path[0] = str(Path(__file__).resolve().parents[1])

from ctrans.base.threads import wait_passively

wait_passively()

import numpy as np
import torch
from scipy.integrate import solve_ivp
from torch import Tensor

from benchmarks.record import keep
from benchmarks.stiff import PROBLEMS, counting
from solvers import CONTROLLERS, PI, Cautious, Controller, RungeKutta, Segment, SolveError, solve
from solvers.esdirk import ESDIRK4

Problem = tuple[Callable[[Tensor, Tensor], Tensor], Tensor, float]
TOLERANCES = (1e-3, 1e-4, 1e-5)
TIMES = 10
RULES: dict[str, Controller] = {
    "cautious": CONTROLLERS["cautious"],
    "cautious, safety 0.9": Cautious(safety=0.9),
    "cautious, safety 0.8, grow 5": Cautious(safety=0.8, grow=5.0),
    "elementary, safety 0.9": PI(alpha=1, beta=0),
    "elementary, safety 0.8, grow 5": PI(alpha=1, beta=0, safety=0.8, grow=5.0),
    "PI 0.8, 0.1, safety 0.92": PI(alpha=0.8, beta=0.1, safety=0.92),
    "PI 0.7, 0.4, safety 0.9": PI(),
    "PI 0.7, 0.4, safety 0.8, grow 5": PI(safety=0.8, grow=5.0),
    "PID": CONTROLLERS["pid"],
}


def hires(t: Tensor, y: Tensor) -> Tensor:
    """Schaefer (1975): eight species of a plant's response to light."""
    a, b, c, d, e, f, g, h = y
    v = 280 * f * h
    return torch.stack(
        [
            -1.71 * a + 0.43 * b + 8.32 * c + 0.0007,
            1.71 * a - 8.75 * b,
            -10.03 * c + 0.43 * d + 0.035 * e,
            8.32 * b + 1.71 * c - 1.12 * d,
            -1.745 * e + 0.43 * f + 0.43 * g,
            -v + 0.69 * d + 1.71 * e - 0.43 * f + 0.69 * g,
            v - 1.81 * g,
            -v + 1.81 * g,
        ]
    )


def oregonator(t: Tensor, y: Tensor) -> Tensor:
    """Field and Noyes (1974)."""
    a, b, c = y
    return torch.stack(
        [77.27 * (b + a * (1 - 8.375e-6 * a - b)), (c - (1 + a) * b) / 77.27, 0.161 * (a - c)]
    )


def chain(t: Tensor, y: Tensor) -> Tensor:
    """Prothero and Robinson (1974): the state follows cos t, at rates from 1 to 10^5."""
    rates = torch.logspace(0, 5, len(y), dtype=y.dtype)
    return -rates * (y - torch.cos(t)) - torch.sin(t)


def brusselator(t: Tensor, y: Tensor) -> Tensor:
    """The Brusselator with diffusion on 20 points."""
    u, v = y.view(2, -1)
    ends = torch.tensor([[1.0], [3.0]], dtype=y.dtype)
    padded = torch.cat([ends, y.view(2, -1), ends], dim=1)
    spread = 0.02 * (u.numel() + 1) ** 2 * (padded[:, 2:] - 2 * padded[:, 1:-1] + padded[:, :-2])
    return torch.cat([1 + u * u * v - 4 * u + spread[0], 3 * u - u * u * v + spread[1]])


def problems() -> dict[str, Problem]:
    grid = torch.linspace(0, 1, 22, dtype=torch.float64)[1:-1]
    return {
        **PROBLEMS,
        "HIRES": (hires, torch.tensor([1, 0, 0, 0, 0, 0, 0, 0.0057], dtype=torch.float64), 320.0),
        "Oregonator": (oregonator, torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64), 30.0),
        "Prothero and Robinson": (chain, torch.ones(6, dtype=torch.float64), 10.0),
        "Brusselator": (
            brusselator,
            torch.cat([1 + torch.sin(2 * math.pi * grid), 3 + 0 * grid]),
            10.0,
        ),
    }


def times(end: float) -> list[float]:
    return [end * (k + 1) / TIMES for k in range(TIMES)]


def exact(problem: Problem) -> Tensor:
    """The states at the times, by scipy's Radau."""
    field, y0, end = problem

    def right(t: float, y: np.ndarray) -> np.ndarray:
        return field(torch.tensor(t, dtype=torch.float64), torch.from_numpy(y)).numpy()

    found = solve_ivp(
        right, (0, end), y0.numpy(), method="Radau", rtol=1e-11, atol=1e-14, t_eval=times(end)
    )
    return torch.from_numpy(found.y.T)


def measured(chosen: dict[str, Problem]) -> list[str]:
    """A line for each rule: at each tolerance its work at equal error, its median error in
    tolerances, and the attempts it rejects.
    """
    solved = {name: (*problem, exact(problem)) for name, problem in chosen.items()}
    lines, base = [], {}
    for name, rule in RULES.items():
        method, cells = RungeKutta(ESDIRK4, adaptive=True, controller=rule), []
        for tolerance in TOLERANCES:
            work, errors, rejected, attempts = [], [], 0, 0
            for field, y0, end, states in solved.values():
                with counting() as products:
                    try:
                        found = solve(
                            [Segment(0, end, field)],
                            y0,
                            method=method,
                            rtol=tolerance,
                            atol=1e-3 * tolerance,
                            times=torch.tensor(times(end), dtype=torch.float64),
                        )
                    except SolveError:
                        work.append(math.inf)
                        continue
                scale = states.abs().amax(0)
                errors.append(
                    max(float(((torch.stack(found.states) - states) / scale).abs().max()), 1e-12)
                )
                work.append(
                    math.log(found.stats.evaluations + products[0]) + math.log(errors[-1]) / 4
                )
                rejected += found.stats.rejected
                attempts += found.stats.rejected + found.stats.accepted
            mean = statistics.mean(work)
            base.setdefault(tolerance, mean)
            middle = statistics.median(errors) / tolerance
            cells.append(
                f"{math.exp(mean - base[tolerance]):7.3f}{middle:8.2f}{100 * rejected / attempts:4.0f}%"
            )
        lines.append(f"{name:34}" + "".join(cells))
    return lines


def report() -> list[str]:
    all_problems = problems()
    names = sorted(all_problems)
    lines = [
        (
            "esdirk4: work at equal error over that of `cautious`, median error in tolerances,"
            " rejected attempts; float64"
        ),
        "",
    ]
    for what, some in {"tuned on": names[::2], "held out": names[1::2]}.items():
        lines += [
            f"{what}: {', '.join(some)}",
            f"{'':34}" + "".join(f"{tolerance:>20g}" for tolerance in TOLERANCES),
        ]
        lines += [*measured({name: all_problems[name] for name in some}), ""]
    return lines


if __name__ == "__main__":
    with torch.no_grad():
        keep("stiff_controllers", report())

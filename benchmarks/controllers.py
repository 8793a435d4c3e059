"""Compares rules for the step size on DETEST and on switched models: work at equal error.

A method of order 5 has an error like evaluations^-5, so evaluations * error^(1/5) does not depend
on the tolerance. The table compares it with that of dopri5 with the rule `cautious`, as a geometric
mean. Rules are chosen on every other problem (tuned). They are tested on the rest (held out) and on
switched models.

python benchmarks/controllers.py
"""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

# in place of this file's own folder, where `import solvers` would find another file
sys.path[0] = str(Path(__file__).resolve().parents[1])

from ctrans.base.threads import wait_passively

wait_passively()

import torch
from torch import Tensor

from benchmarks.record import keep
from benchmarks.solvers import switched_problem
from solvers import CONTROLLERS, PI, Cautious, Controller, RungeKutta, Segment, solve
from solvers.explicit_tableaus import DOPRI5, TSIT5
from solvers.tableau import Tableau

Field = Callable[[Tensor, Tensor], Tensor]
Problem = tuple[list[Segment], Tensor]

TOLERANCES = (1e-3, 1e-6, 1e-9)
RULES: dict[str, tuple[Tableau, Controller]] = {
    "dopri5, cautious": (DOPRI5, CONTROLLERS["cautious"]),
    "tsit5, cautious (accepts near 0.95)": (TSIT5, CONTROLLERS["cautious"]),
    "tsit5, cautious, safety 0.92": (TSIT5, Cautious(safety=0.92)),
    "tsit5, cautious, safety 0.90": (TSIT5, Cautious(safety=0.9)),
    "tsit5, elementary, safety 0.9": (TSIT5, PI(alpha=1, beta=0)),
    "tsit5, PI 0.8, 0.1, safety 0.92": (TSIT5, PI(alpha=0.8, beta=0.1, safety=0.92)),
    "tsit5, PI 0.7, 0.4, safety 0.9": (TSIT5, PI()),
    "dopri5, PI 0.7, 0.4, safety 0.9": (DOPRI5, PI()),
}


def linear(a: Tensor) -> Field:
    return lambda t, y: a @ y


def tridiagonal(n: int) -> Tensor:
    ones = torch.ones(n - 1, dtype=torch.float64)
    return torch.diag(ones, 1) + torch.diag(ones, -1) - 2 * torch.eye(n, dtype=torch.float64)


def chain(rates: Sequence[float]) -> Tensor:
    """Radioactive decay from one to the next, the last one stable."""
    out = torch.tensor([*rates, 0.0], dtype=torch.float64)
    return torch.diag(out[:-1], -1) - torch.diag(out)


def kepler(t: Tensor, y: Tensor) -> Tensor:
    return torch.cat([y[2:], -y[:2] / y[:2].norm() ** 3])


def torus(t: Tensor, y: Tensor) -> Tensor:
    r = y[:2].norm()
    return torch.stack([-y[1] - y[0] * y[2] / r, y[0] - y[1] * y[2] / r, y[0] / r])


def first(n: int) -> list[float]:
    return [1.0] + [0.0] * (n - 1)


# Hull, Enright, Fellen, Sedgwick (1972), on [0, 20]; C5, five bodies, is left out
DETEST: dict[str, tuple[Field, list[float]]] = {
    "A1": (lambda t, y: -y, [1.0]),
    "A2": (lambda t, y: -(y**3) / 2, [1.0]),
    "A3": (lambda t, y: y * torch.cos(t), [1.0]),
    "A4": (lambda t, y: y / 4 * (1 - y / 20), [1.0]),
    "A5": (lambda t, y: (y - t) / (y + t), [4.0]),
    "B1": (lambda t, y: torch.stack([2 * (y[0] - y[0] * y[1]), y[0] * y[1] - y[1]]), [1.0, 3.0]),
    "B2": (
        lambda t, y: torch.stack([y[1] - y[0], y[0] - 2 * y[1] + y[2], y[1] - y[2]]),
        [2.0, 0.0, 1.0],
    ),
    "B3": (lambda t, y: torch.stack([-y[0], y[0] - y[1] ** 2, y[1] ** 2]), [1.0, 0.0, 0.0]),
    "B4": (torus, [3.0, 0.0, 0.0]),
    "B5": (
        lambda t, y: torch.stack([y[1] * y[2], -y[0] * y[2], -0.51 * y[0] * y[1]]),
        [0.0, 1.0, 1.0],
    ),
    "C1": (linear(chain([1.0] * 9)), first(10)),
    "C2": (linear(chain([float(k) for k in range(1, 10)])), first(10)),
    "C3": (linear(tridiagonal(10)), first(10)),
    "C4": (linear(tridiagonal(51)), first(51)),
    **{
        f"D{k}": (kepler, [1 - e, 0.0, 0.0, math.sqrt((1 + e) / (1 - e))])
        for k, e in enumerate((0.1, 0.3, 0.5, 0.7, 0.9), start=1)
    },
    "E1": (
        lambda t, y: torch.stack([y[1], -(y[1] / (t + 1) + (1 - 0.25 / (t + 1) ** 2) * y[0])]),
        [0.6713967071418, 0.0954005144474],
    ),
    "E2": (lambda t, y: torch.stack([y[1], (1 - y[0] ** 2) * y[1] - y[0]]), [2.0, 0.0]),
    "E3": (
        lambda t, y: torch.stack([y[1], y[0] ** 3 / 6 - y[0] + 2 * torch.sin(2.78535 * t)]),
        [0.0, 0.0],
    ),
    "E4": (lambda t, y: torch.stack([y[1], 0.032 - 0.4 * y[1] ** 2]), [30.0, 0.0]),
    "E5": (lambda t, y: torch.stack([y[1], torch.sqrt(1 + y[1] ** 2) / (25 - t)]), [0.0, 0.0]),
}


def detest(name: str) -> Problem:
    field, y0 = DETEST[name]
    return [Segment(0, 20, field)], torch.tensor(y0, dtype=torch.float64)


def switched(seed: int) -> Problem:
    model, x0 = switched_problem(seed)
    return model.depth.segments(), x0


def measured(problems: Iterable[Problem]) -> list[str]:
    """A line for each rule: its work at each tolerance, and the attempts that it rejects."""
    solved = [
        (segments, x0, solve(segments, x0, method="tsit5", rtol=1e-13, atol=1e-13).x1)
        for segments, x0 in problems
    ]
    lines, base = [], {}
    for name, (tableau, rule) in RULES.items():
        method, cells = RungeKutta(tableau, adaptive=True, controller=rule), []
        for tolerance in TOLERANCES:
            work, evaluations, rejected, attempts = [], 0, 0, 0
            for segments, x0, exact in solved:
                found = solve(segments, x0, method=method, rtol=tolerance, atol=tolerance)
                error = max(float((found.x1 - exact).norm()), 1e-13)
                work.append(math.log(found.stats.evaluations) + math.log(error) / 5)
                evaluations += found.stats.evaluations
                rejected += found.stats.rejected
                attempts += found.stats.rejected + found.stats.accepted
            mean = statistics.mean(work)
            base.setdefault(tolerance, mean)
            cells.append(
                f"{math.exp(mean - base[tolerance]):9.3f}{evaluations:8}{100 * rejected / attempts:5.0f}%"
            )
        lines.append(f"{name:38}" + "".join(cells))
    return lines


def report() -> list[str]:
    names = sorted(DETEST)
    lines = [
        (
            "work at equal error over that of dopri5 with `cautious`, evaluations, rejected"
            " attempts; float64"
        ),
        "",
    ]
    for what, problems in {
        "DETEST, tuned on": map(detest, names[::2]),
        "DETEST, held out": map(detest, names[1::2]),
        "switched models": map(switched, range(4)),
    }.items():
        lines += [
            f"{what:38}" + "".join(f"{tolerance:>22g}" for tolerance in TOLERANCES),
            *measured(problems),
            "",
        ]
    return lines


if __name__ == "__main__":
    with torch.no_grad():
        keep("controllers", report())

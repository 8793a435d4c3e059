"""Compares esdirk4 with scipy's Radau and BDF on stiff problems: evaluations of the field, steps
and error at equal tolerances.

Scipy's methods get no Jacobian either. They compute one by differences, with n evaluations, and
solve with its LU factors. esdirk4 has neither matrix nor LU. It uses products J v of one
evaluation's graph. Each costs about as much as an evaluation, and the table counts them separately.
Its memory is that of the state, so it can solve a model's depth, with millions of entries.

python benchmarks/stiff.py
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

# in place of this file's own folder, where `import solvers` would find another file
sys.path[0] = str(Path(__file__).resolve().parents[1])

from ctrans.base.threads import wait_passively

wait_passively()

import numpy as np
import torch
from scipy.integrate import solve_ivp
from torch import Tensor

import solvers.implicit
from benchmarks.record import keep
from solvers import Segment, solve

TOLERANCES = (1e-3, 1e-6)


def van_der_pol(t: Tensor, y: Tensor) -> Tensor:
    return torch.stack([y[1], 1000 * (1 - y[0] ** 2) * y[1] - y[0]])


def robertson(t: Tensor, y: Tensor) -> Tensor:
    slow, fast, turn = 0.04 * y[0], 3e7 * y[1] ** 2, 1e4 * y[1] * y[2]
    return torch.stack([turn - slow, slow - turn - fast, fast])


def heat(n: int) -> Tensor:
    """The second difference on [0, 1] with n points inside: eigenvalues from -10 to -4 n^2."""
    ones = torch.ones(n - 1, dtype=torch.float64)
    return (n + 1) ** 2 * (
        torch.diag(ones, 1) + torch.diag(ones, -1) - 2 * torch.eye(n, dtype=torch.float64)
    )


def reaction(n: int) -> Callable[[Tensor, Tensor], Tensor]:
    a = heat(n)
    return lambda t, y: a @ y + y * (1 - y)


PROBLEMS = {
    "van der Pol, mu = 1000, to 300": (van_der_pol, torch.tensor([2.0, 0.0]).double(), 300.0),
    "Robertson, to 40": (robertson, torch.tensor([1.0, 0.0, 0.0]).double(), 40.0),
    "heat and reaction, 10 points": (reaction(10), torch.linspace(0, 1, 10).double(), 1.0),
    "heat and reaction, 40 points": (reaction(40), torch.linspace(0, 1, 40).double(), 1.0),
}


@contextmanager
def counting() -> Iterator[list[int]]:
    """The number of products J v inside, as the one entry of a list."""
    products, plain = [0], solvers.implicit._linearised

    def counted(*args: object) -> tuple[Tensor, solvers.implicit.Linear]:
        values, product = plain(*args)  # type: ignore[arg-type]

        def told(v: Tensor) -> Tensor:
            products[0] += 1
            return product(v)

        return values, told

    solvers.implicit._linearised = counted
    try:
        yield products
    finally:
        solvers.implicit._linearised = plain


def ours(problem: str, tolerance: float) -> tuple[Tensor, int, int, int]:
    """The state at the end; evaluations, products and accepted steps."""
    field, y0, end = PROBLEMS[problem]
    with counting() as products:
        found = solve(
            [Segment(0, end, field)], y0, method="esdirk4", rtol=tolerance, atol=1e-3 * tolerance
        )
    return found.x1, found.stats.evaluations, products[0], found.stats.accepted


def scipys(problem: str, method: str, rtol: float, atol: float) -> tuple[Tensor, int, int, int]:
    """The same by scipy: its evaluations with those for Jacobians, LU decompositions, steps."""
    field, y0, end = PROBLEMS[problem]
    calls = []

    def right(t: float, y: np.ndarray) -> np.ndarray:
        calls.append(t)  # scipy's own count leaves out what its Jacobians take
        return field(torch.tensor(t, dtype=torch.float64), torch.from_numpy(y)).numpy()

    found = solve_ivp(right, (0, end), y0.numpy(), method=method, rtol=rtol, atol=atol)
    return torch.from_numpy(found.y[:, -1]), len(calls), found.nlu, len(found.t) - 1


def report() -> list[str]:
    lines = ["error: RMS of x - x_exact over 0.001 rtol + rtol |x_exact|, in tolerances", ""]
    for problem in PROBLEMS:
        exact = scipys(problem, "Radau", 1e-9, 1e-13)[0]
        lines.append(
            f"{problem:34}{'rtol':>7}{'evaluations':>13}{'J v / LU':>10}{'steps':>7}{'error':>9}"
        )
        for tolerance in TOLERANCES:
            runs = {"esdirk4": ours(problem, tolerance)}
            runs |= {
                name: scipys(problem, name, tolerance, 1e-3 * tolerance)
                for name in ("Radau", "BDF")
            }
            for name, (x, evaluations, other, steps) in runs.items():
                off = (x - exact) / (tolerance * (1e-3 + exact.abs()))
                error = float(off.norm()) / math.sqrt(len(off))
                lines.append(
                    f"  {name:32}{tolerance:7.0e}{evaluations:13}{other:10}{steps:7}{error:9.2g}"
                )
        print(*lines[-7:], sep="\n", flush=True)
        lines.append("")
    return lines


if __name__ == "__main__":
    keep("stiff", report())

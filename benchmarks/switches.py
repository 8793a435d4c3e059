"""What it is worth to know where a field switches: dopri5 of ctrans and of torchdiffeq on the ODE of
a GPT, at the same tolerances.

The field of a Transformer changes at the end of each sublayer. ctrans is told where, and ends a
step there. torchdiffeq is given the same field as one function of time: once with the switches as
`jump_t`, and once without, where it has to find each one by rejected steps. All start cold. The reference is dop853 of ctrans at 1e-12.

    python -m benchmarks.switches
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

from ctrans.base.threads import wait_passively

wait_passively()

import torch
import torchdiffeq

from benchmarks.record import keep
from ctrans import GPT, GPTConfig
from solvers import solve

RTOL = 1e-4
ATOL = 1e-6
ROUNDS = 5
"""Rounds; each runs both solvers, one after the other."""


@torch.no_grad()
def main() -> None:
    torch.manual_seed(0)
    config = GPTConfig(depth=12, width=128, heads=4, context=64, placement="peri", dt=0.1)
    model = GPT(config).double()
    x0 = model.embed(torch.randint(256, (4, 64)))
    segments = model.depth.segments(continuous=True)
    exact = solve(segments, x0, method="dop853", rtol=1e-12, atol=1e-12).x1
    ends = torch.tensor([float(segment.t1) for segment in segments])
    evaluations = 0

    def field(t: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        nonlocal evaluations
        evaluations += 1
        k = int(torch.searchsorted(ends, t.float(), right=True).clamp_max(len(segments) - 1))
        return segments[k].field(t, x)

    def ours() -> tuple[torch.Tensor, int]:
        solution = solve(segments, x0, method="dopri5", rtol=RTOL, atol=ATOL)
        return solution.x1, solution.stats.evaluations

    def theirs() -> tuple[torch.Tensor, int]:
        nonlocal evaluations
        evaluations = 0
        times = torch.tensor([0.0, float(ends[-1])], dtype=torch.float64)
        states = torchdiffeq.odeint(field, x0, times, method="dopri5", rtol=RTOL, atol=ATOL)
        return states[-1], evaluations

    def theirs_with_jumps() -> tuple[torch.Tensor, int]:
        nonlocal evaluations
        evaluations = 0
        times = torch.tensor([0.0, float(ends[-1])], dtype=torch.float64)
        options = {"jump_t": ends[:-1].double()}
        states = torchdiffeq.odeint(
            field, x0, times, method="dopri5", rtol=RTOL, atol=ATOL, options=options
        )
        return states[-1], evaluations

    solvers: dict[str, Callable[[], tuple[torch.Tensor, int]]] = {
        "ctrans, told where the field switches": ours,
        "torchdiffeq, told by jump_t": theirs_with_jumps,
        "torchdiffeq, the field as one function of t": theirs,
    }
    seconds: dict[str, list[float]] = {name: [] for name in solvers}
    found = {}
    for _ in range(ROUNDS):
        for name, run in solvers.items():
            start = time.perf_counter()
            found[name] = run()
            seconds[name].append(time.perf_counter() - start)
    lines = [
        f"dopri5, rtol {RTOL:g}, atol {ATOL:g}: 12 blocks of width 128, peri, dt .1, 4 x 64 tokens",
        f"{'':45}evaluations  relative error  median of {ROUNDS} (s)",
    ]
    for name, (x1, count) in found.items():
        error = float((x1 - exact).norm() / exact.norm())
        median = statistics.median(seconds[name])
        lines.append(f"{name:45}{count:11,}  {error:14.1e}  {median:15.2f}")
    keep("switches", lines)


if __name__ == "__main__":
    main()

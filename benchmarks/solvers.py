"""Compares our solvers with torchdiffeq: evaluations, error and time over switches, and overhead
over a hand-written loop.

python benchmarks/solvers.py
"""

from __future__ import annotations

import dataclasses
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

# in place of this file's own folder, where `import solvers` would find this file
sys.path[0] = str(Path(__file__).resolve().parents[1])

from ctrans.base.threads import wait_passively

wait_passively()

import torch
import torchdiffeq
from torch import Tensor

from benchmarks.record import keep
from ctrans.model.config import GPTConfig
from ctrans.model.gpt import GPT
from solvers import Segment, solve

TOLERANCES = (1e-4, 1e-6, 1e-8)
SEEDS = range(6)
PAIRS = 40


def switched_problem(seed: int) -> tuple[GPT, Tensor]:
    """Four unit segments of a peri field, width 64, float64."""
    config = GPTConfig(
        vocab_size=8,
        context=16,
        depth=2,
        width=64,
        heads=4,
        placement="peri",
        dt=1.0,
        initialisation="xavier",
    )
    x0 = torch.randn(1, 16, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return GPT(config, seed=seed).double(), x0


class Counted:
    """Counts evaluations of each segment's field, and those at times outside that segment."""

    def __init__(self, model: GPT):
        self.evaluations, self.outside = 0, 0
        self.segments = [
            dataclasses.replace(segment, field=self.watch(segment))
            for segment in model.depth.segments()
        ]

    def watch(self, segment: Segment) -> Callable[[Tensor, Tensor], Tensor]:
        def field(t: Tensor, x: Tensor) -> Tensor:
            self.evaluations += 1
            self.outside += not segment.start <= float(t) <= segment.end
            return segment.field(t, x)

        return field

    def switched(self, t: Tensor, x: Tensor) -> Tensor:
        """All segments as one field of t, as torchdiffeq's users write it; past the end the last
        one goes on.
        """
        return self.segments[min(max(int(t), 0), len(self.segments) - 1)].field(t, x)


class Run(NamedTuple):
    x1: Tensor
    evaluations: int
    outside: int


Solver = Callable[[GPT, Tensor, float], Run]


def by_torchdiffeq(jumps: list[float]) -> Solver:
    def run(model: GPT, x0: Tensor, tolerance: float) -> Run:
        fields = Counted(model)
        options = {"jump_t": torch.tensor(jumps, dtype=torch.float64)} if jumps else {}
        times = torch.tensor([0.0, 4.0], dtype=torch.float64)
        solution = torchdiffeq.odeint(
            fields.switched,
            x0,
            times,
            rtol=tolerance,
            atol=tolerance,
            method="dopri5",
            options=options,
        )
        return Run(solution[-1], fields.evaluations, fields.outside)

    return run


def by_ours(method: str, factor: float = 1.0) -> Solver:
    def run(model: GPT, x0: Tensor, tolerance: float) -> Run:
        fields = Counted(model)
        x1 = solve(
            fields.segments, x0, method=method, rtol=factor * tolerance, atol=factor * tolerance
        ).x1
        return Run(x1, fields.evaluations, fields.outside)

    return run


SOLVERS: dict[str, Solver] = {
    "torchdiffeq dopri5, nothing declared": by_torchdiffeq([]),
    "torchdiffeq dopri5, interior switches in jump_t": by_torchdiffeq([1.0, 2.0, 3.0]),
    "torchdiffeq dopri5, switches and end in jump_t": by_torchdiffeq([1.0, 2.0, 3.0, 4.0]),
    "torchdiffeq dopri5, restarted per segment": by_ours("torchdiffeq:dopri5"),
    "solvers dopri5": by_ours("dopri5"),
    "solvers dopri5, tolerances x 1.5": by_ours("dopri5", 1.5),
    "solvers tsit5": by_ours("tsit5"),
}


def adaptive() -> list[str]:
    problems = [switched_problem(seed) for seed in SEEDS]
    exact = [
        solve(model.depth.segments(), x0, method="tsit5", rtol=1e-12, atol=1e-12).x1
        for model, x0 in problems
    ]
    lines = [
        (
            "Switched peri field, width 64, 16 tokens, 4 unit segments, float64; sums over"
            f" {len(problems)} seeds."
        ),
        (
            "Outside: evaluations of a segment's field past its ends. Error: |X -"
            " X_exact|/|X_exact|, geometric mean (largest)."
        ),
    ]
    for tolerance in TOLERANCES:
        lines += [
            "",
            f"rtol = atol = {tolerance:g}",
            f"{'':50}{'evaluations':>12}{'outside':>9}{'error':>20}{'ms':>9}",
        ]
        for name, run in SOLVERS.items():
            start = time.perf_counter()
            runs = [run(model, x0, tolerance) for model, x0 in problems]
            milliseconds = 1e3 * (time.perf_counter() - start)
            errors = [float((r.x1 - x).norm() / x.norm()) for r, x in zip(runs, exact, strict=True)]
            evaluations, outside = sum(r.evaluations for r in runs), sum(r.outside for r in runs)
            error = f"{statistics.geometric_mean(errors):.1e} ({max(errors):.1e})"
            lines.append(f"{name:50}{evaluations:12}{outside:9}{error:>20}{milliseconds:9.0f}")
    return lines


def euler_loops() -> dict[str, Callable[[], Tensor]]:
    """Euler over a model of 12 blocks: by hand, by ours and by torchdiffeq."""
    config = GPTConfig(
        vocab_size=8, context=64, depth=12, width=128, heads=4, placement="peri", dt=0.1
    )
    model = GPT(config)
    x0 = torch.randn(4, 64, 128, generator=torch.Generator().manual_seed(0))
    segments = model.depth.segments()

    def by_hand() -> Tensor:
        x = x0
        for sublayer in model.depth.sublayers:
            x = x + 0.1 * sublayer(x)
        return x

    def torchdiffeq_euler() -> Tensor:
        times = torch.linspace(0, 2.4, 25)
        fields = iter(segments)
        return torchdiffeq.odeint(lambda t, x: next(fields).field(t, x), x0, times, method="euler")[
            -1
        ]

    def ours() -> Tensor:
        return solve(segments, x0, method="euler").x1

    assert torch.equal(by_hand(), ours())
    return {"hand loop": by_hand, "solvers euler": ours, "torchdiffeq euler": torchdiffeq_euler}


def overhead() -> list[str]:
    by_hand, ours, torchdiffeq_euler = euler_loops().values()

    def pair(first: Callable[[], Tensor], second: Callable[[], Tensor]) -> tuple[float, float]:
        seconds = []
        for run in (first, second):
            start = time.perf_counter()
            run()
            seconds.append(time.perf_counter() - start)
        return seconds[0], seconds[1]

    lines = [
        "",
        (
            f"12-block peri model, width 128, 64 tokens, batch 4, float32: medians of {PAIRS}"
            " pairs, order alternating."
        ),
    ]
    for name, run in (("solvers euler", ours), ("torchdiffeq euler", torchdiffeq_euler)):
        pair(by_hand, run)
        ratios, mine, loop = [], [], []
        for k in range(PAIRS):
            a, b = pair(by_hand, run) if k % 2 else pair(run, by_hand)[::-1]
            ratios.append(b / a)
            loop.append(1e3 * a)
            mine.append(1e3 * b)
        medians = [statistics.median(values) for values in (mine, loop, ratios)]
        lines.append("{:20} {:7.2f} ms, hand loop {:7.2f} ms, ratio {:.3f}".format(name, *medians))
    return lines


if __name__ == "__main__":
    with torch.no_grad():
        keep("solvers", adaptive() + overhead())

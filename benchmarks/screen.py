"""The largest singular value of a sublayer's Jacobian: matrix-free and dense, and at the width of
GPT-2.

python benchmarks/screen.py
"""

from __future__ import annotations

import resource
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

# in place of this file's own folder, as in the other benchmarks
sys.path[0] = str(Path(__file__).resolve().parents[1])

from ctrans.base.threads import wait_passively

wait_passively()

import torch
from torch import Tensor

from benchmarks.record import keep
from ctrans.dynamics.depth import Depth
from ctrans.dynamics.sublayer import Sublayer
from ctrans.measure.backward.sensitivity import (
    Sensitivity,
    backward_sensitivity,
    sublayer_sensitivity,
)
from ctrans.model.config import GPTConfig
from ctrans.model.gpt import GPT

SMALL, LARGE = (128, 64), (768, 256)
"""Width and tokens."""
REPEATS = 3


def problem(placement: str, width: int, tokens: int) -> tuple[Depth, Tensor]:
    """One block of a random model with 64 channels a head, float32, and a state of unit size."""
    config = GPTConfig(
        vocab_size=8, context=8, depth=1, width=width, heads=width // 64, placement=placement
    )
    x = torch.randn(1, tokens, width, generator=torch.Generator().manual_seed(0))
    return GPT(config).requires_grad_(requires_grad=False).depth, x


def dense(sublayer: Sublayer, x: Tensor) -> float:
    """As one would without iterating: every row of the Jacobian by autograd, then its largest
    singular value.
    """
    jacobian = torch.autograd.functional.jacobian(sublayer.velocity, x).reshape(
        x.numel(), x.numel()
    )
    return float(torch.linalg.eigvalsh(jacobian @ jacobian.mT)[-1].sqrt())


def rows_only(sublayer: Sublayer, x: Tensor) -> None:
    torch.autograd.functional.jacobian(sublayer.velocity, x)


def timed(function: Callable[[], object]) -> tuple[float, object]:
    start = time.perf_counter()
    result = function()
    return time.perf_counter() - start, result


def pairwise(placement: str) -> list[str]:
    """Dense and matrix-free in turns; building the dense matrix alone is what they are compared
    by.
    """
    lines = []
    depth, x = problem(placement, *SMALL)
    for sublayer in depth.sublayers:
        sublayer_sensitivity(sublayer, x)  # the first call of all pays for what torch sets up
        slow, fast = [], []
        for _ in range(REPEATS):
            slow.append(timed(lambda: rows_only(sublayer, x))[0])  # noqa: B023 - called at once
            fast.append(timed(lambda: sublayer_sensitivity(sublayer, x))[0])  # noqa: B023
        found, exact = sublayer_sensitivity(sublayer, x), dense(sublayer, x)
        assert found.value is not None
        ratio = statistics.median(a / b for a, b in zip(slow, fast, strict=True))
        lines.append(
            f"{placement:9} {sublayer.kind:9} {statistics.median(slow):9.2f}"
            f" {statistics.median(fast):9.3f} {ratio:7.0f} {found.products:8}"
            f" {abs(found.value / exact - 1):8.1e}"
        )
    return lines


def large(placement: str) -> list[str]:
    lines = []
    depth, x = problem(placement, *LARGE)
    for sublayer in depth.sublayers:
        runs = [timed(lambda: sublayer_sensitivity(sublayer, x)) for _ in range(REPEATS)]  # noqa: B023
        found = runs[-1][1]
        assert isinstance(found, Sensitivity)
        seconds = statistics.median(run[0] for run in runs)
        lines.append(
            f"{placement:9} {sublayer.kind:9} {seconds:9.2f} {found.products:8} {found.error:9.1e}"
        )
    return lines


def whole(placement: str) -> str:
    """All sublayers, blocks and products of GPT-2's shape with random weights, once."""
    config = GPTConfig(
        vocab_size=8, context=8, depth=12, width=LARGE[0], heads=12, placement=placement
    )
    x = torch.randn(1, LARGE[1], LARGE[0], generator=torch.Generator().manual_seed(0))
    seconds, _ = timed(
        lambda: backward_sensitivity(GPT(config).requires_grad_(requires_grad=False).depth, x)
    )
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    return f"{placement:9} {seconds:9.1f} {memory:9.2f}"


def main() -> list[str]:
    placements = ("pre", "peri", "post")
    return [
        (
            f"Width {SMALL[0]}, {SMALL[1]} tokens: seconds to build the dense Jacobian (without its"
            " singular value), and to find its"
        ),
        (
            f"largest singular value matrix-free; median of {REPEATS} in turns;"
            f" {torch.get_num_threads()} threads."
        ),
        (
            f"{'placement':9} {'sublayer':9} {'dense':>9} {'free':>9} {'ratio':>7} {'products':>8}"
            f" {'apart':>8}"
        ),
        *(line for placement in placements for line in pairwise(placement)),
        "",
        (
            f"Width {LARGE[0]}, {LARGE[1]} tokens, where the dense Jacobian has"
            f" {LARGE[0] * LARGE[1]:,} rows: seconds, median of {REPEATS}."
        ),
        f"{'placement':9} {'sublayer':9} {'free':>9} {'products':>8} {'estimate':>9}",
        *(line for placement in placements for line in large(placement)),
        "",
        (
            "GPT-2's shape, 12 blocks: seconds for 24 sublayers, 12 blocks and 12 products J_{i:D};"
            " GiB at most in use so far."
        ),
        f"{'placement':9} {'seconds':>9} {'memory':>9}",
        *(whole(placement) for placement in ("pre", "peri")),
    ]


if __name__ == "__main__":
    keep("screen", main())

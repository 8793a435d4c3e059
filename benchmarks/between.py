"""Compares the time of today's sources with that of another checkout: python benchmarks/between.py
CHECKOUT [--pairs N].

Commands run as whole processes. Pieces of the library run inside one process for each checkout,
which stays up. Each pair runs first one and then the other. The result is the median of the ratios
of the pairs, with the quartiles. If a command does more work today, its ratio is what the user
waits for, not the cost of the same work.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SMALL = ["--depth", "3", "--width", "64", "--heads", "4", "--context", "32"]
COMMANDS = {
    "ctrans --help": ["--help"],
    "ctrans simulate, peri": [
        "simulate",
        "--placement",
        "peri",
        "--dt",
        "0.1",
        *SMALL,
        "--out",
        "simulate",
    ],
    "ctrans hjb-check, peri": ["hjb-check", "--placement", "peri", *SMALL, "--out", "hjb"],
    "ctrans screen, pre, quick": [
        "screen",
        "--placement",
        "pre",
        "--quick",
        *SMALL,
        "--out",
        "quick",
    ],
    "ctrans screen, pre": ["screen", "--placement", "pre", *SMALL, "--out", "full"],
    "ctrans train, 40 iterations": [
        "train",
        "--iterations",
        "40",
        *SMALL,
        "--overwrite",
        "--out",
        "train",
    ],
}


def pieces() -> dict[str, Callable[[], object]]:
    """What is timed inside, by names that both checkouts have."""
    import torch

    from ctrans import GPT, GPTConfig
    from solvers import solve

    def model(depth: int, width: int, context: int) -> GPT:
        return GPT(
            GPTConfig(
                vocab_size=65,
                context=context,
                depth=depth,
                width=width,
                heads=4,
                placement="peri",
                dt=0.1,
            )
        )

    def states(tokens: int, width: int) -> torch.Tensor:
        return torch.randn(2, tokens, width, generator=torch.Generator().manual_seed(0))

    small, deep, wide = model(12, 64, 32), model(48, 64, 32), model(4, 128, 64)
    ids = torch.randint(0, 65, (4, 64), generator=torch.Generator().manual_seed(0))

    @torch.no_grad()
    def solved(**how: object) -> object:
        return solve(small.depth.segments(), states(32, 64), **how).x1

    def back(which: GPT, x0: torch.Tensor, **how: object) -> None:
        which.zero_grad()
        solve(which.depth.segments(), x0, **how).x1.square().sum().backward()

    def trained() -> None:
        wide.zero_grad()
        wide(ids, ids)[1].backward()

    return {
        "Euler, 12 blocks": lambda: solved(method="euler"),
        "rk4, 12 blocks": lambda: solved(method="rk4", steps=2),
        "tsit5 at 1e-5, 12 blocks": lambda: solved(method="tsit5", rtol=1e-5, atol=1e-5),
        "forward and backward, width 128": trained,
        **{
            f"{kind}, 48 blocks": lambda kind=kind: back(
                deep, states(32, 64), method="euler", gradient=kind
            )
            for kind in ("backprop", "checkpoint", "reversible", "adjoint")
        },
    }


def work() -> None:
    """Runs the piece whose name it reads, and says its seconds, until there is nothing more to
    read.
    """
    known = pieces()
    for line in sys.stdin:
        start = time.perf_counter()
        known[line.strip()]()
        print(time.perf_counter() - start, flush=True)


class Checkout:
    """One state of the sources: seconds of a command, or of a piece."""

    def __init__(self, place: Path, scratch: Path):
        self.scratch, self.environment = scratch, {**os.environ, "PYTHONPATH": str(place)}
        scratch.mkdir()
        self._worker = subprocess.Popen(
            [sys.executable, __file__, "--work", str(place)],
            env=self.environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def command(self, arguments: list[str]) -> float:
        start = time.perf_counter()
        subprocess.run(
            [sys.executable, "-m", "ctrans", *arguments],
            env=self.environment,
            cwd=self.scratch,
            check=True,
            capture_output=True,
        )
        return time.perf_counter() - start

    def piece(self, name: str) -> float:
        assert self._worker.stdin is not None
        assert self._worker.stdout is not None
        self._worker.stdin.write(f"{name}\n")
        self._worker.stdin.flush()
        return float(self._worker.stdout.readline())

    def close(self) -> None:
        self._worker.communicate()


def row(name: str, pair: Callable[[], tuple[float, float]], pairs: int) -> str:
    """Medians of both, and the ratio's median and quartiles, after one pair that is not counted."""
    pair()
    found = [pair() for _ in range(pairs)]
    low, middle, high = statistics.quantiles([now / before for now, before in found], n=4)
    now, before = (statistics.median(each) for each in zip(*found, strict=True))
    return f"{name:32}{before:10.3f}{now:10.3f}{middle:10.2f}   {low:.2f} to {high:.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "checkout", type=Path, help="sources to compare with, as git worktree makes them"
    )
    parser.add_argument("--pairs", type=int, default=5)
    given = parser.parse_args()
    sys.path[0] = str(ROOT)
    from ctrans.base.threads import wait_passively

    wait_passively()  # and so do the processes that are started, of either checkout
    from benchmarks.record import keep

    version = subprocess.run(
        ["git", "-C", str(given.checkout), "log", "-1", "--format=%h of %cs"],
        check=True,
        capture_output=True,
        text=True,
    ).stdout.strip()
    lines = [
        f"beside commit {version}; seconds, {given.pairs} pairs",
        "",
        f"{'':32}{'before':>10}{'now':>10}{'ratio':>10}   quartiles",
    ]
    with tempfile.TemporaryDirectory() as scratch:
        before, now = (
            Checkout(place, Path(scratch, name))
            for place, name in ((given.checkout.resolve(), "before"), (ROOT, "now"))
        )
        for name in pieces():
            lines.append(
                row(name, lambda name=name: (now.piece(name), before.piece(name)), 4 * given.pairs)
            )
            print(lines[-1], flush=True)
        for name, arguments in COMMANDS.items():
            lines.append(
                row(
                    name,
                    lambda arguments=arguments: (now.command(arguments), before.command(arguments)),
                    given.pairs,
                )
            )
            print(lines[-1], flush=True)
        before.close()
        now.close()
    keep("between", lines)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--work"]:
        sys.path[0] = sys.argv[2]
        work()
    else:
        main()

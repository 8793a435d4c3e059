"""Times one forward pass on a quiet machine and next to two busy processes, by the wait policy and
number of OpenMP threads.

python benchmarks/threads.py [ROUNDS]

- default: torch's own settings
- passive: OMP_WAIT_POLICY=passive
- chosen: what the command `ctrans` sets (`ctrans.base.threads`)

Each is a process of its own, because OpenMP reads its settings once. They take turns, quiet and
next to the busy processes, round by round. Targets for `chosen`: next to busy processes at most 2.5
times its quiet time, and quiet at most 1.03 times the time of `default`.
"""

from __future__ import annotations

import contextlib
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

# in place of this file's own folder, as in the other benchmarks
sys.path[0] = str(Path(__file__).resolve().parents[1])

from ctrans.base.threads import USERS, WAITING, choose_threads, flops

BUSY = 2
ROUNDS = 15
SAMPLE = 0.15
"""Seconds of passes in a row that are timed as one, at least."""
SETTINGS: dict[str, dict[str, str]] = {
    "default": {},
    "passive": {"OMP_WAIT_POLICY": "passive"},
    "chosen": WAITING,
}


class Case(NamedTuple):
    """A peri model of `blocks` blocks, and how many sequences it reads."""

    width: int
    batch: int
    context: int
    dtype: str
    blocks: int = 6

    def __str__(self) -> str:
        return (
            f"{self.blocks} blocks, width {self.width}, {self.batch} x {self.context} tokens,"
            f" {self.dtype}"
        )


CASES = (
    Case(64, 1, 64, "float32"),
    Case(64, 4, 128, "float32"),
    Case(128, 4, 128, "float64"),
    Case(512, 2, 128, "float32"),
)


def serve(setting: str) -> None:
    """A process of that setting: for every number of a case that it reads, the seconds of a pass
    and its threads.
    """
    import torch

    from ctrans import GPT, GPTConfig

    torch.set_grad_enabled(False)
    most = torch.get_num_threads()
    for line in sys.stdin:
        case = CASES[int(line)]
        dtype = getattr(torch, case.dtype)
        torch.set_num_threads(most)
        if setting == "chosen":
            choose_threads(flops(case.width, case.batch, case.context), dtype.itemsize)
        heads = max(1, case.width // 64)
        config = GPTConfig(
            8,
            context=case.context,
            depth=case.blocks,
            width=case.width,
            heads=heads,
            placement="peri",
            dt=0.1,
        )
        depth = GPT(config).to(dtype).depth
        x = torch.randn(
            case.batch,
            case.context,
            case.width,
            dtype=dtype,
            generator=torch.Generator().manual_seed(0),
        )
        depth(x)
        passes, start = 0, time.perf_counter()
        while (taken := time.perf_counter() - start) < SAMPLE:
            depth(x)
            passes += 1
        print(taken / passes, torch.get_num_threads(), flush=True)


@contextlib.contextmanager
def process(*args: str, **options: str) -> Iterator[subprocess.Popen[str]]:
    """Python with those arguments, and ours of the variables about threads; it ends with the
    block.
    """
    environment = {
        name: value for name, value in os.environ.items() if name not in (*USERS, "OMP_NUM_THREADS")
    }
    started = subprocess.Popen(
        [sys.executable, *args],
        env={**environment, **options},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield started
    finally:
        started.kill()
        started.wait()


def ask(server: subprocess.Popen[str], number: int) -> tuple[float, int]:
    assert server.stdin is not None
    assert server.stdout is not None
    server.stdin.write(f"{number}\n")
    server.stdin.flush()
    seconds, threads = server.stdout.readline().split()
    return float(seconds), int(threads)


def measure(rounds: int) -> list[str]:
    with contextlib.ExitStack() as stack:
        busy = [stack.enter_context(process("-c", "while True: pass")) for _ in range(BUSY)]
        servers = {
            name: stack.enter_context(process(__file__, "--serve", name, **settings))
            for name, settings in SETTINGS.items()
        }

        def told(number: signal.Signals) -> None:
            for one in busy:
                one.send_signal(number)

        told(signal.SIGSTOP)
        lines = []
        for number, case in enumerate(CASES):
            threads = {name: ask(server, number)[1] for name, server in servers.items()}
            taken: dict[tuple[str, bool], list[float]] = {
                (name, there): [] for name in servers for there in (False, True)
            }
            for _ in range(rounds):
                for there in (False, True):
                    told(signal.SIGCONT if there else signal.SIGSTOP)
                    for name, server in servers.items():
                        taken[name, there].append(ask(server, number)[0])
            told(signal.SIGSTOP)
            lines += ["", str(case)]
            for name in servers:
                quiet, beside = taken[name, False], taken[name, True]
                alone, besides = 1e3 * statistics.median(quiet), 1e3 * statistics.median(beside)
                worst = max(a / b for a, b in zip(beside, quiet, strict=True))
                lines.append(
                    f"  {name:8} {threads[name]} threads: quiet {alone:8.2f} ms,"
                    f" {ratio(quiet, taken['default', False]):5.2f} of default; beside {BUSY} busy"
                    f" {besides:8.2f} ms, {ratio(beside, quiet):6.2f} of quiet (worst {worst:.1f})"
                )
    return lines


def ratio(these: list[float], those: list[float]) -> float:
    """The median of the ratios round by round, since what else runs on the machine changes
    slowly.
    """
    return statistics.median(a / b for a, b in zip(these, those, strict=True))


def main(rounds: int) -> None:
    from benchmarks.record import keep

    load = ", ".join(f"{value:.2f}" for value in os.getloadavg())
    lines = [
        (
            f"{rounds} rounds in turns; medians. Load of the machine over 1, 5 and 15 minutes"
            f" before: {load}."
        ),
        *measure(rounds),
    ]
    keep("threads", lines)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        serve(sys.argv[2])
    else:
        main(int(sys.argv[1]) if sys.argv[1:] else ROUNDS)

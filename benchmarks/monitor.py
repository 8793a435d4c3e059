"""What a monitor costs: time of a training step with and without it, compiled and not, memory, and
the size of a long log.

    python benchmarks/monitor.py            # width 256, 12 blocks on the CPU; on a GPU 124M. Below 5 minutes on two quiet cores

A cycle is six steps of one training. The first and the last have no monitor. The four between them
have one: between reports, sampling weights before a report, reporting, and between reports again.
With a report every 50 steps,

    overhead = ((report - without) + (sample - without))/50 + idle,  over the step without.

The differences are those of one cycle. idle is the time of `Monitor.step` on a step between
reports, which hooks nothing. The table shows medians over cycles. Memory is the largest resident
size of a process that makes six steps, or the device's largest allocation.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

# in place of this file's own folder, where `import solvers` would find another file
sys.path[0] = str(Path(__file__).resolve().parents[1])

from ctrans.base.threads import wait_passively

wait_passively()

import torch

from benchmarks.record import keep
from ctrans import GPT, GPTConfig
from ctrans.training.monitor import Monitor, read_log
from ctrans.training.monitor.log import LOG, LogWriter
from ctrans.training.monitor.log_lines import Header, Report

EVERY = 50
PEAK_STEPS = 6


@dataclasses.dataclass(frozen=True)
class Size:
    """A training: its model, and a batch."""

    width: int
    depth: int
    heads: int
    context: int
    batch: int
    vocabulary: int

    def __str__(self) -> str:
        return f"{self.depth} blocks, width {self.width}, batch {self.batch} x {self.context}"


SIZES = {
    "256": Size(256, 12, 8, 128, 4, 512),
    "124M": Size(768, 12, 12, 1024, 8, 50304),
    "tiny": Size(16, 2, 2, 8, 2, 32),
}


class Training:
    """A training of random tokens, one step at a time; on a GPU in bfloat16."""

    def __init__(self, size: Size, device: str, backend: str | None = None):
        torch.manual_seed(0)
        self.device = torch.device(device)
        config = GPTConfig(size.vocabulary, size.context, size.depth, size.width, size.heads)
        self.model = GPT(config).to(self.device)
        self.optimiser = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.compiled = backend is not None
        self.called: Any = (
            torch.compile(self.model, backend=backend) if backend is not None else self.model
        )
        self.tokens = torch.randint(
            size.vocabulary, (size.batch, size.context + 1), device=self.device
        )

    def step(self, monitor: Monitor | None) -> tuple[float, float]:
        """Seconds of the step, and of the monitor's own part as the host sees it."""
        half = (
            torch.autocast("cuda", torch.bfloat16)
            if self.device.type == "cuda"
            else contextlib.nullcontext()
        )
        self._wait()
        started = time.perf_counter()
        with half:
            loss = self.called(self.tokens[:, :-1], self.tokens[:, 1:])[1]
        loss.backward()
        before = time.perf_counter()
        if monitor is not None:
            monitor.step(loss, self.optimiser, batch=self.tokens[:, :-1] if self.compiled else None)
        own = time.perf_counter() - before
        self.optimiser.step()
        self.optimiser.zero_grad()
        self._wait()
        return time.perf_counter() - started, own

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def overhead(size: Size, device: str, cycles: int, backend: str | None = None) -> str:
    """Pairs of steps of one training with and without, as the module says."""
    training = Training(size, device, backend)
    with tempfile.TemporaryDirectory() as out:
        monitor = Monitor(
            training.called, every=4, out=out
        )  # steps of 4: reports, idle, idle, samples for the next report
        for _ in range(5):  # a report at 1 and at 4 among them
            training.step(monitor)
        samples, reports = list[float](), list[float]()
        without, idle = list[float](), list[float]()
        # the monitor's steps 6, 7, 8, 9, and so on by fours; none without between these, as hooks
        # would see it
        for _ in range(cycles):
            plain = [training.step(None)[0]]
            idle.append(training.step(monitor)[1])
            sample, report = training.step(monitor)[0], training.step(monitor)[0]
            idle.append(training.step(monitor)[1])
            plain.append(training.step(None)[0])
            without.append(statistics.mean(plain))
            samples.append(sample - without[-1])
            reports.append(report - without[-1])
        monitor.close()
    step, sample, report, call = (
        statistics.median(each) for each in (without, samples, reports, idle)
    )
    share = (report + sample) / EVERY / step + call / step
    return (
        f"{'compiled' if backend is not None else 'not compiled'}: a step without {1e3 * step:.1f}"
        f" ms; more with a report {1e3 * report:.2f} ms, with a sample of weights"
        f" {1e3 * sample:.2f} ms, between {1e3 * call:.3f} ms: {100 * share:.2f}% of a step at"
        f" every = {EVERY}"
    )


def memory(name: str, size: Size, device: str) -> str:
    """The peak without and with a monitor that reports at every step."""
    if device == "cuda":
        sizes = [peak_of(size, device, monitored=monitored) / 2**20 for monitored in (False, True)]
    else:
        sizes = []
        for monitored in ("no", "yes"):
            words = [sys.executable, __file__, "--peak", monitored, "--size", name]
            sizes.append(
                int(subprocess.run(words, capture_output=True, text=True, check=True).stdout) / 1024
            )
    return (
        f"memory: {sizes[0]:.0f} MiB without, {sizes[1]:.0f} MiB with:"
        f" {100 * (sizes[1] / sizes[0] - 1):+.2f}%"
    )


def peak_of(size: Size, device: str, *, monitored: bool) -> int:
    """Bytes of the device, or KiB of the process, at most, while six steps are made."""
    from ctrans.interop import open_model  # what the monitor imports is there in both

    assert open_model
    training = Training(size, device)
    monitor = Monitor(training.model, every=1) if monitored else None
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    for _ in range(PEAK_STEPS):
        training.step(monitor)
    return (
        torch.cuda.max_memory_allocated()
        if device == "cuda"
        else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    )


def long_log(steps: int) -> str:
    """So many steps of 200 sublayers of 16 heads."""
    count, heads = 200, [16 if k % 2 == 0 else 0 for k in range(200)]
    names = (
        "rms",
        "mean_abs",
        "largest",
        "peak",
        "costate",
        "velocity",
        "bound_share",
        "step_share",
        "gradient",
        "update",
        "adam_gradient_ratio",
    )
    generator = torch.Generator().manual_seed(0)
    with tempfile.TemporaryDirectory() as out:
        writer = LogWriter(
            Path(out),
            Header(
                "a model", [f"block {k // 2}" for k in range(count)], ["ffn"] * count, heads, EVERY
            ),
        )
        started = time.perf_counter()
        for step in range(EVERY, steps + 1, EVERY):
            by = {name: torch.rand(count, generator=generator).tolist() for name in names}
            by |= {
                name: torch.rand(sum(heads), generator=generator).tolist()
                for name in ("logit", "entropy")
            }
            writer.report(
                Report(
                    step,
                    {"loss": 1.0, "highest_loss": 1.0, "gradient_norm": 1.0, "seconds": 1.0, **by},
                )
            )
        written = time.perf_counter() - started
        size = (Path(out) / LOG).stat().st_size
        started = time.perf_counter()
        log = read_log(Path(out))
        opened = time.perf_counter() - started
    return (
        f"log of {steps:,} steps x 200 sublayers (16 heads), every {EVERY}: {size / 1e6:.1f} MB,"
        f" {len(log.reports)} reports, opens in {opened:.2f} s;"
        f" {1e3 * written / (steps // EVERY):.1f} ms to write a report, thinning included"
    )


def measured(
    size: Size, device: str, *, cycles: int, backend: str = "inductor", log_steps: int = 100_000
) -> list[str]:
    """All of it, in lines, each said as it comes."""
    name = next(name for name, each in SIZES.items() if each == size)
    parts: list[Callable[[], str]] = [
        lambda: f"GPT of {size}, {torch.get_num_threads()} thread(s), {device}",
        lambda: overhead(size, device, cycles),
        lambda: overhead(size, device, cycles, backend),
        lambda: memory(name, size, device),
        lambda: long_log(log_steps),
    ]
    lines = []
    for part in parts:
        lines.append(part())
        print(lines[-1], file=sys.stderr, flush=True)
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=[*SIZES], help="124M where there is a GPU, else 256")
    parser.add_argument("--cycles", type=int, default=12)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--backend", default="inductor", help="what compiles")
    parser.add_argument("--peak", choices=["no", "yes"], help=argparse.SUPPRESS)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    size = SIZES[given.size or ("124M" if device == "cuda" else "256")]
    if given.peak:
        print(peak_of(size, "cpu", monitored=given.peak == "yes"))
        return
    lines = measured(size, device, cycles=given.cycles, backend=given.backend)
    if size != SIZES["tiny"]:
        keep("monitor", lines)


if __name__ == "__main__":
    main()

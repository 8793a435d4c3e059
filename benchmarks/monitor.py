"""What a monitor costs: time of a training's step with and without, compiled and not, memory, and the size of a long log.

    python benchmarks/monitor.py            # width 256, 12 blocks; --cycles 12, --width, --depth, --device cuda

A cycle is four steps of one training, one after the other: without a monitor, with one that does nothing, with one that samples
weights before a report, and with one that reports. With reports every 50 steps, overhead = (report + sample + 48 idle)/50 over the
step without. Medians over cycles. Memory is the largest resident size of a process that makes six steps. Weights are float32.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

# in place of this file's own folder, where `import solvers` would find another file
sys.path[0] = str(Path(__file__).resolve().parents[1])

from ctrans.threads import wait_passively

wait_passively()

import torch

from benchmarks.record import keep
from ctrans import GPT, GPTConfig
from ctrans.monitor import Monitor, read_log
from ctrans.monitor.log import LOG, Header, LogWriter, Report

EVERY = 50


def training(given: argparse.Namespace, *, compiled: bool):
    torch.manual_seed(0)
    device = torch.device(given.device)
    model = GPT(GPTConfig(vocab_size=512, context=given.context, depth=given.depth, width=given.width, heads=8)).to(device)
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-4)
    called = torch.compile(model) if compiled else model
    tokens = torch.randint(512, (given.batch, given.context + 1), device=device)

    def step(monitor: Monitor | None) -> float:
        if device.type == "cuda":
            torch.cuda.synchronize()
        started = time.perf_counter()
        loss = called(tokens[:, :-1], tokens[:, 1:])[1]
        loss.backward()
        if monitor is not None:
            monitor.step(loss, optimiser, batch=tokens[:, :-1] if compiled else None)
        optimiser.step()
        optimiser.zero_grad()
        if device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - started

    return model, called, step


def overhead(given: argparse.Namespace, *, compiled: bool) -> str:
    _, called, step = training(given, compiled=compiled)
    with tempfile.TemporaryDirectory() as out:
        monitor = Monitor(called, every=3, out=out)
        monitor.step(0.0)  # the first report, of no pass
        monitor.step(0.0)
        for _ in range(2):
            step(None)
        monitor.gauges.arm() if not compiled else None
        monitor.step(0.0)
        times: dict[str, list[float]] = {"without": [], "idle": [], "sample": [], "report": []}
        for _ in range(given.cycles):
            for name, of_time in times.items():
                of_time.append(step(None if name == "without" else monitor))
    middle = {name: statistics.median(of_time) for name, of_time in times.items()}
    # each against the step without of its own cycle, so that a machine that slows down slows both
    ratio = {
        name: statistics.median(a / b for a, b in zip(of_time, times["without"], strict=True)) for name, of_time in times.items()
    }
    share = (ratio["report"] + ratio["sample"] + (EVERY - 2) * ratio["idle"]) / EVERY - 1
    busy = (ratio["report"] + ratio["sample"] - 2) / EVERY
    said = ", ".join(f"{name} {1e3 * value:.1f} ms" for name, value in middle.items())
    over = ", ".join(f"{name} {value:.3f}" for name, value in ratio.items() if name != "without")
    what = "compiled" if compiled else "not compiled"
    total = f"{100 * share:.2f}% ({100 * busy:.2f}% with idle steps as without)"
    return f"{what}: {said}; over the step without: {over}; overhead at every = {EVERY}: {total}"


def memory(given: argparse.Namespace) -> str:
    sizes = []
    for monitored in ("no", "yes"):
        own = [f"--{name}={getattr(given, name)}" for name in ("width", "depth", "context", "batch")]
        done = subprocess.run([sys.executable, __file__, "--peak", monitored, *own], capture_output=True, text=True, check=True)
        sizes.append(int(done.stdout))
    return f"memory: {sizes[0] / 1024:.0f} MiB without, {sizes[1] / 1024:.0f} MiB with: {100 * (sizes[1] / sizes[0] - 1):+.2f}%"


def peak(given: argparse.Namespace) -> int:
    """The largest resident size in KiB after six steps, each of which reports where there is a monitor."""
    model, _, step = training(given, compiled=False)
    from ctrans.interop import open_model  # what the monitor imports is there in both

    assert open_model
    monitor = Monitor(model, every=1) if given.peak == "yes" else None
    for _ in range(6):
        step(monitor)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def long_log() -> str:
    """100,000 steps of 200 sublayers of 16 heads."""
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
        "surprise",
    )
    generator = torch.Generator().manual_seed(0)
    with tempfile.TemporaryDirectory() as out:
        writer = LogWriter(Path(out), Header("a model", [f"block {k // 2}" for k in range(count)], ["ffn"] * count, heads, EVERY))
        started = time.perf_counter()
        for step in range(EVERY, 100_001, EVERY):
            by = {name: torch.rand(count, generator=generator).tolist() for name in names}
            by |= {name: torch.rand(sum(heads), generator=generator).tolist() for name in ("logit", "entropy")}
            writer.report(Report(step, {"loss": 1.0, "highest_loss": 1.0, "gradient_norm": 1.0, "seconds": 1.0, **by}))
        written = time.perf_counter() - started
        size = (Path(out) / LOG).stat().st_size
        started = time.perf_counter()
        log = read_log(Path(out))
        opened = time.perf_counter() - started
    return (
        f"log of 100,000 steps x 200 sublayers (16 heads), every {EVERY}: {size / 1e6:.1f} MB, {len(log.reports)} reports, opens in "
        f"{opened:.2f} s; {1e3 * written / 2000:.1f} ms to write a report, thinning included"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in (("width", 256), ("depth", 12), ("context", 128), ("batch", 4), ("cycles", 12), ("threads", 1)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--peak", choices=["no", "yes"])
    parser.add_argument("--eager-only", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    if given.peak:
        print(peak(given))
        return
    size = f"{given.depth} blocks, width {given.width}, batch {given.batch} x {given.context}"
    lines = [f"GPT of {size}, {given.threads} thread(s), {given.device}"]
    lines.append(overhead(given, compiled=False))
    print(lines[-1], flush=True)
    if not given.eager_only:
        lines.append(overhead(given, compiled=True))
        print(lines[-1], flush=True)
    if given.device == "cpu":
        lines.append(memory(given))
    lines.append(long_log())
    keep("monitor", lines)


if __name__ == "__main__":
    main()

"""A monitored training of 100,000 steps: the memory of its process stays what it was after 10,000.

python -m benchmarks.monitor_life [STEPS]
"""

import os
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from torch import nn

from benchmarks.record import keep
from ctrans import GPT, GPTConfig
from ctrans.monitor import Monitor
from ctrans.monitor.log import LOG

STEPS, FIRST = 100_000, 10
"""The steps of the whole, and the share of them before which memory may grow: one of ten."""
WAYS = {"no report": 10**9, "a report every 16 steps": 16}
TOKENS = torch.randint(32, (2, 9), generator=torch.Generator().manual_seed(1))


def resident():
    """The memory of this process in bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def lived(every, steps, out):
    """The bytes after a tenth of the steps, the most after it, and the log's size. Spikes of the loss, and every 1,000th that is not a
    number, raise alarms all the time."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocab_size=32, context=8, depth=1, width=16, heads=2), seed=0)
    optimiser = torch.optim.SGD(model.parameters(), lr=1e-3)
    monitor = Monitor(model, every=every, out=out, probe_every=min(10 * every, 10**9), held=(TOKENS[:, :-1], TOKENS[:, 1:]))
    early = most = 0
    for step in range(1, steps + 1):
        reports = step % every == 0 or step == 1
        if reports:  # a step between reports needs no passes
            loss = model(TOKENS[:, :-1], TOKENS[:, 1:])[1]
            loss.backward()
        shown = torch.tensor(float("nan") if step % 1_000 == 0 else 1e6 if step % 3_000 < 16 else 1.0)
        monitor.step(shown, optimiser)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.zero_grad()
        if step * FIRST == steps:
            early = resident()
        elif step * FIRST > steps and step % 500 == 0:
            most = max(most, resident())
        if step * FIRST % steps == 0:
            print(f"  every {every}: {resident() / 1e6:.2f} MB after {step:,} steps", flush=True)
    alarms = len(monitor.alarms)
    monitor.close()
    log = out / LOG
    return early, most, alarms, log.stat().st_size if log.exists() else 0


def main(steps):
    lines = []
    for name, every in WAYS.items():
        started = time.perf_counter()
        with tempfile.TemporaryDirectory() as place:
            early, most, alarms, size = lived(every, steps, Path(place))
        lines.append(
            f"{name}, {steps:,} steps: {early / 1e6:.1f} MB after {steps // FIRST:,}, at most {(most - early) / 1e6:+.2f} MB after that; "
            f"{alarms:,} alarms, a log of {size / 1e6:.2f} MB; {time.perf_counter() - started:.0f} s"
        )
        print(lines[-1], flush=True)
    keep("monitor-life", lines)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else STEPS)

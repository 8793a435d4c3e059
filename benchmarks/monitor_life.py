"""How much the memory of a training's process grows after a tenth of its 100,000 steps: with a
monitor that reports, with one that does not, and without a monitor.

python benchmarks/monitor_life.py [STEPS]
"""

import os
import sys
import tempfile
import time
from pathlib import Path

# in place of this file's own folder, as in the other benchmarks
sys.path[0] = str(Path(__file__).resolve().parents[1])

from ctrans.base.threads import wait_passively

wait_passively()

import torch
from torch import nn

from benchmarks.record import keep
from ctrans import GPT, GPTConfig
from ctrans.training.monitor import Monitor
from ctrans.training.monitor.log import LOG

STEPS, FIRST = 100_000, 10
"""The steps of the whole, and the share of them before which memory may grow: one of ten."""
EVERY = 16
"""Steps between passes, and between reports."""
WAYS = {
    "no monitor": None,
    "a monitor without reports": 10**9,
    f"a report every {EVERY} steps": EVERY,
}
"""The monitor's `every`, or None."""
TOKENS = torch.randint(32, (2, 9), generator=torch.Generator().manual_seed(1))


def resident():
    """The memory of this process in bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def lived(every, steps, out):
    """The bytes after a tenth of the steps, the most after it, and the log's size. Spikes of the
    loss, and every 1,000th that is not a number, raise alarms all the time.
    """
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocab_size=32, context=8, depth=1, width=16, heads=2), seed=0)
    optimiser = torch.optim.SGD(model.parameters(), lr=1e-3)
    held = (TOKENS[:, :-1], TOKENS[:, 1:])
    monitor = (
        None
        if every is None
        else Monitor(model, every=every, out=out, probe_every=min(10 * every, 10**9), held=held)
    )
    early = most = 0
    for step in range(1, steps + 1):
        if step % EVERY == 0 or step == 1:  # a step between reports needs no passes
            loss = model(TOKENS[:, :-1], TOKENS[:, 1:])[1]
            loss.backward()
        shown = torch.tensor(
            float("nan") if step % 1_000 == 0 else 1e6 if step % 3_000 < 16 else 1.0
        )
        if monitor is not None:
            monitor.step(shown, optimiser)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.zero_grad()
        if step * FIRST == steps:
            early = resident()
        elif step * FIRST > steps and step % 500 == 0:
            most = max(most, resident())
        if step * FIRST % steps == 0:
            print(f"  {resident() / 1e6:.2f} MB after {step:,} steps", flush=True)
    alarms = 0 if monitor is None else len(monitor.alarms)
    if monitor is not None:
        monitor.close()
    log = out / LOG
    return early, most, alarms, log.stat().st_size if log.exists() else 0


def main(steps):
    lines = []
    for name, every in WAYS.items():
        print(name, flush=True)
        started = time.perf_counter()
        with tempfile.TemporaryDirectory() as place:
            early, most, alarms, size = lived(every, steps, Path(place))
        lines.append(
            f"{name}, {steps:,} steps: {early / 1e6:.1f} MB after {steps // FIRST:,}, at most"
            f" {(most - early) / 1e6:+.2f} MB after that; {alarms:,} alarms, a log of"
            f" {size / 1e6:.2f} MB; {time.perf_counter() - started:.0f} s"
        )
        print(lines[-1], flush=True)
    keep("monitor-life", lines)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else STEPS)

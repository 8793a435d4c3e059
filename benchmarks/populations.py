"""Runs per hour of one processor, one by one and as a population, by the size of a step.

python benchmarks/populations.py [ROUNDS]

A pair is STEPS iterations of each member alone, one after the other, and of all together. The
figures are medians of interleaved pairs, with one thread. The target is 3 times the runs per hour
at width 64. Up to `ctrans.study.population.MOST_TOKENS` it is at least 1.5.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
import warnings
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1])

from ctrans.base.threads import wait_passively

wait_passively()

import torch

from benchmarks.record import keep
from ctrans.model.config import GPTConfig
from ctrans.model.text import default_text
from ctrans.study.description import PlannedRun
from ctrans.study.population import MOST_MEMBERS, Population, update
from ctrans.study.training import begin
from ctrans.training.data import from_text
from ctrans.training.settings import TrainConfig

STEPS = 2
CASES = [(8, 1, 16), (8, 1, 32), (4, 2, 32), (8, 1, 64), (8, 4, 32), (8, 8, 64), (8, 16, 64)]
"""Blocks, sequences and tokens of a sequence, of width 64."""


def samples(
    blocks: int, batch: int, context: int, rounds: int, device: str = "cpu"
) -> list[tuple[float, float]]:
    """A member's step alone, and of a population: seconds in pairs, after one that warms up."""
    where = torch.device(device)
    data = from_text(default_text(), context)
    model = GPTConfig(context=context, depth=blocks, width=64, heads=4, placement="pre")
    runs = [
        PlannedRun(model, TrainConfig(batch=batch, seed=i, eval_windows=1), {})
        for i in range(MOST_MEMBERS)
    ]
    with tempfile.TemporaryDirectory() as place:
        alone = [begin(run, data, Path(place), where) for run in runs]
        together = Population([begin(run, data, Path(place), where) for run in runs])
        times: list[tuple[float, float]] = []
        for step in range(1 + rounds):
            started = time.perf_counter()
            for run in alone:
                for i in range(STEPS):
                    run.iterate(STEPS * step + i)
            middle = time.perf_counter()
            for i in range(STEPS):
                losses = together.differentiate(STEPS * step + i)
                for member, loss in zip(together.members, losses, strict=True):
                    update(member, STEPS * step + i, loss)
            ended = time.perf_counter()
            times.append(
                ((middle - started) / STEPS / len(runs), (ended - middle) / STEPS / len(runs))
            )
    return times[1:]


def seconds(
    blocks: int, batch: int, context: int, rounds: int, device: str = "cpu"
) -> tuple[float, float]:
    """The medians of both."""
    alone, together = zip(*samples(blocks, batch, context, rounds, device), strict=True)
    return statistics.median(alone), statistics.median(together)


def line(blocks: int, batch: int, context: int, rounds: int, device: str = "cpu") -> str:
    """Both, and how many times the runs an hour that is. Every step's losses are moved to the host,
    which waits for the device.
    """
    one, many = seconds(blocks, batch, context, rounds, device)
    return (
        f"{blocks} blocks, {batch:2} x {context} tokens: alone {1e3 * one:6.1f} ms a step, together"
        f" {1e3 * many:6.1f} ms, {one / many:.2f} times the runs an hour (load"
        f" {os.getloadavg()[0]:.1f})"
    )


def main() -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    lines = [
        f"{MOST_MEMBERS} members of width 64, one thread, medians of {rounds} pairs, load"
        f" {os.getloadavg()[0]:.1f} at the start"
    ]
    for case in CASES:
        lines.append(line(*case, rounds))
        print(lines[-1], flush=True)
    keep("populations", lines)


if __name__ == "__main__":
    main()

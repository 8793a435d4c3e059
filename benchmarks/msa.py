"""Compares layerwise maximisation of the augmented Hamiltonian (`--optimiser msa`) with AdamW at equal
work, on two tasks that need depth.

python benchmarks/msa.py              # about four minutes on one core
python benchmarks/msa.py --passes 60  # a smaller budget

Work is counted in passes: one is a forward and a backward pass through all sublayers. AdamW makes one
an iteration. msa makes one, and those of its inner maximisations.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

# in place of this file's own folder, so that imports find the packages
sys.path[0] = str(Path(__file__).resolve().parents[1])

from ctrans.base.threads import wait_passively

wait_passively()

import torch

from benchmarks.record import keep
from ctrans.model.config import GPTConfig
from ctrans.model.gpt import GPT
from ctrans.training.data import Data
from ctrans.training.layerwise import LayerwiseMaximisation
from ctrans.training.loop import TrainingRun
from ctrans.training.parallel import get_parallel
from ctrans.training.processes import Processes
from ctrans.training.run_directory import RunDirectory
from ctrans.training.run_start import anew
from ctrans.training.settings import TrainConfig
from ctrans.training.tasks import TASKS

TASK_NAMES = ("recall", "counting")
PASSES = 500
SEEDS = (0, 1, 2)
TRIED = 5
"""Iterations of msa from which its passes an iteration are known."""


@dataclasses.dataclass(frozen=True)
class Contestant:
    """An optimiser, the learning rates that are tried, and the iterations of each maximisation."""

    optimiser: str
    rates: tuple[float, ...]
    inner: int = 0
    as_many_iterations_as: str = ""


CONTESTANTS = {
    "msa, 5 iterations of L-BFGS": Contestant("msa", (3e-4, 1e-3, 3e-3), inner=5),
    "msa, 2 iterations of L-BFGS": Contestant("msa", (3e-4, 1e-3, 3e-3), inner=2),
    "adamw": Contestant("adamw", (3e-3, 1e-2, 3e-2)),
    "adamw, with the batches of msa, 5": Contestant(
        "adamw", (3e-3, 1e-2, 3e-2), as_many_iterations_as="msa, 5 iterations of L-BFGS"
    ),
}


@dataclasses.dataclass(frozen=True)
class Trial:
    """A training that has ended."""

    rate: float
    iterations: int
    passes: float
    seconds: float
    loss: float


def made(task: str, data: Data, config: TrainConfig, inner: int, directory: str) -> TrainingRun:
    """The run, ready to iterate."""
    model = GPT(
        GPTConfig(
            depth=2,
            width=32,
            heads=2,
            placement="peri",
            dt=0.1,
            initialisation="xavier",
            embedding_std=0.1,
            **TASKS[task].architecture,
        ),
        seed=config.seed,
    )
    run, _ = anew(
        model,
        config,
        data,
        RunDirectory(Path(directory) / "run"),
        get_parallel("none", config),
        Processes(torch.device("cpu")),
        source={},
    )
    if isinstance(run.optimiser, LayerwiseMaximisation):
        run.optimiser.inner = inner
    return run


def passes_of(run: TrainingRun, iterations: int) -> float:
    """The passes so far."""
    if isinstance(run.optimiser, LayerwiseMaximisation):
        return iterations + run.optimiser.passes / len(run.model.depth.sublayers)
    return float(iterations)


def trained(
    task: str, data: Data, one: Contestant, rate: float, seed: int, iterations: int
) -> Trial:
    """Trains for so many iterations, and evaluates."""
    config = TrainConfig(
        optimiser=one.optimiser,
        learning_rate=rate,
        batch=32,
        iterations=iterations,
        warmup=max(1, iterations // 10),
        eval_windows=256,
        seed=seed,
    )
    with tempfile.TemporaryDirectory() as directory:
        run = made(task, data, config, one.inner, directory)
        started = time.process_time()
        for step in range(iterations):
            run.iterate(step)
        seconds = time.process_time() - started
        _, row = run.evaluate(run.state.progress)
        return Trial(rate, iterations, passes_of(run, iterations), seconds, row["validation_loss"])


def iterations_for(passes: int, task: str, data: Data, one: Contestant) -> int:
    """How many iterations make so many passes."""
    if one.inner == 0:
        return passes
    tried = trained(task, data, one, one.rates[0], seed=99, iterations=TRIED)
    return max(1, round(passes / (tried.passes / TRIED)))


def rows(task: str, passes: int) -> Iterator[str]:
    """A line for each contestant, at its best rate."""
    data = TASKS[task].data()
    counts: dict[str, int] = {}
    for name, one in CONTESTANTS.items():
        if one.as_many_iterations_as:
            counts[name] = counts[one.as_many_iterations_as]
        else:
            counts[name] = iterations_for(passes, task, data, one)
        by_rate = [
            [trained(task, data, one, rate, seed, counts[name]) for seed in SEEDS]
            for rate in one.rates
        ]
        best = min(by_rate, key=lambda trials: statistics.fmean(trial.loss for trial in trials))
        losses = [trial.loss for trial in best]
        work = statistics.fmean(trial.passes for trial in best)
        seconds = statistics.fmean(trial.seconds for trial in best)
        yield (
            f"{task:9} {name:34} {best[0].rate:<6g} {counts[name]:10d} {work:7.0f} {seconds:8.1f}"
            f"   {statistics.fmean(losses):.3f} ({', '.join(f'{loss:.3f}' for loss in losses)})"
        )


def main() -> None:
    """Runs both tasks, and keeps the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--passes", type=int, default=PASSES)
    passes = parser.parse_args().passes
    torch.set_num_threads(1)
    lines = [
        f"2 blocks, width 32, peri, dt = 0.1, xavier, batch 32, float32; 1 thread; about {passes} passes; cosine;"
        f" seeds {', '.join(map(str, SEEDS))}.",
        "rate: the best of three by the mean loss. passes: forward and backward, through all"
        " sublayers. loss: validation loss at the end in nats, mean and each seed.",
        "",
        f"{'task':9} {'optimiser':34} {'rate':6} {'iterations':>10} {'passes':>7}"
        f" {'seconds':>8}   loss",
    ]
    for task in TASK_NAMES:
        for line in rows(task, passes):
            print(line, flush=True)
            lines.append(line)
    keep("msa", lines)


if __name__ == "__main__":
    main()

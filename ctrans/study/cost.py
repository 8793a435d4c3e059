"""The cost of a study: runs, tokens, floating-point operations, and hours on this machine, measured
by a short run.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ctrans.model.size import number_of_weights
from ctrans.study.description import PlannedRun
from ctrans.study.training import train_run
from ctrans.training.data import Data

STEPS = 5
"""The number of iterations of the timed run."""


@dataclass(frozen=True)
class Cost:
    """The cost of several runs: their number, training tokens, floating-point operations, and the
    rate of these on one processor.
    """

    runs: int
    tokens: float
    flops: float
    flops_per_second: float

    @property
    def processor_hours(self) -> float:
        """Hours on one processor."""
        return self.flops / self.flops_per_second / 3600

    def hours(self, workers: int) -> float:
        """Hours with that number of processes, each on a processor of its own."""
        return self.processor_hours / max(1, min(workers, self.runs))


def tokens_of(run: PlannedRun) -> float:
    """The number of training tokens."""
    settings = run.training
    return float(settings.iterations) * settings.batch * settings.accumulate * run.model.context


def flops_of(run: PlannedRun) -> float:
    """6 W + 12 D T d operations per training token, where W is the number of weights that multiply
    it, and a third of that per evaluated token.

    Source: Kaplan et al. 2020, with two operations per weight forward and four backward, and 2 T d
    per block for each of scores and averages.
    """
    model = run.model
    settings = run.training
    weights = number_of_weights(model) - (
        model.context * model.width if model.positions == "learned" else 0
    )
    token = 6.0 * weights + 12.0 * model.depth * model.context * model.width
    evaluations = (
        1
        + settings.iterations // settings.eval_every
        + (settings.iterations % settings.eval_every > 0)
    )
    return token * (tokens_of(run) + evaluations * settings.eval_windows * model.context / 3)


def cost_of(runs: Sequence[PlannedRun], rate: float) -> Cost:
    """The cost at a rate of floating-point operations per second and processor."""
    return Cost(len(runs), sum(map(tokens_of, runs)), sum(map(flops_of, runs)), rate)


def measured_rate(run: PlannedRun, data: Data) -> float:
    """The floating-point operations per processor second of such a run here, by a short run after a
    warm-up run.
    """
    short = replace(
        run,
        training=replace(run.training, iterations=STEPS, warmup=0, eval_every=STEPS),
        measure=(),
    )
    train_run(short, data)
    started = time.process_time()
    train_run(short, data)
    return flops_of(short) / max(time.process_time() - started, 1e-9)

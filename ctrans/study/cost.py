"""What a study will cost: runs, tokens, floating-point operations, and hours on this machine by a
short run that is timed.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence

from ctrans.model.gpt import number_of_weights
from ctrans.study.description import PlannedRun
from ctrans.study.training import train_run
from ctrans.training.data import Data

STEPS = 5
"""Iterations of the run that is timed."""


@dataclasses.dataclass(frozen=True)
class Cost:
    """Of runs together: how many, tokens trained on, floating-point operations, and processor
    seconds by a rate that was measured.
    """

    runs: int
    tokens: float
    flops: float
    flops_per_second: float

    @property
    def processor_hours(self) -> float:
        """Of one processor."""
        return self.flops / self.flops_per_second / 3600

    def hours(self, workers: int) -> float:
        """With so many processes, each with a processor of its own."""
        return self.processor_hours / max(1, min(workers, self.runs))


def tokens_of(run: PlannedRun) -> float:
    """Tokens that it is trained on."""
    settings = run.training
    return float(settings.iterations) * settings.batch * settings.accumulate * run.model.context


def flops_of(run: PlannedRun) -> float:
    """6 W + 12 D T d a token trained on, W the weights that multiply it, and a third of that a
    token of an evaluation.

    (Kaplan et al. 2020: two operations a weight forward, twice as many back; 2 T d a block for
    scores and as many for averages.)
    """
    model, settings = run.model, run.training
    weights = number_of_weights(model) - (model.context * model.width if model.positions == "learned" else 0)
    token = 6.0 * weights + 12.0 * model.depth * model.context * model.width
    evaluations = 1 + settings.iterations // settings.eval_every + (settings.iterations % settings.eval_every > 0)
    return token * (tokens_of(run) + evaluations * settings.eval_windows * model.context / 3)


def cost_of(runs: Sequence[PlannedRun], rate: float) -> Cost:
    """At so many floating-point operations a second and processor."""
    return Cost(len(runs), sum(map(tokens_of, runs)), sum(map(flops_of, runs)), rate)


def measured_rate(run: PlannedRun, data: Data, clock: Callable[[], float] = time.process_time) -> float:
    """Floating-point operations a processor second of such a run here: a short one is timed, a
    second time when all is warm.
    """
    short = dataclasses.replace(
        run, training=dataclasses.replace(run.training, iterations=STEPS, warmup=0, eval_every=STEPS), measure=()
    )
    train_run(short, data)
    started = clock()
    train_run(short, data)
    return flops_of(short) / max(clock() - started, 1e-9)

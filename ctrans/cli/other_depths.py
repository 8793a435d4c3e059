"""`ctrans train --eval-depth`: the trained model with other numbers of blocks over the same
depth-time.
"""

from __future__ import annotations

from collections.abc import Sequence

from ctrans.base.memory import memory
from ctrans.dynamics.depth import MOST_BLOCKS, check_count
from ctrans.model.checkpoint import LAST, load
from ctrans.model.config import GPTConfig
from ctrans.model.size import check_buildable
from ctrans.report.progress import progress_bar
from ctrans.training.evaluation import evaluate
from ctrans.training.loop import TrainingRun
from ctrans.training.objective import Objective
from ctrans.training.processes import Processes
from ctrans.training.settings import TrainConfig
from solvers import ConfigError


def check_depths(depths: Sequence[int], architecture: GPTConfig, config: TrainConfig) -> None:
    """Raises ConfigError for a depth whose weights or hidden states do not fit in memory."""
    for depth in depths:
        check_count("eval_depth", depth, MOST_BLOCKS)
        config_at_depth = architecture.at_depth(depth)
        try:
            check_buildable(config_at_depth, config.seed)
        except ConfigError as error:
            raise ConfigError(f"--eval-depth {depth}: {error}; or a lower --eval-depth") from None
        states = (
            (config_at_depth.segments + 1)
            * config.batch
            * architecture.context
            * architecture.width
            * config.weight_dtype.itemsize
        )
        if states > memory():
            raise ConfigError(
                f"--eval-depth {depth}: the hidden states of a batch need {states / 1e9:.3g} GB and"
                f" this machine has {memory() / 1e9:.3g}: give a lower --eval-depth"
            )


def losses_at(depths: Sequence[int], run: TrainingRun) -> dict[int, float]:
    """The validation loss of the last checkpoint's model at each depth, over the same depth-time
    and in the run's precision.

    It runs in this process alone. Raises as `load` and `solve`.
    """
    if not depths:
        return {}
    model = load(run.store.directory / LAST)
    config = run.config
    alone = Processes(run.processes.device)
    batches = -(-len(run.data.validation_windows(config.eval_windows)[0]) // config.batch)
    losses = {}
    with progress_bar("evaluate", batches * len(depths)) as advance:
        for depth in depths:
            objective = Objective(model.at_depth(depth).to(alone.device), config)
            objective.register_forward_hook(lambda *_, depth=depth: advance(f"{depth} blocks"))
            with run.precision():
                losses[depth] = evaluate(
                    objective, run.data, config.eval_windows, config.batch, alone
                )["validation_loss"]
    return losses

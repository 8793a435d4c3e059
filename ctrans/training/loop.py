"""The training loop: iterations, evaluations, checkpoints, and the endings of a run."""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor, nn

from ctrans.dynamics.fields import Balances, HasTemperature
from ctrans.model.gpt import GPT
from ctrans.training import log
from ctrans.training.attention_theta import mean_theta
from ctrans.training.data import Data
from ctrans.training.evaluation import evaluate
from ctrans.training.explained_errors import explaining
from ctrans.training.parallel import Parallel
from ctrans.training.processes import Processes
from ctrans.training.rows import Labelled
from ctrans.training.run_checkpoint import full, save_checkpoint
from ctrans.training.run_directory import RunDirectory
from ctrans.training.schedule import learning_rate, temperature
from ctrans.training.settings import PRECISIONS, TrainConfig
from ctrans.training.signals import stopping
from ctrans.training.training_state import Progress, State
from solvers import SolveError, Status

Observer = Callable[[log.Row], None]


@dataclass(frozen=True)
class Advice:
    """What a watcher asks for before an optimiser's step; by default nothing.

    - `skip`: makes no step. Figures that are not finite then do not end the run
    - `save`: saves a checkpoint of the iteration before, with these files by name
    - `stop`: the reason to end the run after the step and a checkpoint, or ""
    """

    skip: bool = False
    save: Mapping[str, str] | None = None
    stop: str = ""


class Watcher:
    """Watches the iterations of a run, as a monitor does. This one does nothing."""

    def before_step(
        self, loss: Tensor, norm: Tensor, optimiser: torch.optim.Optimizer, tokens: Tensor
    ) -> Advice:
        """Called in each iteration with the loss, the gradient's norm, the optimiser and the last
        tokens.
        """
        return Advice()

    def files(self) -> Mapping[str, str]:
        """Further files of a checkpoint, by name."""
        return {}

    def end(self, outcome: Outcome) -> None:
        """Called when the run has ended without an error."""


def unobserved(row: log.Row) -> None:
    """An observer that does nothing."""


class Ending(enum.Enum):
    """How a run ended."""

    FINISHED = "finished"
    INTERRUPTED = "interrupted"
    DIVERGED = "diverged"
    STOPPED = "stopped"
    """A watcher ended the run."""


RAN_AWAY = (Status.NON_FINITE, Status.STEP_UNDERFLOW, Status.TOO_MANY_STEPS)
"""How a solve ends where the state, or the speed of its change, runs away."""


@dataclass(frozen=True)
class Outcome:
    """How a run ended, its progress, the reason in words, and the number of the signal that ended
    it.
    """

    ending: Ending
    progress: Progress
    message: str
    signal: int = 0


@dataclass(frozen=True)
class Passed:
    """An iteration after its passes and before its step: the row so far, and what the step
    needs.
    """

    row: log.Row
    loads: list[Tensor]
    advice: Advice
    started: float


@dataclass(frozen=True)
class TrainingRun:
    """The parts of a training. `module` is the objective as `parallel` wraps it."""

    model: GPT
    module: nn.Module
    optimiser: torch.optim.Optimizer
    data: Data
    config: TrainConfig
    store: RunDirectory
    state: State
    parallel: Parallel
    processes: Processes
    observe: Observer = unobserved
    watch: Watcher = dataclasses.field(default_factory=Watcher)

    def iterate(self, step: int) -> log.Row:
        """Makes one update from `accumulate` micro-batches; none if the loss or the gradient is not
        finite.
        """
        return self.update(self.passes(step))

    def passes(self, step: int) -> Passed:
        """Computes the gradients of `accumulate` micro-batches, asks the watcher, and clips
        them.
        """
        config = self.config
        started = time.perf_counter()
        rate = learning_rate(config, step)
        for group in self.optimiser.param_groups:
            group["lr"] = rate * group.get("scale", 1.0)
        tau = self.heat(temperature(config, step, self.model.config.temperature))
        self.optimiser.zero_grad(set_to_none=True)
        loss = torch.zeros((), device=self.processes.device)
        terms: dict[str, Tensor] = {}
        loads: list[Tensor] = []
        for micro in range(config.accumulate):
            tokens, targets = self.data.batch(
                step,
                micro,
                batch=config.batch,
                seed=config.seed,
                rank=self.processes.rank,
                world=self.processes.world,
            )
            with self.parallel.micro_batch(self.module, last=micro == config.accumulate - 1):
                with self.precision():
                    losses = self.module(
                        tokens.to(self.processes.device), targets.to(self.processes.device)
                    )
                (losses.total / config.accumulate).backward()
            loss += losses.cross_entropy / config.accumulate
            for name, value in losses.auxiliary:
                terms[name] = terms.get(name, 0.0) + value / config.accumulate
            if loads:
                loads = [a + b for a, b in zip(loads, losses.loads, strict=True)]
            else:
                loads = list(losses.loads)
        total = nn.utils.get_total_norm(
            [weight.grad for weight in self.weights if weight.grad is not None]
        )
        norm = full(total)
        advice = self.watch.before_step(loss, norm, self.optimiser, tokens)  # before clipping
        # queued before the numbers below wait for a device
        nn.utils.clip_grads_with_norm_(self.weights, config.clip, total)
        row = {
            "step": step + 1,
            "loss": float(self.processes.sum(loss)) / self.processes.world,
            "learning_rate": rate,
            "gradient_norm": float(norm),
            "temperature": tau,
            **{
                name: float(self.processes.sum(value)) / self.processes.world
                for name, value in terms.items()
            },
        }
        if advice.skip:
            row["skipped"] = True
        return Passed(row, loads, advice, started)

    def update(self, passed: Passed) -> log.Row:
        """Makes the step, unless it is skipped or a figure is not finite. Returns the row of the
        iteration.
        """
        config = self.config
        row = passed.row
        finite = math.isfinite(row["loss"]) and math.isfinite(row["gradient_norm"])
        if finite and not passed.advice.skip:
            self.optimiser.step()
            self.model.after_step()
            self.rebalance(passed.loads)
        tokens = config.batch * config.accumulate * self.data.context
        return {**row, "tokens_per_second": tokens / (time.perf_counter() - passed.started)}

    def evaluate(self, progress: Progress) -> tuple[Progress, log.Row]:
        """Returns the progress with one more validation loss, and the figures of the evaluation."""
        self.heat(self.model.config.temperature)
        with self.precision():
            row = evaluate(
                self.module, self.data, self.config.eval_windows, self.config.batch, self.processes
            )
        if not isinstance(self.data, Labelled):
            del row["accuracy"]
        if self.config.theta:
            tokens, _ = self.data.validation_windows(1)
            row["theta"] = mean_theta(self.model, tokens.to(self.processes.device))
        return progress.evaluated(row["validation_loss"], self.config.margin), row

    def save(self, progress: Progress, files: Mapping[str, str] | None = None) -> None:
        """Saves a checkpoint with the watcher's files. The link `last`, and `best` for the best
        one, then point to it.
        """
        if files is None:
            files = self.watch.files()
        state = replace(self.state, progress=progress, beside=files)
        if self.parallel.saves:
            save_checkpoint(
                self.store,
                state,
                self.model,
                self.optimiser,
                self.processes,
                sharded=self.parallel.sharded,
            )

    def report(self, row: log.Row) -> None:
        """Adds the row to the log and calls the observer."""
        if self.processes.first:
            self.store.check_ours()
            self.run_log.append(row)
            self.observe(row)

    def rebalance(self, loads: list[Tensor]) -> None:
        """Moves what balances the parts of maps without a loss, by the loads of the whole
        iteration, in every process alike.
        """
        if loads:
            fields = [
                branch.field
                for sublayer in self.model.depth.sublayers
                for branch in sublayer.branches.values()
            ]
            balanced = [field for field in fields if isinstance(field, Balances)]
            for field, load in zip(balanced, loads, strict=True):
                field.rebalance(self.processes.sum(load), self.config.bias_rate)

    def heat(self, tau: float) -> float:
        """Sets the temperature of every attention."""
        for part in self.heated:
            part.temperature = tau
        return tau

    @cached_property
    def run_log(self) -> log.RunLog:
        """The log of the run."""
        return log.RunLog(self.store.directory)

    @cached_property
    def heated(self) -> list[HasTemperature]:
        """The maps with a temperature. To ask each module takes longer than a small model's
        step.
        """
        return [part for part in self.model.modules() if isinstance(part, HasTemperature)]

    @cached_property
    def weights(self) -> list[nn.Parameter]:
        """The parameters of the module."""
        return list(self.module.parameters())

    def precision(self) -> contextlib.AbstractContextManager[None]:
        """Autocast to bfloat16 where that is what the maps compute in."""
        device = self.processes.device.type
        dtype = PRECISIONS[self.config.dtype]
        if dtype is torch.bfloat16:
            return torch.autocast(device, dtype)
        return contextlib.nullcontext()


def carry_out(run: TrainingRun, progress: Progress) -> Outcome:
    """Trains from `progress` to `iterations`, or until a signal, a watcher or divergence ends it.

    A first SIGINT, SIGTERM or SIGHUP ends the run after the present iteration, with a checkpoint. A
    run has diverged when a loss, a gradient or a solution is not finite, or when `patience`
    validation losses in a row lie above the first by more than `margin`. Meanwhile it saves no
    checkpoint before its end; after divergence `last` points to the newest one up to the last good
    validation loss. Raises ConfigError if a checkpoint cannot be written or memory runs out, and
    the errors of `unsolved`.
    """
    config = run.config
    with stopping() as wish, explaining(config, run.data.context):
        try:
            if progress.first is None:
                progress, ended = before_iterations(run, progress)
                if ended is not None:
                    return ended
                run.save(progress)
                if run.processes.first:
                    log.bring_back(run.store.directory, run.store.checkpoints.name)
            while progress.step < config.iterations:
                passed = run.passes(progress.step)
                if (
                    passed.advice.save is not None
                    and progress.above == 0
                    and progress.step not in run.store.steps()
                ):
                    run.save(progress, passed.advice.save)
                progress, ended = after_iteration(run, progress, run.update(passed))
                if ended is not None:
                    return ended
                number = torch.tensor(wish.number, device=run.processes.device)
                signal = int(run.processes.max(number))
                ends = progress.step == config.iterations or signal or passed.advice.stop
                due = progress.step % config.save_every == 0 or progress.step == progress.best_step
                if ends or (due and progress.above == 0):
                    run.save(progress)
                if passed.advice.stop:
                    return Outcome(
                        Ending.STOPPED,
                        progress,
                        f"stopped after iteration {progress.step}: {passed.advice.stop}",
                    )
                if signal:
                    return Outcome(
                        Ending.INTERRUPTED,
                        progress,
                        f"stopped after iteration {progress.step} and saved",
                        signal,
                    )
        except SolveError as error:
            return unsolved(run, progress, error)
    return finished(progress)


def before_iterations(run: TrainingRun, progress: Progress) -> tuple[Progress, Outcome | None]:
    """Reports the first validation loss. Returns the progress, and the outcome if the loss is not
    finite.
    """
    progress, row = run.evaluate(progress)
    run.report({"step": 0, log.RUN: run.state.run, **row})
    if math.isfinite(row["validation_loss"]):
        return progress, None
    return progress, diverged(
        run, progress, "the validation loss is not finite before the first iteration"
    )


def after_iteration(
    run: TrainingRun, progress: Progress, row: log.Row
) -> tuple[Progress, Outcome | None]:
    """Reports the row of an iteration, with an evaluation if one is due. Returns the progress, and
    the outcome if the run has diverged.
    """
    for name in ("loss", "gradient_norm"):
        if not math.isfinite(row[name]) and not row.get("skipped"):
            run.report(row)
            return progress, diverged(
                run, progress, f"{name.replace('_', ' ')} {row[name]} in iteration {row['step']}"
            )
    progress = replace(progress, step=row["step"])
    if progress.step == run.config.iterations or progress.step % run.config.eval_every == 0:
        progress, measured = run.evaluate(progress)
        row = row | measured
    run.report(row)
    # at an evaluation: a resumed run may have a lower patience
    if "validation_loss" in row and (
        progress.above >= run.config.patience or not math.isfinite(row["validation_loss"])
    ):
        above = (
            f"validation loss {row['validation_loss']:.4g} at step {progress.step}, above the first"
            f" ({progress.first:.4g}) by more than the margin for {progress.above} evaluations"
        )
        return progress, diverged(run, progress, above)
    return progress, None


def finished(progress: Progress) -> Outcome:
    """The outcome of a run that finished."""
    return Outcome(Ending.FINISHED, progress, f"{progress.step} iterations done")


def unsolved(run: TrainingRun, progress: Progress, error: SolveError) -> Outcome:
    """The outcome of a solve that failed because states, or the speed of their change, ran away.

    Raises the error, with its iteration, if a solver could not keep what it promises: if the
    `reversible` gradient misses the initial state, if an implicit step is not solved, if a field
    changes between two passes, or if tolerances alone need too many steps. That says nothing of the
    training.
    """
    message = f"iteration {progress.step + 1}: {error}"
    status = getattr(error.solution, "status", None)
    tight = getattr(error.solution, "tight", None)
    if status not in RAN_AWAY or tight is not None:
        raise SolveError(message, error.solution) from error
    return diverged(run, progress, message)


def diverged(run: TrainingRun, progress: Progress, why: str) -> Outcome:
    """Logs the divergence, points `last` to the last good checkpoint, and returns the outcome."""
    run.report({"step": progress.step, "diverged": why})
    if run.processes.first:
        run.store.go_back(progress.good)
    return Outcome(Ending.DIVERGED, progress, why)

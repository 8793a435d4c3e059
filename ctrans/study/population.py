"""Runs with the same shapes, trained as one batched model. Learning rates, seeds, decays and
initial scales may differ.

Two tensors have all weights, with a row for each member: one for matrices, which decay, and one for
vectors. Batched passes use them as (members, *shape). A member's optimiser and clipping use its
rows, and its model's parameters are views of them, so its evaluation and ending are those of a
single run. Members do not affect each other, even if one diverges.

A population is faster only if a step is so small that calls cost more than arithmetic: see
`MOST_TOKENS`.
"""

from __future__ import annotations

import contextlib
import json
import math
import tempfile
import time
import warnings
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from ctrans.dynamics.fields import ATTENTIONS, FFNS, MapEntry, reference_kernels
from ctrans.model.gpt import GPT
from ctrans.model.parametrisation import STANDARD
from ctrans.study.description import PlannedRun
from ctrans.study.measures import measured
from ctrans.study.training import RunResult, begin, result_of, train_run
from ctrans.training.data import Data
from ctrans.training.loop import (
    Ending,
    Outcome,
    TrainingRun,
    after_iteration,
    before_iterations,
    finished,
    unsolved,
)
from ctrans.training.objective import Objective
from ctrans.training.optimiser import OPTIMISERS
from ctrans.training.schedule import learning_rate, temperature
from ctrans.training.signals import stopping
from ctrans.training.training_state import Progress
from solvers import ConfigError, SolveError

OWN_MODEL = frozenset({"initialisation", "embedding_std"})
OWN_TRAINING = frozenset(
    {
        "seed",
        "learning_rate",
        "min_learning_rate",
        "warmup",
        "schedule",
        "weight_decay",
        "decay_gains",
        "beta1",
        "beta2",
        "clip",
        "margin",
        "patience",
    }
)
"""Settings that may differ between members: they change no shape and no operation."""
MOST_TOKENS = 128
"""The largest number of tokens of a member's iteration. Up to it a population makes at least 1.5
times the runs per hour (`benchmarks/populations.py`). Above it matrix products are as fast in
single runs, and a population's activations exceed the cache.
"""
MOST_MEMBERS = 16


class UncheckedGPT(GPT):
    """A GPT that does not check the values of tokens, which a batched model cannot do. The data are
    checked before.
    """

    def _check_range(self, what: str, ids: Tensor) -> None:
        pass


def shared(run: PlannedRun) -> str:
    """The common settings of the members of a population, as one text."""
    model = {name: value for name, value in asdict(run.model).items() if name not in OWN_MODEL}
    training = {
        name: value for name, value in asdict(run.training).items() if name not in OWN_TRAINING
    }
    return json.dumps([model, training, run.measure], sort_keys=True)


def batches(run: PlannedRun) -> bool:
    """Whether the run can be a member: the discrete model, in one precision, of maps that can be
    batched.
    """
    model = run.model
    training = run.training
    entries = ATTENTIONS[model.attention], FFNS[model.ffn]
    return (
        training.scheme.evaluates_once
        and training.gradient == "backprop"
        and not training.kinetic
        and model.parametrisation == STANDARD
        and not OPTIMISERS[training.optimiser].orthogonal
        and not OPTIMISERS[training.optimiser].layerwise
        and all(isinstance(entry, MapEntry) and entry.batches for entry in entries)
        and not training.compile
        and training.dtype != "bfloat16"
        and model.depth_weights == "free"
    )


def grouped(runs: Sequence[PlannedRun]) -> list[list[PlannedRun]]:
    """The runs as jobs, in their order: populations where these are possible and faster, else
    single runs.
    """
    groups: list[list[PlannedRun]] = []
    last_group: dict[str, list[PlannedRun]] = {}
    for run in runs:
        if not batches(run) or run.training.batch * run.model.context > MOST_TOKENS:
            groups.append([run])
            continue
        settings = shared(run)
        if settings in last_group and len(last_group[settings]) < MOST_MEMBERS:
            last_group[settings].append(run)
        else:
            groups.append([run])
            last_group[settings] = groups[-1]
    return groups


def train_population(runs: Sequence[PlannedRun], data: Data) -> list[RunResult]:
    """The results of runs with the same `shared`. They equal those of single runs, up to the order
    of sums.
    """
    started = time.process_time()
    with contextlib.ExitStack() as stack:
        folders = [
            Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ctrans-study-")))
            for _ in runs
        ]
        try:
            members = [begin(run, data, folder) for run, folder in zip(runs, folders, strict=True)]
        except (ConfigError, SolveError):  # each single run reports its own error
            return [train_run(run, data) for run in runs]
        before = [
            measured(run.measure, member.model, data)
            for run, member in zip(runs, members, strict=True)
        ]
        outcomes = Population(members).carry_out()
        try:
            results = [
                result_of(run, member, outcome, measures, started)
                for run, member, outcome, measures in zip(
                    runs, members, outcomes, before, strict=True
                )
            ]
        except SolveError:  # a log lost rows: each single run has its own
            return [train_run(run, data) for run in runs]
        seconds = (time.process_time() - started) / len(runs)
        return [replace(result, seconds=seconds) for result in results]


class Population:
    """Members whose weights are rows of common tensors."""

    def __init__(self, members: Sequence[TrainingRun]):
        # gradients are views of a common tensor on purpose
        warnings.filterwarnings(
            "ignore",
            message="grad and param do not obey the gradient layout contract",
            category=UserWarning,
        )
        first = members[0]
        template = UncheckedGPT(first.model.config).to(
            first.processes.device, first.config.weight_dtype
        )
        self.objective = Objective(template, first.config)
        self.leaves: dict[str, Tensor] = {}
        """The weights of all members by name, as views of their rows."""
        self.members = self._with_rows(members)

    def _with_rows(self, members: Sequence[TrainingRun]) -> list[TrainingRun]:
        """Moves the weights into rows. Returns the members with optimisers of their rows."""
        rows: list[list[nn.Parameter]] = [[] for _ in members]
        parameters = [dict(member.model.named_parameters()) for member in members]
        for matrices in (True, False):
            names = [
                name
                for name, parameter in parameters[0].items()
                if (parameter.dim() >= 2) == matrices
            ]
            if not names:  # a model without gains and biases has no vectors
                continue
            vectors = []
            for weights in parameters:
                vectors.append(torch.cat([weights[name].detach().flatten() for name in names]))
            values = torch.stack(vectors)
            gradients = torch.zeros_like(values)
            start = 0
            for name in names:
                shape = parameters[0][name].shape
                end = start + parameters[0][name].numel()
                leaf = values[:, start:end].view(len(members), *shape).requires_grad_()
                leaf.grad = gradients[:, start:end].view(len(members), *shape)
                self.leaves[f"model.{name}"] = leaf
                for i in range(len(members)):
                    parameters[i][name].data = values[i, start:end].view(shape)
                start = end
            for i in range(len(members)):
                # decay depends on the number of dimensions: a matrix has two
                if matrices:
                    row = nn.Parameter(values[i : i + 1])
                    row.grad = gradients[i : i + 1]
                else:
                    row = nn.Parameter(values[i])
                    row.grad = gradients[i]
                rows[i].append(row)
        return [
            replace(member, optimiser=member.config.make_optimiser(member_rows))
            for member, member_rows in zip(members, rows, strict=True)
        ]

    def carry_out(self) -> list[Outcome]:
        """Trains all members to their ends. Some may diverge before, and a signal stops all."""
        with stopping() as wish:
            states = [before_iterations(member, Progress()) for member in self.members]
            for step in range(self.members[0].config.iterations):
                if wish.number or all(ended for _, ended in states):
                    break
                losses = self.differentiate(step)
                for i, member in enumerate(self.members):
                    progress, ended = states[i]
                    if ended is None:
                        states[i] = _after(member, progress, update(member, step, losses[i]))
        return [ended or _end(progress, wish.number) for progress, ended in states]

    def differentiate(self, step: int) -> list[float]:
        """Computes the gradients of this iteration in the rows of members. Returns the losses."""
        config = self.members[0].config
        device = self.members[0].processes.device
        for member in self.members:
            member.optimiser.zero_grad(set_to_none=False)
        template = self.objective.model
        replace(self.members[0], model=template).heat(
            temperature(config, step, template.config.temperature)
        )
        total = torch.zeros(len(self.members), device=device)
        for micro in range(config.accumulate):
            pairs = [
                member.data.batch(step, micro, batch=config.batch, seed=member.config.seed)
                for member in self.members
            ]
            tokens = torch.stack([tokens for tokens, _ in pairs]).to(device)
            targets = torch.stack([targets for _, targets in pairs]).to(device)

            def losses(
                weights: dict[str, Tensor], tokens: Tensor, targets: Tensor
            ) -> tuple[Tensor, Tensor]:
                objective = functional_call(self.objective, weights, (tokens, targets))
                return objective.total, objective.cross_entropy

            with reference_kernels(self.objective):  # the fused kernel has no batching rule
                objective, reported = vmap(losses)(self.leaves, tokens, targets)
            (objective.sum() / config.accumulate).backward()
            total += reported / config.accumulate
        return [float(loss) for loss in total]


def _end(progress: Progress, signal: int) -> Outcome:
    """The outcome of a member that did not diverge; `signal` is the one that stopped it, or 0."""
    if signal:
        return Outcome(Ending.INTERRUPTED, progress, message="stopped", signal=signal)
    return finished(progress)


def update(member: TrainingRun, step: int, loss: float) -> dict[str, float]:
    """Makes a clipped step of one member, as `TrainingRun.iterate` does. Returns its row of the
    log.
    """
    rate = learning_rate(member.config, step)
    for group in member.optimiser.param_groups:
        group["lr"] = rate
    rows = [row for group in member.optimiser.param_groups for row in group["params"]]
    norm = float(nn.utils.clip_grad_norm_(rows, member.config.clip))
    if math.isfinite(loss) and math.isfinite(norm):
        member.optimiser.step()
        member.model.after_step()
    return {"step": step + 1, "loss": loss, "learning_rate": rate, "gradient_norm": norm}


def _after(
    member: TrainingRun, progress: Progress, row: dict[str, float]
) -> tuple[Progress, Outcome | None]:
    try:
        return after_iteration(member, progress, row)
    except SolveError as error:
        return progress, unsolved(member, progress, error)

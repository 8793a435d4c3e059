"""A training of the clinic: what a fault may spoil and a cure may set right, and the loop."""

from __future__ import annotations

import copy
import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.clinic.architectures import make
from benchmarks.clinic.bodies import CONTEXT, MASK_ID, Body
from ctrans.measure.findings import Finding
from ctrans.model.text import default_text
from ctrans.training.digits import LEVELS, PIXELS
from ctrans.training.monitor import Monitor
from ctrans.training.tasks import TASKS

STEPS, WARM_UP, RATE, BATCH, EVERY, ROWS = 240, 24, 3e-3, 16, 5, 256
"""Steps of a training, of its warm-up; the rate; rows of a batch; steps between reports; rows of an
evaluation.
"""
Batch = tuple[Tensor, Tensor]


@functools.cache
def _text() -> Tensor:
    return torch.frombuffer(bytearray(default_text()), dtype=torch.uint8).long()


@functools.cache
def _data(task: str) -> Any:
    return TASKS[task].data()


def _of_text(count: int, draws: torch.Generator, body: Body, *, held_out: bool) -> Batch:
    text = _text()
    cut = len(text) - len(text) // 10
    first, last = (cut, len(text)) if held_out else (0, cut)
    places = torch.randint(first, last - CONTEXT - 1, (count,), generator=draws)
    rows = torch.stack([text[p : p + CONTEXT + 1] for p in places.tolist()])
    if body.causal:
        return rows[:, :-1], rows[:, 1:]
    tokens = rows[:, :-1]
    hidden = torch.rand(tokens.shape, generator=draws) < 0.2
    return torch.where(hidden, MASK_ID, tokens), torch.where(hidden, tokens, -1)


def batch(task: str, body: Body, step: int, seed: int) -> Batch:
    """The batch of a step: the same for each training with that seed."""
    if task == "text":
        return _of_text(
            BATCH, torch.Generator().manual_seed(1000 * seed + step), body, held_out=False
        )
    return _as_read(task, *_data(task).batch(step, 0, batch=BATCH, seed=seed))


def held_out(task: str, body: Body) -> Batch:
    """`ROWS` rows that no training reads."""
    if task == "text":
        return _of_text(ROWS, torch.Generator().manual_seed(7), body, held_out=True)
    return _as_read(task, *_data(task).validation_windows(ROWS))


def _as_read(task: str, tokens: Tensor, targets: Tensor) -> Batch:
    if task != "digits":
        return tokens, targets
    images = tokens[:, :PIXELS].reshape(-1, 1, 8, 8).float() / (LEVELS - 1)
    return images, targets[:, -1] - LEVELS - 1


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten(), ignore_index=-1)


@dataclasses.dataclass
class Course:
    """A training. Faults and cures change its fields; each function gets the course, so that a copy
    has its own.
    """

    body: Body
    task: str
    seed: int
    architecture: str = ""
    rate: float = RATE
    warm_up: int = WARM_UP
    ends_at: int = 10**6
    """The step at which the schedule lets the rate fall to zero."""
    clip: float = 1.0
    scale: float = 1.0
    """The factor of the loss in `backward`."""
    zero_every: int = 1
    """Steps between calls of `zero_grad`."""
    micro: int = 1
    """Micro-batches of a step, whose gradients are added and not divided."""
    embedding_factor: float = 1.0
    data: Callable[[Course, int, Batch], Batch] | None = None
    pipeline: Callable[[Batch], Batch] | None = None
    """What is done to each batch, of a training and of an evaluation."""
    loss: Callable[[Course, int, Tensor, Tensor], Tensor] | None = None
    after: Callable[[Course, int], None] | None = None
    optimiser: Any = None
    step: int = 0
    losses: list[float] = dataclasses.field(default_factory=list)
    norms: list[float] = dataclasses.field(default_factory=list)

    def make_optimiser(
        self,
        betas: tuple[float, float] = (0.9, 0.99),
        eps: float = 1e-8,
        without: Any = (),
        gain_decay: float = 0.0,
        decay: float = 0.1,
    ) -> None:
        """AdamW, with weight decay on matrices only unless `gain_decay` is given; keeps no state of
        an earlier one.
        """
        left = {id(each) for each in without}
        embedding = id(self.body.part("embedding"))
        groups: dict[tuple[float, float], list[Any]] = {}
        for weight in self.body.model.parameters():
            if id(weight) not in left:
                factor = self.embedding_factor if id(weight) == embedding else 1.0
                groups.setdefault((decay if weight.dim() > 1 else gain_decay, factor), []).append(
                    weight
                )
        made = [
            {"params": each, "weight_decay": of_group, "factor": factor}
            for (of_group, factor), each in groups.items()
        ]
        self.optimiser = torch.optim.AdamW(made, lr=self.rate, betas=betas, eps=eps)

    def rate_at(self, step: int) -> float:
        return (
            0.0 if step >= self.ends_at else self.rate * min(1.0, (step + 1) / max(1, self.warm_up))
        )

    def advance(self, monitor: Monitor | None = None) -> list[Finding]:
        """One step; the alarms of the monitor at it."""
        self.body.model.train()
        for group in self.optimiser.param_groups:
            group["lr"] = self.rate_at(self.step) * group["factor"]
        for part in range(self.micro):
            given = batch(self.task, self.body, self.step * self.micro + part, self.seed)
            if self.pipeline:
                given = self.pipeline(given)
            read, targets = self.data(self, self.step, given) if self.data else given
            logits = self.body.logits(read)
            loss = (
                self.loss(self, self.step, logits, targets)
                if self.loss
                else cross_entropy(logits, targets)
            )
            (loss * self.scale).backward()
        weights = [p for p in self.body.model.parameters() if p.grad is not None]
        norm = torch.nn.utils.get_total_norm([p.grad for p in weights if p.grad is not None])
        told = [] if monitor is None else monitor.step(loss, self.optimiser, gradient_norm=norm)
        torch.nn.utils.clip_grads_with_norm_(weights, self.clip, norm)
        self.optimiser.step()
        if self.step % self.zero_every == 0:
            self.optimiser.zero_grad()
            for weight in self.body.model.parameters():
                weight.grad = None
        if self.after:
            self.after(self, self.step)
        self.losses.append(float(loss.detach()))
        self.norms.append(float(norm))
        self.step += 1
        return told

    def run(self, until: int) -> Course:
        while self.step < until and (not self.losses or math.isfinite(self.losses[-1])):
            self.advance()
        return self

    @torch.no_grad()
    def evaluate(self) -> float:
        """The cross-entropy of held-out rows, with later tokens hidden in a causal model; inf if it
        is not finite.
        """
        self.body.model.eval()
        masking = self.body.masking()
        self.body.set_causal(True) if self.body.causal else None
        found = float(cross_entropy(*self._read(self.held_out())))
        for module, name, value in masking:
            setattr(module, name, value)
        return found if math.isfinite(found) else math.inf

    def held_out(self) -> Batch:
        """The rows of an evaluation, as they reach the model."""
        given = held_out(self.task, self.body)
        return self.pipeline(given) if self.pipeline else given

    def _read(self, given: Batch) -> Batch:
        return self.body.logits(given[0]).float(), given[1]

    def copy(self) -> Course:
        return copy.deepcopy(self)


def course(architecture: str, task: str, seed: int) -> Course:
    """A healthy training at its start."""
    made = Course(make(architecture, task, seed), task, seed, architecture)
    made.make_optimiser()
    return made

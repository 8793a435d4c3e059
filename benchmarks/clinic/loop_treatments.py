"""Treatments that change a training's loop: its rate, optimiser, loss or data."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.clinic.case import Case
from benchmarks.clinic.course import RATE, WARM_UP, Batch, Course


def lower_rate(case: Case) -> None:
    case.course.rate *= 0.1


def warm_up(case: Case) -> None:
    case.course.rate *= 0.3
    case.course.warm_up = case.course.step + 50


def usual_betas(case: Case) -> None:
    optimiser(case, betas=(0.9, 0.95))


def optimiser(case: Case, **options: Any) -> None:
    case.course.makeoptimiser(**options)


def higher_rate(case: Case) -> None:
    """The usual rate and warm-up, from here on."""
    case.course.rate, case.course.warm_up = RATE, WARM_UP
    steps_as_planned(case)


def steps_as_planned(case: Case) -> None:
    """Adam's eps, the loss's scale and the schedule as they are usually."""
    case.course.scale, case.course.ends_at = 1.0, 10**6
    optimiser(case)


def usual_eps_and_scale(case: Case) -> None:
    case.course.scale = 1.0
    optimiser(case)


def slow_embedding(case: Case) -> None:
    case.course.embedding_factor = 0.3
    optimiser(case)


def train_all(case: Case) -> None:
    for weight in case.course.body.model.parameters():
        weight.requires_grad_(requires_grad=True)
    optimiser(case)


def train_all_as_usual(case: Case) -> None:
    """Weights that this model has, at the usual rate."""
    train_all(case)
    higher_rate(case)


def whole_loop_as_usual(case: Case) -> None:
    """Weights that move, the loss's sign, and targets that belong to their inputs."""
    train_all_as_usual(case)
    plain_loss(case)
    own_data(case)


def float32(case: Case) -> None:
    """Weights in float32, and no rounding of them."""
    case.course.body.model.float()
    case.course.after = None
    optimiser(case)


PADDING = 0


def ignore_padding(case: Case) -> None:
    """Targets that are padding do not count."""
    before = case.course.data

    def data(course: Course, step: int, given: Batch) -> Batch:
        inputs, targets = given if before is None else before(course, step, given)
        return inputs, torch.where(targets == PADDING, -1, targets)

    case.course.data = data


def own_data(case: Case) -> None:
    """The data as the task has them: shifted labels, its own tokenizer, other batches."""
    case.course.data = case.course.pipeline = None


def reset_gradients(case: Case) -> None:
    case.course.zero_every = 1
    case.course.optimiser.zero_grad()


def divide_gradients(case: Case) -> None:
    case.course.micro, case.course.clip = 1, 1.0


def plain_loss(case: Case) -> None:
    case.course.loss = None

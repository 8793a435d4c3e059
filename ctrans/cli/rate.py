"""`ctrans rate`."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from ctrans.cli.click_options import OptionValues, settings_of
from ctrans.cli.ending import directory_of, end
from ctrans.cli.request import command_of
from ctrans.cli.train_options import OfTraining
from ctrans.model.gpt import GPT
from ctrans.monitor.largest_rate import RATES, largest_rate
from ctrans.option import Range, option
from ctrans.report.progress import progress_bar
from ctrans.threads import choose_threads, flops
from ctrans.training.data import Data
from ctrans.training.data_sources import source_of
from ctrans.training.processes import get_device
from ctrans.training.settings import TrainConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class RateRequest(OfTraining):
    """The request of `rate`."""

    training: OptionValues = settings_of(
        TrainConfig, only=("batch", "iterations", "optimiser", "weight_decay", "decay_gains", "beta1", "beta2", "clip", "seed")
    )
    rates: tuple[float, ...] = option(RATES, "Repeatable: the learning rates.", default_words="half decades from 0.0032 to 0.32")
    budget: float = option(
        0.05,
        "The cost of all short trainings, as a share of one training of --iterations.",
        limits=Range(1e-6, 1e3),
    )


@dataclasses.dataclass(frozen=True)
class Batches(Sequence[Any]):
    """The batches of the first steps of a training, each made when it is asked for."""

    data: Data
    settings: TrainConfig
    steps: int

    def __len__(self) -> int:
        return self.steps

    def __getitem__(self, step: Any) -> Any:
        return self.data.batch(step, 0, batch=self.settings.batch, seed=self.settings.seed)


@command_of(RateRequest, "rate")
def command(request: RateRequest) -> None:
    """Estimate the largest stable learning rate of a model on its data from short trainings.

    Each learning rate gets a short training with its own warm-up and cosine, all together for
    --budget of a full training. The estimate is the centre of the rates that end near the best
    loss. It says what short trainings accept: a long one can fail later, so that a constant rate
    was about as good on the tasks of our study (docs/why/prediction.md). The directory gets
    rate.json and rate.png.

    \b
    ctrans rate
    ctrans rate --task recall --placement pre --dt 1 --iterations 600 --batch 16
    ctrans rate --file book.txt --iterations 5000 --budget 0.2
    """
    model, settings = request.model, request.settings
    data = source_of(request.source, model.context)[1]
    directory = directory_of(request)
    choose_threads(flops(model.width, settings.batch, model.context), settings.weight_dtype.itemsize)
    device = get_device("cpu")
    made = GPT(model, seed=settings.seed)
    steps = max(1, round(request.budget * settings.iterations / len(set(request.rates))))
    with progress_bar("rate", len(set(request.rates))) as advance:
        found = largest_rate(
            made,
            Batches(data, settings, steps),
            settings.make_optimiser(made.parameters(), device),
            rates=request.rates,
            steps=steps,
            clip=settings.clip,
            progress=advance,
        )
    end(
        request,
        directory,
        result={**vars(found), "cost": found.steps / settings.iterations},
    )

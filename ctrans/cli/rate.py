"""`ctrans rate`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ctrans.base.option import Range, option
from ctrans.base.threads import choose_threads, flops
from ctrans.cli.click_options import OptionValues, settings_of
from ctrans.cli.ending import directory_of, end
from ctrans.cli.request import command_of
from ctrans.cli.train_options import OfTraining
from ctrans.model.gpt import GPT
from ctrans.report.progress import progress_bar
from ctrans.study.outcomes import Floor
from ctrans.study.rate_sweep import RATES, largest_rate
from ctrans.training.data import Data
from ctrans.training.data_sources import source_of
from ctrans.training.settings import TrainConfig


@dataclass(frozen=True, kw_only=True)
class RateRequest(OfTraining):
    """The request of `rate`."""

    training: OptionValues = settings_of(
        TrainConfig,
        only=(
            "batch",
            "iterations",
            "optimiser",
            "weight_decay",
            "decay_gains",
            "beta1",
            "beta2",
            "clip",
            "seed",
        ),
    )
    rates: tuple[float, ...] = option(
        RATES, "Repeatable: the learning rates.", default_words="half decades from 0.0032 to 0.32"
    )
    share: float = option(
        1.0,
        "Length of each training, as a share of --iterations. Short ones cost less, and were no"
        " better than a constant.",
        limits=Range(1e-6, 1.0),
    )


@dataclass(frozen=True)
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
    """Find the largest stable learning rate of a model on its data by a sweep.

    Each learning rate gets a training of --iterations with a warm-up and a cosine. Going up from
    the best rate, the answer is the rate at which the loss crosses the middle between the best loss
    and that of a model without depth. A monitor says what gives way first above it. The loss is the
    mean training loss of the last tenth. On three tasks it was within a factor of 2 of a study's
    answer for 14, 12 and 13 of 14 models. Sweeps of short trainings were not
    (docs/why/prediction.md). The directory gets rate.json and rate.png.

    \b
    ctrans rate
    ctrans rate --task recall --placement pre --dt 1 --iterations 600 --batch 16
    ctrans rate --file book.txt --iterations 1000 --rates 0.001 --rates 0.01 --rates 0.1
    """
    model = request.model
    settings = request.settings
    data = source_of(request.source, model.context)[1]
    directory = directory_of(request)
    choose_threads(
        flops(model.width, settings.batch, model.context), settings.weight_dtype.itemsize
    )
    made = GPT(model, seed=settings.seed)
    steps = max(1, round(request.share * settings.iterations))
    with progress_bar("rate", len(set(request.rates))) as advance:
        found = largest_rate(
            made,
            Batches(data, settings, steps),
            settings.make_optimiser(made.parameters(), model=made),
            rates=request.rates,
            steps=steps,
            floor=Floor(data.depthless_loss(), data.guess_loss()),
            clip=settings.clip,
            progress=advance,
        )
    end(
        request,
        directory,
        result={**vars(found), "cost": found.steps / settings.iterations},
    )

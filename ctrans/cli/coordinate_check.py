"""`ctrans coordinate-check`."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from ctrans.base.option import Range, option
from ctrans.base.threads import choose_threads, flops
from ctrans.cli.click_options import OptionValues, settings_of
from ctrans.cli.ending import directory_of, end
from ctrans.cli.request import command_of
from ctrans.cli.train_options import OfTraining
from ctrans.report.progress import progress_bar
from ctrans.training.coordinate_check import coordinate_check
from ctrans.training.data_sources import source_of
from ctrans.training.settings import TrainConfig
from ctrans.training.transferred import in_words, measured


@dataclasses.dataclass(frozen=True, kw_only=True)
class CoordinateRequest(OfTraining):
    """The request of `coordinate-check`."""

    training: OptionValues = settings_of(
        TrainConfig, only=("batch", "optimiser", "weight_decay", "seed")
    )
    widths: tuple[int, ...] = option(
        (32, 64, 128, 256),
        "Repeatable: widths, at --depth. Heads are as wide as those of --width with --heads.",
    )
    depths: tuple[int, ...] = option(
        (4, 8, 16, 32), "Repeatable: numbers of blocks, at --width. One alone is not checked."
    )
    rates: tuple[float, ...] = option(
        (1e-3, 4e-3), "Repeatable: learning rates, a quarter or less of the best one."
    )
    seeds: int = option(3, "Models of each size and rate.", limits=Range(1, 1000))
    updates: int = option(3, "Optimiser steps, all on one batch.", limits=Range(1, 1000))

    defaults: ClassVar[OptionValues] = {
        "depth": 4,
        "width": 32,
        "heads": 2,
        "context": 32,
        "initialisation": "lecun",
        "embedding_std": 1.0,
        "tied": False,
        "weight_decay": 0.0,
    }
    common: ClassVar[frozenset[str]] = OfTraining.common | {
        "optimiser",
        "parametrisation",
        "widths",
        "depths",
        "rates",
        "seeds",
        "updates",
    }


@command_of(CoordinateRequest, "coordinate-check")
def command(request: CoordinateRequest) -> None:
    """Check whether a learning rate transfers to other widths and depths.

    Models of several widths, and of several depths, take the same few steps on one batch. The
    command fits mean |change| ~ size^k for the output of each module, for attention logits, and for
    rate times weight decay. If each k is near 0, the best rate of a small model should suit a large
    one. The base of --parametrisation is --width and --depth. The directory gets
    coordinate-check.json and coordinate-check.png.

    \b
    ctrans coordinate-check
    ctrans coordinate-check --parametrisation completep --placement pre
    ctrans coordinate-check --parametrisation mup --optimiser muon --depths 4
    """
    model = request.model
    settings = request.settings
    tokens = source_of(request.source, model.context)[1]
    directory = directory_of(request)
    choose_threads(
        flops(max(request.widths), settings.batch, model.context), settings.weight_dtype.itemsize
    )
    sizes = {name: sorted(set(getattr(request, name))) for name in ("widths", "depths")}
    with progress_bar("coordinate-check", len(sizes["widths"]) + len(sizes["depths"])) as advance:
        checked = coordinate_check(
            model,
            tokens,
            settings,
            **sizes,
            rates=request.rates,
            seeds=request.seeds,
            updates=request.updates,
            progress=advance,
        )
    end(
        request,
        directory,
        result={**vars(checked), "verdict": checked.verdict, "answer": in_words(checked)},
        options=request.as_trained(request.model, request.settings),
        measured=measured(checked),
    )

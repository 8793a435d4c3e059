"""`ctrans coordinate-check`."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import ClassVar

from ctrans.cli.click_options import OptionValues, settings_of
from ctrans.cli.ending import directory_of, end
from ctrans.cli.request import WrittenRequest, command_of
from ctrans.model.config import GPTConfig
from ctrans.model.text import VOCABULARY
from ctrans.option import Range, option
from ctrans.report.pages.coordinate_page import coordinate_words
from ctrans.report.progress import progress_bar
from ctrans.threads import choose_threads, flops
from ctrans.training.coordinate_check import coordinate_check, place_names, powers
from ctrans.training.data_sources import source_of
from ctrans.training.settings import TrainConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class CoordinateRequest(WrittenRequest):
    """The request of `coordinate-check`. `config` has fields of `GPTConfig`, `training` fields of
    `TrainConfig`.
    """

    config: OptionValues = settings_of(GPTConfig)
    training: OptionValues = settings_of(TrainConfig, only=("batch", "optimiser", "learning_rate", "weight_decay", "seed"))
    widths: tuple[int, ...] = option(
        (64, 128, 256, 512), "Repeatable: the widths. Heads are as wide as those of --width with --heads."
    )
    updates: int = option(3, "Optimiser steps, all on one batch.", limits=Range(1, 1000))
    file: Path | None = option(
        None, "Take the batch from this file's bytes.", group="Data", default_words="Python's language documentation"
    )

    defaults: ClassVar[OptionValues] = {
        "depth": 2,
        "width": 64,
        "heads": 4,
        "context": 32,
        "initialisation": "lecun",
        "embedding_std": 1.0,
        "learning_rate": 1e-3,
        "weight_decay": 0.0,
    }

    @property
    def model(self) -> GPTConfig:
        """The architecture of --width. Raises ConfigError for an invalid one."""
        return GPTConfig(VOCABULARY, **self.config)

    @property
    def settings(self) -> TrainConfig:
        """The training's settings. Raises ConfigError for invalid ones."""
        return TrainConfig(**self.training)


@command_of(CoordinateRequest, "coordinate-check")
def command(request: CoordinateRequest) -> None:
    """Measure how activations and their updates grow with the width.

    The model of each width takes the same few steps on one batch with one learning rate. If a
    change grows with the width (k > 0 in mean |change| ~ width^k), the best learning rate of a
    narrow model is too large for a wide one. mup makes k = 0 everywhere (Yang et al. 2022, appendix
    D.1). The result has the standard error of k. The directory gets coordinate-check.json and
    coordinate-check.png.

    \b
    ctrans coordinate-check
    ctrans coordinate-check --placement pre --norm rmsnorm --ffn swiglu --no-bias --widths 128 --widths 256 --widths 1024
    ctrans coordinate-check --optimiser sgd --learning-rate 0.1 --updates 1
    """
    model, settings = request.model, request.settings
    tokens = source_of(request.file, model.context)[1]
    directory = directory_of(request)
    choose_threads(flops(max(request.widths), settings.batch, model.context), settings.weight_dtype.itemsize)
    widths = sorted(set(request.widths))
    with progress_bar("coordinate-check", len(widths)) as advance:
        found = coordinate_check(model, widths, tokens, settings, updates=request.updates, progress=advance)
    places = place_names(model)
    verdict = coordinate_words(found, places, widths)
    end(
        request,
        directory,
        result={
            "widths": widths,
            "places": places,
            "coordinates": found,
            "size_powers": [powers(each.sizes) for each in found],
            "change_powers": [powers(each.changes) for each in found],
            "verdict": verdict,
        },
    )

"""`ctrans coordinate-check`."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import ClassVar

import click

from ctrans.cli import options
from ctrans.cli.ending import CommandEnding, directory_of, end
from ctrans.cli.request import Request, WrittenRequest, takes
from ctrans.cli.train_options import ARCHITECTURE, model_options
from ctrans.depth import check_count
from ctrans.model.config import GPTConfig
from ctrans.model.text import VOCABULARY
from ctrans.report.coordinate_report import coordinate_figure, coordinate_table, coordinate_words
from ctrans.report.files import png
from ctrans.report.progress import progress_bar
from ctrans.threads import choose_threads, flops
from ctrans.training.coordinate_check import coordinate_check, place_names, powers
from ctrans.training.data import source_of
from ctrans.training.optimiser import OPTIMISERS
from ctrans.training.settings import TrainConfig

DEFAULTS = {"depth": 2, "width": 64, "heads": 4, "context": 32, "initialisation": "lecun", "embedding_std": 1.0}
MOST_UPDATES = 1000


@dataclasses.dataclass(frozen=True, kw_only=True)
class CoordinateRequest(WrittenRequest):
    """What `coordinate-check` is asked; the architecture's options are fields of `model`, checked when asked for."""

    widths: tuple[int, ...]
    updates: int
    file: Path | None

    unshown: ClassVar[frozenset[str]] = Request.unshown | {"out"}

    @property
    def model(self) -> GPTConfig:
        """The architecture, whose heads give theirs to every width. Raises ConfigError for what cannot be."""
        return GPTConfig(VOCABULARY, **{name: self.options[name] for name in ARCHITECTURE})

    @property
    def settings(self) -> TrainConfig:
        """How it is trained. Raises ConfigError for what cannot be."""
        own = {name: self.options[name] for name in ("batch", "optimiser", "learning_rate", "weight_decay", "seed")}
        return TrainConfig(**own)


@click.command("coordinate-check", context_settings={"default_map": DEFAULTS})
@model_options
@click.option(
    "--widths",
    multiple=True,
    type=int,
    default=(64, 128, 256, 512),
    show_default=True,
    help="Repeatable: the widths, each with heads as wide as --width has with --heads.",
)
@click.option("--updates", default=3, show_default=True, help="Steps of the optimiser, all on one batch.")
@click.option("--batch", default=8, show_default=True, help="Sequences of the batch.")
@click.option(
    "--optimiser", default="adamw", show_default=True, metavar="NAME", help=f"{options.one_of(OPTIMISERS).capitalize()}."
)
@click.option("--learning-rate", default=1e-3, show_default=True, help="The same at every width.")
@click.option("--weight-decay", default=0.0, show_default=True, help="Of matrices.")
@click.option(
    "--file",
    type=click.Path(path_type=Path),
    help="The batch is from this file's bytes.  [default: Python's language documentation]",
)
@options.out_option("coordinate-check")
@options.json_option
@takes(CoordinateRequest)
def command(request: CoordinateRequest) -> None:
    """Measure how activations, and what updates do to them, grow with the width.

    Each width's model takes the same few steps on one batch at one learning rate. Where a change grows with the width (k > 0 in
    mean |change| ~ width^k), the best learning rate of a narrow model is too large for a wide one; k = 0 everywhere is what mup is
    for (Yang et al. 2022, appendix D.1). k has its standard error. The directory gets coordinate-check.json and coordinate-check.png.

    \b
    ctrans coordinate-check
    ctrans coordinate-check --placement pre --norm rmsnorm --ffn swiglu --no-bias --widths 128 --widths 256 --widths 1024
    ctrans coordinate-check --optimiser sgd --learning-rate 0.1 --updates 1
    """
    check_count("updates", request.updates, MOST_UPDATES)
    model, settings = request.model, request.settings
    tokens = source_of(request.file, model.context)[1]
    directory = directory_of(request)
    choose_threads(flops(max(request.widths), settings.batch, model.context), settings.weight_dtype.itemsize)
    widths = sorted(set(request.widths))
    with progress_bar("coordinate-check", len(widths)) as advance:
        found = coordinate_check(model, widths, tokens, settings, updates=request.updates, progress=advance)
    places = place_names(model)
    verdict = coordinate_words(found, places, widths)
    ending = CommandEnding(
        result={
            "widths": widths,
            "places": places,
            "coordinates": found,
            "size_powers": [powers(each.sizes) for each in found],
            "change_powers": [powers(each.changes) for each in found],
            "verdict": verdict,
        },
        files={"coordinate-check.png": lambda: png(coordinate_figure(found, places))},
        page=[coordinate_table(found, places), "", verdict],
    )
    end(request, directory, ending)

"""`ctrans screen`."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from functools import partial
from typing import ClassVar

from ctrans.base.option import option
from ctrans.cli.click_options import expand, expand_placements
from ctrans.cli.comparison import SETTINGS, architectures_of, axes_of
from ctrans.cli.ending import directory_of, end
from ctrans.cli.inputs import read_batch
from ctrans.cli.model_request import ComparisonRequest
from ctrans.cli.model_sources import ModelSource, check_foreign_options, find_models, seeded
from ctrans.cli.request import command_of
from ctrans.dynamics.norm import NORMS
from ctrans.dynamics.weights.on_demand import watch
from ctrans.examine.screened import NAMED, as_object, by_verdict, measured
from ctrans.examine.screening.screen import EFFORTS, Screening, screen
from ctrans.model.architectures import ARCHITECTURES, PLAIN
from ctrans.report.progress import Bar, progress_bar
from solvers import ConfigError


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScreenRequest(ComparisonRequest):
    """The request of `screen`."""

    compare: tuple[str, ...] = option(
        (),
        "Repeatable: compare every combination of values of settings, or architectures by name."
        f" Settings are {', '.join(SETTINGS)}. Settings with names also take all. Architectures"
        " are separated by commas, such as llama,mixtral,post:swiglu:dt=0.1. Each is a change of"
        f" plain pre-LN. Names are all, modern, {', '.join(ARCHITECTURES)}. Join names and"
        " settings with colons.",
        metavar="NAME=V,V",
    )
    quick: bool = option(
        default=False,
        help="Take seconds instead of minutes: fewer tokens, layers and certificates, wider"
        " tolerances, no curvature and no spectrum.",
    )

    common: ClassVar[frozenset[str]] = ComparisonRequest.common | {"compare", "quick"}


@command_of(ScreenRequest, "screen")
def command(request: ScreenRequest) -> None:
    """Screen an architecture before you train it, or an existing model.

    The first four steps are Kan's: whether training is a well-posed control problem, how hidden
    states grow, how gradients propagate, and how far uncertainty travels. Further steps: attention
    sensitivity, the effect of one optimiser step, and initialisation theory. Every quantity has a
    lower and an upper limit. A model outside them does nothing or diverges. A step that cannot
    handle the model says why. The directory gets screen.json and screen.png.

    \b
    ctrans screen --placement pre --quick
    ctrans screen --placement all --compare dt=1,0.1 --quick
    ctrans screen --compare modern --quick
    ctrans screen --compare pre,llama,mixtral,post:swiglu:dt=0.1 --quick
    ctrans screen out/train --file book.txt
    ctrans screen run/step-1000 run/step-2000 --quick
    ctrans screen models/gpt2 --quick --dtype float32
    ctrans screen --architecture llama-70b --depth 8 --tokens 32 --quick
    """
    if request.dtype == "bfloat16":
        raise ConfigError(
            "dtype 'bfloat16' is too coarse for singular values and certificates: choose float32 or"
            " float64"
        )
    jobs = _jobs(request)
    sources = list(jobs.values())
    batch = read_batch(request, sources, walks=2)
    # half of the sequences are of another text, which the transport step needs; other arguments of
    # an example belong to its first rows
    half = len(batch.tokens) // 2
    if sources[0].example:
        screened_rows = slice(half)
        comparison_rows = slice(half, None)
    else:
        screened_rows = slice(0, None, 2)
        comparison_rows = slice(1, None, 2)
    comparison_tokens = batch.tokens[comparison_rows]
    batch = dataclasses.replace(
        batch, tokens=batch.tokens[screened_rows], targets=batch.targets[screened_rows]
    )
    directory = directory_of(request)
    effort = EFFORTS["quick"] if request.quick else EFFORTS["full"]
    results: dict[str, Screening] = {}
    with progress_bar("screen", 2 * sum(source.segments for source in sources)) as advance:
        for name, source in jobs.items():
            model = source.model(request)
            watch(model, partial(_advance_weights, advance, name))
            progress = partial(_advance_step, advance, name)
            results[name] = screen(
                model,
                batch.tokens,
                batch.targets,
                effort,
                other=comparison_tokens,
                seed=request.seed,
                trained=source.trained,
                progress=progress,
            )
    if len(results) > NAMED:
        results = by_verdict(results)
    placements = dict.fromkeys(name for source in sources for name in source.placements)
    end(
        request,
        directory,
        options={"placements": list(placements)},
        inputs=batch,
        result=as_object(results),
        measured=measured(results),
        failures=[
            f"{name}: activations become non-finite in segment {screening.broken}"
            for name, screening in results.items()
            if screening.broken is not None
        ],
    )


def _advance_weights(advance: Bar, name: str, piece: str) -> None:
    """Shows in the progress bar which weights are being made."""
    advance(f"{name}, weights of {piece}", 0)


def _advance_step(advance: Bar, name: str, step: str) -> None:
    """Moves the progress bar by one step of the screening."""
    advance(f"{name}, {step}")


def _jobs(request: ScreenRequest) -> dict[str, ModelSource]:
    """The models by name. Raises ConfigError for options that contradict each other."""
    axes = axes_of(request.compare)
    saved = next((option for option, _ in request.named_models), None)
    if axes and saved is not None:
        raise ConfigError(
            f"--{saved} brings its own architecture: leave out --compare, or leave out --{saved}"
        )
    if "placements" in request.typed and "placement" in axes:
        raise ConfigError(
            "placements are given twice: choose one of --placement and --compare placement=..."
        )
    if saved is not None:
        return {source.name: source for source in find_models(request)}
    check_foreign_options(request)
    named = architectures_of(request.compare, request.config["depth"])
    if "placements" in request.typed or not named:
        placements = {name: name for name in expand_placements(request.placements)}
        axes = {"placement": placements, **axes}
    plain = {} if "placement" in axes else PLAIN
    if "norm" not in axes and len(expand(request.norms, NORMS, "norm")) > 1:
        raise ConfigError(
            "--norm all stands for several norms, and each model has one: choose one, or --compare"
            " norm=..."
        )
    jobs = {}
    for values in itertools.product(*(axis.items() for axis in axes.values())):
        changes = {SETTINGS[axis]: value for axis, (_, value) in zip(axes, values, strict=True)}
        setting = label([(axis, text) for axis, (text, _) in zip(axes, values, strict=True)])
        for name, fields in named.items():
            job_name = f"{name}, {setting}" if setting else name
            jobs[job_name] = seeded(request, {**changes, **plain, **fields})
        if not named:
            jobs[setting] = seeded(request, changes)
    return jobs


def label(changes: Sequence[tuple[str, object]]) -> str:
    """A model's name from its own settings: `peri, dt 0.1`."""
    parts = []
    for name, value in changes:
        text = f"{value:g}" if isinstance(value, float) else str(value)
        if name != "placement":
            text = f"{name} {text}"
        parts.append(text)
    return ", ".join(parts)

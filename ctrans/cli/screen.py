"""`ctrans screen`."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from functools import partial
from typing import ClassVar

from torch import Tensor

from ctrans.cli.click_options import expand, expand_placements
from ctrans.cli.comparison import SETTINGS, architectures_of, axes_of
from ctrans.cli.ending import CommandEnding, directory_of, end
from ctrans.cli.inputs import InputRows, InputSummary, Text, read
from ctrans.cli.model_sources import Subject, check_foreign_options, find, seeded, settle_threads
from ctrans.cli.request import MODEL_OPTIONS, ComparisonRequest, ModelRequest, command_of, get_device, get_dtype
from ctrans.model.architectures import ARCHITECTURES, PLAIN
from ctrans.norm import NORMS
from ctrans.option import option
from ctrans.report.axes import MOST_LINES
from ctrans.report.progress import Bar, progress_bar
from ctrans.stability.screening.screen import EFFORTS, Screening, as_result, screen
from ctrans.weights.on_demand import watch
from solvers import ConfigError


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScreenRequest(ComparisonRequest):
    """The request of `screen`."""

    compare: tuple[str, ...] = option(
        (),
        f"Repeatable: compare every combination of the values of settings: {', '.join(SETTINGS)}. Settings with names also take all. Or "
        "compare architectures by name, with commas between them, such as llama,mixtral,post:swiglu:dt=0.1. Each differs from plain "
        f"pre-LN. Names are all, modern, {', '.join(ARCHITECTURES)}; join names and settings with colons.",
        metavar="NAME=V,V",
    )
    quick: bool = option(
        False,
        "Seconds instead of minutes: fewer tokens, layers and certificates, wider tolerances, no curvature and no spectrum.",
    )

    unshown: ClassVar[frozenset[str]] = ModelRequest.unshown | {"compare", "quick"}


@command_of(ScreenRequest, "screen")
def command(request: ScreenRequest) -> None:
    """Screen an architecture before you train it, or a model that exists.

    Kan's four steps: is training a well-posed control problem, how do hidden states grow, how do
    gradients pass, how far does uncertainty travel. Further steps: attention sensitivity, the
    effect of one optimiser step, and initialisation theory. Every quantity has a lower and an upper
    limit. A model outside them does nothing or explodes. A step that cannot handle the model says
    so. The directory gets screen.json and screen.png.

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
    _check_dtype(request.dtype)
    device, dtype = get_device(request.device), get_dtype(request.dtype)
    jobs = _jobs(request)
    found = list(jobs.values())
    text = read(request, found)
    tokens, targets, other = (part.to(device) for part in _parts(text, request, found))
    settle_threads(found, tokens, get_dtype(request.dtype))
    directory = directory_of(request)
    effort = EFFORTS["quick" if request.quick else "full"]
    results: dict[str, Screening] = {}
    with progress_bar("screen", sum(map(_visits, found))) as advance:
        for name, subject in jobs.items():
            model = subject.model(dtype, device)
            watch(model, partial(_under_way, advance, name))
            told = partial(_told, advance, name)
            results[name] = screen(
                model, tokens, targets, effort, other=other, seed=request.seed, trained=subject.trained, progress=told
            )
    if len(results) > MOST_LINES:
        results = by_verdict(results)
    ending = CommandEnding(
        options={"placements": _placements(found), "compare": request.compare, "quick": request.quick},
        looked_at=InputSummary(request, found, text, tokens),
        device=device,
        result=as_result(results),
        failures=[
            f"{name}: activations become non-finite in segment {screening.broken}"
            for name, screening in results.items()
            if screening.broken is not None
        ],
    )
    end(request, directory, ending)


def _visits(subject: Subject) -> int:
    """How often its screening tells its progress, known before it is made: every segment, there and
    back.
    """
    return 2 * subject.segments


def _told(advance: Bar, name: str, step: str) -> None:
    advance(f"{name}, {step}")


def _under_way(advance: Bar, name: str, piece: str) -> None:
    """A step takes minutes where weights are made on demand."""
    advance.say(f"{name}, weights of {piece}")


def _jobs(request: ScreenRequest) -> dict[str, Subject]:
    """Every model by name: whatever can be wrong is said before anything is computed."""
    axes = axes_of(request.compare)
    saved = _named(request)
    if axes and saved is not None:
        raise ConfigError(f"--{saved} brings its own architecture: leave out --compare, or leave out --{saved}")
    if "placements" in request.typed and "placement" in axes:
        raise ConfigError("placements are given twice: choose one of --placement and --compare placement=...")
    if saved is not None:
        return {subject.name: subject for subject in find(request)}
    check_foreign_options(request)
    named = architectures_of(request.compare, request.config["depth"])
    if "placements" in request.typed or not named:
        placements = {name: name for name in expand_placements(request.placements)}
        axes = {"placement": placements, **axes}
    plain = {} if "placement" in axes else PLAIN
    if "norm" not in axes and len(expand(request.norms, NORMS, "norm")) > 1:
        raise ConfigError(
            "--norm all stands for several norms, and one is looked at in each model: choose one, or --compare norm=..."
        )
    jobs = {}
    for values in itertools.product(*(axis.items() for axis in axes.values())):
        changes = {SETTINGS[axis]: value for axis, (_, value) in zip(axes, values, strict=True)}
        words = label([(axis, said) for axis, (said, _) in zip(axes, values, strict=True)])
        for name, fields in named.items():
            jobs[", ".join(filter(None, (name, words)))] = seeded(request, {**changes, **plain, **fields})
        if not named:
            jobs[words] = seeded(request, changes)
    return jobs


def _named(request: ScreenRequest) -> str | None:
    """The option that names a model, or the first of several."""
    return request.several[0][0] if request.several else next((o for o in MODEL_OPTIONS if getattr(request, o) is not None), None)


def _placements(found: Sequence[Subject]) -> list[str]:
    """Each placement that a sublayer of these models has."""
    return list(dict.fromkeys(name for subject in found for name in subject.placements))


def _check_dtype(name: str) -> None:
    if name == "bfloat16":
        raise ConfigError("dtype 'bfloat16' is too coarse for singular values and certificates: choose float32 or float64")


def _parts(text: Text | InputRows, request: ScreenRequest, found: Sequence[Subject]) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, targets, and as many tokens of another text: every second sequence."""
    shortest = min(subject.context for subject in found)
    tokens, targets = text.pairs(request.batch, shortest, 2)
    return tokens[::2], targets[::2], tokens[1::2]


def by_verdict(screenings: Mapping[str, Screening]) -> dict[str, Screening]:
    """The same, those first that have fewer quantities outside of their limits; whose states are
    not finite, last.
    """
    return dict(sorted(screenings.items(), key=lambda each: (each[1].broken is not None, len(each[1].flags))))


def label(changes: Sequence[tuple[str, object]]) -> str:
    """A model's name from what sets it apart, as `peri, dt 0.1`."""
    words = [f"{value:g}" if isinstance(value, float) else str(value) for _, value in changes]
    return ", ".join(word if name == "placement" else f"{name} {word}" for (name, _), word in zip(changes, words, strict=True))

"""`ctrans screen`."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource
from rich.console import Console
from torch import Tensor

from ctrans.cli import options
from ctrans.cli.subjects import Subject, Text, read, say_model, subjects, summary, weights_of
from ctrans.depth import check_count
from ctrans.model.initialisation import INITIALISATIONS
from ctrans.norm import NORMS
from ctrans.placement import PLACEMENTS
from ctrans.report.files import png, write_atomic
from ctrans.report.progress import Bar, progress_bar
from ctrans.report.screen_figure import screen_figure
from ctrans.report.screen_report import KEY, label, ranked, ranking_table, screen_reasons, screen_table
from ctrans.stability.screening.screen import EFFORTS, STEPS, Screening, screen
from ctrans.weights.on_demand import watch
from solvers import ConfigError
from solvers.errors import look_up

Values = Callable[[str], list[Any]]


def _names(table: dict[str, Any], what: str) -> Values:
    return lambda text: options.expand(text.split(","), table, what)


def _numbers(kind: type[int] | type[float], what: str) -> Values:
    def parse(text: str) -> list[Any]:
        try:
            return [kind(part) for part in text.split(",")]
        except ValueError:
            raise ConfigError(f"--compare {what}={text}: give numbers with commas between them, such as {what}=1,2") from None

    return parse


COMPARABLE: dict[str, tuple[str, Values]] = {
    "placement": ("placement", _names(PLACEMENTS, "placement")),
    "norm": ("norm", _names(NORMS, "norm")),
    "dt": ("dt", _numbers(float, "dt")),
    "init": ("initialisation", _names(INITIALISATIONS, "initialisation")),
    "embedding-std": ("embedding_std", _numbers(float, "embedding-std")),
    "depth": ("depth", _numbers(int, "depth")),
}
"""What can be compared: the setting it changes, and how its values are read."""


@click.command("screen")
@options.placement_option
@options.architecture_options
@click.option(
    "--compare",
    multiple=True,
    metavar="NAME=V,V",
    help=f"Repeatable: every combination of the values, ranked. {options.one_of(COMPARABLE).capitalize()}; names also take all.",
)
@click.option(
    "--quick", is_flag=True, help="Seconds instead of minutes: fewer tokens, layers and certificates, wider tolerances."
)
@options.text_options
@options.device_options
@options.model_options
@options.out_option("screen")
@options.json_option
def command(
    placements: tuple[str, ...],
    compare: tuple[str, ...],
    quick: bool,
    out: Path | None,
    json_path: str | None,
    **settings: Any,
) -> None:
    """Screen an architecture before it is trained, or a model that there is.

    Kan's four steps: is training a well-posed control problem, how do hidden states grow, how do gradients pass, how far does
    uncertainty travel. Beside them attention sensitivity and initialisation theory, and a stability score made of all. A step
    that cannot handle the model says so. The directory gets screen.json and screen.png.

    \b
    ctrans screen --placement pre --quick
    ctrans screen --placement all --compare dt=1,0.1 --quick
    ctrans screen --checkpoint out/train --file book.txt
    ctrans screen --model models/gpt2 --quick --dtype float32
    ctrans screen --architecture llama-70b --depth 8 --tokens 32 --quick
    """
    _check_dtype(settings["dtype"])
    device, dtype = options.get_device(settings["device"]), options.get_dtype(settings["dtype"])
    jobs = _jobs(placements, compare, settings)
    found = list(jobs.values())
    settings["stream"] = any(subject.streamed for subject in found)
    text = read(settings, found)
    tokens, targets, other = (part.to(device) for part in _parts(text, settings, found))
    options.set_threads(settings, tokens)
    directory = options.out_directory(out, json_path, "screen")
    effort = EFFORTS["quick" if quick else "full"]
    results: dict[str, Screening] = {}
    with progress_bar("screen", len(STEPS) * len(jobs)) as advance:
        for name, subject in jobs.items():
            model = subject.model(dtype, device)
            watch(model, partial(_under_way, advance, name))
            results[name] = screen(
                model,
                tokens,
                targets,
                effort,
                other=other,
                seed=settings["seed"],
                trained=settings["checkpoint"] is not None or settings["model"] is not None,
                progress=partial(_told, advance, name),
            )
    if directory is not None:
        write_atomic(directory / "screen.png", png(screen_figure(results, _title(settings, list(results)))))
    result = {
        "command": "screen",
        "options": {**options.printable(settings), "placements": _placements(found), "compare": compare, "quick": quick},
        "environment": options.environment(device),
        "model": summary(found, text, tokens),
        "ranking": ranked(results),
        "models": {name: _summary(screening) for name, screening in results.items()},
    }
    options.write_json(result, json_path, directory, "screen")
    if json_path != "-":
        console = Console()
        say_model(console, found, text, tokens)
        _print(console, results, directory)
    broken = {name: screening.broken for name, screening in results.items() if screening.broken is not None}
    for name, segment in broken.items():
        click.echo(f"ctrans: {name}: activations become non-finite in segment {segment}", err=True)
    if broken:
        raise SystemExit(1)


def _told(advance: Bar, name: str, step: str) -> None:
    advance(f"{name}, {step}")


def _under_way(advance: Bar, name: str, piece: str) -> None:
    """A step takes minutes where weights are made on demand."""
    advance.say(f"{name}, weights of {piece}")


def _jobs(placements: Sequence[str], compare: Sequence[str], settings: dict[str, Any]) -> dict[str, Subject]:
    """Every model by name: whatever can be wrong is said before anything is computed."""
    axes = _axes(compare)
    saved = next((name for name in ("checkpoint", "model", "architecture") if settings[name] is not None), None)
    if axes and saved is not None:
        raise ConfigError(f"--{saved} brings its own architecture: leave out --compare, or leave out --{saved}")
    given = click.get_current_context().get_parameter_source("placements") is ParameterSource.COMMANDLINE
    if given and "placement" in axes:
        raise ConfigError("placements are given twice: choose one of --placement and --compare placement=...")
    if saved is not None:
        (subject,) = subjects(settings, placements, [settings["norm"]])
        return {subject.config.placement: subject}
    axes = {"placement": options.expand(placements, PLACEMENTS, "placement"), **axes}
    jobs = {}
    for values in itertools.product(*axes.values()):
        changes = list(zip(axes, values, strict=True))
        own = {**settings, **{COMPARABLE[name][0]: value for name, value in changes}}
        (jobs[label(changes)],) = subjects(own, [own["placement"]], [own["norm"]])
    return jobs


def _placements(found: Sequence[Subject]) -> list[str]:
    """Each placement that a sublayer of these models has."""
    return list(dict.fromkeys(name for subject in found for name in subject.placements))


def _axes(compare: Sequence[str]) -> dict[str, list[Any]]:
    axes = {}
    for text in compare:
        name, equals, values = text.partition("=")
        if not equals:
            raise ConfigError(f"--compare {text}: give a name and values, such as dt=1,0.1")
        axes[name] = look_up("setting to compare", name, COMPARABLE)[1](values)
    return axes


def _check_dtype(name: str) -> None:
    if name == "bfloat16":
        raise ConfigError("dtype 'bfloat16' is too coarse for singular values and certificates: choose float32 or float64")


def _parts(text: Text, settings: dict[str, Any], jobs: Sequence[Subject]) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, targets, and as many tokens of another text: every second sequence."""
    longest = [subject.config.context for subject in jobs if subject.config.context is not None]
    tokens, targets = text.pairs(2 * check_count("batch", settings["batch"]), min([settings["context"], *longest]))
    return tokens[::2], targets[::2], tokens[1::2]


def _title(settings: dict[str, Any], names: list[str]) -> str:
    if len(names) > 1:
        return "Screening, width {width}".format(**settings)
    return "Screening: {depth} blocks, width {width}, dt = {dt:g}, ".format(**settings) + weights_of(settings)


def _summary(screening: Screening) -> dict[str, Any]:
    findings = {name: {**vars(finding), "score": finding.score} for name, finding in screening.findings.items()}
    return {**vars(screening), "findings": findings}


def _print(console: Console, results: dict[str, Screening], directory: Path | None) -> None:
    if len(results) > 1:
        console.print(ranking_table(results))
    else:
        for name, screening in results.items():
            console.print(screen_table(name, screening))
            console.print("", screen_reasons(screening), sep="\n", highlight=False)
    console.print("", KEY, "", sep="\n", highlight=False)
    if directory is not None:
        console.print(f"Written: {directory}/screen.json, {directory}/screen.png", soft_wrap=True)

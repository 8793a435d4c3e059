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
from ctrans.gpt import GPTConfig
from ctrans.initialisation import INITIALISATIONS
from ctrans.norm import NORMS
from ctrans.placement import PLACEMENTS
from ctrans.report.files import png, write_atomic
from ctrans.report.progress import progress_bar
from ctrans.report.screen_figure import screen_figure
from ctrans.report.screen_report import KEY, label, ranked, ranking_table, screen_reasons, screen_table
from ctrans.stability.screen import EFFORTS, STEPS, Screening, screen
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
@options.checkpoint_option
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
    """Screen an architecture before it is trained.

    Kan's four steps: is training a well-posed control problem, how do hidden states grow, how do gradients pass, how far does
    uncertainty travel. Beside them attention sensitivity and initialisation theory, and a stability score made of all. A step
    that cannot handle the model says so. The directory gets screen.json and screen.png.

    \b
    ctrans screen --placement pre --quick
    ctrans screen --placement all --compare dt=1,0.1 --quick
    ctrans screen --checkpoint out/train --file book.txt
    """
    jobs = _jobs(placements, compare, settings)
    device, dtype = options.get_device(settings["device"]), options.get_dtype(settings["dtype"])
    _check_dtype(settings["dtype"])
    length = min(settings["context"], *(config.context for _, config in jobs.values()))
    tokens, targets, other = (part.to(device) for part in _read(settings, length))
    directory = options.out_directory(out, json_path, "screen")
    effort = EFFORTS["quick" if quick else "full"]
    results: dict[str, Screening] = {}
    with progress_bar("screen", len(STEPS) * len(jobs)) as advance:
        for name, (own, config) in jobs.items():
            model = options.make_model(config, own, dtype, device)
            results[name] = screen(
                model,
                tokens,
                targets,
                effort,
                other=other,
                seed=settings["seed"],
                trained=settings["checkpoint"] is not None,
                progress=partial(_told, advance, name),
            )
    if directory is not None:
        write_atomic(directory / "screen.png", png(screen_figure(results, _title(settings, list(results)))))
    result = {
        "command": "screen",
        "options": {**options.printable(settings), "placements": placements, "compare": compare, "quick": quick},
        "environment": options.environment(device),
        "ranking": ranked(results),
        "models": {name: _summary(screening) for name, screening in results.items()},
    }
    options.write_json(result, json_path, directory, "screen")
    if json_path != "-":
        _print(results, directory)
    broken = {name: screening.broken for name, screening in results.items() if screening.broken is not None}
    for name, segment in broken.items():
        click.echo(f"ctrans: {name}: activations become non-finite in segment {segment}", err=True)
    if broken:
        raise SystemExit(1)


def _told(advance: Callable[[str], None], name: str, step: str) -> None:
    advance(f"{name}, {step}")


def _jobs(
    placements: Sequence[str], compare: Sequence[str], settings: dict[str, Any]
) -> dict[str, tuple[dict[str, Any], GPTConfig]]:
    """Settings and architecture of every model by name: whatever can be wrong is said before anything is computed."""
    axes = _axes(compare)
    if axes and settings["checkpoint"] is not None:
        raise ConfigError("--checkpoint brings its own architecture: leave out --compare, or leave out --checkpoint")
    given = click.get_current_context().get_parameter_source("placements") is ParameterSource.COMMANDLINE
    if given and "placement" in axes:
        raise ConfigError("placements are given twice: choose one of --placement and --compare placement=...")
    if settings["checkpoint"] is not None:
        (config,) = options.architectures(settings, placements, [settings["norm"]])
        return {config.placement: (settings, config)}
    axes = {"placement": options.expand(placements, PLACEMENTS, "placement"), **axes}
    jobs = {}
    for values in itertools.product(*axes.values()):
        changes = list(zip(axes, values, strict=True))
        own = {**settings, **{COMPARABLE[name][0]: value for name, value in changes}}
        (config,) = options.architectures(own, [own["placement"]], [own["norm"]])
        jobs[label(changes)] = own, config
    return jobs


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


def _read(settings: dict[str, Any], length: int) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, targets, and as many tokens of another text: every second window."""
    windows = options.read_tokens({**settings, "batch": 2 * settings["batch"]}, length + 1)
    return windows[::2, :-1], windows[::2, 1:], windows[1::2, :-1]


def _title(settings: dict[str, Any], names: list[str]) -> str:
    if len(names) > 1:
        return "Screening, width {width}".format(**settings)
    weights = "{initialisation} weights, seed {seed}" if settings["checkpoint"] is None else "weights of {checkpoint}"
    return ("Screening: {depth} blocks, width {width}, dt = {dt:g}, " + weights).format(**settings)


def _summary(screening: Screening) -> dict[str, Any]:
    findings = {name: {**vars(finding), "score": finding.score} for name, finding in screening.findings.items()}
    return {**vars(screening), "findings": findings}


def _print(results: dict[str, Screening], directory: Path | None) -> None:
    console = Console()
    if len(results) > 1:
        console.print(ranking_table(results))
    else:
        for name, screening in results.items():
            console.print(screen_table(name, screening))
            console.print("", screen_reasons(screening), sep="\n", highlight=False)
    console.print("", KEY, "", sep="\n", highlight=False)
    if directory is not None:
        console.print(f"Written: {directory}/screen.json, {directory}/screen.png", soft_wrap=True)

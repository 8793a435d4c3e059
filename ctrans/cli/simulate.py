"""`ctrans simulate`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from torch import Tensor

from ctrans.cli import options
from ctrans.cli.subjects import Subject, Text, read, say_model, subjects, summary, weights_of
from ctrans.report.files import png, write_atomic
from ctrans.report.progress import progress_bar
from ctrans.report.simulate_report import simulation_figure, simulation_table
from ctrans.stability.forward.simulation import simulate
from solvers import ConfigError, Status
from solvers.methods import get_method
from solvers.request import check_solver


@click.command("simulate")
@options.placement_option
@options.architecture_options
@options.text_options
@click.option(
    "--method",
    default="euler",
    show_default=True,
    metavar="NAME",
    help="euler (with one step: the discrete model), midpoint, heun, rk4, dopri5, tsit5, or torchdiffeq:NAME.",
)
@click.option("--steps", type=int, help="Steps per segment of a fixed-step method.  [default: 1]")
@click.option("--rtol", type=float, help="Relative tolerance of an adaptive method.  [default: 1e-6]")
@click.option("--atol", type=float, help="Absolute tolerance of an adaptive method.  [default: 1e-8]")
@click.option(
    "--reference/--no-reference",
    default=True,
    show_default=True,
    help="Also solve the ODE in float64, to compare with: hundreds of times the work of the discrete model.",
)
@options.device_options
@options.model_options
@options.out_option("simulate")
@options.json_option
def command(placements: tuple[str, ...], out: Path | None, json_path: str | None, reference: bool, **settings: Any) -> None:
    """Run real text through a GPT, seeded or your own, and see how its hidden states move through depth.

    Each placement of normalisation gets a table by depth: moments of the hidden state, what theory bounds them by, drift from the
    conservation law, and the distance of the discrete model to the ODE it is an Euler step of. The directory gets
    simulate.json and simulate.png.

    \b
    ctrans simulate --placement peri --dt 0.1
    ctrans simulate --placement all --dt 0.1 --init xavier
    ctrans simulate --placement pre --placement peri --method tsit5 --rtol 1e-6 --file book.txt
    ctrans simulate --model models/gpt2 --dtype float32
    ctrans simulate --architecture llama-7b --tokens 32 --batch 1 --no-reference
    """
    found, text, tokens, solver = _check(placements, settings)
    options.set_threads(settings, tokens)
    directory = options.out_directory(out, json_path, "simulate")
    passes = (1 if solver["method"] == "euler" and solver["steps"] == 1 else 2) + reference
    results = []
    with progress_bar("simulate", passes * 2 * settings["depth"] * len(found)) as advance:
        for subject in found:
            model = subject.model(options.get_dtype(settings["dtype"]), tokens.device)
            word = partial(lambda name, k: advance(name), subject.config.placement)
            results.append(simulate(model, tokens, **solver, reference=reference, progress=word))
    broken = [s for s in results if s.status is not Status.SUCCESS]
    title = "{depth} blocks, width {width}, dt = {dt:g}, ".format(**settings) + weights_of(settings)
    if directory is not None:
        write_atomic(directory / "simulate.png", png(simulation_figure(results, title)))
    result = {
        "command": "simulate",
        "options": options.printable({**settings, "reference": reference}),
        "environment": options.environment(options.get_device(settings["device"])),
        "model": summary(found, text, tokens),
        "placements": {s.placement: s for s in results},
    }
    options.write_json(result, json_path, directory, "simulate")
    if json_path != "-":
        console = Console()
        say_model(console, found, text, tokens)
        for s in results:
            console.print(simulation_table(s), "")
        console.print(f"{title}. Written: {directory}/simulate.json, {directory}/simulate.png", soft_wrap=True)
    for s in broken:
        click.echo(f"ctrans: {s.placement}: {s.message}", err=True)
    if broken:
        raise SystemExit(1)


def _check(placements: Sequence[str], settings: dict[str, Any]) -> tuple[list[Subject], Text, Tensor, dict[str, Any]]:
    """The models, the text, its tokens and the solver's request: whatever can be wrong is said before anything is computed."""
    device = options.get_device(settings["device"])
    solver = {key: settings[key] for key in ("method", "steps", "rtol", "atol")}
    if get_method(solver["method"]).adaptive and solver["steps"] is not None:
        raise ConfigError(
            f"method {solver['method']!r} chooses its own steps and takes no --steps: give --rtol and --atol, or use rk4"
        )
    solver["steps"] = 1 if solver["steps"] is None else solver["steps"]
    check_solver(**solver, dtype=options.get_dtype(settings["dtype"]))
    found = subjects(settings, placements, [settings["norm"]])
    text = read(settings, found)
    return found, text, text.sequences(settings["batch"], settings["context"]).to(device), solver

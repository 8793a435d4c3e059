"""`ctrans control`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
from rich.console import Console

from ctrans.cli import options
from ctrans.cli.subjects import read, say_model, subjects, summary
from ctrans.control.attained import Attained, attained
from ctrans.control.costate import costate
from ctrans.control.maximum_principle import MaximumPrinciple, maximum_principle
from ctrans.report.control_figure import control_figure
from ctrans.report.control_report import attained_table, control_table
from ctrans.report.files import png, write_atomic
from ctrans.report.progress import progress_bar
from solvers import ConfigError
from solvers.request import check_solver

SMALLER: dict[str, Any] = {"depth": 6, "context": 64, "batch": 2}


@click.command("control", context_settings={"default_map": SMALLER})
@options.placement_option
@options.architecture_options
@options.text_options
@click.option("--rtol", type=float, help="Relative tolerance of state and costate.  [default: 1e-6]")
@click.option("--atol", type=float, help="Absolute tolerance of state and costate.  [default: 1e-8]")
@options.device_options
@options.model_options
@options.out_option("control")
@options.json_option
def command(placements: tuple[str, ...], out: Path | None, json_path: str | None, **settings: Any) -> None:
    """See by depth what a GPT, seeded or your own, leaves of the maximum principle on a real text.

    The costate P = dL/dX solves the adjoint ODE backward from the loss of the next token. By segment: its norm, the drift of
    <P, v>, which the ODE conserves, and the gap H(P) + <P, v> >= 0 to velocities that were free at each token, with the
    alignment of the layer's velocity v with the best of them. Where no output norm bounds the velocities H is infinite, and the
    alignment is cos(-P, v). Weights are shared: a second table has what they leave, and the identity that makes alignment 0,
    not 1, what training attains. The directory gets control.json and control.png.

    \b
    ctrans control
    ctrans control --placement pre --placement peri --file book.txt
    ctrans control --placement all --dt 0.1 --rtol 1e-8
    ctrans control --model out/ckpt.pt --ids data/val.bin
    """
    dtype, device = options.get_dtype(settings["dtype"]), options.get_device(settings["device"])
    solver = {"rtol": settings["rtol"], "atol": settings["atol"]}
    check_solver("tsit5", 1, **solver, dtype=dtype)
    found = subjects(settings, placements, [settings["norm"]])
    text = read(settings, found)
    tokens, targets = (part.to(device) for part in text.pairs(settings["batch"], settings["context"]))
    directory = options.out_directory(out, json_path, "control")
    readings: dict[str, MaximumPrinciple] = {}
    trained: dict[str, Attained | str] = {}
    with progress_bar("control", len(found)) as advance:
        for subject in found:
            model, name = subject.model(dtype, device), subject.config.placement
            readings[name] = maximum_principle(model.depth, costate(model, tokens, targets, form="continuous", **solver))
            try:
                trained[name] = attained(model, tokens, targets)
            except ConfigError as error:
                trained[name] = str(error)
            advance(name)
    if directory is not None:
        write_atomic(directory / "control.png", png(control_figure(readings)))
    result = {
        "command": "control",
        "options": options.printable(settings),
        "environment": options.environment(device),
        "model": summary(found, text, tokens),
        "placements": readings,
        "attained": trained,
    }
    options.write_json(result, json_path, directory, "control")
    if json_path != "-":
        console = Console()
        say_model(console, found, text, tokens)
        for name, reading in readings.items():
            console.print(control_table(name, reading), "")
            found_by_training = trained[name]
            if not isinstance(found_by_training, str):
                console.print(attained_table(name, found_by_training), "")
        console.print(f"Written: {directory}/control.json, {directory}/control.png", soft_wrap=True)

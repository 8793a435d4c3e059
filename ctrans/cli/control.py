"""`ctrans control`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
from rich.console import Console

from ctrans.cli import options
from ctrans.control.costate import costate
from ctrans.control.maximum_principle import MaximumPrinciple, maximum_principle
from ctrans.report.control_figure import control_figure
from ctrans.report.control_report import control_table
from ctrans.report.files import png, write_atomic
from ctrans.report.progress import progress_bar
from solvers.request import check_solver

SMALLER: dict[str, Any] = {"depth": 6, "context": 64, "batch": 2}


@click.command("control", context_settings={"default_map": SMALLER})
@options.placement_option
@options.architecture_options
@options.text_options
@click.option("--rtol", type=float, help="Relative tolerance of state and costate.  [default: 1e-6]")
@click.option("--atol", type=float, help="Absolute tolerance of state and costate.  [default: 1e-8]")
@options.device_options
@options.checkpoint_option
@options.out_option("control")
@options.json_option
def command(placements: tuple[str, ...], out: Path | None, json_path: str | None, **settings: Any) -> None:
    """See by depth how far a seeded GPT, reading real text, is from what the optimal control would do.

    The costate P = dL/dX solves the adjoint ODE backward from the loss of the next byte. By segment: its norm, the drift of
    <P, v>, which the ODE conserves, and Pontryagin's gap H(P) + <P, v> >= 0 with the alignment of the layer's velocity v with
    the optimal one. Where no output norm bounds the velocities H is infinite, and the alignment is cos(-P, v). The directory
    gets control.json and control.png.

    \b
    ctrans control
    ctrans control --placement pre --placement peri --file book.txt
    ctrans control --placement all --dt 0.1 --rtol 1e-8
    """
    configs = options.architectures(settings, placements, [settings["norm"]])
    dtype, device = options.get_dtype(settings["dtype"]), options.get_device(settings["device"])
    solver = {"rtol": settings["rtol"], "atol": settings["atol"]}
    check_solver("tsit5", 1, **solver, dtype=dtype)
    tokens = options.read_tokens(settings, settings["context"] + 1).to(device)
    directory = options.out_directory(out, json_path, "control")
    readings: dict[str, MaximumPrinciple] = {}
    with progress_bar("control", len(configs)) as advance:
        for config in configs:
            model = options.make_model(config, settings, dtype, device)
            found = costate(model, tokens[:, :-1], tokens[:, 1:], form="continuous", **solver)
            readings[config.placement] = maximum_principle(model.depth, found)
            advance(config.placement)
    if directory is not None:
        write_atomic(directory / "control.png", png(control_figure(readings)))
    result = {
        "command": "control",
        "options": options.printable(settings),
        "environment": options.environment(device),
        "placements": readings,
    }
    options.write_json(result, json_path, directory, "control")
    if json_path != "-":
        console = Console()
        for name, reading in readings.items():
            console.print(control_table(name, reading), "")
        console.print(f"Written: {directory}/control.json, {directory}/control.png", soft_wrap=True)

"""`ctrans simulate`."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import ClassVar

import click
import torch

from ctrans.cli import options
from ctrans.cli.ending import CommandEnding, directory_of, end
from ctrans.cli.reading import LookedAt, read
from ctrans.cli.request import ModelRequest, get_device, get_dtype, takes
from ctrans.cli.subjects import find, settle_threads
from ctrans.report.files import png
from ctrans.report.progress import progress_bar
from ctrans.report.simulate_report import simulation_figure, simulation_table
from ctrans.scheme import Scheme
from ctrans.stability.forward.simulation import Simulation, simulate
from solvers import NORMS, ConfigError, Status
from solvers.methods import get_method


@dataclasses.dataclass(frozen=True, kw_only=True)
class SimulateRequest(ModelRequest):
    """What `simulate` is asked; `steps` is None where the user gave none."""

    method: str
    steps: int | None
    rtol: float | None
    atol: float | None
    error_norm: str | None
    reference: bool

    unshown: ClassVar[frozenset[str]] = ModelRequest.unshown | {"reference"}


@click.command("simulate")
@options.one_model
@options.placements_option("peri")
@options.architecture_options
@options.text_options
@click.option(
    "--method",
    default="euler",
    show_default=True,
    metavar="NAME",
    help=options.METHOD_HELP,
)
@click.option("--steps", type=int, help="Steps per segment of a fixed-step method.  [default: 1]")
@click.option("--rtol", type=float, help="Relative tolerance of an adaptive method.  [default: 1e-6]")
@click.option("--atol", type=float, help="Absolute tolerance of an adaptive method.  [default: 1e-8]")
@click.option(
    "--error-norm",
    type=click.Choice(sorted(NORMS)),
    help="Of a step's error, by an adaptive method: all entries' root mean square, the largest token's, or the largest entry.  "
    "[default: rms]",
)
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
@takes(SimulateRequest)
def command(request: SimulateRequest) -> None:
    """Run real text through a GPT, seeded or your own, and see how its hidden states move through depth.

    Each placement of normalisation gets a table by depth: moments of the hidden state, what theory bounds them by, drift from the
    conservation law, and the distance of the discrete model to the ODE it is an Euler step of. The directory gets
    simulate.json and simulate.png.

    \b
    ctrans simulate --placement peri --dt 0.1
    ctrans simulate --placement all --dt 0.1 --init xavier
    ctrans simulate --placement pre --placement peri --method tsit5 --rtol 1e-6 --file book.txt
    ctrans simulate models/gpt2 --dtype float32
    ctrans simulate --architecture llama-7b --tokens 32 --batch 1 --no-reference
    """
    device, dtype = get_device(request.device), get_dtype(request.dtype)
    solver = _scheme(request, dtype)
    found = find(request)
    text = read(request, found)
    tokens = text.sequences(request.batch, found[0].context).to(device)
    settle_threads(found, tokens, get_dtype(request.dtype))
    directory = directory_of(request)
    passes = (1 if solver.discrete else 2) + request.reference
    results: list[Simulation] = []
    with progress_bar("simulate", passes * sum(subject.segments for subject in found)) as advance:
        for subject in found:
            word = partial(lambda name, k: advance(name), subject.name)
            model = subject.model(dtype, device)
            results.append(
                simulate(
                    model,
                    tokens,
                    method=request.method,
                    steps=solver.steps,
                    rtol=request.rtol,
                    atol=request.atol,
                    norm=request.error_norm,
                    reference=request.reference,
                    progress=word,
                )
            )
    title = found[0].title
    ending = CommandEnding(
        options={"reference": request.reference},
        looked_at=LookedAt(request, found, text, tokens),
        device=device,
        findings={"placements": {s.placement: s for s in results}},
        files={"simulate.png": lambda: png(simulation_figure(results, title))},
        page=[part for s in results for part in (simulation_table(s), "")],
        said=f"{title}. ",
        failures=[f"{s.placement}: {s.message}" for s in results if s.status is not Status.SUCCESS],
    )
    end(request, directory, ending)


def _scheme(request: SimulateRequest, dtype: torch.dtype) -> Scheme:
    """How the models are integrated: whatever can be wrong is said before anything is computed."""
    if get_method(request.method).adaptive and request.steps is not None:
        raise ConfigError(
            f"method {request.method!r} chooses its own steps and takes no --steps: give --rtol and --atol, or use rk4"
        )
    scheme = Scheme(
        request.method, 1 if request.steps is None else request.steps, request.rtol, request.atol, norm=request.error_norm
    )
    scheme.check_numbers(dtype)
    return scheme

"""`ctrans simulate`."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any, ClassVar

import click
import torch
from torch import Tensor

from ctrans.cli import options
from ctrans.cli.ending import CommandEnding, directory_of, end
from ctrans.cli.reading import Batch, LookedAt, Pictures, Text, read
from ctrans.cli.request import ModelRequest, get_device, get_dtype, takes
from ctrans.cli.subjects import find, settle_threads
from ctrans.depth import check_count
from ctrans.interop.losses import AnyModel, ModelWithLoss
from ctrans.model.gpt import GPT
from ctrans.report.progress import progress_bar
from ctrans.scheme import Scheme
from ctrans.stability.backward.token_exponents import TokenExponents, token_exponents
from ctrans.stability.forward.contributions import ContributionsByDepth, contributions_by_depth
from ctrans.stability.forward.simulation import Simulation, simulate
from ctrans.stability.forward.spectra import Spectra, SpectrumFigures, spectrum_figures
from ctrans.walk import walk
from solvers import ERROR_NORMS, ConfigError, Status
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
    lyapunov: int
    spectra: bool
    contributions: bool

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
    type=click.Choice(sorted(ERROR_NORMS)),
    help="Of a step's error, by an adaptive method: all entries' root mean square, the largest token's, or the largest entry.  "
    "[default: rms]",
)
@click.option(
    "--reference/--no-reference",
    default=True,
    show_default=True,
    help="Also solve the ODE in float64, to compare with: hundreds of times the work of the discrete model.",
)
@click.option(
    "--lyapunov",
    type=int,
    default=0,
    show_default=True,
    help="Show so many tokens as coloured text, by how a small change of each grows on its way to the last one's state.",
)
@click.option("--spectra", is_flag=True, help="Eigenvalues of QK, OV and the FFN's W_2 W_1 by depth: spectra.png.")
@click.option(
    "--contributions",
    is_flag=True,
    help="What each sublayer adds to the last state and to the target's logit: contributions.png.",
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
    ctrans simulate --checkpoint out/train --lyapunov 64 --spectra --contributions
    """
    device, dtype = get_device(request.device), get_dtype(request.dtype)
    solver = _scheme(request, dtype)
    found = find(request)
    text = read(request, found)
    tokens = text.sequences(request.batch, found[0].context).to(device)
    settle_threads(found, tokens, get_dtype(request.dtype))
    analyses = _OptionalAnalyses(request, text, tokens)
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
            analyses.add(results[-1].placement, model)
    ending = CommandEnding(
        options={"reference": request.reference},
        looked_at=LookedAt(request, found, text, tokens),
        device=device,
        result={"placements": {s.placement: {**vars(s), **analyses.of(s.placement)} for s in results}},
        failures=[f"{s.placement}: {s.message}" for s in results if s.status is not Status.SUCCESS],
    )
    end(request, directory, ending)


class _OptionalAnalyses:
    """Analyses that the user asked for besides the trajectory, by the name of each model."""

    def __init__(self, request: SimulateRequest, text: Text | Pictures | Batch, tokens: Tensor):
        if request.lyapunov:
            check_count("lyapunov", request.lyapunov)
        if request.lyapunov and not isinstance(text, Text):
            raise ConfigError("--lyapunov shows tokens of a text, and this model reads none: leave it out")
        self.request, self.text, self.tokens = request, text, tokens
        self.exponents: dict[str, TokenExponents] = {}
        self.words: list[str] = []
        self.spectra: dict[str, list[SpectrumFigures]] = {}
        self.contributions: dict[str, ContributionsByDepth] = {}

    def add(self, name: str, model: AnyModel | ModelWithLoss) -> None:
        """Analyses the model."""
        if self.request.lyapunov and isinstance(self.text, Text):
            sequence = self.tokens[0, : self.request.lyapunov]
            self.exponents[name] = token_exponents(model, sequence)
            self.words = self.words or self.text.words(sequence.tolist())
        if self.request.spectra:
            (found,) = walk(model, self.tokens[:1], None, [Spectra()])
            self.spectra[name] = [spectrum_figures(each) for each in found]
        if self.request.contributions:
            targets = self.tokens[:, 1:] if isinstance(self.text, Text) and isinstance(model, GPT) else None
            read = self.tokens if targets is None else self.tokens[:, :-1]
            self.contributions[name] = contributions_by_depth(model, read, targets)

    def of(self, name: str) -> dict[str, Any]:
        """The JSON's keys of that model."""
        exponents = self.exponents.get(name)
        return {
            "lyapunov": None if exponents is None else {**vars(exponents), "words": self.words},
            "spectra": self.spectra.get(name),
            "contributions": self.contributions.get(name),
        }


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

"""`ctrans simulate`."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any, ClassVar

import click
import torch
from torch import Tensor

from ctrans.cli.ending import CommandEnding, directory_of, end
from ctrans.cli.inputs import InputRows, InputSummary, Text, read
from ctrans.cli.model_sources import find, settle_threads
from ctrans.cli.request import ModelRequest, command_of, get_device, get_dtype
from ctrans.interop.losses import AnyModel, ModelWithLoss
from ctrans.model.gpt import GPT
from ctrans.option import Range, option
from ctrans.report.progress import progress_bar
from ctrans.scheme import METHOD_WORDS, Scheme
from ctrans.stability.backward.token_exponents import TokenExponents, token_exponents
from ctrans.stability.forward.contributions import ContributionsByDepth, contributions_by_depth
from ctrans.stability.forward.simulation import Simulation, simulate
from ctrans.stability.forward.spectra import Spectra, SpectrumFigures, spectrum_figures
from ctrans.walk import walk
from solvers import ERROR_NORMS, ConfigError, Status
from solvers.methods import get_method


@dataclasses.dataclass(frozen=True, kw_only=True)
class SimulateRequest(ModelRequest):
    """The request of `simulate`."""

    method: str = option("euler", f"Method of integration: {METHOD_WORDS}.", metavar="NAME")
    steps: int | None = option(None, "Steps per segment of a fixed-step method.", default_words="1")
    rtol: float | None = option(None, "Relative tolerance of an adaptive method.", default_words="1e-6")
    atol: float | None = option(None, "Absolute tolerance of an adaptive method.", default_words="1e-8")
    error_norm: str | None = option(
        None,
        "How an adaptive method measures the error of a step: root mean square of all entries, the largest token's, or the largest "
        "entry.",
        default_words="rms",
        type=click.Choice(sorted(ERROR_NORMS)),
    )
    reference: bool = option(
        True,
        "Also solve the ODE in float64, and show the distance to it. This takes hundreds of times the work of the discrete model.",
    )
    lyapunov: int = option(
        0,
        "Show this many tokens as coloured text: how much a small change of each grows on its way to the last token's state.",
        limits=Range(0, 10**9),
    )
    spectra: bool = option(False, "Show eigenvalues of QK, OV and the FFN's W_2 W_1 by depth: spectra.png.")
    contributions: bool = option(
        False, "Show what each sublayer adds to the last state and to the target's logit: contributions.png."
    )

    unshown: ClassVar[frozenset[str]] = ModelRequest.unshown | {"reference"}


@command_of(SimulateRequest, "simulate")
def command(request: SimulateRequest) -> None:
    """Run text through a GPT, seeded or your own, and show how its hidden states move through
    depth.

    Each placement of normalisation gets a table by depth: moments of the hidden state and their
    bounds in theory, the drift from the conservation law, and the distance between the discrete
    model and the ODE of which it is an Euler step. The directory gets simulate.json and
    simulate.png.

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
    analyses = OptionalAnalyses(request, text, tokens)
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
        looked_at=InputSummary(request, found, text, tokens),
        device=device,
        result={"placements": {s.placement: {**vars(s), **analyses.of(s.placement)} for s in results}},
        failures=[f"{s.placement}: {s.message}" for s in results if s.status is not Status.SUCCESS],
    )
    end(request, directory, ending)


class OptionalAnalyses:
    """Analyses that the user asked for besides the trajectory, by the name of each model."""

    def __init__(self, request: SimulateRequest, text: Text | InputRows, tokens: Tensor):
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

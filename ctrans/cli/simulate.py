"""`ctrans simulate`."""

from __future__ import annotations

import dataclasses
from typing import Any

import click
import torch

from ctrans import interop
from ctrans.base.option import Range, option
from ctrans.cli.ending import directory_of, end
from ctrans.cli.inputs import Batch, Text, read_batch
from ctrans.cli.model_sources import find_models
from ctrans.cli.request import ModelRequest, command_of, get_dtype
from ctrans.dynamics.scheme import METHOD_WORDS, Scheme
from ctrans.measure.backward.token_exponents import token_exponents
from ctrans.measure.forward.contributions import contributions_by_depth
from ctrans.measure.forward.simulation import Simulation, simulate
from ctrans.measure.forward.spectra import Spectra
from ctrans.measure.walk import walk
from ctrans.model.gpt import GPT
from ctrans.report.progress import progress_bar
from solvers import ERROR_NORMS, ConfigError, Status
from solvers.methods import get_method


@dataclasses.dataclass(frozen=True, kw_only=True)
class SimulateRequest(ModelRequest):
    """The request of `simulate`."""

    method: str = option("euler", f"Method of integration: {METHOD_WORDS}.", metavar="NAME")
    steps: int | None = option(None, "Steps per segment of a fixed-step method.", default_words="1")
    rtol: float | None = option(
        None, "Relative tolerance of an adaptive method.", default_words="1e-6"
    )
    atol: float | None = option(
        None, "Absolute tolerance of an adaptive method.", default_words="1e-8"
    )
    error_norm: str | None = option(
        None,
        "Norm of an adaptive method's step error: root mean square over all entries, the largest"
        " over tokens, or the largest entry.",
        default_words="rms",
        type=click.Choice(sorted(ERROR_NORMS)),
    )
    reference: bool = option(
        True,
        "Also solve the ODE in float64 and show the distance to it. This takes hundreds of times"
        " the work of the discrete model.",
    )
    lyapunov: int = option(
        0,
        "Show this many tokens as coloured text. The colour shows how much a small change of the"
        " token grows on its way to the last token's state.",
        limits=Range(0, 10**9),
    )
    spectra: bool = option(
        False, "Show eigenvalues of QK, OV and the FFN's W_2 W_1 by depth: spectra.png."
    )
    contributions: bool = option(
        False,
        "Show what each sublayer adds to the last state and to the target's logit:"
        " contributions.png.",
    )


@command_of(SimulateRequest, "simulate")
def command(request: SimulateRequest) -> None:
    """Run a text through a GPT, seeded or your own, and show how hidden states change with depth.

    For each placement, a table by depth shows moments of the hidden state with their theoretical
    bounds, the drift from the conservation law, and the distance between the discrete model and its
    ODE. The discrete model is an Euler step of the ODE. The directory gets simulate.json and
    simulate.png.

    \b
    ctrans simulate --placement peri --dt 0.1
    ctrans simulate --placement all --dt 0.1 --init xavier
    ctrans simulate --placement pre --placement peri --method tsit5 --rtol 1e-6 --file book.txt
    ctrans simulate models/gpt2 --dtype float32
    ctrans simulate --architecture llama-7b --tokens 32 --batch 1 --no-reference
    ctrans simulate --checkpoint out/train --lyapunov 64 --spectra --contributions
    """
    solver = _scheme(request, get_dtype(request.dtype))
    found = find_models(request)
    batch = read_batch(request, found, targets=False)
    if request.lyapunov and not isinstance(batch.text, Text):
        raise ConfigError(
            "--lyapunov shows tokens of a text, and this model reads none: leave it out"
        )
    directory = directory_of(request)
    passes = (1 if solver.discrete else 2) + request.reference
    results: list[Simulation] = []
    analyses: list[dict[str, Any]] = []
    with progress_bar("simulate", passes * sum(source.segments for source in found)) as advance:
        for source in found:
            model = source.model(request)
            results.append(
                simulate(
                    model,
                    batch.tokens,
                    method=request.method,
                    steps=solver.steps,
                    rtol=request.rtol,
                    atol=request.atol,
                    norm=request.error_norm,
                    reference=request.reference,
                    progress=advance.of(source.name),
                )
            )
            analyses.append(_analyses(request, batch, model))
    end(
        request,
        directory,
        inputs=batch,
        result={
            "placements": {
                s.placement: {**vars(s), **more} for s, more in zip(results, analyses, strict=True)
            }
        },
        failures=[f"{s.placement}: {s.message}" for s in results if s.status is not Status.SUCCESS],
    )


def _analyses(
    request: SimulateRequest, batch: Batch, model: interop.AnyModel | interop.ModelWithLoss
) -> dict[str, Any]:
    """The results of the optional analyses; None for those that the user did not ask for."""
    text = batch.text
    tokens = batch.tokens
    found = dict.fromkeys(("lyapunov", "spectra", "contributions"))
    if request.lyapunov and isinstance(text, Text):
        sequence = tokens[0, : request.lyapunov]
        found["lyapunov"] = {
            **vars(token_exponents(model, sequence)),
            "words": text.words(sequence.tolist()),
        }
    if request.spectra:
        (found["spectra"],) = walk(model, tokens[:1], None, [Spectra()])
    if request.contributions:
        if isinstance(text, Text) and isinstance(model, GPT):
            targets = tokens[:, 1:]
        else:
            targets = None
        found["contributions"] = contributions_by_depth(
            model, tokens if targets is None else tokens[:, :-1], targets
        )
    return found


def _scheme(request: SimulateRequest, dtype: torch.dtype) -> Scheme:
    """The request's scheme. Raises ConfigError for numbers that the method or dtype does not
    allow.
    """
    if get_method(request.method).adaptive and request.steps is not None:
        raise ConfigError(
            f"method {request.method!r} chooses its own steps and takes no --steps: give --rtol and"
            " --atol, or use rk4"
        )
    scheme = Scheme(
        request.method,
        1 if request.steps is None else request.steps,
        request.rtol,
        request.atol,
        norm=request.error_norm,
    )
    scheme.check_numbers(dtype)
    return scheme

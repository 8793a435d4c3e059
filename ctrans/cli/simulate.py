"""`ctrans simulate`."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar

import click
import torch

from ctrans import interop
from ctrans.base.option import Range, option
from ctrans.cli.click_options import OptionValues
from ctrans.cli.ending import directory_of, end
from ctrans.cli.inputs import Batch, Text, read_batch
from ctrans.cli.model_request import ModelRequest, get_dtype
from ctrans.cli.model_sources import ModelSource, find_models
from ctrans.cli.orders import LIMITS, OrderJob, measure_orders, plan_orders
from ctrans.cli.request import command_of
from ctrans.control.action import ActionByDepth
from ctrans.dynamics.scheme import METHOD_WORDS, Scheme
from ctrans.examine.converged import measured as measured_orders
from ctrans.examine.simulated import Simulated, measured
from ctrans.measure.backward.token_exponents import token_exponents
from ctrans.measure.forward.contributions import contributions_by_depth
from ctrans.measure.forward.simulation import simulate
from ctrans.measure.forward.spectra import Spectra
from ctrans.measure.measured import together
from ctrans.measure.walk import walk
from ctrans.model.gpt import GPT
from ctrans.report.progress import progress_bar
from solvers import ERROR_NORMS, METHODS, ConfigError, Status, unknown
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
        default=True,
        help="Also solve the ODE in float64 and show the distance to it. This takes hundreds of"
        " times the work of the discrete model.",
    )
    lyapunov: int = option(
        0,
        "Show this many tokens as coloured text. The colour shows how much a small change of the"
        " token grows on its way to the last token's state.",
        limits=Range(0, 10**9),
    )
    spectra: bool = option(
        default=False,
        help="Show eigenvalues of QK, OV and the FFN's W_2 W_1 by depth: spectra.png.",
    )
    orders: tuple[str, ...] = option(
        (),
        "Repeatable: also measure orders of convergence, with these placements, norm and seed: of"
        " methods by name (rk4), of all own methods (substeps), of more blocks (depth), or all. For"
        " all placements this takes two minutes.",
        metavar="NAME",
        default_words="none",
    )
    contributions: bool = option(
        default=False,
        help="Show what each sublayer adds to the last state and to the target's logit:"
        " contributions.png.",
    )

    defaults: ClassVar[OptionValues] = {**ModelRequest.defaults, "batch": 1}
    fewest_rows: ClassVar[int] = 4
    common: ClassVar[frozenset[str]] = ModelRequest.common | {
        "method",
        "reference",
        "lyapunov",
        "spectra",
        "orders",
        "contributions",
    }


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
    _check_orders(request)
    sources = find_models(request)
    orders = _plan_orders(request, sources)
    batch = read_batch(request, sources, targets=False)
    if request.lyapunov and not isinstance(batch.text, Text):
        raise ConfigError(
            "--lyapunov shows tokens of a text, and this model reads none: leave it out"
        )
    directory = directory_of(request)
    passes = 1 if solver.discrete else 2
    if request.reference:
        passes += 1
    models: dict[str, Simulated] = {}
    with progress_bar("simulate", passes * sum(source.segments for source in sources)) as advance:
        for source in sources:
            model = source.model(request)
            action = ActionByDepth()
            simulation = simulate(
                model,
                batch.tokens,
                method=request.method,
                steps=solver.steps,
                rtol=request.rtol,
                atol=request.atol,
                norm=request.error_norm,
                reference=request.reference,
                progress=advance.of(source.name),
                instruments=[action],
            )
            simulated = Simulated(simulation, action=action.figures())
            models[simulation.placement] = _with_analyses(request, batch, model, simulated)
    failed = {
        name: model.simulation
        for name, model in models.items()
        if model.simulation.status is not Status.SUCCESS
    }
    table = measured(models)
    if orders:
        table = together(table, measured_orders(measure_orders(orders)))
    end(
        request,
        directory,
        inputs=batch,
        result={"placements": {name: _object(model) for name, model in models.items()}},
        measured=table,
        failures=[f"{name}: {simulation.message}" for name, simulation in failed.items()],
    )


def _check_orders(request: SimulateRequest) -> None:
    """Raises ConfigError for an order that there is not."""
    for name in request.orders:
        is_method = name in METHODS or ":" in name
        if name not in (*LIMITS, "all") and not is_method:
            raise unknown("order", name, ["all", *LIMITS, *METHODS])


def _plan_orders(request: SimulateRequest, sources: Sequence[ModelSource]) -> list[OrderJob]:
    """The measurements of orders that the user asked for, with the models' placements and norms."""
    limits = [name for name in request.orders if name in (*LIMITS, "all")]
    methods = [name for name in request.orders if name not in limits]
    if methods and "all" not in limits:
        limits.append("substeps")
    placements: dict[str, dict[str, None]] = {}
    for source in sources:
        names = (source.config.placement,) if source.opened is None else source.placements
        placements.setdefault(source.config.norm, {}).update(dict.fromkeys(names))
    jobs: list[OrderJob] = []
    if limits:
        for norm, of_norm in placements.items():
            jobs += plan_orders(list(of_norm), norm, request.seed, limits=limits, methods=methods)
    return jobs


def _object(model: Simulated) -> dict[str, Any]:
    """A model in the JSON of version 1."""
    lyapunov = None
    if model.lyapunov is not None:
        lyapunov = {**vars(model.lyapunov), "words": model.words}
    return {
        **vars(model.simulation),
        "lyapunov": lyapunov,
        "spectra": model.spectra,
        "contributions": model.contributions,
        "action": model.action,
    }


def _with_analyses(
    request: SimulateRequest,
    batch: Batch,
    model: interop.AnyModel | interop.ModelWithLoss,
    simulated: Simulated,
) -> Simulated:
    """The simulation with the analyses that the user asked for."""
    text = batch.text
    tokens = batch.tokens
    if request.lyapunov and isinstance(text, Text):
        sequence = tokens[0, : request.lyapunov]
        simulated = dataclasses.replace(
            simulated,
            lyapunov=token_exponents(model, sequence),
            words=text.texts_of(sequence.tolist()),
        )
    if request.spectra:
        (spectra,) = walk(model, tokens[:1], None, [Spectra()])
        simulated = dataclasses.replace(simulated, spectra=spectra)
    if request.contributions:
        inputs = tokens
        targets = None
        if isinstance(text, Text) and isinstance(model, GPT):
            inputs = tokens[:, :-1]
            targets = tokens[:, 1:]
        contributions = contributions_by_depth(model, inputs, targets)
        simulated = dataclasses.replace(simulated, contributions=contributions)
    return simulated


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

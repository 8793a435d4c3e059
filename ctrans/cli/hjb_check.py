"""`ctrans hjb-check`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar

import torch

from ctrans.base.option import option
from ctrans.cli.click_options import OptionValues, settings_of
from ctrans.cli.ending import directory_of, end
from ctrans.cli.inputs import Batch, Text, read_batch
from ctrans.cli.model_request import ModelRequest, get_dtype
from ctrans.cli.model_sources import ModelSource, check_loss_name, find_models
from ctrans.cli.request import command_of
from ctrans.control.control_checks import findings_of
from ctrans.control.hjb.hopf_lax import velocity_hull
from ctrans.control.hjb.study import PDEStudy, pde_study
from ctrans.control.model_check import (
    ModelCheck,
    check_dtype,
    check_model,
    why_not_applicable,
)
from ctrans.control.regularization import Regularization
from ctrans.dynamics.norm import NORMS, RMSNorm
from ctrans.dynamics.placement import get_placement
from ctrans.examine.certified import measured, name_of
from ctrans.examine.principled import Principled, principled
from ctrans.examine.principled import measured as measured_principles
from ctrans.examine.valued import Valued, valued
from ctrans.examine.valued import measured as measured_values
from ctrans.measure.measured import Measured, together
from ctrans.model.config import GPTConfig
from ctrans.report import hjb_figure
from ctrans.report.files import png
from ctrans.report.progress import progress_bar
from ctrans.training.degeneracy import CASES, LAST_STEP, degeneracy
from solvers import ConfigError
from solvers.request import check_solver

ADVICE = (
    "an ascent ended early, or a verdict is wrong: compare another --seed, --batch or --context,"
    " and --dtype float64 if you chose another; if the same finding fails there, report it with the"
    " command and hjb-check.json"
)
"""The line after findings that do not hold."""
PDE_POINTS = 41
PDE_PICTURE = "hjb-pde.png"
PDE_GAINS = (1.0, 0.5)
"""Gains of the output norm of the example with two coordinates."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class HJBCheckRequest(ModelRequest):
    """The request of `hjb-check`: regularization, and whether to solve the HJB equation."""

    config: OptionValues = settings_of(GPTConfig, without=("placement", "norm"))
    norms: tuple[str, ...] = option(
        ("layernorm", "rmsnorm"),
        "Repeatable: all, or names.",
        group="Norms",
        choices=NORMS,
        flags="--norm",
    )
    weight_decay: float | None = option(
        None,
        "Show whether a penalty LAM/2 |W|^2 of every matrix in the training loss bounds H without"
        " an output norm. The answer is for this model on this text, and not for AdamW's decoupled"
        " decay. ctrans compares LAM with dt lam*, the penalty needed for the best queries, keys,"
        " values, outputs and FFN matrices.",
        metavar="LAM",
    )
    last_map_decay: float | None = option(
        None,
        "Regularization: running cost LAM/2 |W|^2 of each last linear map and its bias; all other"
        " weights are fixed. LAM is a penalty in a training loss divided by dt.",
        metavar="LAM",
    )
    gain_decay: float | None = option(
        None,
        "Regularization: running cost LAM/2 (|gamma|^2 + |beta|^2) of the trained gains and offsets"
        " of each output norm. LAM is a penalty in a training loss divided by dt.",
        metavar="LAM",
    )
    kinetic: float | None = option(
        None, "Regularization: running cost LAM/2 |f|^2 of each velocity.", metavar="LAM"
    )
    principle: bool = option(
        default=False,
        help="Also show by depth how far each layer is from the maximum principle, the loss of the"
        " optimal trajectory, and which tokens' losses the weights can move.",
    )
    rtol: float | None = option(
        None, "With --principle: relative tolerance of state and costate.", default_words="1e-6"
    )
    atol: float | None = option(
        None, "With --principle: absolute tolerance of state and costate.", default_words="1e-8"
    )
    thorough: bool = option(
        default=False,
        help="Search weights at each layer, not only at the one with the largest costate, and with"
        " trained gains. This takes four times as long.",
    )
    pde: bool = option(
        default=False,
        help="Also solve the HJB equation in the plane and draw it in hjb-pde.png. This takes half"
        " a minute.",
    )

    train: bool = option(
        default=False,
        help="Also train six small models in a minute, and show how velocities, H and the loss"
        " change with the steps. They are one block of width 16 on a task that cross-entropy can"
        " separate: pre and peri, with and without a penalty, and a squared error. hjb-train.png"
        " has the curves. Of the options, the trainings use --seed.",
    )

    defaults: ClassVar[OptionValues] = {
        "placements": ("all",),
        "depth": 3,
        "context": 64,
        "batch": 1,
    }
    common: ClassVar[frozenset[str]] = (ModelRequest.common - {"norm"}) | {
        "norms",
        "weight_decay",
        "principle",
        "thorough",
        "pde",
        "train",
    }
    unshown = ModelRequest.unshown | {"pde", "principle", "train"}


@command_of(HJBCheckRequest, "hjb-check")
def command(request: HJBCheckRequest) -> None:
    """Check whether training a model is a well-posed control problem, or degenerate.

    A GPT, seeded or your own, reads a text. For each placement and layer ctrans computes the
    Hamiltonian H(P) = sup of -<P, f>: the fastest fall of the loss by velocities f that the
    placement allows, at the costate P of this text. H is finite, for bounded gains: well-posed. H
    is infinite: degenerate, only the size of the weights limits the best velocity, as in GPT-2 and
    Llama. Ascents check the closed form without using it. The exit code is 1 if they contradict a
    verdict. The directory gets hjb-check.json and hjb-check.png.

    \b
    ctrans hjb-check
    ctrans hjb-check --placement pre --weight-decay 0.1
    ctrans hjb-check --placement peri --gain-decay 0.1
    ctrans hjb-check --kinetic 0.1 --file book.txt
    ctrans hjb-check models/gemma --context 32
    ctrans hjb-check --placement pre --placement peri --train
    """
    regularization = Regularization(
        **{field.name: getattr(request, field.name) for field in dataclasses.fields(Regularization)}
    )
    if request.pde and request.quiet and request.out is None:
        raise ConfigError(
            "--pde draws a picture, but --json - writes no files: add --out DIRECTORY"
        )
    if not request.principle and {"rtol", "atol"} & request.typed:
        raise ConfigError("--rtol and --atol are for --principle: add it, or leave them out")
    check_dtype(get_dtype(request.dtype))
    check_solver("tsit5", 1, request.rtol, request.atol, get_dtype(request.dtype))
    check_loss_name(request, "hjb-check")
    sources = find_models(request)
    refused = _refused(sources, regularization)
    jobs = [source for source in sources if source.config.placement not in refused]
    if not jobs:
        raise ConfigError(next(iter(refused.values())))
    batch = read_batch(request, sources)
    directory = directory_of(request, files=[PDE_PICTURE])
    checks: dict[str, list[ModelCheck]] = {source.config.norm: [] for source in sources}
    principles: dict[str, Principled] = {}
    values: dict[str, Valued] = {}
    passes = 3 if request.principle else 1
    with progress_bar("hjb-check", passes * sum(source.segments for source in jobs)) as advance:
        for source in jobs:
            norm = source.config.norm
            placement = source.config.placement
            progress = advance.of(f"{norm}, {placement}")
            model = source.model(request)
            check = check_model(
                model,
                batch.tokens,
                batch.targets,
                regularization,
                thorough=request.thorough,
                progress=progress,
            )
            checks[norm].append(dataclasses.replace(check, placement=placement))
            name = name_of(norm, placement, len(checks))
            values[name] = valued(
                model,
                batch.tokens,
                batch.targets,
                placement=placement,
                kinetic=request.kinetic,
                words=_words(request, batch),
            )
            if request.principle:
                principles[name] = principled(
                    model,
                    batch.tokens,
                    batch.targets,
                    rtol=request.rtol,
                    atol=request.atol,
                    kinetic=request.kinetic,
                    progress=progress,
                )
        study_summary, files = _in_the_plane(request)
    if request.train:
        trained = _trained(request.seed)
    named = [(f"{norm}, {check.placement}", check) for norm, row in checks.items() for check in row]
    by_placement = {norm: {check.placement: check for check in row} for norm, row in checks.items()}
    table = measured(by_placement, refused, study_summary)
    table = together(table, measured_values(values))
    if principles:
        table = together(table, measured_principles(principles))
    if request.train:
        table = together(table, trained)
    failures = [f"{name}, {failure}" for name, check in named for failure in check.failures]
    if failures:
        failures.append(ADVICE)
    end(
        request,
        directory,
        inputs=batch,
        result={
            "findings": [finding for name, check in named for finding in findings_of(name, check)],
            "checks": {
                norm: {check.placement: _summary(check) for check in row}
                for norm, row in checks.items()
            },
            "missing": refused,
            "pde": study_summary,
        },
        measured=table,
        files=files,
        failures=failures,
    )


def _in_the_plane(
    request: HJBCheckRequest,
) -> tuple[dict[str, object] | None, dict[str, Callable[[], bytes]]]:
    """The figures and the picture of --pde; None and no file without it."""
    if not request.pde:
        return None, {}
    study = pde_study(velocity_hull(_norm_of_the_plane()), points=PDE_POINTS)
    return study.summary(), {PDE_PICTURE: partial(_picture, study)}


def _words(request: HJBCheckRequest, batch: Batch) -> list[str]:
    """The texts of the tokens of the first sequence, for --principle on a text."""
    if not request.principle or not isinstance(batch.text, Text):
        return []
    return batch.text.texts_of(batch.tokens[0].tolist())


def _norm_of_the_plane() -> RMSNorm:
    """A norm of width 2 with unequal gains, whose image is an ellipse."""
    norm = RMSNorm(2).double().requires_grad_(requires_grad=False)
    norm.weight.copy_(torch.tensor(PDE_GAINS))
    return norm


def _trained(seed: int) -> Measured:
    """The table of the trainings of --train."""
    with progress_bar("trainings", len(CASES) * LAST_STEP) as advance:
        return degeneracy(seed=seed, progress=advance)


def _picture(study: PDEStudy) -> bytes:
    return png(hjb_figure.draw(study))


def _refused(sources: Sequence[ModelSource], regularization: Regularization) -> dict[str, str]:
    """Why the regularization does not apply, by the placement of each model that has such a
    sublayer.
    """
    refused: dict[str, str] = {}
    for source in sources:
        for placement in source.placements:
            reason = why_not_applicable(get_placement(placement), regularization)
            if reason:
                refused[source.config.placement] = reason
                break
    return refused


def _summary(check: ModelCheck) -> dict[str, Any]:
    properties = (
        "verdict",
        "step_verdict",
        "agrees",
        "failures",
        "evidence",
        "step_evidence",
        "training_threshold",
        "held",
    )
    segments = [
        {**vars(segment), "verdict": segment.verdict, "hamiltonian": segment.hamiltonian}
        for segment in check.segments
    ]
    derived = {name: getattr(check, name) for name in properties}
    return {**vars(check), **derived, "segments": segments, "largest": check.largest.segment}

"""`ctrans hjb-check`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

import click

from ctrans.cli import options
from ctrans.cli.ending import CommandEnding, directory_of, end
from ctrans.cli.reading import LookedAt, read
from ctrans.cli.request import ModelRequest, get_device, get_dtype, takes
from ctrans.cli.subjects import Subject, check_loss, find, settle_threads
from ctrans.control.hjb_study import PDEStudy, pde_study
from ctrans.control.hopf_lax import velocity_hull
from ctrans.control.model_check import ModelCheck, check_model, why_not_applicable
from ctrans.control.regularization import Regularization
from ctrans.norm import NORMS, RMSNorm
from ctrans.placement import get_placement
from ctrans.report import hjb_figure
from ctrans.report.files import png
from ctrans.report.hjb_check_report import check_figure, check_notes, evidence_table, key, verdict_table
from ctrans.report.progress import progress_bar
from solvers import ConfigError
from solvers.request import check_solver

SMALLER: dict[str, Any] = {"depth": 3, "context": 64, "batch": 1}
ADVICE = (
    "an ascent that ended early, or a verdict that is wrong: compare another --seed, --batch or --context, and --dtype float64 if "
    "you chose another; if the same finding fails there, report it, with the command and hjb-check.json"
)
"""After findings that do not hold."""
PDE_POINTS = 41


@dataclasses.dataclass(frozen=True, kw_only=True)
class HJBCheckRequest(ModelRequest):
    """What `hjb-check` is asked: remedies, and whether to solve the HJB equation too."""

    weight_decay: float | None
    last_map_decay: float | None
    gain_decay: float | None
    kinetic: float | None
    pde: bool

    unshown: ClassVar[frozenset[str]] = ModelRequest.unshown | {"pde"}


@click.command("hjb-check", context_settings={"default_map": SMALLER})
@options.one_model
@options.placements_option("all")
@click.option(
    "--norm",
    "norms",
    multiple=True,
    default=("layernorm", "rmsnorm"),
    show_default=True,
    metavar="NAME",
    help=f"Repeatable; all, or {options.one_of(NORMS)}.",
)
@click.option(
    "--weight-decay",
    type=float,
    metavar="LAM",
    help="What a penalty LAM/2 |W|^2 of every matrix in a training loss (not AdamW's decoupled decay) makes of H where no output norm "
    "bounds it, on this text and for this model: LAM is compared with dt lam*.",
)
@click.option(
    "--last-map-decay",
    type=float,
    metavar="LAM",
    help="Remedy: running cost LAM/2 |W|^2 of each last linear map and its bias alone, what feeds them being fixed (a penalty in a "
    "training loss, over dt).",
)
@click.option(
    "--gain-decay",
    type=float,
    metavar="LAM",
    help="Remedy: running cost LAM/2 (|gamma|^2 + |beta|^2) of each output norm's trained gains and offsets (a penalty in a training "
    "loss, over dt).",
)
@click.option("--kinetic", type=float, metavar="LAM", help="Remedy: running cost LAM/2 |f|^2 of each velocity.")
@click.option("--pde", is_flag=True, help="Also solve the HJB equation in the plane, and draw it: hjb-pde.png. Half a minute.")
@options.size_options
@options.residual_options
@options.parallel_option
@options.stack_option
@options.norm_details
@options.map_options
@options.weight_options
@options.text_options
@options.device_options
@options.model_options
@options.out_option("hjb-check")
@options.json_option
@takes(HJBCheckRequest)
def command(request: HJBCheckRequest) -> None:
    """Is the Hamiltonian of training finite, and under which assumptions? For each placement of normalisation.

    A GPT, seeded or your own, reads real text; at every segment the Hamiltonian H(P) = sup of -<P, f> over the velocities that
    the placement allows is computed in closed form at the costate P, for the ODE and for the discrete step, and checked by
    ascents that do not know the formula. H = inf means that the best velocity runs away. Behind a norm H is finite for bounded
    gains: with gains trained it grows as they do, and a decay of them or a kinetic cost mends that. All this is found at one
    text's costates, and a finite H alone does not make an optimum exist. Exit code 1 if any
    evidence disagrees with its verdict. The directory gets hjb-check.json and hjb-check.png.

    \b
    ctrans hjb-check
    ctrans hjb-check --placement pre --weight-decay 0.1
    ctrans hjb-check --placement peri --gain-decay 0.1
    ctrans hjb-check --kinetic 0.1 --file book.txt
    ctrans hjb-check models/gemma --context 32
    """
    regularization = Regularization(**{field.name: getattr(request, field.name) for field in dataclasses.fields(Regularization)})
    if request.pde and request.quiet and request.out is None:
        raise ConfigError("--pde draws a picture, and with --json - nothing is written: add --out DIRECTORY")
    dtype, device = get_dtype(request.dtype), get_device(request.device)
    check_solver("tsit5", 1, None, None, dtype)
    found = find(request)
    check_loss(found, "hjb-check")
    refused = _refused(found, regularization)
    jobs = [subject for subject in found if subject.config.placement not in refused]
    if not jobs:
        raise ConfigError(next(iter(refused.values())))
    text = read(request, found)
    tokens, targets = (part.to(device) for part in text.pairs(request.batch, found[0].context))
    settle_threads(found, tokens, get_dtype(request.dtype))
    directory = directory_of(request)
    checks: dict[str, list[ModelCheck]] = {subject.config.norm: [] for subject in found}
    with progress_bar("hjb-check", sum(subject.segments for subject in jobs)) as advance:
        for subject in jobs:
            norm = subject.config.norm
            progress = partial(lambda word, k: advance(word), f"{norm}, {subject.config.placement}")
            check = check_model(subject.model(dtype, device), tokens, targets, regularization, progress=progress)
            checks[norm].append(dataclasses.replace(check, placement=subject.config.placement))
        study = pde_study(velocity_hull(RMSNorm(2).double()), points=PDE_POINTS) if request.pde else None
    failures = [f"{norm}, {c.placement}, {failure}" for norm, row in checks.items() for c in row for failure in c.failures]
    ending = CommandEnding(
        looked_at=LookedAt(request, found, text, tokens),
        device=device,
        result={
            "checks": {norm: {check.placement: _summary(check) for check in row} for norm, row in checks.items()},
            "not_applicable": refused,
            "pde": None if study is None else study.summary(),
        },
        files=_pictures(checks, study),
        page=[
            *(part for norm, row in checks.items() for part in _tables(norm, row, refused)),
            *(key(refused), ""),
        ],
        failures=[*failures, ADVICE] if failures else [],
    )
    end(request, directory, ending)


def _refused(found: Sequence[Subject], regularization: Regularization) -> dict[str, str]:
    """Why the regularization does not apply, by the name of each model that does not take it, or has a sublayer that does not."""
    reasons = {
        subject.config.placement: next(
            (why for p in subject.placements if (why := why_not_applicable(get_placement(p), regularization))), None
        )
        for subject in found
    }
    return {name: reason for name, reason in reasons.items() if reason is not None}


def _tables(norm: str, row: Sequence[ModelCheck], refused: Mapping[str, str]) -> list[Any]:
    """What the terminal shows of the checks with one norm."""
    return [verdict_table(norm, row, refused), "", evidence_table(row), "", check_notes(row), ""]


def _summary(check: ModelCheck) -> dict[str, Any]:
    properties = ("verdict", "step_verdict", "agrees", "failures", "evidence", "step_evidence", "training_threshold", "held")
    return {**vars(check), **{name: getattr(check, name) for name in properties}, "largest": check.largest.segment}


def _pictures(checks: Mapping[str, Sequence[ModelCheck]], study: PDEStudy | None) -> dict[str, Callable[[], bytes]]:
    """What makes each picture, by the name of its file."""
    pictures = {"hjb-check.png": lambda: png(check_figure(checks))}
    return pictures if study is None else {**pictures, "hjb-pde.png": lambda: png(hjb_figure.draw(study))}

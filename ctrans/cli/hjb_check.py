"""`ctrans hjb-check`."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from ctrans.cli import options
from ctrans.cli.subjects import Subject, read, say_model, subjects, summary
from ctrans.control.hjb_study import PDEStudy, pde_study
from ctrans.control.hopf_lax import velocity_hull
from ctrans.control.model_check import ModelCheck, Remedy, check_model, refusal
from ctrans.norm import NORMS, RMSNorm
from ctrans.placement import PLACEMENTS, get_placement
from ctrans.report import hjb_figure
from ctrans.report.files import png, write_atomic
from ctrans.report.hjb_check_report import check_figure, check_notes, evidence_table, key, verdict_table
from ctrans.report.progress import progress_bar
from solvers import ConfigError
from solvers.request import check_solver

SMALLER: dict[str, Any] = {"depth": 3, "context": 64, "batch": 1}
PDE_POINTS = 41


@click.command("hjb-check", context_settings={"default_map": SMALLER})
@click.option(
    "--placement",
    "placements",
    multiple=True,
    default=("all",),
    show_default=True,
    metavar="NAME",
    help=f"Repeatable; all, or {options.one_of(PLACEMENTS)}.",
)
@click.option(
    "--norm",
    "norms",
    multiple=True,
    default=("all",),
    show_default=True,
    metavar="NAME",
    help=f"Repeatable; all, or {options.one_of(NORMS)}.",
)
@click.option(
    "--weight-decay",
    type=float,
    metavar="LAM",
    help="What LAM/2 |W|^2 of every matrix, as in training, makes of H where no output norm bounds it: compare it with lam*.",
)
@click.option(
    "--last-map-decay",
    type=float,
    metavar="LAM",
    help="Remedy: running cost LAM/2 |W|^2 of each last linear map alone, what feeds it being fixed.",
)
@click.option(
    "--gain-decay",
    type=float,
    metavar="LAM",
    help="Remedy: running cost LAM/2 (|gamma|^2 + |beta|^2) of each output norm's trained gains and offsets.",
)
@click.option("--kinetic", type=float, metavar="LAM", help="Remedy: running cost LAM/2 |f|^2 of each velocity.")
@click.option("--pde", is_flag=True, help="Also solve the HJB equation in the plane, and draw it: hjb-pde.png. Half a minute.")
@options.size_options
@options.weight_options
@options.text_options
@options.device_options
@options.model_options
@options.out_option("hjb-check")
@options.json_option
def command(
    placements: tuple[str, ...], norms: tuple[str, ...], pde: bool, out: Path | None, json_path: str | None, **settings: Any
) -> None:
    """Is the Hamiltonian of training finite, and under which assumptions? For each placement of normalisation.

    A GPT, seeded or your own, reads real text; at every segment the Hamiltonian H(P) = sup of -<P, f> over the velocities that
    the placement allows is computed in closed form at the costate P, for the ODE and for the discrete step, and checked by
    ascents that do not know the formula. H = inf means that the best velocity runs away. Behind a norm H is finite for bounded
    gains: with gains trained it grows as they do, and a decay of them or a kinetic cost mends that. Exit code 1 if any
    evidence disagrees with its verdict. The directory gets hjb-check.json and hjb-check.png.

    \b
    ctrans hjb-check
    ctrans hjb-check --placement pre --weight-decay 0.1
    ctrans hjb-check --placement peri --gain-decay 0.1
    ctrans hjb-check --kinetic 0.1 --file book.txt
    ctrans hjb-check --model models/gemma --context 32
    """
    remedy = Remedy(**{field.name: settings[field.name] for field in dataclasses.fields(Remedy)})
    if pde and json_path == "-" and out is None:
        raise ConfigError("--pde draws a picture, and with --json - nothing is written: add --out DIRECTORY")
    dtype, device = options.get_dtype(settings["dtype"]), options.get_device(settings["device"])
    check_solver("tsit5", 1, None, None, dtype)
    wanted = subjects(settings, placements, norms)
    refused = _refused(wanted, remedy)
    jobs = [subject for subject in wanted if subject.config.placement not in refused]
    if not jobs:
        raise ConfigError(next(iter(refused.values())))
    text = read(settings, wanted)
    tokens, targets = (part.to(device) for part in text.pairs(settings["batch"], settings["context"]))
    directory = options.out_directory(out, json_path, "hjb-check")
    checks: dict[str, list[ModelCheck]] = {subject.config.norm: [] for subject in wanted}
    with progress_bar("hjb-check", 2 * settings["depth"] * len(jobs)) as advance:
        for subject in jobs:
            norm, placement = subject.config.norm, subject.config.placement
            model, word = subject.model(dtype, device), f"{norm}, {placement}"
            progress = partial(lambda word, k: advance(word), word)
            checks[norm].append(check_model(model, tokens, targets, remedy, progress=progress))
        study = pde_study(velocity_hull(RMSNorm(2).double()), points=PDE_POINTS) if pde else None
    if directory is not None:
        _draw(directory, checks, study)
    result = {
        "command": "hjb-check",
        "options": options.printable(settings),
        "environment": options.environment(device),
        "model": summary(wanted, text, tokens),
        "checks": {norm: [_summary(check) for check in found] for norm, found in checks.items()},
        "not_applicable": refused,
        "pde": None if study is None else study.summary(),
    }
    options.write_json(result, json_path, directory, "hjb-check")
    if json_path != "-":
        console = Console()
        say_model(console, wanted, text, tokens)
        for norm, found in checks.items():
            console.print(verdict_table(norm, found, refused), evidence_table(found), sep="\n\n")
            console.print("", check_notes(found), "", sep="\n", highlight=False)
        console.print(key(refused), "", sep="\n", highlight=False)
        files = ["hjb-check.json", "hjb-check.png"] + ["hjb-pde.png"] * pde
        console.print("Written: " + ", ".join(f"{directory}/{name}" for name in files), soft_wrap=True)
    failures = [f"{norm}, {c.placement}, {failure}" for norm, found in checks.items() for c in found for failure in c.failures]
    for failure in failures:
        click.echo(f"ctrans: {failure}", err=True)
    if failures:
        raise SystemExit(1)


def _refused(wanted: Sequence[Subject], remedy: Remedy) -> dict[str, str]:
    """Why the remedy does not apply, by the name of each placement that does not take it, or has a sublayer that does not."""
    reasons = {
        subject.config.placement: next((why for p in subject.placements if (why := refusal(get_placement(p), remedy))), None)
        for subject in wanted
    }
    return {name: reason for name, reason in reasons.items() if reason is not None}


def _summary(check: ModelCheck) -> dict[str, Any]:
    properties = ("verdict", "step_verdict", "agrees", "failures", "evidence", "step_evidence", "threshold")
    return {**vars(check), **{name: getattr(check, name) for name in properties}, "largest": check.largest.segment}


def _draw(directory: Path, checks: dict[str, list[ModelCheck]], study: PDEStudy | None) -> None:
    write_atomic(directory / "hjb-check.png", png(check_figure(checks)))
    if study is not None:
        write_atomic(directory / "hjb-pde.png", png(hjb_figure.draw(study)))

"""`ctrans hjb-check`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import torch
from rich.console import Console
from torch import Tensor

from ctrans.cli import options
from ctrans.control.check import ModelCheck, Remedy, check_model, refusal
from ctrans.control.hjb_study import PDEStudy, pde_study
from ctrans.control.hopf_lax import velocity_hull
from ctrans.gpt import GPTConfig
from ctrans.norm import NORMS, RMSNorm
from ctrans.placement import PLACEMENTS, get_placement
from ctrans.report import hjb_figure
from ctrans.report.files import png, write_atomic
from ctrans.report.hjb_check_report import check_figure, check_notes, check_table, key
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
@click.option("--weight-decay", type=float, metavar="LAM", help="Remedy: running cost LAM/2 |W|^2 of each last linear map.")
@click.option("--kinetic", type=float, metavar="LAM", help="Remedy: running cost LAM/2 |f|^2 of each velocity.")
@click.option("--pde", is_flag=True, help="Also solve the HJB equation in the plane, and draw it: hjb-pde.png. Half a minute.")
@options.size_options
@options.weight_options
@options.text_options
@options.device_options
@options.checkpoint_option
@options.out_option("hjb-check")
@options.json_option
def command(
    placements: tuple[str, ...], norms: tuple[str, ...], pde: bool, out: Path | None, json_path: str | None, **settings: Any
) -> None:
    """Certify whether training is a well-posed optimal-control problem, for each placement of normalisation.

    A seeded GPT reads real text; at every segment the Hamiltonian H(P) = sup of -<P, f> over the velocities that the placement
    allows is computed in closed form at the costate P, and checked by ascents that do not know the formula. H = inf means that
    the best velocity runs away: training is degenerate, and a running cost mends it. Exit code 1 if any evidence disagrees with
    its verdict. The directory gets hjb-check.json and hjb-check.png.

    \b
    ctrans hjb-check
    ctrans hjb-check --placement pre --weight-decay 0.1
    ctrans hjb-check --kinetic 0.1 --file book.txt
    """
    wanted = options.architectures(settings, placements, norms)
    remedy = Remedy(settings["weight_decay"], settings["kinetic"])
    names = dict.fromkeys(config.placement for config in wanted)
    refused = {name: reason for name in names if (reason := refusal(get_placement(name), remedy)) is not None}
    jobs = [config for config in wanted if config.placement not in refused]
    if not jobs:
        raise ConfigError(next(iter(refused.values())))
    if pde and json_path == "-" and out is None:
        raise ConfigError("--pde draws a picture, and with --json - nothing is written: add --out DIRECTORY")
    dtype, device = options.get_dtype(settings["dtype"]), options.get_device(settings["device"])
    check_solver("tsit5", 1, None, None, dtype)
    tokens = options.read_tokens(settings, settings["context"] + 1).to(device)
    directory = options.out_directory(out, json_path, "hjb-check")
    checks: dict[str, list[ModelCheck]] = {config.norm: [] for config in wanted}
    with progress_bar("hjb-check", 2 * settings["depth"] * len(jobs)) as advance:
        for config in jobs:
            checks[config.norm].append(_check(config, settings, dtype, tokens, remedy, advance))
        study = pde_study(velocity_hull(RMSNorm(2).double()), points=PDE_POINTS) if pde else None
    if directory is not None:
        _draw(directory, checks, study)
    result = {
        "command": "hjb-check",
        "options": options.printable(settings),
        "environment": options.environment(device),
        "checks": {norm: [_summary(check) for check in found] for norm, found in checks.items()},
        "not_applicable": refused,
        "pde": None if study is None else study.summary(),
    }
    options.write_json(result, json_path, directory, "hjb-check")
    if json_path != "-":
        console = Console()
        for norm, found in checks.items():
            console.print(check_table(norm, found, refused))
            console.print("", check_notes(found), "", sep="\n", highlight=False)
        console.print(key(refused), "", sep="\n", highlight=False)
        files = ["hjb-check.json", "hjb-check.png"] + ["hjb-pde.png"] * pde
        console.print("Written: " + ", ".join(f"{directory}/{name}" for name in files), soft_wrap=True)
    failures = [f"{norm}, {c.placement}, {failure}" for norm, found in checks.items() for c in found for failure in c.failures]
    for failure in failures:
        click.echo(f"ctrans: {failure}", err=True)
    if failures:
        raise SystemExit(1)


def _check(
    config: GPTConfig,
    settings: dict[str, Any],
    dtype: torch.dtype,
    tokens: Tensor,
    remedy: Remedy,
    advance: Callable[[str], None],
) -> ModelCheck:
    model = options.make_model(config, settings, dtype, tokens.device)
    word = f"{config.norm}, {config.placement}"
    return check_model(model, tokens[:, :-1], tokens[:, 1:], remedy, progress=lambda k: advance(word))


def _summary(check: ModelCheck) -> dict[str, Any]:
    properties = ("verdict", "agrees", "failures", "evidence")
    return {**vars(check), **{name: getattr(check, name) for name in properties}, "largest": check.largest.segment}


def _draw(directory: Path, checks: dict[str, list[ModelCheck]], study: PDEStudy | None) -> None:
    write_atomic(directory / "hjb-check.png", png(check_figure(checks)))
    if study is not None:
        write_atomic(directory / "hjb-pde.png", png(hjb_figure.draw(study)))

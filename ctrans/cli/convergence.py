"""`ctrans convergence`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import click
import torch
from rich.console import Console

from ctrans.cli import options
from ctrans.norm import NORMS
from ctrans.placement import PLACEMENTS
from ctrans.report.convergence_report import convergence_figure, convergence_table
from ctrans.report.files import png, write_atomic
from ctrans.report.progress import progress_bar
from ctrans.threads import choose_threads
from ctrans.verify.convergence import Convergence, depth_convergence, fixed_step, own_methods, substep_convergence
from solvers import METHODS, ConfigError
from solvers.errors import unknown

LIMITS = ("substeps", "depth")


@click.command("convergence")
@click.option(
    "--method",
    "methods",
    multiple=True,
    metavar="NAME",
    help="Repeatable; own methods, or fixed-step torchdiffeq:NAME.  [default: all own]",
)
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
    "--limit",
    "limits",
    multiple=True,
    default=("all",),
    show_default=True,
    metavar="NAME",
    help="Repeatable; all, substeps (more steps per segment) or depth (more blocks).",
)
@click.option("--norm", default="layernorm", show_default=True, metavar="NAME", help=f"{options.one_of(NORMS).capitalize()}.")
@click.option("--seed", default=0, show_default=True, help="Seed of weights and state.")
@options.out_option("convergence")
@options.json_option
def command(
    methods: tuple[str, ...],
    placements: tuple[str, ...],
    limits: tuple[str, ...],
    norm: str,
    seed: int,
    out: Path | None,
    json_path: str | None,
) -> None:
    """Measure the order of each method on each placement, in both limits a Transformer has.

    Substeps: fixed blocks, more and more steps per segment; a method of order p has error O(steps^-p). Depth: fixed depth-time,
    more and more blocks with weights smooth in depth; plain blocks have order 1, symmetric ones (half FFN, attention, half FFN)
    order 2. The same functions make the convergence tests. The directory gets convergence.json and convergence.png.
    """
    names = options.expand(placements, PLACEMENTS, "placement")
    chosen = options.expand(limits, dict.fromkeys(LIMITS), "limit")
    if norm not in NORMS:
        raise unknown("norm", norm, NORMS)
    if methods and "substeps" not in chosen:
        raise ConfigError("--method only matters in the substeps limit: add --limit substeps, or leave it out")
    wanted = options.expand(methods, METHODS, "method") or own_methods()
    for method in wanted:
        fixed_step(method)
    jobs: list[tuple[str, Callable[[], Convergence]]] = []
    if "substeps" in chosen:
        jobs += [(f"{m}, {p}", partial(substep_convergence, m, p, norm, seed)) for m in wanted for p in names]
    if "depth" in chosen:
        jobs += [
            (f"depth, {p}", partial(depth_convergence, p, symmetric=s, norm=norm, seed=seed))
            for s in (False, True)
            for p in names
        ]
    choose_threads(0)  # its models are small
    directory = options.out_directory(out, json_path, "convergence")
    results = []
    with progress_bar("convergence", len(jobs)) as advance:
        for word, job in jobs:
            advance(word)
            results.append(job())
    if directory is not None:
        write_atomic(directory / "convergence.png", png(convergence_figure(results)))
    rows = [{**vars(r), "order": r.order} for r in results]
    result = {
        "command": "convergence",
        "options": {"norm": norm, "seed": seed},
        "environment": options.environment(torch.device("cpu")),
        "results": rows,
    }
    options.write_json(result, json_path, directory, "convergence")
    if json_path != "-":
        Console().print(convergence_table(results), f"Written: {directory}/convergence.json, {directory}/convergence.png")

"""`ctrans convergence`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial

from ctrans.base.option import option
from ctrans.base.threads import choose_threads
from ctrans.cli.click_options import expand, expand_placements, placements_option
from ctrans.cli.ending import directory_of, end
from ctrans.cli.request import WrittenRequest, command_of
from ctrans.dynamics.norm import NORMS
from ctrans.dynamics.placement import PLACEMENTS
from ctrans.examine.converged import as_object, measured
from ctrans.model.orders import Convergence, depth_convergence, own_methods, substep_convergence
from ctrans.report.progress import progress_bar
from solvers import METHODS, ConfigError
from solvers.methods import fixed_step

LIMITS = ("substeps", "depth")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConvergenceRequest(WrittenRequest):
    """The request of `convergence`. No methods stand for all own methods."""

    methods: tuple[str, ...] = option(
        (),
        "Repeatable: own methods, or torchdiffeq:NAME with fixed steps.",
        flags="--method",
        metavar="NAME",
        default_words="all own",
    )
    placements: tuple[str, ...] = placements_option("all")
    limits: tuple[str, ...] = option(
        ("all",),
        "Repeatable: all, substeps (more steps per segment) or depth (more blocks).",
        flags="--limit",
        metavar="NAME",
    )
    norm: str = option("layernorm", "The norm.", choices=NORMS)
    seed: int = option(0, "Seed of weights and state.")

    unshown = WrittenRequest.unshown | {"methods", "placements", "limits"}


@command_of(ConvergenceRequest, "convergence")
def command(request: ConvergenceRequest) -> None:
    """Measure the order of each method on each placement, in the two limits of a Transformer.

    Limit substeps: the blocks stay and the steps per segment grow; a method of order p has the
    error O(steps^-p). Limit depth: the depth-time stays and the number of blocks grows, with
    weights smooth in depth. Plain blocks then have order 1, and symmetric blocks (half FFN,
    attention, half FFN) order 2. The convergence tests use the same functions. All of it takes one
    to two minutes. The directory gets convergence.json and convergence.png.
    """
    choose_threads(0)  # its models are small
    names = expand_placements(request.placements)
    chosen = expand(request.limits, dict.fromkeys(LIMITS), "limit")
    if request.methods and "substeps" not in chosen:
        raise ConfigError(
            "--method applies to the substeps limit only: add --limit substeps, or leave it out"
        )
    mixed = [name for name in names if name not in PLACEMENTS]
    if mixed and "depth" in chosen:
        raise ConfigError(
            f"placement {mixed[0]!r}: the depth limit needs one placement for all sublayers: choose"
            " --limit substeps"
        )
    methods = expand(request.methods, METHODS, "method") or own_methods()
    for method in methods:
        fixed_step(method)
    jobs = _jobs(request, methods, names, chosen)
    directory = directory_of(request)
    results: list[Convergence] = []
    with progress_bar("convergence", len(jobs)) as advance:
        for word, job in jobs:
            advance(word)
            results.append(job())
    end(request, directory, result=as_object(results), measured=measured(results))


def _jobs(
    request: ConvergenceRequest,
    methods: Sequence[str],
    placements: Sequence[str],
    limits: Sequence[str],
) -> list[tuple[str, Callable[[], Convergence]]]:
    """The measurements, each with a word for the progress bar."""
    norm = request.norm
    seed = request.seed
    jobs: list[tuple[str, Callable[[], Convergence]]] = []
    if "substeps" in limits:
        jobs += [
            (f"{method}, {placement}", partial(substep_convergence, method, placement, norm, seed))
            for method in methods
            for placement in placements
        ]
    if "depth" in limits:
        jobs += [
            (f"depth, {p}", partial(depth_convergence, p, symmetric=s, norm=norm, seed=seed))
            for s in (False, True)
            for p in placements
        ]
    return jobs

"""`ctrans convergence`."""

from __future__ import annotations

import dataclasses

from ctrans.base.option import option
from ctrans.cli.click_options import expand_placements, placements_option
from ctrans.cli.ending import directory_of, end
from ctrans.cli.orders import measure_orders, plan_orders
from ctrans.cli.request import WrittenRequest, command_of
from ctrans.dynamics.norm import NORMS
from ctrans.examine.converged import as_object, measured


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
    jobs = plan_orders(
        expand_placements(request.placements),
        request.norm,
        request.seed,
        limits=request.limits,
        methods=request.methods,
    )
    directory = directory_of(request)
    results = measure_orders(jobs)
    end(request, directory, result=as_object(results), measured=measured(results))

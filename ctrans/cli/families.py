"""`ctrans families`."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from ctrans.cli.click_options import argument
from ctrans.cli.ending import CommandEnding, check_json, end
from ctrans.cli.request import Request, command_of
from ctrans.interop.families import FAMILIES, found_family
from ctrans.interop.transformers_library import import_transformers, quiet
from ctrans.report.progress import progress_bar
from ctrans.threads import choose_threads
from solvers.errors import look_up


@dataclasses.dataclass(frozen=True, kw_only=True)
class FamiliesRequest(Request):
    """The request of `families`; no names stand for all families."""

    names: tuple[str, ...] = argument("[NAME]...")

    unshown: ClassVar[frozenset[str]] = Request.unshown | {"names"}


@command_of(FamiliesRequest, "families")
def command(request: FamiliesRequest) -> None:
    """List the families of other libraries' models that are known, what was found in each, and what
    is not known of it.

    A NAME is that of a config's model_type. Each family is built here, small and random, and opened
    as --model opens a checkpoint of it; what is said is what was found. Other families, and any
    nn.Module, are opened too where their blocks can be told: these were tried. All of them take ten
    to thirty seconds.

    A line says: where norms act; theta, whether attention's scores and heads are known (Emadi's
    bounds); bound, whether it is known how large each map can be; weights, whether each map's
    matrices are known (statements on initialisation); last, whether each map ends in a linear map
    (Hamiltonians over weights, growth under larger weights). With names it also says why not.

    \b
    ctrans families
    ctrans families gpt_neox mixtral
    ctrans families --json -
    """
    names = list(dict.fromkeys(request.names)) or list(FAMILIES)
    for name in names:
        look_up("family", name, FAMILIES)
    check_json(request)
    choose_threads(0)  # its models are small
    found = []
    with quiet(import_transformers()), progress_bar("families", len(names)) as advance:
        for name in names:
            found.append(found_family(name))
            advance(name)
    ending = CommandEnding(
        options={"names": list(request.names)},
        result={"families": {each.family: each for each in found}},
    )
    end(request, None, ending)

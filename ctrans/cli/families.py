"""`ctrans families`."""

from __future__ import annotations

import dataclasses

from ctrans.base.threads import choose_threads
from ctrans.cli.click_options import argument
from ctrans.cli.ending import check_json, end
from ctrans.cli.request import Request, command_of
from ctrans.interop.families import FAMILIES, found_family
from ctrans.interop.transformers_library import quiet
from ctrans.report.progress import progress_bar
from solvers import look_up


@dataclasses.dataclass(frozen=True, kw_only=True)
class FamiliesRequest(Request):
    """The request of `families`. No names stand for all families."""

    names: tuple[str, ...] = argument("[NAME]...")


@command_of(FamiliesRequest, "families")
def command(request: FamiliesRequest) -> None:
    """List the known model families of other libraries, and what ctrans recognises in each.

    A NAME is the model_type of a config. ctrans builds each family here as a small random model and
    opens it as --model opens a checkpoint. All families take ten to thirty seconds. ctrans also
    opens other families and any nn.Module if it can find their blocks.

    A line shows where norms act, and what ctrans knows of the maps. theta: attention's scores and
    heads (Emadi's bounds). bound: how large each map can be. weights: each map's matrices
    (statements on initialisation). last: that each map ends in a linear map (Hamiltonians over
    weights, growth under larger weights). With names ctrans also prints why something is unknown.

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
    with quiet(), progress_bar("families", len(names)) as advance:
        for name in names:
            found.append(found_family(name))
            advance(name)
    end(request, None, result={"families": {each.family: each for each in found}})

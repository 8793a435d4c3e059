"""`ctrans control`."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from ctrans.base.option import option
from ctrans.cli.click_options import OptionValues
from ctrans.cli.ending import directory_of, end
from ctrans.cli.inputs import read_batch
from ctrans.cli.model_request import ModelRequest, get_dtype
from ctrans.cli.model_sources import check_loss_name, find_models
from ctrans.cli.request import command_of
from ctrans.examine.principled import as_object, measured, principled
from ctrans.report.progress import progress_bar
from solvers.request import check_solver


@dataclasses.dataclass(frozen=True, kw_only=True)
class ControlRequest(ModelRequest):
    """The request of `control`."""

    rtol: float | None = option(
        None, "Relative tolerance of state and costate.", default_words="1e-6"
    )
    atol: float | None = option(
        None, "Absolute tolerance of state and costate.", default_words="1e-8"
    )

    defaults: ClassVar[OptionValues] = {"depth": 6, "context": 64, "batch": 2}


@command_of(ControlRequest, "control")
def command(request: ControlRequest) -> None:
    """Show by depth how far a GPT, seeded or your own, is from the maximum principle on a text.

    The costate P = dL/dX solves the adjoint ODE backward from the loss of the next token. For each
    segment the first table shows its norm and the drift of <P, v>, which the ODE conserves. It also
    shows the gap H(P) + <P, v> >= 0 to the best velocity, if each token could choose its own, and
    the alignment of the layer's velocity v with it. If no output norm bounds the velocities, H is
    infinite and the alignment is cos(-P, v). Tokens share weights: the second table shows the gap
    that is left with shared weights, and why training reaches alignment 0, not 1. The directory
    gets control.json and control.png.

    \b
    ctrans control
    ctrans control --placement pre --placement peri --file book.txt
    ctrans control --placement all --dt 0.1 --rtol 1e-8
    ctrans control out/ckpt.pt --ids data/val.bin
    """
    check_solver("tsit5", 1, request.rtol, request.atol, get_dtype(request.dtype))
    check_loss_name(request, "control")
    sources = find_models(request)
    batch = read_batch(request, sources)
    directory = directory_of(request)
    with progress_bar("control", sum(source.segments for source in sources)) as advance:
        models = {
            source.name: principled(
                source.model(request),
                batch.tokens,
                batch.targets,
                rtol=request.rtol,
                atol=request.atol,
                progress=advance.of(source.name),
            )
            for source in sources
        }
    end(request, directory, inputs=batch, result=as_object(models), measured=measured(models))

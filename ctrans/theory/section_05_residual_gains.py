"""Section 5: the costate and a residual's gains."""

from __future__ import annotations

import torch

from ctrans.base.draw import Draw
from ctrans.control.attained import StepAt
from ctrans.control.costate import costate
from ctrans.theory.random_models import describe_model, random_model, random_text
from ctrans.theory.statement import Trial, equal, statement

SECTION = 5


@statement(
    "gain-radial",
    "ctrans",
    "dt <P, r> = <g, dL/dg> for a residual's gains g, nGPT's steps and what hyper-connections"
    " write: 0 at a critical point",
    1e-11,
    0.2,
)
def radial(draw: Draw) -> Trial:
    """<g, dL/dg> by autograd against dt <P, r>, P dL/d(X + dt r) of the discrete model."""
    residual = draw.choice(("layerscale", "rezero", "ngpt", "hyper_connections"))
    if residual == "ngpt":
        placement = "post"
    else:
        placement = draw.choice(("pre", "peri"))
    model = random_model(draw, placement, residual=residual)
    ids = random_text(draw)
    targets = random_text(draw)
    k = draw.integer(4)
    sublayer = model.depth.sublayers[k]
    dt = model.depth.lengths[k]
    step = StepAt.of(sublayer, costate(model, ids, targets), k, dt, (0.0, 0.0))
    parameter = "gain"
    if residual == "hyper_connections":
        parameter = "write_weights"
    gains = sublayer.residual.get_parameter(parameter)
    with torch.enable_grad():
        gains.requires_grad_()
        (slope,) = torch.autograd.grad(model(ids, targets)[1], gains)
        gains.requires_grad = False
    return equal(
        (gains * slope).sum(), step.work, f"{residual}, {describe_model(model)}", step.size
    )

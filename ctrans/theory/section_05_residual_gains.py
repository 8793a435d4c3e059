"""Section 5: the costate and a residual's gains."""

from __future__ import annotations

import torch

from ctrans.base.draw import Draw
from ctrans.control.attained import StepAt
from ctrans.control.costate import costate
from ctrans.theory.random_models import described, random_model, random_text
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
    made = random_model(
        draw, "post" if residual == "ngpt" else draw.choice(("pre", "peri")), residual=residual
    )
    ids = random_text(draw)
    targets = random_text(draw)
    k = draw.integer(4)
    sublayer = made.depth.sublayers[k]
    dt = made.depth.lengths[k]
    step = StepAt.of(sublayer, costate(made, ids, targets), k, dt, (0.0, 0.0))
    gains = sublayer.residual.get_parameter(
        "write_weights" if residual == "hyper_connections" else "gain"
    )
    with torch.enable_grad():
        gains.requires_grad_()
        (slope,) = torch.autograd.grad(made(ids, targets)[1], gains)
        gains.requires_grad_(False)
    return equal((gains * slope).sum(), step.work, f"{residual}, {described(made)}", step.size)

"""Probes: walks with instruments on one held batch, rarer than reports. A new probe is one entry of
`PROBES`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ctrans.base.as_found import as_found
from ctrans.control.costate import costate
from ctrans.control.maximum_principle import maximum_principle
from ctrans.control.regularization import Regularization
from ctrans.control.segment_check import check_segment
from ctrans.dynamics.fields import TokenBound
from ctrans.dynamics.sublayer import Sublayer
from ctrans.measure.attention.by_depth import AttentionByDepth
from ctrans.measure.backward.lyapunov import LyapunovExponents
from ctrans.measure.backward.sensitivity import Sensitivities
from ctrans.measure.forward.bounds import map_bound
from ctrans.measure.walk import Attempt, Model, terminal_loss, walk
from ctrans.training.attention_theta import MeanTheta
from ctrans.training.monitor.edge_of_stability import over_edge, trained_by
from ctrans.training.monitor.hooks import in_a_line
from ctrans.training.monitor.sites import Sites
from solvers import ConfigError, SolveError, shown

TOKENS = 32
"""The number of tokens of the held batch's first sequence at which Jacobians are taken."""
EXPONENTS = 2
TOLERANCE = 0.05
"""The relative error of a Jacobian's norm, while the training waits."""


@dataclass(frozen=True, eq=False)
class Held:
    """The batch of the probes: tokens, and the targets of the model's loss. Raises ConfigError for
    tokens without entries.
    """

    tokens: Tensor
    targets: Any

    def __post_init__(self) -> None:
        if not isinstance(self.tokens, Tensor) or self.tokens.numel() == 0:
            raise ConfigError(
                f"held[0] = {shown(self.tokens)}: give a tensor of tokens with at least one entry"
            )


@dataclass(frozen=True, eq=False)
class Probed:
    """The argument of a probe. `trained` are the weights that train, and `few` the first tokens of
    the held batch's first sequence.
    """

    sites: Sites
    model: Model
    held: Held
    optimizer: torch.optim.Optimizer | None
    trained: Sequence[nn.Parameter]
    few: Tensor


def attention(at: Probed) -> Mapping[str, Any]:
    """theta, the balanced-mass factor over all rows, and log S of the first and the last attention
    (Emadi).
    """
    places = [site.k for site in at.sites.by_depth if site.sublayer.attention is not None]
    if not places:
        raise ConfigError("no sublayer of this model shows an attention")
    missing: dict[str, str] = {}
    theta = Attempt(MeanTheta(), missing, "theta")
    by_depth = Attempt(
        AttentionByDepth({places[0], places[-1]}, tolerance=TOLERANCE), missing, "log_sensitivity"
    )
    mean, layers = walk(at.model, at.few, instruments=[theta, by_depth])
    figures = {}
    if mean is not None:
        figures["theta"] = mean
    if layers:
        for end, layer in (("first", layers[0]), ("last", layers[-1])):
            if layer.log_sensitivity:
                figures[f"log_sensitivity_{end}"] = math.fsum(layer.log_sensitivity.values())
    if not figures:
        why = missing.get("theta") or missing.get("log_sensitivity") or "no state is finite"
        raise ConfigError(why)
    return figures


def jacobians(at: Probed) -> Mapping[str, Any]:
    """|dv_k/dX| of each sublayer, and the largest Lyapunov exponents per unit of depth-time."""
    velocities = Sensitivities(tolerance=TOLERANCE, starts=0)
    rates = Attempt(LyapunovExponents(count=EXPONENTS))
    lyapunov = walk(at.model, at.few, instruments=[velocities, rates])[1]
    figures = {"sensitivity": [_number(one.value) for one in velocities.sublayers]}
    if lyapunov is not None:
        figures["lyapunov"] = [float(exponent) for exponent in lyapunov.exponents]
    return figures


def principle(at: Probed) -> Mapping[str, Any]:
    """H, the gap g = H + <P, v> and the alignment of each sublayer; inf where H is, nan where they
    are unknown.
    """
    costates = costate(at.model, at.held.tokens, at.held.targets)
    result = maximum_principle(at.model.depth, costates)
    return {
        "hamiltonian": list(map(_number, result.hamiltonian)),
        "gap": list(map(_number, result.gap)),
        "alignment": list(map(_number, result.alignment)),
    }


def _number(value: Any) -> float:
    """The value as a float; nan for None."""
    if value is None:
        return math.nan
    return float(value)


def exponents(at: Probed) -> Mapping[str, Any]:
    """k of the best -<P, f> ~ R^k over last maps with |W|_F <= R, for the first and the last
    sublayer, at the held batch's first tokens.

    k is 1 if H is infinite, 0 if it is finite. It comes from ascents that use neither
    (`ctrans.control.segment_check.check_segment`).
    """
    adjoint = costate(at.model, at.held.tokens, at.held.targets)
    sublayers = list(at.model.depth.sublayers)
    figures = dict[str, Any]()
    for end, k in (("first", 0), ("last", len(sublayers) - 1)):
        x, p = adjoint.starts[k]
        check = check_segment(
            sublayers[k],
            (adjoint.states[k][:1, :TOKENS], adjoint.costates[k + 1][:1, :TOKENS]),
            (x[:1, :TOKENS], p[:1, :TOKENS]),
            continuous=False,
            segment=k,
            time=adjoint.times[k],
            dt=at.model.depth.lengths[k],
            regularization=Regularization(),
        )
        if check.certificate.growth is not None:
            figures[f"hamiltonian_exponent_{end}"] = float(check.certificate.growth.exponent)
    return figures


def curvature(at: Probed) -> Mapping[str, Any]:
    """The loss's sharpness, and its ratio to the optimiser's edge of stability."""
    return over_edge(at.model, at.trained, at.held.tokens, at.held.targets, at.optimizer)


def held_loss(at: Probed) -> Mapping[str, Any]:
    """The loss at the held batch."""
    with torch.no_grad():
        states = at.model.depth(at.model.embed(at.held.tokens))
        return {"held_loss": float(terminal_loss(at.model, states, at.held.targets))}


def bounds(at: Probed) -> Mapping[str, Any]:
    """Bounds on the outputs of maps without a norm behind them, for the gauge `bound_share`."""
    return {"map_bounds": [_map_bound(sublayer) for sublayer in at.model.depth.sublayers]}


def _map_bound(sublayer: Sublayer) -> TokenBound | None:
    if sublayer.output_norm is not None or sublayer.image is not None:
        return None
    try:
        return map_bound(sublayer)
    except ConfigError:
        return None


PROBES: dict[str, Callable[[Probed], Mapping[str, Any]]] = {
    "held loss": held_loss,
    "attention": attention,
    "jacobians": jacobians,
    "principle": principle,
    "exponents": exponents,
    "curvature": curvature,
    "bounds": bounds,
}
"""Probes by name. Each returns figures by name: numbers, or lists by sublayer. Errors are under
`missing`.
"""


def probe(sites: Sites, held: Held, optimizer: torch.optim.Optimizer | None) -> dict[str, Any]:
    """The figures of all probes, of the model in evaluation mode. The model does not change."""
    if sites.vocabulary:
        few = held.tokens[:1, :TOKENS]
    else:
        few = held.tokens[:1]
    figures: dict[str, Any] = {}
    missing: dict[str, str] = {}
    trained = trained_by(list(sites.root.parameters()), optimizer)
    with as_found(sites.root):
        at = Probed(sites, sites.model, held, optimizer, trained, few)
        for name, look in PROBES.items():
            try:
                figures.update(look(at))
            except Exception as error:
                # of any kind, such as lack of memory: a training must not stop for a figure
                if isinstance(error, (ConfigError, SolveError)):
                    missing[name] = str(error)
                else:
                    missing[name] = in_a_line(error)
    if missing:
        figures["missing"] = missing
    return figures

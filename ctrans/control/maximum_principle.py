"""The maximum principle by depth and token: the gap between each layer's velocity and the best one
that its norm allows.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ctrans.base.as_found import leaving_as_found
from ctrans.base.old_names import OldReasons
from ctrans.base.shapes import TokenRows
from ctrans.control.costate import Costate, places
from ctrans.control.set_of_placement import admissible_set
from ctrans.dynamics.depth import Depth
from ctrans.dynamics.sublayer import Sublayer
from ctrans.measure.missing import tried
from solvers import ConfigError, unknown


@dataclasses.dataclass(frozen=True)
class MaximumPrinciple:
    """One entry per segment, at its start. Norms and products run over all tokens of the batch.
    Every field suits JSON.

    - `times`, `kinds`, `placements`: identify the segment
    - `costate_norm` is |P|, `velocity_norm` |v| and `product` <P, v>; `drift`: how well the segment
      conserves <P, v> (see `Costate`)
    - `hamiltonian` is H(P), `gap` is H(P) + <P, v>: inf if H is; None if H is finite but the
      measure is the cosine
    - `alignment`: in [-1, 1], by the measure in `measures` ("gap" or "cosine"); None if every
      allowed velocity is optimal, or P or v is zero
    - `form`: that of the costate
    - `missing`: the segments without a velocity in the ODE (a norm around the state with a dead
      gain), with the reason. Their figures that need a velocity are None
    """

    form: str
    loss: float
    times: list[float]
    kinds: list[str]
    placements: list[str]
    measures: list[str]
    costate_norm: list[float]
    velocity_norm: list[float | None]
    product: list[float | None]
    drift: list[float]
    hamiltonian: list[float | None]
    gap: list[float | None]
    alignment: list[float | None]
    missing: dict[str, str] = dataclasses.field(default_factory=dict)

    skipped = OldReasons()


class PointwiseReading(NamedTuple):
    """H(P), the gap and the alignment of one velocity v, |v| and <P, v>; None if not defined."""

    hamiltonian: float | None = None
    gap: float | None = None
    alignment: float | None = None
    velocity_norm: float | None = None
    product: float | None = None


NOTHING = PointwiseReading()


class Alignment(NamedTuple):
    """A way to compare a sublayer's velocity v with the costate P: `compare` is a function of the
    sublayer, P and v, and `words` say what the alignment then is.
    """

    compare: Callable[[Sublayer, Tensor, Tensor], PointwiseReading]
    words: str


@torch.no_grad()
@leaving_as_found
def maximum_principle(
    depth: Depth, costate: Costate, *, measure: str | None = None
) -> MaximumPrinciple:
    """g = H(P) + <P, v> >= 0 and a = (<P, beta> - <P, v>)/(<P, beta> + H(P)) of each segment; a =
    cos(-P, v) if H is +inf.

    v is the layer's velocity at the segment's start and P the costate there. H(P) = sup -<P, f>
    over the velocities f that the output norm allows at its present gains; beta is their centre.

    - g is the first-order gain of velocities that are free at each state and token. g = 0 would be
      Pontryagin's condition for them. All tokens and data share the weights, so training leads
      elsewhere: to <P, v> = 0, or a little below with decay (see `attained`)
    - a is the share of the steepest allowed descent of L that the layer achieves: g = (1 - a)(H +
      <P, beta>), a = 1 at the maximiser and -1 opposite to it. It is the mean over tokens of
      cos(u_j, u*_j), weighted with |C(gamma * p_j)|; u and u* are v and the maximiser as points of
      the norm's sphere. With eps > 0, v stays inside the set and a below 1

    `measure` is "gap" or "cosine" for all segments. By default each segment has the gap if its H is
    finite, else the cosine. Raises ConfigError for the gap of a sublayer without finite H, naming
    its placement, and for an unknown measure. Theory, section 5; Kan, eq. 58 and 99.
    """
    if measure is not None and measure not in ALIGNMENTS:
        raise unknown("measure of alignment", measure, ALIGNMENTS)
    sublayers = list(depth.sublayers)
    missing = dict[str, str]()
    readings = list[PointwiseReading]()
    measures = [measure or _measure_of(sublayer) for sublayer in sublayers]
    for k, (name, sublayer, (x, p)) in enumerate(
        zip(measures, sublayers, costate.starts, strict=True)
    ):
        v = tried(missing, f"segment {k} ({sublayer.kind})", sublayer.velocity, x)
        if v is None:
            readings.append(NOTHING)
            continue
        pointwise = ALIGNMENTS[name].compare(sublayer, p, v)
        readings.append(
            pointwise._replace(velocity_norm=float(v.norm()), product=float((p * v).sum()))
        )
    columns = {
        name: [getattr(reading, name) for reading in readings] for name in PointwiseReading._fields
    }
    return MaximumPrinciple(
        form=costate.form,
        loss=costate.loss,
        **places(depth),
        measures=measures,
        costate_norm=[float(p.norm()) for _, p in costate.starts],
        drift=list(costate.drift),
        missing=missing,
        **columns,
    )


def _measure_of(sublayer: Sublayer) -> str:
    """The gap if H is finite, else the cosine."""
    if sublayer.placement.output_norm:
        return "gap"
    return "cosine"


def _against_maximizer(sublayer: Sublayer, p: TokenRows, v: TokenRows) -> PointwiseReading:
    placement = sublayer.placement
    norm = sublayer.output_norm
    if norm is None:
        raise ConfigError(
            f"placement {placement.name!r} has no output norm on its {sublayer.kind} sublayer, so"
            " H(P) = +inf and no velocity approaches it: choose the measure 'cosine', or a model"
            " of placement peri or output"
        )
    allowed = admissible_set(norm, placement)
    # v = gain * W N_out f, so H(P) is the norm's at the pulled costate
    scaled = sublayer.pulled(p)
    hamiltonian = allowed.support(scaled).sum()
    centre = (scaled @ norm.beta).sum()
    product = (p * v).sum()
    alignment: float | None = None
    if not allowed.ties(scaled).all():
        alignment = float((centre - product) / (centre + hamiltonian))
    return PointwiseReading(
        hamiltonian=float(hamiltonian), gap=float(hamiltonian + product), alignment=alignment
    )


def _against_costate(sublayer: Sublayer, p: TokenRows, v: TokenRows) -> PointwiseReading:
    bounded = sublayer.placement.output_norm or sublayer.image is not None
    # a finite H is not part of this measure; H(0) = 0
    hamiltonian: float | None
    if bounded:
        hamiltonian = None
    elif p.any():
        hamiltonian = math.inf
    else:
        hamiltonian = 0.0
    size = p.norm() * v.norm()
    alignment: float | None = None
    if size != 0:
        alignment = float(-(p * v).sum() / size)
    return PointwiseReading(hamiltonian, gap=hamiltonian, alignment=alignment)


ALIGNMENTS = {
    "gap": Alignment(
        _against_maximizer,
        "alignment is the share of the steepest descent that the velocity achieves of what its norm"
        " allows token by token",
    ),
    "cosine": Alignment(
        _against_costate, "alignment is cos(-P, v), as no norm at the output bounds velocities"
    ),
}
"""The ways to compare a velocity with the costate, by name."""

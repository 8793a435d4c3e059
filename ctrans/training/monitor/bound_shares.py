"""How near velocities come to their bounds."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from torch import nn

from ctrans.dynamics.fields import TokenBound
from ctrans.dynamics.sublayer import Sublayer
from ctrans.measure.forward.bounds import velocity_bound
from ctrans.training.monitor.sites import Sites
from ctrans.training.monitor.training_measures import GaugeAt


def bound_shares(
    sites: Sites, map_bounds: Sequence[TokenBound | None], values: Mapping[GaugeAt, list[float]]
) -> dict[GaugeAt, list[float]]:
    """The longest token of r_k over `velocity_bound`, at the weights of the pass.

    Dropout of share p in a map multiplies its bound by 1/(1 - p). No figure without a known
    bound, or for sharded weights.
    """
    shares: dict[GaugeAt, list[float]] = {}
    for site in sites.by_depth:
        sublayer = site.sublayer
        k = site.k
        map_bound = None
        if map_bounds:
            map_bound = map_bounds[k]
        bounded_behind = sublayer.output_norm is not None or sublayer.image is not None
        if not bounded_behind and map_bound is None:
            continue
        if ("longest", k) not in values:
            continue
        if any(hasattr(weight, "full_tensor") for weight in sublayer.parameters()):
            continue
        radius = values.get(("radius", k), [math.nan])[0]
        limit = velocity_bound(sublayer, radius, map_bound)
        if not bounded_behind:
            limit = dropped(sublayer) * limit
        share = math.nan
        if limit > 0:
            share = values["longest", k][0] / limit
        shares["bound_share", k] = [share]
    return shares


def dropped(sublayer: Sublayer) -> float:
    """The largest factor of dropout on the output of the sublayer's map: the product of 1/(1 - p)
    over all dropout in it.

    That is dropout modules, and attributes with such names (`attention_dropout`, `drop_prob`), in
    training mode.
    """
    factor = 1.0
    for part in sublayer.field.modules():
        if not part.training:
            continue
        shares = [
            value
            for name, value in vars(part).items()
            if "drop" in name and isinstance(value, float)
        ]
        if isinstance(part, nn.modules.dropout._DropoutNd):
            shares = [part.p, *shares]
        for share in shares:
            if 0 <= share < 1:
                factor *= 1 / (1 - share)
            else:
                factor *= math.inf
    return factor

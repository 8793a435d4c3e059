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
    for site in sites.sites:
        part = site.sublayer
        k = site.k
        if map_bounds:
            bound = map_bounds[k]
        else:
            bound = None
        known = ("longest", k) in values and not any(
            hasattr(weight, "full_tensor") for weight in part.parameters()
        )
        if not known or (part.output_norm is None and part.image is None and bound is None):
            continue
        limit = velocity_bound(part, values.get(("radius", k), [math.nan])[0], bound)
        if part.output_norm is not None or part.image is not None:
            slack = 1.0
        else:
            slack = dropped(part)
        shares["bound_share", k] = [
            values["longest", k][0] / (slack * limit) if limit > 0 else math.nan
        ]
    return shares


def dropped(sublayer: Sublayer) -> float:
    """The largest factor of dropout on the output of the sublayer's map: the product of 1/(1 - p)
    over all dropout in it.

    That is dropout modules, and attributes with such names (`attention_dropout`, `drop_prob`), in
    training mode.
    """
    factor = 1.0
    for part in sublayer.field.modules():
        if part.training:
            named = {
                name: value
                for name, value in vars(part).items()
                if "drop" in name and isinstance(value, float)
            }
            if isinstance(part, nn.modules.dropout._DropoutNd):
                shares = [part.p, *named.values()]
            else:
                shares = [*named.values()]
            for share in shares:
                if 0 <= share < 1:
                    factor *= 1 / (1 - share)
                else:
                    factor *= math.inf
    return factor

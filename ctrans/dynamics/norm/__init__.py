"""Norms with their geometry: image, support function, maximiser, tangent space, retraction and
Jacobian. The table is NORMS.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from ctrans.base.option import Count
from ctrans.dynamics.norm.boxes import Derf, DyT, SquashNorm
from ctrans.dynamics.norm.clips import ClipEntries, ClipLength, ClipNorm
from ctrans.dynamics.norm.fewer_gains import (
    L2Norm,
    PlainLayerNorm,
    PlainNorm,
    PlainRMSNorm,
    ScaleNorm,
)
from ctrans.dynamics.norm.groups import GroupRMSNorm
from ctrans.dynamics.norm.norm import Norm, check_norm
from ctrans.dynamics.norm.options import NormOptions
from ctrans.dynamics.norm.spheres import LayerNorm, RMSNorm, SphereNorm, SphereOf, WithEps
from solvers import ConfigError, look_up, shown

NORMS: dict[str, Callable[..., Norm]] = {
    "layernorm": LayerNorm,
    "rmsnorm": RMSNorm,
    "plain_layernorm": PlainLayerNorm,
    "plain_rmsnorm": PlainRMSNorm,
    "scalenorm": ScaleNorm,
    "l2norm": L2Norm,
    "group_rmsnorm": GroupRMSNorm,
    "dyt": DyT,
    "derf": Derf,
    "clip_length": ClipLength,
    "clip_entries": ClipEntries,
}
"""From name to norm, made as NORM(width, eps, bias=..., **options). A new one is one entry; models
and commands include it. Its `options` name the fields of `NormOptions` that it takes.
"""

WITHOUT_GAINS = {"layernorm": "plain_layernorm", "rmsnorm": "plain_rmsnorm"}
"""The norm that gives x_hat alone, for norms gamma * x_hat + beta: maps may have their own gains on
it.
"""


def norm_settings(
    name: str, settings: NormOptions, width: Count, heads: Count | None = None
) -> dict[str, Any]:
    """The keyword arguments of the norm besides width, eps and bias, from `settings` with the
    fields of `NormOptions`. The default of its groups is the number of heads.

    Raises ConfigError for an option that the norm does not take, with the norms that do, and for
    invalid values.
    """
    takes = _options_of(look_up("norm", name, NORMS))
    options: dict[str, Any] = {}
    if "norm_groups" in takes and heads is not None:
        options["norm_groups"] = heads
    for field in dataclasses.fields(NormOptions):
        option = field.name
        value = getattr(settings, option)
        if value is None:
            continue
        if option not in takes:
            able = ", ".join(norm for norm, maker in NORMS.items() if option in _options_of(maker))
            raise ConfigError(
                f"{option} = {shown(value)} has no meaning for norm {name!r}: leave it out, or"
                f" choose {able}"
            )
        options[option] = value
    if options:
        with torch.device("meta"):
            NORMS[name](width, **options)  # raises ConfigError for invalid values
    return options


def _options_of(maker: Callable[..., Norm]) -> frozenset[str]:
    """The fields of `NormOptions` that an entry of `NORMS` takes; none for a plain function."""
    options: frozenset[str] = getattr(maker, "options", frozenset())
    return options


def make_norm(config: NormOptions) -> Norm:
    """A new norm of the `GPTConfig`'s kind. LayerNorm has no offset if the model has no biases."""
    model: Any = config
    maker = NORMS[model.norm]
    has_offset: bool = getattr(maker, "has_offset", False)
    options = norm_settings(model.norm, model, model.width, model.heads)
    return maker(model.width, model.eps, bias=model.bias and has_offset, **options)


__all__ = [
    "NORMS",
    "WITHOUT_GAINS",
    "ClipEntries",
    "ClipLength",
    "ClipNorm",
    "Derf",
    "DyT",
    "GroupRMSNorm",
    "L2Norm",
    "LayerNorm",
    "Norm",
    "NormOptions",
    "PlainLayerNorm",
    "PlainNorm",
    "PlainRMSNorm",
    "RMSNorm",
    "ScaleNorm",
    "SphereNorm",
    "SphereOf",
    "SquashNorm",
    "WithEps",
    "check_norm",
    "make_norm",
    "norm_settings",
]

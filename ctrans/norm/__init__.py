"""Norms with their geometry: image, support function, maximiser, tangent space, retraction and
Jacobian. The table is NORMS.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ctrans.norm.boxes import Derf, DyT, SquashNorm
from ctrans.norm.clips import ClipEntries, ClipLength, ClipNorm
from ctrans.norm.fewer_gains import L2Norm, PlainLayerNorm, PlainNorm, PlainRMSNorm, ScaleNorm
from ctrans.norm.groups import GroupRMSNorm
from ctrans.norm.norm import Norm, check_norm
from ctrans.norm.options import CHECKS, NormOptions, options_taken
from ctrans.norm.spheres import LayerNorm, RMSNorm, SphereNorm, SphereOf, WithEps

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


def norm_settings(name: str, settings: Any, width: int, heads: int | None = None) -> dict[str, Any]:
    """The keyword arguments of the norm besides width, eps and bias. Raises ConfigError for options
    that it does not take, and for invalid values.
    """
    taken = options_taken(name, NORMS, settings, heads)
    return {option: CHECKS[option](value, width) for option, value in taken.items()}


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
    "norm_settings",
]

"""The key of a run in a store, and how to find a run that an older ctrans stored.

The key hashes the values of all fields of `GPTConfig` and of `TrainConfig`. It hashes values, so
that a changed default makes another run. A new field changes the keys of all runs. A stored run is
therefore found by its configuration: its own fields, and for newer fields the value in `BEFORE`,
with which ctrans does the same as before the field. That value never changes, even if a default
does.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ctrans.model.checkpoint import digest

BEFORE: dict[str, dict[str, Any]] = {
    "model": {
        "residual": "plain",
        "residual_init": None,
        "streams": None,
        "parallel_blocks": False,
        "tied": True,
        "experts": 8,
        "top_k": 2,
        "shared_experts": 0,
        "router": "topk_softmax",
        "expert": "mlp",
        "norm_groups": None,
        "norm_alpha": None,
        "norm_radius": None,
        "branch_norms": False,
        "stack_steps": None,
        "parametrisation": "standard",
        "base_width": None,
        "base_depth": None,
    },
    "training": {"balance": 0.01, "router_z": 0.001, "bias_rate": 0.0, "low_rank": 0},
}
"""The fields of `GPTConfig` ("model") and of `TrainConfig` ("training") that are newer than the
first stores. A new field needs an entry here.
"""


PLUGINS = {"digest": ""}
"""The digest of the plugins with which this process plans and finds runs; "" without plugins."""


def run_key(
    model: Mapping[str, Any],
    training: Mapping[str, Any],
    fingerprint: str,
    measure: tuple[str, ...],
    plugins: str = "",
) -> str:
    """SHA-256 of all fields, of the data's fingerprint, and of the measures and the plugins if
    there are any.
    """
    settings: dict[str, Any] = {"model": model, "training": training, "data": fingerprint}
    if measure:
        settings["measure"] = sorted(measure)
    if plugins:
        settings["plugins"] = plugins
    return digest(settings)

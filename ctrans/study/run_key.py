"""What a run is called in a store, and how it is found again when ctrans has gained options since.

A run's key hashes the value of every field of `GPTConfig` and of `TrainConfig`: values, not
defaults, so that a default that changes makes another run. A field that comes later changes the
keys of all runs. A kept run is therefore found by its configuration: the fields that it was kept
with, which its key vouches for, and for those that came since the value with which ctrans does what
it did `BEFORE` them. That value is written down once and never follows a default.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

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
    },
    "training": {"balance": 0.01, "router_z": 0.001, "bias_rate": 0.0, "low_rank": 0},
}
"""Fields of `GPTConfig` ("model") and of `TrainConfig` ("training") that came after the first
stores; a new one gets an entry here.
"""


def run_key(model: Mapping[str, Any], training: Mapping[str, Any], fingerprint: str, measure: tuple[str, ...]) -> str:
    """SHA-256 of the fields of both, of the data's fingerprint, and of what is measured where
    something is.
    """
    settings: dict[str, Any] = {"model": model, "training": training, "data": fingerprint}
    settings |= {"measure": sorted(measure)} if measure else {}
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()


def as_now(kind: str, kept: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a kept configuration with those that came since."""
    return {**BEFORE[kind], **kept}

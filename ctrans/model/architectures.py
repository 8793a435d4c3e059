"""Architectures by name, each as its differences from plain pre-LN. A new one is one entry of
`ARCHITECTURES`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from ctrans.dynamics.placement import PLACEMENTS
from solvers import look_up

PLAIN: Mapping[str, Any] = MappingProxyType({"placement": "pre"})
"""The base of all architectures: fields of `GPTConfig`; the other fields have their defaults."""

Differences = Mapping[str, Any] | Callable[[int], Mapping[str, Any]]
"""Fields of `GPTConfig`, or a function of the number of blocks that gives them."""


def _mix_ln(blocks: int) -> Mapping[str, Any]:
    """Mix-LN (arXiv 2412.13795): post in the first quarter of the blocks, pre in the others."""
    first = blocks // 4
    if first == 0:
        return {"placement": "pre"}
    return {"placement": f"post*{first}+pre*{blocks - first}"}


LLAMA = {"norm": "rmsnorm", "positions": "rotary", "ffn": "swiglu", "bias": False}
MANY_EXPERTS = {**LLAMA, "ffn": "moe", "expert": "swiglu", "experts": 16}

MODERN: dict[str, Differences] = {
    "gpt-2": {},
    "bloom": {"positions": "alibi"},
    "primer": {"activation": "relu2", "qk_norm": "layer"},
    "llama": LLAMA,
    "llama-2-70b": {**LLAMA, "kv_heads": 2},
    "mistral": {**LLAMA, "kv_heads": 2, "window": 32},
    "qwen-3": {**LLAMA, "kv_heads": 2, "qk_norm": "rms"},
    "gemma-2": {**LLAMA, "placement": "peri", "kv_heads": 2, "ffn": "geglu", "softcap": 50.0},
    "gemma-3": {
        **LLAMA,
        "placement": "peri",
        "kv_heads": 1,
        "ffn": "geglu",
        "qk_norm": "rms",
        "window": 32,
    },
    "olmo-2": {**LLAMA, "placement": "output", "qk_norm": "rms"},
    "gated-attention": {**LLAMA, "gated_output": True},
    "switch": {"ffn": "moe", "top_k": 1, "router": "softmax_topk", "activation": "relu"},
    "mixtral": {**LLAMA, "kv_heads": 2, "ffn": "moe", "expert": "swiglu"},
    "qwen-3-moe": {**MANY_EXPERTS, "kv_heads": 2, "qk_norm": "rms", "top_k": 4},
    "deepseek-moe": {**MANY_EXPERTS, "top_k": 3, "shared_experts": 1, "router": "softmax_topk"},
    "deepseek-v3": {**MANY_EXPERTS, "top_k": 3, "shared_experts": 1, "router": "sigmoid"},
    "gpt-oss": {
        **LLAMA,
        "kv_heads": 2,
        "window": 32,
        "sinks": True,
        "ffn": "moe",
        "expert": "swiglu",
    },
    "differential-transformer": {**LLAMA, "positions": "none", "attention": "differential"},
    "linear-transformer": {"attention": "linear"},
    "gated-linear-attention": {**LLAMA, "positions": "none", "attention": "gated_linear"},
}
"""Blocks of published models: their norms, placements and maps, not their sizes."""

ARCHITECTURES: dict[str, Differences] = {
    **{name: {"placement": name} for name in PLACEMENTS},
    "hybrid-norm": {"placement": "post/pre"},
    "mix-ln": _mix_ln,
    "pre-dt-0.1": {"dt": 0.1},
    "peri-dt-0.1": {"placement": "peri", "dt": 0.1},
    "pre-rmsnorm": {"norm": "rmsnorm"},
    "peri-rmsnorm": {"placement": "peri", "norm": "rmsnorm"},
    "post-rmsnorm": {"placement": "post", "norm": "rmsnorm"},
    "rotary": {"positions": "rotary"},
    "rotary-half": {"positions": "rotary", "rotary_fraction": 0.5},
    "no-positions": {"positions": "none"},
    "grouped-queries": {"kv_heads": 2},
    "multi-query": {"kv_heads": 1},
    "window": {"window": 32},
    "qk-rms": {"qk_norm": "rms"},
    "qk-layer": {"qk_norm": "layer"},
    "qk-l2": {"qk_norm": "l2"},
    "softcap": {"softcap": 50.0},
    "sinks": {"sinks": True},
    "gated-output": {"gated_output": True},
    "relu": {"activation": "relu"},
    "relu2": {"activation": "relu2"},
    "swiglu": {"ffn": "swiglu"},
    "geglu": {"ffn": "geglu"},
    "reglu": {"ffn": "reglu"},
    "moe": {"ffn": "moe"},
    "moe-shared": {"ffn": "moe", "shared_experts": 1, "router": "softmax_topk"},
    **MODERN,
}
"""Architectures by name."""

GROUPS: dict[str, Mapping[str, Differences]] = {"all": ARCHITECTURES, "modern": MODERN}
"""Names of groups of architectures."""


def differences(name: str, blocks: int) -> dict[str, Any]:
    """The fields of `GPTConfig` in which this architecture differs from `PLAIN`. Raises ConfigError
    with the nearest name for an unknown one.
    """
    entry = look_up("architecture", name, ARCHITECTURES)
    if callable(entry):
        return dict(entry(blocks))
    return dict(entry)

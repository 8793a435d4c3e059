"""Which cases of a test are run when there is little time: every value of every parameter, not all
their combinations.
"""

from collections.abc import Mapping, Sequence

SLOW_PLACES = (
    "campaigns/",
    "cli/test_signals.py",
    "interop/test_subprocess_guard.py",
    "training/monitor/test_parallel.py",
    "training/test_parallel.py",
)
"""Folders and files under tests that only `make test-all` runs: campaigns, signals, processes."""


def is_in_slow_place(path: str) -> bool:
    """Whether `path`, relative to tests, is in one of `SLOW_PLACES`."""
    return path.startswith(SLOW_PLACES)


PAPERS = ("layernorm", "rmsnorm")
"""The norms that the papers are about: with gains that tests set by hand."""


def covering(combinations: Sequence[Mapping[str, int]]) -> list[int]:
    """Places of a few combinations in which every parameter takes each of its values that it takes
    in all of them.

    Greedy: the next is the first of those that bring the most values that were not met yet.
    """
    missing = {pair for each in combinations for pair in each.items()}
    chosen = []
    while missing:
        new = [len(missing & set(each.items())) for each in combinations]
        chosen.append(new.index(max(new)))
        missing -= set(combinations[chosen[-1]].items())
    return sorted(chosen)


def evenly_spread(places: Sequence[int], count: int) -> list[int]:
    """At most `count` of the places, spread evenly, the first among them."""
    wanted = min(count, len(places))
    return [places[i * len(places) // wanted] for i in range(wanted)]


VARIANTS = {
    "rotary": {"positions": "rotary"},
    "rotary, part": {
        "positions": "rotary",
        "rotary_fraction": 0.5,
        "rotary_base": 100.0,
        "kv_heads": 1,
    },
    "alibi": {"positions": "alibi"},
    "no positions": {"positions": "none", "kv_heads": 2},
    "window": {"window": 3},
    "rms of queries and keys": {"qk_norm": "rms", "positions": "rotary"},
    "layer norm of queries and keys": {"qk_norm": "layer"},
    "unit queries and keys": {"qk_norm": "l2"},
    "softcap": {"softcap": 2.0, "window": 4, "positions": "rotary", "kv_heads": 2},
    "sinks": {"sinks": True, "kv_heads": 2, "positions": "alibi"},
    "gated output": {"gated_output": True, "positions": "rotary"},
    "gate and sinks, no bias": {"gated_output": True, "sinks": True, "bias": False, "softcap": 3.0},
    "linear": {"attention": "linear"},
    "gated linear": {"attention": "gated_linear", "bias": False, "positions": "none"},
    "differential": {"attention": "differential"},
    "swiglu": {"ffn": "swiglu"},
    "geglu": {"ffn": "geglu", "bias": False},
    "reglu": {"ffn": "reglu"},
    "squared relu": {"activation": "relu2"},
    "parallel": {"parallel_blocks": True},
    "parallel, gated": {
        "parallel_blocks": True,
        "ffn": "swiglu",
        "positions": "rotary",
        "kv_heads": 1,
        "bias": False,
    },
    "parallel, two norms": {"parallel_blocks": True, "branch_norms": True},
    "parallel, two norms, gated": {
        "parallel_blocks": True,
        "branch_norms": True,
        "norm": "rmsnorm",
        "ffn": "swiglu",
        "bias": False,
    },
    "experts": {"ffn": "moe"},
    "experts, shared": {
        "ffn": "moe",
        "experts": 6,
        "top_k": 2,
        "shared_experts": 1,
        "router": "softmax_topk",
        "bias": False,
    },
    "gated experts": {"ffn": "moe", "experts": 4, "expert": "swiglu", "router": "sigmoid"},
    "one expert a token": {"ffn": "moe", "experts": 3, "top_k": 1, "router": "softmax_topk"},
    "all experts": {"ffn": "moe", "experts": 3, "top_k": 3},
}
"""Options of the maps of tables, as changes of a configuration with four heads; each is enrolled in
tests/model/test_variants.py.
"""

RESIDUAL_CASES = {
    "layerscale, pre": ("pre", {"residual": "layerscale"}),
    "layerscale, peri": ("peri", {"residual": "layerscale", "residual_init": 1e-2}),
    "layerscale, post": ("post", {"residual": "layerscale", "norm": "rmsnorm"}),
    "rezero, pre": ("pre", {"residual": "rezero"}),
    "rezero, none": ("none", {"residual": "rezero", "residual_init": 0.5}),
    "rezero, output": ("output", {"residual": "rezero", "norm": "rmsnorm"}),
    "ngpt, post": ("post", {"residual": "ngpt", "norm": "rmsnorm"}),
    "ngpt, pre_post": ("pre_post", {"residual": "ngpt", "parallel_blocks": True}),
    "hyper-connections, pre": ("pre", {"residual": "hyper_connections", "streams": 3}),
    "hyper-connections, output": (
        "output",
        {"residual": "hyper_connections", "streams": 2, "parallel_blocks": True},
    ),
    "mhc, peri": ("peri", {"residual": "mhc", "streams": 3}),
    "mhc, none": ("none", {"residual": "mhc", "streams": 2, "norm": "rmsnorm"}),
    "layerscale, parallel": ("pre", {"residual": "layerscale", "parallel_blocks": True}),
    "depth scaled, pre": ("pre", {"residual": "depth_scaled"}),
    "depth scaled, peri": ("peri", {"residual": "depth_scaled", "norm": "rmsnorm"}),
}
"""Residuals in placements that take them; each is enrolled in tests/model/test_residuals.py."""

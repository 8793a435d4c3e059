"""Which cases of a test are run when there is little time: every value of every parameter, not all their combinations."""

from collections.abc import Mapping, Sequence

PAPERS = ("layernorm", "rmsnorm")
"""The norms that the papers are about: with gains that tests set by hand."""


def covering(combinations: Sequence[Mapping[str, int]]) -> list[int]:
    """Places of a few combinations in which every parameter takes each of its values that it takes in all of them.

    Greedy: the next is the first of those that bring the most values that were not met yet.
    """
    missing = {pair for each in combinations for pair in each.items()}
    chosen = []
    while missing:
        new = [len(missing & set(each.items())) for each in combinations]
        chosen.append(new.index(max(new)))
        missing -= set(combinations[chosen[-1]].items())
    return sorted(chosen)


VARIANTS = {
    "rotary": {"positions": "rotary"},
    "rotary, part": {"positions": "rotary", "rotary_fraction": 0.5, "rotary_base": 100.0, "kv_heads": 1},
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
}
"""Options of the maps of tables, as changes of a configuration with four heads; each is enrolled in tests/model/test_variants.py."""

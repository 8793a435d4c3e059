"""The architectures of the study of prediction, by family, and which families are sealed.

A family is what somebody would call a new architecture: one placement, one attention, one initialisation. A predictor that has seen
it at one dt knows it at another, so the split is by family. A third of them is sealed by the hash of their names: for ever the same,
and of nobody's choosing.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator, Mapping
from typing import Any

from ctrans.fields import ATTENTIONS, FFNS
from ctrans.model.config import GPTConfig
from ctrans.model.initialisation import INITIALISATIONS
from ctrans.norm import NORMS
from ctrans.placement import PLACEMENTS
from ctrans.study.description import Study
from ctrans.weights.functions_of_depth import BASES
from solvers import ConfigError
from solvers.errors import look_up

BASE: dict[str, Any] = {
    "vocab_size": 256,
    "context": 64,
    "depth": 8,
    "width": 64,
    "heads": 4,
    "embedding_std": 0.1,
    "iterations": 400,
    "batch": 16,
    "warmup": 40,
    "eval_every": 50,
    "eval_windows": 64,
    "clip": 1.0,
    "weight_decay": 0.1,
}
"""Long enough that good runs pass the plateau of single bytes' frequencies (3.3 nats)."""
REGIMES: dict[str, Mapping[str, Any]] = {"adamw": {}, "no-warmup": {"warmup": 0}, "sgd": {"optimiser": "sgd"}}
RATES: dict[str, tuple[float, ...]] = {
    "adamw": (3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1),
    "no-warmup": (3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1),
    "sgd": (1e-2, 3e-2, 1e-1, 3e-1, 1.0, 3.0),
}
"""By regime: peak learning rates, about half a decade apart."""
SEEDS = (0, 1)
SHARES = 3
"""One family of so many is sealed."""
WIDELY = ({"placement": "pre"}, {"placement": "peri"})
STEPS = (1.0, 0.1)
OPTIONS: dict[str, Mapping[str, Any]] = {
    "rotary": {"positions": "rotary"},
    "alibi": {"positions": "alibi"},
    "no positions": {"positions": "none"},
    "qk norm": {"qk_norm": "rms"},
    "window": {"window": 16},
    "softcap": {"softcap": 5.0},
    "sinks": {"sinks": True},
    "gated output": {"gated_output": True},
    "one kv head": {"kv_heads": 1},
}
Fields = dict[str, Any]


def families() -> dict[str, list[Fields]]:
    """By family, what each of its architectures has in place of `BASE`'s. Entries of the tables that need more are left out."""
    found: dict[str, list[Fields]] = {}
    for name, fields in _all():
        made = found.setdefault(name, [])
        if fields not in made and all(fields not in others for others in found.values()) and _buildable(fields):
            made.append(fields)
    return {name: made for name, made in found.items() if made}


def _all() -> Iterator[tuple[str, Fields]]:
    for placement, dt, depth in itertools.product(PLACEMENTS, (1.0, 0.3, 0.1), (4, 8)):
        yield f"placement {placement}", {"placement": placement, "dt": dt, "depth": depth}
    for kind, table, usual in (
        ("attention", ATTENTIONS, "softmax"),
        ("ffn", FFNS, "mlp"),
        ("norm", NORMS, "layernorm"),
        ("initialisation", INITIALISATIONS, "gpt2"),
        ("depth_weights", BASES, "free"),
    ):
        for name in table:
            if name != usual:
                yield from _around(f"{kind} {name}", {kind: name})
    for name, option in OPTIONS.items():
        yield from _around(f"option {name}", dict(option))


def _around(family: str, fields: Fields) -> Iterator[tuple[str, Fields]]:
    for placement, dt in itertools.product(WIDELY, STEPS):
        yield family, {**placement, "dt": dt, **fields}


def _buildable(fields: Fields) -> bool:
    model = {name: value for name, value in {**BASE, **fields}.items() if name in GPTConfig.__dataclass_fields__}
    try:
        GPTConfig(**model)
    except ConfigError:
        return False
    return True


def sealed(family: str) -> bool:
    """Whether the family is in the third that is kept for the end: by the hash of its name."""
    return int.from_bytes(hashlib.sha256(family.encode()).digest()[:8]) % SHARES == 0


def prediction_study(regime: str, *, seal: bool, budget: float | None = None) -> Study:
    """The trainings of the sealed third, or of the rest, in that regime. ConfigError for a regime that is none."""
    changes = look_up("regime", regime, REGIMES)
    cases = [fields for family, each in families().items() if sealed(family) == seal for fields in each]
    return Study("predict", {**BASE, **changes}, cases=cases, learning_rates=RATES[regime], seeds=SEEDS, budget=budget)

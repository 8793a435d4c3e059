"""The architectures of the study of prediction, by family, and which families are sealed.

A family is what somebody would call a new architecture: one placement, one attention, one
initialisation. A predictor that has seen it at one dt knows it at another, so the split is by
family: the third of them whose names have the lowest hashes is sealed, which is nobody's choosing.
The list was frozen in `architectures.json` before anything was trained; what the tables gain later
is outside of what was studied.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ctrans.base.given_files import read_json
from ctrans.dynamics.fields import ATTENTIONS, FFNS
from ctrans.dynamics.norm import NORMS
from ctrans.dynamics.placement import PLACEMENTS
from ctrans.dynamics.residual import RESIDUALS
from ctrans.dynamics.weights.functions_of_depth import BASES
from ctrans.model.config import GPTConfig
from ctrans.model.initialisation import INITIALISATIONS
from ctrans.study.description import Study
from solvers import ConfigError
from solvers.errors import look_up

FILE = Path(__file__).parent / "architectures.json"
BASE: dict[str, Any] = {
    "vocab_size": 256,
    "context": 64,
    "depth": 6,
    "width": 64,
    "heads": 4,
    "embedding_std": 0.1,
    "iterations": 200,
    "batch": 4,
    "warmup": 20,
    "eval_every": 100,
    "eval_windows": 64,
    "clip": 1.0,
    "weight_decay": 0.1,
}
"""Long enough that good runs pass the plateau of single bytes' frequencies (3.3 nats): `pre` at dt
1 ends at 2.4.
"""
REGIMES: dict[str, Mapping[str, Any]] = {
    "adamw": {},
    "no-warmup": {"warmup": 0},
    "sgd": {"optimiser": "sgd"},
}
RATES: dict[str, tuple[float, ...]] = {
    "adamw": (1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 3e-1),
    "no-warmup": (1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 3e-1),
    "sgd": (1e-2, 3e-2, 1e-1, 3e-1, 1.0, 3.0),
}
"""By regime: peak learning rates, about half a decade apart."""
SEEDS = (0, 1)
SHARE = 1 / 3
"""Of the families, how many are sealed."""
WIDELY = ({"placement": "pre", "dt": 1.0}, {"placement": "peri", "dt": 0.3})
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
    "parallel blocks": {"parallel_blocks": True},
    "relu": {"activation": "relu"},
    "depth 2": {"depth": 2},
    "depth 16": {"depth": 16},
    "width 32": {"width": 32},
    "width 128": {"width": 128},
    "embedding 0.02": {"embedding_std": 0.02},
    "embedding 1": {"embedding_std": 1.0},
    "temperature 0.1": {"temperature": 0.1},
    "ngpt": {"placement": "post", "norm": "l2norm", "residual": "ngpt"},
}
MIXED: dict[str, str] = {
    "mix-ln": "post*2+pre*4",
    "hybrid": "pre/post",
}
"""Placements by block or by sublayer."""
Fields = dict[str, Any]


@functools.cache
def families() -> dict[str, list[Fields]]:
    """By family, what each of its architectures has in place of `BASE`'s."""
    return {family: each["architectures"] for family, each in _frozen().items()}


def sealed(family: str) -> bool:
    """Whether the family is in the third that is kept for the end."""
    return bool(_frozen()[family]["sealed"])


@functools.cache
def _frozen() -> dict[str, dict[str, Any]]:
    return read_json(FILE)  # type: ignore[no-any-return]


def drawn() -> dict[str, dict[str, Any]]:
    """What `architectures.json` would be if it were made of today's tables. Entries of the tables
    that need more are left out.
    """
    found: dict[str, list[Fields]] = {}
    for name, fields in _all():
        made = found.setdefault(name, [])
        if (
            fields not in made
            and all(fields not in others for others in found.values())
            and _buildable(fields)
        ):
            made.append(fields)
    found = {name: made for name, made in found.items() if made}
    kept = sorted(found, key=lambda family: hashlib.sha256(family.encode()).digest())[
        : math.ceil(SHARE * len(found))
    ]
    return {
        family: {"sealed": family in kept, "architectures": each} for family, each in found.items()
    }


def _all() -> Iterator[tuple[str, Fields]]:
    for placement, dt in itertools.product(PLACEMENTS, (1.0, 0.3, 0.1)):
        yield f"placement {placement}", {"placement": placement, "dt": dt}
    for name, placement in MIXED.items():
        for dt in (1.0, 0.3):
            yield f"placement {name}", {"placement": placement, "dt": dt}
    for kind, table, usual in (
        ("attention", ATTENTIONS, "softmax"),
        ("ffn", FFNS, "mlp"),
        ("norm", NORMS, "layernorm"),
        ("residual", RESIDUALS, "plain"),
        ("initialisation", INITIALISATIONS, "gpt2"),
        ("depth_weights", BASES, "free"),
    ):
        for name in table:
            if name != usual:
                yield from _around(f"{kind} {name}", {kind: name})
    for name, option in OPTIONS.items():
        yield from _around(f"option {name}", dict(option))


def _around(family: str, fields: Fields) -> Iterator[tuple[str, Fields]]:
    for usual in WIDELY:
        yield family, {**usual, **fields}


def _buildable(fields: Fields) -> bool:
    model = {
        name: value
        for name, value in {**BASE, **fields}.items()
        if name in GPTConfig.__dataclass_fields__
    }
    try:
        GPTConfig(**model)
    except ConfigError:
        return False
    return True


def prediction_study(regime: str, *, seal: bool, budget: float | None = None) -> Study:
    """The trainings of the sealed third, or of the rest, in that regime. ConfigError for an unknown
    regime.
    """
    changes = look_up("regime", regime, REGIMES)
    cases = [
        fields for family, each in families().items() if sealed(family) == seal for fields in each
    ]
    return Study(
        "predict",
        {**BASE, **changes},
        cases=cases,
        learning_rates=RATES[regime],
        seeds=SEEDS,
        budget=budget,
    )


if __name__ == "__main__":
    print(json.dumps(drawn(), indent=1))

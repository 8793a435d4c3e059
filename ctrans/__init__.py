"""ctrans: a stability laboratory for deep Transformers. Depth is time: attention and FFN are the fields of a switched ODE.

The names below are imported when first asked for, so that `import ctrans` and `ctrans --help` stay quick.
"""

from __future__ import annotations

import importlib
from typing import Any

_HOMES = {
    "GPT": "ctrans.model.gpt",
    "GPTConfig": "ctrans.model.config",
    "Depth": "ctrans.depth",
    "Sublayer": "ctrans.sublayer",
    "Attention": "ctrans.fields",
    "FeedForward": "ctrans.fields",
    "LayerNorm": "ctrans.norm",
    "RMSNorm": "ctrans.norm",
    "PLACEMENTS": "ctrans.placement",
    "ODEBlock": "ctrans.ode_block",
    "ConfigError": "solvers",
    "SolveError": "solvers",
}
__all__ = list(_HOMES)
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'ctrans' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)

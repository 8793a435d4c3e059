"""ctrans: a stability laboratory for deep Transformers. Depth is time: attention and FFN are the
fields of a switched ODE.

The names below are imported on first use, so that `import ctrans` and `ctrans --help` are quick.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # the same names, for type checkers and editors
    from ctrans.analysis import diagnose, screen, simulate
    from ctrans.control.certificate import certify
    from ctrans.control.costate import costate
    from ctrans.depth import Depth
    from ctrans.fields import ATTENTIONS, FFNS, Attention, FeedForward
    from ctrans.interop import from_nanogpt, from_transformers, open_model
    from ctrans.model.checkpoint import load, save
    from ctrans.model.config import GPTConfig
    from ctrans.model.gpt import GPT
    from ctrans.monitor import Monitor, largest_rate
    from ctrans.norm import LayerNorm, RMSNorm
    from ctrans.ode_block import ODEBlock
    from ctrans.placement import PLACEMENTS
    from ctrans.scheme import Scheme
    from ctrans.stability.diagnosis.low_precision import low_precision
    from ctrans.sublayer import Sublayer
    from ctrans.training.settings import TrainConfig
    from ctrans.training.train import resume, train
    from solvers import ConfigError, SolveError

_HOMES = {
    "ATTENTIONS": "ctrans.fields",
    "Attention": "ctrans.fields",
    "ConfigError": "solvers",
    "Depth": "ctrans.depth",
    "FFNS": "ctrans.fields",
    "FeedForward": "ctrans.fields",
    "GPT": "ctrans.model.gpt",
    "GPTConfig": "ctrans.model.config",
    "LayerNorm": "ctrans.norm",
    "Monitor": "ctrans.monitor",
    "ODEBlock": "ctrans.ode_block",
    "PLACEMENTS": "ctrans.placement",
    "RMSNorm": "ctrans.norm",
    "Scheme": "ctrans.scheme",
    "SolveError": "solvers",
    "Sublayer": "ctrans.sublayer",
    "TrainConfig": "ctrans.training.settings",
    "certify": "ctrans.control.certificate",
    "costate": "ctrans.control.costate",
    "diagnose": "ctrans.analysis",
    "from_nanogpt": "ctrans.interop",
    "from_transformers": "ctrans.interop",
    "largest_rate": "ctrans.monitor",
    "load": "ctrans.model.checkpoint",
    "low_precision": "ctrans.stability.diagnosis.low_precision",
    "open_model": "ctrans.interop",
    "resume": "ctrans.training.train",
    "save": "ctrans.model.checkpoint",
    "screen": "ctrans.analysis",
    "simulate": "ctrans.analysis",
    "train": "ctrans.training.train",
}
"""The module of each name. A test compares it with the imports above."""
__version__ = "0.3.0"
__all__ = [
    "ATTENTIONS",
    "FFNS",
    "GPT",
    "PLACEMENTS",
    "Attention",
    "ConfigError",
    "Depth",
    "FeedForward",
    "GPTConfig",
    "LayerNorm",
    "Monitor",
    "ODEBlock",
    "RMSNorm",
    "Scheme",
    "SolveError",
    "Sublayer",
    "TrainConfig",
    "certify",
    "costate",
    "diagnose",
    "from_nanogpt",
    "from_transformers",
    "largest_rate",
    "load",
    "low_precision",
    "open_model",
    "resume",
    "save",
    "screen",
    "simulate",
    "train",
]


if not TYPE_CHECKING:  # otherwise a type checker would accept any name

    def __getattr__(name: str) -> Any:
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = globals()[name] = getattr(importlib.import_module(_HOMES[name]), name)
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})

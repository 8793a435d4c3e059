"""ctrans: a stability laboratory for deep Transformers. Depth is time: attention and FFN are the
fields of a switched ODE.

The names below are imported on first use, so that `import ctrans` and `ctrans --help` are quick.
"""

from __future__ import annotations

import importlib
import inspect
from typing import TYPE_CHECKING, Any

from ctrans.base import old_names

if TYPE_CHECKING:  # the same names, for type checkers and editors
    from ctrans.control.certificate import certify
    from ctrans.dynamics.depth import Depth
    from ctrans.dynamics.fields import ATTENTIONS, FFNS, Attention, FeedForward
    from ctrans.dynamics.norm import LayerNorm, RMSNorm
    from ctrans.dynamics.ode_block import ODEBlock
    from ctrans.dynamics.placement import PLACEMENTS
    from ctrans.dynamics.scheme import Scheme
    from ctrans.dynamics.sublayer import Sublayer
    from ctrans.examine.analysis import compare, costate, diagnose, screen, simulate
    from ctrans.examine.diagnosis.low_precision import low_precision
    from ctrans.interop.hugging_face import from_transformers
    from ctrans.interop.nanogpt import from_nanogpt
    from ctrans.interop.open_model import open_model
    from ctrans.model.checkpoint import load, save
    from ctrans.model.config import GPTConfig
    from ctrans.model.gpt import GPT
    from ctrans.training.monitor.monitor import Monitor
    from ctrans.training.settings import TrainConfig
    from ctrans.training.train import resume, train
    from solvers import ConfigError, SolveError

_HOMES = {
    "ATTENTIONS": "ctrans.dynamics.fields",
    "Attention": "ctrans.dynamics.fields",
    "ConfigError": "solvers",
    "Depth": "ctrans.dynamics.depth",
    "FFNS": "ctrans.dynamics.fields",
    "FeedForward": "ctrans.dynamics.fields",
    "GPT": "ctrans.model.gpt",
    "GPTConfig": "ctrans.model.config",
    "LayerNorm": "ctrans.dynamics.norm",
    "Monitor": "ctrans.training.monitor.monitor",
    "ODEBlock": "ctrans.dynamics.ode_block",
    "PLACEMENTS": "ctrans.dynamics.placement",
    "RMSNorm": "ctrans.dynamics.norm",
    "Scheme": "ctrans.dynamics.scheme",
    "SolveError": "solvers",
    "Sublayer": "ctrans.dynamics.sublayer",
    "TrainConfig": "ctrans.training.settings",
    "certify": "ctrans.control.certificate",
    "compare": "ctrans.examine.analysis",
    "costate": "ctrans.examine.analysis",
    "diagnose": "ctrans.examine.analysis",
    "from_nanogpt": "ctrans.interop.nanogpt",
    "from_transformers": "ctrans.interop.hugging_face",
    "load": "ctrans.model.checkpoint",
    "low_precision": "ctrans.examine.diagnosis.low_precision",
    "open_model": "ctrans.interop.open_model",
    "resume": "ctrans.training.train",
    "save": "ctrans.model.checkpoint",
    "screen": "ctrans.examine.analysis",
    "simulate": "ctrans.examine.analysis",
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
    "compare",
    "costate",
    "diagnose",
    "from_nanogpt",
    "from_transformers",
    "load",
    "low_precision",
    "open_model",
    "resume",
    "save",
    "screen",
    "simulate",
    "train",
]


_REMOVED = {"largest_rate": "examples/largest_rate.py has the search"}
"""Names of version 0.3 that are gone, and what to use."""

if not TYPE_CHECKING:  # otherwise a type checker would accept any name

    def __getattr__(name: str) -> Any:
        if name in _REMOVED:
            raise AttributeError(f"ctrans.{name} was removed: {_REMOVED[name]}")
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(_HOMES[name]), name)
        if inspect.isfunction(value):  # checked where a user calls, and nowhere inside
            value = importlib.import_module("solvers").checked(value, face=__name__)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})


old_names.install()

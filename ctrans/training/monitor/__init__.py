"""Watches a running training: gauges from its own passes, probes on a held batch, alarms with
fixes, and a log.

`TrainerCallback` needs transformers, `LightningCallback` needs lightning. The import happens at the
first use of the name.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from ctrans.training.monitor.alarms import ALARMS
from ctrans.training.monitor.log import MonitorLog, read_log
from ctrans.training.monitor.monitor import Monitor
from ctrans.training.monitor.reactions import REACTIONS
from ctrans.training.monitor.training_measures import GAUGES
from solvers import checked

if TYPE_CHECKING:
    from ctrans.training.monitor.lightning import LightningCallback
    from ctrans.training.monitor.trainer import TrainerCallback

__all__ = [
    "ALARMS",
    "GAUGES",
    "REACTIONS",
    "LightningCallback",
    "Monitor",
    "MonitorLog",
    "TrainerCallback",
    "read_log",
]
_HOMES = {
    "LightningCallback": "ctrans.training.monitor.lightning",
    "TrainerCallback": "ctrans.training.monitor.trainer",
}

globals()["read_log"] = checked(read_log, face=__name__)  # checked where a user calls

if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name not in _HOMES:
            raise AttributeError(f"module 'ctrans.training.monitor' has no attribute {name!r}")
        return getattr(importlib.import_module(_HOMES[name]), name)

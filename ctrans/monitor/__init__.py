"""Watches a running training: gauges from its own passes, probes on a held batch, alarms with
fixes, and a log.

`TrainerCallback` needs transformers, `LightningCallback` needs lightning. The import happens at the
first use of the name.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from ctrans.monitor.alarms import ALARMS
from ctrans.monitor.gauge_table import GAUGES
from ctrans.monitor.log import MonitorLog, read_log
from ctrans.monitor.monitor import Monitor
from ctrans.monitor.rate_sweep import RateSweep, largest_rate
from ctrans.monitor.reactions import REACTIONS

if TYPE_CHECKING:
    from ctrans.monitor.lightning import LightningCallback
    from ctrans.monitor.trainer import TrainerCallback

__all__ = [
    "ALARMS",
    "GAUGES",
    "REACTIONS",
    "LightningCallback",
    "Monitor",
    "MonitorLog",
    "RateSweep",
    "TrainerCallback",
    "largest_rate",
    "read_log",
]
_HOMES = {"LightningCallback": "ctrans.monitor.lightning", "TrainerCallback": "ctrans.monitor.trainer"}

if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name not in _HOMES:
            raise AttributeError(f"module 'ctrans.monitor' has no attribute {name!r}")
        return getattr(importlib.import_module(_HOMES[name]), name)

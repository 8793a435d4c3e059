"""A training watched while it runs: gauges from its own passes, probes on a held batch, alarms with what helps, a log."""

from ctrans.monitor.alarms import ALARMS, Alarm, Rule
from ctrans.monitor.gauges import GAUGES
from ctrans.monitor.log import MonitorLog, read_log
from ctrans.monitor.monitor import Monitor
from ctrans.monitor.reactions import REACTIONS

__all__ = ["ALARMS", "GAUGES", "REACTIONS", "Alarm", "Monitor", "MonitorLog", "Rule", "read_log"]

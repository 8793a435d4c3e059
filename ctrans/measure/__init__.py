"""What ctrans measures: the table of measures, limits and findings, and the table of a result.

`MEASURES` has the entries of the modules that are imported: a room adds its own when it is used.
"""

from ctrans.measure.findings import Check, Finding
from ctrans.measure.measured import Measured, Value
from ctrans.measure.measures import MEASURES, Measure

__all__ = ["MEASURES", "Check", "Finding", "Measure", "Measured", "Value"]

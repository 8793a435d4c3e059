"""What a monitor's log holds of a training, as one table: its last report by depth, and the figures
of the whole run over the steps.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ctrans.base.from_json import from_json
from ctrans.measure.findings import Finding
from ctrans.measure.measured import Answer, Measured, Value, along_depth
from ctrans.measure.measures import MEASURES


def measured(run: Mapping[str, Any]) -> Measured:
    """The table of the result of `ctrans watch`."""
    name = str(run["log"].model)
    counts = len(run["findings"])
    plural = "" if counts == 1 else "s"
    answer = Answer(f"{len(run['steps'])} reports, {counts} finding{plural}.")
    findings = [from_json(Finding, finding) for finding in run["findings"]]
    return Measured(
        values=tuple(_values(name, run)),
        missing={name: dict(run["missing"])} if run["missing"] else {},
        answers=(answer,),
        findings={name: findings} if findings else {},
        notes={name: run["remarks"]} if run.get("remarks") else {},
    )


def _values(model: str, run: Mapping[str, Any]) -> Iterator[Value]:
    for measure, figures in run["last"].items():
        if measure not in MEASURES:
            continue
        if isinstance(figures, list):
            yield from along_depth(model, measure, figures)
    over_time = run["history"]["over_time"]
    for measure, series in over_time.items():
        for step, figure in zip(run["steps"], series, strict=False):
            if figure is not None:
                yield Value(model, measure, float(figure), step=step)

"""How a diagnosis is shown: findings in words, the most severe first, and a picture of how far each quantity is outside by depth."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import TwoSlopeNorm
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from rich.markup import escape
from rich.table import Table

from ctrans.findings import Finding, in_words
from ctrans.report.axes import count_in_whole_numbers, title_above
from ctrans.stability.diagnosis import words
from ctrans.stability.diagnosis.diagnose import Diagnosis
from ctrans.stability.diagnosis.diagnostic_checks import CHECKS

FIRST = 3
"""So many findings open the page of a screening."""
COLOURS = "RdBu_r"
REACH = 3.0
"""Powers of ten from a limit at which the picture's colours end."""


def summary(name: str, diagnosis: Diagnosis) -> str:
    """How many findings there are, or that there is none."""
    return escape(words.summary(name, diagnosis))


def findings_table(diagnosis: Diagnosis) -> Table:
    """A paragraph for each finding, which any width holds."""
    table = Table.grid(padding=(0, 1, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for i, finding in enumerate(diagnosis.findings, 1):
        table.add_row(f"{i}.", f"[bold]{escape(finding.check)}[/bold] ({finding.severity})")
        for word, text in in_words(dataclasses.asdict(finding)).items():
            table.add_row(word, escape(text))
        table.add_row("", "")
    return table


def not_looked_at(diagnosis: Diagnosis) -> str:
    """What is close to its limits, and what could not be looked at and why, a line each; empty where there is neither."""
    return escape("\n".join([*words.close_to_limits(diagnosis), *words.not_looked_at(diagnosis)]))


def first_findings(diagnosis: Diagnosis) -> str:
    """The first findings in a line each, with what helps: how the page of a screening opens."""
    if diagnosis.healthy:
        return escape(words.summary("diagnosis", diagnosis))
    lines = [
        f"{i}. {s.check} ({s.severity}): {s.place}: {s.figure}.{_more(s)} Fix: {s.remediation}"
        for i, s in enumerate(diagnosis.findings[:FIRST], 1)
    ]
    rest = len(diagnosis.findings) - FIRST
    lines += [f"and {rest} more: ctrans diagnose shows all"] if rest > 0 else []
    return escape("\n".join(["diagnosis, the most severe first (ctrans diagnose says more):", *lines]))


def _more(finding: Finding) -> str:
    others = max(0, len(finding.places) - 1)
    return f" So at {others} more place{'s' * (others > 1)}." if others else ""


def diagnosis_figure(diagnoses: Mapping[str, Diagnosis], title: str) -> Figure:
    """By model, a row for each kind of finding that has figures by segment: how many powers of ten they are inside or outside of their
    limits; a cross marks what is outside.
    """
    rows = {name: _rows(diagnosis) for name, diagnosis in diagnoses.items()}
    heights = [max(1, len(each)) for each in rows.values()]
    figure = Figure(figsize=(11, 1.2 + 0.36 * sum(heights) + 0.7 * len(rows)), layout="constrained")
    panels = figure.subplots(len(rows), 1, squeeze=False, height_ratios=heights)[:, 0]
    shades = TwoSlopeNorm(0.0, -REACH, REACH)
    image: AxesImage | None = None
    for axes, (name, each) in zip(panels, rows.items(), strict=True):
        axes.set_title(name, loc="left")
        image = _draw(axes, each, shades) or image
    if image is not None:
        figure.colorbar(image, ax=list(panels), label="powers of ten beyond the limit (cross: outside)", aspect=40)
    title_above(figure, title)
    return figure


def _rows(diagnosis: Diagnosis) -> dict[str, dict[int, float]]:
    """By ailment, the farthest excess of each segment."""
    found: dict[str, dict[int, float]] = {}
    for name, ailment in CHECKS.items():
        for reading in diagnosis.readings.get(ailment.quantity, []):
            if reading.segment is not None and not math.isnan(reading.value):
                row = found.setdefault(name, {})
                row[reading.segment] = max(row.get(reading.segment, -math.inf), ailment.excess(reading.value))
    return found


def _draw(axes: Axes, rows: Mapping[str, Mapping[int, float]], shades: TwoSlopeNorm) -> AxesImage | None:
    if not rows:
        axes.set(xticks=[], yticks=[])
        return None
    columns = 1 + max(segment for row in rows.values() for segment in row)
    values = np.full((len(rows), columns), np.nan)
    for i, row in enumerate(rows.values()):
        for segment, excess in row.items():
            values[i, segment] = np.clip(excess, -REACH, REACH)
            if excess > 0:
                axes.plot(segment, i, "x", color="black", markersize=6)
    image = axes.imshow(values, aspect="auto", cmap=COLOURS, norm=shades, interpolation="nearest")
    axes.set(yticks=range(len(rows)), yticklabels=list(rows), xlabel="segment")
    count_in_whole_numbers(axes)
    return image

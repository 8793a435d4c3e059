"""The chart of `ctrans hjb-check`: the best value of a layer against a bound on its weights."""

from __future__ import annotations

import math
from collections.abc import Mapping

from ctrans.control.model_check import ModelCheck
from ctrans.examine.certified import checks_in, name_of
from ctrans.report.sections import Chapter, JSONObject, Line, Plot


def chapter(result: JSONObject) -> Chapter:
    """Growth with the weights, at the segment with the largest costate. Of several norms it is that
    of the first: the others' charts look alike.
    """
    checks = checks_in(result)
    first = [growth_chart(norm, row, norms=len(checks)) for norm, row in checks.items()][:1]
    return Chapter("Growth with the weights", first, picture="hjb-check")


def growth_chart(norm: str, checks: Mapping[str, ModelCheck], *, norms: int = 1) -> Plot:
    """The best value with |W|_F <= R against R."""
    lines = [
        line
        for placement, check in checks.items()
        for line in _lines(name_of(norm, placement, norms), check)
    ]
    return Plot(
        f"Best rate of a layer, {norm}",
        "bound on the last linear map's weights, R/R_0",
        "how fast the loss could fall, less any penalty",
        lines,
        "Of the Transformer's step. Found by search: solid. By formula: dashed. A curve that levels"
        " off is bounded; one that grows with R is not. R_0 makes the best velocity out of the"
        " features. Gains are as they are.",
        log_x=True,
    )


def _lines(name: str, check: ModelCheck) -> list[Line]:
    """What a search found, and where it is finite what the formula says."""
    segment = check.largest
    certificate = segment.step or segment.certificate
    growth = certificate.growth
    lines = []
    radii = [0.01, 100.0]
    share = [0.01, 100.0]
    if growth is not None:
        points = [
            (radius, value)
            for radius, value in zip(growth.radii, growth.values, strict=True)
            if 0 < radius < math.inf
        ]
        if not points:
            return []
        radii = [radius for radius, _ in points]
        middle = math.exp((math.log(radii[0]) + math.log(radii[-1])) / 2)
        share = [radius / middle for radius in radii]
        lines.append(Line(name, share, [value for _, value in points], check.placement))
    if segment.slope is None or segment.step is not None:
        bound = [certificate.hamiltonian for _ in radii]
    else:
        bound = [segment.slope * radius for radius in radii]
    if math.isfinite(bound[0]):
        lines.append(Line(name, share, bound, check.placement, bound=True))
    return lines

"""The charts of measured values: titles, units and formulas come from the table of measures."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import replace

from ctrans.measure.findings import Check
from ctrans.measure.measured import Measured, Value
from ctrans.measure.measures import MEASURES, Measure
from ctrans.report.sections import ColouredText, Line, Plot, Token, digits, finite
from ctrans.report.token_colours import colours, visible

REACH = 3.0
"""Powers of ten from a limit at which charts are cut off."""
UNKNOWN_MEASURE = Measure(formula="", measured_by="a result of another version")
"""Stands for a measure that is not in the table, such as one of a plugin that is not loaded."""
BY_DEPTH = ("state", "sublayer")
AXES = {"state": "segments done", "sublayer": "segment", "head": "head, counted through the depth"}
"""What the axis of a chart counts, by scope."""


def known_measure(name: str) -> Measure:
    """The entry of a measure."""
    return MEASURES.get(name, UNKNOWN_MEASURE)


def of_scope(measures: Collection[str], *scopes: str) -> list[str]:
    """Those measures whose figures are of a model, a state, a sublayer, a head, a token or a size,
    in the order of the table of measures.
    """
    present = set(measures)
    ordered = [name for name in MEASURES if name in present]
    unknown = [name for name in measures if name not in MEASURES]
    return [name for name in (*ordered, *unknown) if known_measure(name).scope in scopes]


def charts(
    measured: Measured, *, detail: bool, picture: str | None = None
) -> list[Plot | ColouredText]:
    """A chart for each measure that has a figure at several places, with the measures that are
    bounds on it dashed. `picture` chooses those of one PNG file.
    """
    names = [name for name in measured.measures if picture in (None, known_measure(name).picture)]
    drawn: list[Plot | ColouredText] = []
    if not detail:
        drawn += [*_coloured_texts(measured, names), *_points(measured, names)]
    for name in of_scope(names, *BY_DEPTH, "size", "head"):
        measure = known_measure(name)
        is_bound = measure.bounds in measured.measures
        if not measure.charted or is_bound or measure.detail != detail:
            continue
        lines = [*_lines(measured, name), *_bound_lines(measured, name)]
        lines = [line for line in lines if len(line.x) > 1 and finite(line.y)]
        if lines:
            drawn.append(_chart(measured, name, lines))
    return drawn


def _bound_lines(measured: Measured, name: str) -> list[Line]:
    """The lines of the bounds on a measure."""
    return [
        replace(line, bound=True)
        for bound in measured.measures
        if known_measure(bound).bounds == name and not known_measure(bound).end
        for line in _lines(measured, bound)
    ]


def _coloured_texts(measured: Measured, names: Sequence[str]) -> list[ColouredText]:
    """Tokens in the colours of a figure, for each measure of tokens and each model."""
    texts = []
    for name in of_scope(names, "token"):
        for model in measured.models:
            values = measured.of(name, model)
            if values:
                texts.append(_coloured_text(f"{model}: {MEASURES.title(name)}", name, values))
    return texts


def _coloured_text(title: str, name: str, values: Sequence[Value]) -> ColouredText:
    figures = [-math.inf if value.value is None else value.value for value in values]
    finite_values = sorted(figure for figure in figures if math.isfinite(figure))
    scale = "no token reaches it"
    if finite_values:
        scale = f"{digits(finite_values[0])} to {digits(finite_values[-1])}"
    tokens = [
        Token(visible(value.place), colour, digits(figure))
        for value, colour, figure in zip(values, colours(figures), figures, strict=True)
    ]
    return ColouredText(f"{title}, {scale}", tokens, known_measure(name).formula)


def _points(measured: Measured, names: Sequence[str]) -> list[Plot]:
    """Points in a plane, for each measure that is drawn against another, and each model."""
    plots = []
    for name in names:
        measure = known_measure(name)
        if not measure.against:
            continue
        for model in measured.models:
            values = measured.of(name, model)
            line = Line(
                model,
                [value.value or 0.0 for value in measured.of(measure.against, model)],
                [value.value for value in values],
                measured.styles.get(model),
                shade=[float(value.depth or 0) for value in values],
            )
            x = known_measure(measure.against).unit or measure.against
            title = f"{model}: {MEASURES.title(name)}"
            if values:
                plots.append(
                    Plot(title, x, measure.unit, [line], measure.formula, log=False, kind="points")
                )
    return plots


def _chart(measured: Measured, name: str, lines: list[Line]) -> Plot:
    measure = known_measure(name)
    title = MEASURES.title(name)
    if measure.scope == "size":
        axis = measure.over
    elif measure.scope == "state" and "times" in measured.measures:
        axis = "depth-time t"
    else:
        axis = AXES[measure.scope]
    return Plot(
        title[:1].upper() + title[1:],
        axis,
        measure.unit or title,
        [*lines, *_slope_lines(measure, lines)],
        measure.formula,
        log=measure.log,
        log_x=measure.log_x,
        kind=measure.drawn,
        events=_named_sizes(measured, name),
        limits=_limits(measure),
    )


def _limits(measure: Measure) -> tuple[float | None, float | None]:
    """The limits of a measure, the narrowest of several; None where it has none. A note is worth
    knowing, and no limit.
    """
    checks = [check for check in measure.checks.values() if check.severity != "note"]
    lows = finite([check.low for check in checks])
    highs = finite([check.high for check in checks])
    return max(lows, default=None), min(highs, default=None)


def _slope_lines(measure: Measure, lines: Sequence[Line]) -> list[Line]:
    """The line of the slope that theory says, through the middle of the last points."""
    if measure.slope is None:
        return []
    ends = [
        (x, y)
        for line in lines
        for x, y in zip(line.x[-1:], line.y[-1:], strict=True)
        if y is not None and 0 < y < math.inf
    ]
    if not ends:
        return []
    middle_x = math.exp(sum(math.log(x) for x, _ in ends) / len(ends))
    middle_y = math.exp(sum(math.log(y) for _, y in ends) / len(ends))
    x = sorted({at for line in lines for at in line.x})
    y = [middle_y * (at / middle_x) ** measure.slope for at in x]
    return [Line(f"slope {measure.slope:g}", x, y, bound=True, predicted=True, local=True)]


def _named_sizes(measured: Measured, name: str) -> list[tuple[float, str]]:
    """The sizes along a logarithmic axis that have a name: the words of their values."""
    if not known_measure(name).log_x:
        return []
    words: dict[float, dict[str, None]] = {}
    for value in measured.of(name):
        if value.words and value.step is not None:
            words.setdefault(float(value.step), {})[value.words] = None
    return [(step, "; ".join(names)) for step, names in words.items()]


def _lines(measured: Measured, name: str) -> list[Line]:
    """A line for each model that has the measure, with the ends of its interval where they are
    measured.
    """
    ends = {
        known_measure(end).end: end
        for end in measured.measures
        if known_measure(end).bounds == name and known_measure(end).end
    }
    lines = []
    for model in measured.models:
        values = measured.of(name, model)
        if values:
            line = Line(
                model,
                _places(measured, name, model),
                [value.value for value in values],
                measured.styles.get(model),
                low=measured.series(ends["low"], model) if "low" in ends else (),
                high=measured.series(ends["high"], model) if "high" in ends else (),
            )
            lines.append(line)
    return lines


def _places(measured: Measured, name: str, model: str) -> list[float]:
    """Where the values of a measure stand along the axis of its chart."""
    values = measured.of(name, model)
    scope = known_measure(name).scope
    if scope == "size":
        return [float(value.step or 0) for value in values]
    if scope == "head":
        return [float(head) for head in range(len(values))]
    depths = [value.depth or 0 for value in values]
    times = _times(measured, model) if scope == "state" else {}
    return [float(times.get(depth, depth)) for depth in depths]


def _times(measured: Measured, model: str) -> dict[int, float]:
    """The depth-time of each state of a model, where the result says it."""
    return {
        value.depth: value.value
        for value in measured.of("times", model)
        if value.depth is not None and value.value is not None
    }


def distances(measured: Measured) -> list[Plot]:
    """By check and segment, how many powers of ten the worst value is beyond its limit."""
    plots = []
    meaning = (
        f"Above 0 is outside of the limit. Distances of more than {REACH:g} powers of ten are drawn"
        f" as {REACH:g}."
    )
    for model in measured.models:
        lines = []
        for name in measured.measures:
            for word, check in known_measure(name).checks.items():
                worst = _worst_excess(check, name, measured.of(name, model))
                if worst:
                    depths = sorted(worst)
                    figures = [worst[depth] for depth in depths]
                    lines.append(Line(word, depths, figures, local=True))
        if lines:
            title = f"{model}: distance from the limits"
            axis = "powers of ten beyond the limit"
            plots.append(
                Plot(title, "segment or block", axis, lines, meaning, log=False, limits=(None, 0.0))
            )
    return plots


def _worst_excess(check: Check, name: str, values: Sequence[Value]) -> dict[float, float]:
    """By segment or block, how far beyond the limit the worst value is, within `REACH`. A state
    counts for the segment at whose end it is, and X_0 for none.
    """
    worst: dict[float, float] = {}
    first = 0
    if known_measure(name).scope == "state":
        first = 1
    if check.low == -math.inf and check.high == math.inf:
        return worst
    for value in values:
        if value.depth is None or value.value is None or math.isnan(value.value):
            continue
        segment = value.depth - first
        if segment < 0:
            continue
        excess = min(REACH, max(-REACH, check.excess(value.value)))
        worst[segment] = max(excess, worst.get(segment, -REACH))
    return worst

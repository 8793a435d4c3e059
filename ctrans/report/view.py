"""How measured values are shown: the answer, the findings, a chart for each measure, tables, and
how to read them.

Every command's result is shown by `view` alone. Titles, units and formulas come from the table of
measures. Two results have code of their own beside it: the growth curves of `ctrans hjb-check`, and
the curves of a training.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace

from ctrans.measure.findings import SEVERITY_MARKS, Check, Finding
from ctrans.measure.measured import Measured, Value
from ctrans.measure.measures import MEASURES, Measure
from ctrans.report.sections import (
    Cell,
    Chapter,
    ColouredText,
    Column,
    Findings,
    Line,
    Mark,
    Plot,
    Section,
    Table,
    Token,
    Words,
    cell,
    digits,
    finite,
    mark_of,
)
from ctrans.report.token_colours import colours, visible
from ctrans.report.words import terms_in, verdicts

FEW = 3
"""Up to so many models are columns of a table of many measures."""
MANY_MEASURES = 6
"""More measures of whole models than these are the rows of a table, not its columns."""
REACH = 3.0
"""Powers of ten from a limit at which charts are cut off."""
VERDICTS = "Verdicts"
"""The topic of measures that are a verdict in a word."""
ROWS_SHOWN = 7
"""About so many rows of a table by depth stand on a terminal."""
UNKNOWN_MEASURE = Measure(formula="", measured_by="a result of another version")
"""Stands for a measure that is not in the table, such as one of a plugin that is not loaded."""
BY_DEPTH = ("state", "sublayer")
AXES = {"state": "segments done", "sublayer": "segment", "head": "head, counted through the depth"}
"""What the axis of a chart counts, by scope."""


def view(measured: Measured, picture: str) -> list[Chapter]:
    """The chapters of a page. `picture` names the PNG file that holds the charts."""
    chapters = [
        Chapter("Summary", [*measured.answers, *_run_tables(measured, detail=False)]),
        Chapter("Findings, the most severe first", findings(measured)),
        Chapter("Remarks", _remarks(measured)),
        Chapter("What the verdicts mean", _explained(measured)),
        Chapter("By depth", _charts(measured, detail=False), picture=picture),
        Chapter("Close to a limit", [near(measured)]),
        Chapter("Distance from the limits", distances(measured), folded=True),
        Chapter("Further figures", _run_tables(measured, detail=True), folded=True),
        Chapter("Further charts", _charts(measured, detail=True), folded=True),
        Chapter("Figures by depth", _depth_tables(measured), folded=len(measured.models) > 1),
        Chapter("By place", _place_tables(measured), folded=True),
        Chapter("Not measured", _missing(measured), folded=True),
        Chapter("Reasons", _reasons(measured), folded=True),
        Chapter("What the figures mean", [meanings(measured.measures)], folded=True),
    ]
    return [chapter.shown for chapter in chapters if chapter.shown.parts]


def known_measure(name: str) -> Measure:
    """The entry of a measure."""
    return MEASURES.get(name, UNKNOWN_MEASURE)


def findings(measured: Measured) -> list[Section]:
    """The findings of each model, under its name where there are several."""
    several = len(measured.models) > 1
    shown: list[Section] = []
    for model, found in measured.findings.items():
        title = model if several else ""
        shown.append(Findings([asdict(finding) for finding in found], title))
    return shown


def _remarks(measured: Measured) -> list[Words]:
    several = len(measured.notes) > 1 or len(measured.models) > 1
    remarks = []
    for model, lines in measured.notes.items():
        named = several and bool(model)
        if named and len(lines) > 1:
            remarks.append(Words(f"{model}:", list(lines)))
            continue
        for line in lines:
            remarks.append(Words(f"{model}: {line}" if named else line))
    return remarks


def _reasons(measured: Measured) -> list[Words]:
    """Longer explanations, and the terms in them."""
    shown = [Words(model, list(lines)) for model, lines in measured.reasons.items() if lines]
    text = " ".join(line for lines in measured.reasons.values() for line in lines)
    terms = terms_in(text)
    if terms:
        shown.append(Words("Terms in these sentences:", terms))
    return shown


def _explained(measured: Measured) -> list[Words]:
    """What the verdicts in a word mean, which stand in tables."""
    used = {value.words for value in measured.values if known_measure(value.measure).scope == "run"}
    lines = [f"{word}: {meaning}" for word, meaning in verdicts().items() if word in used]
    return [Words("", lines)] if lines else []


def near(measured: Measured) -> Table:
    """Of each check that found nothing, the value that is closest to its limit, where one is
    close.
    """
    rows = []
    for model in measured.models:
        found = {finding.check for finding in measured.findings.get(model, ())}
        for name in measured.measures:
            for word, check in known_measure(name).checks.items():
                close = [
                    value
                    for value in measured.of(name, model)
                    if value.value is not None and check.close(value.value)
                ]
                if close and word not in found:
                    worst = max(close, key=lambda value: check.excess(value.value or 0.0))
                    words = worst.words or digits(worst.value or 0.0)
                    rows.append([model, word, worst.place, words, check.limit])
    columns = ["model", "check", "place", "figure", "a finding where it is"]
    cells = [[cell(text) for text in row] for row in rows]
    return Table("", [Column(name) for name in columns], cells)


def distances(measured: Measured) -> list[Plot]:
    """By check and segment, how many powers of ten the worst value is beyond its limit."""
    charts = []
    meaning = (
        f"Above 0 is outside of the limit. Distances of more than {REACH:g} powers of ten are drawn"
        f" as {REACH:g}."
    )
    for model in measured.models:
        lines = []
        for name in measured.measures:
            for word, check in known_measure(name).checks.items():
                worst = _worst_excess(check, measured.of(name, model))
                if worst:
                    places = sorted(worst)
                    lines.append(Line(word, places, [worst[place] for place in places]))
        if lines:
            title = f"{model}: distance from the limits"
            axis = "powers of ten beyond the limit"
            charts.append(Plot(title, "segment or block", axis, lines, meaning, log=False))
    return charts


def _worst_excess(check: Check, values: Sequence[Value]) -> dict[float, float]:
    """By depth, how far beyond the limit the worst value is, within `REACH`."""
    worst: dict[float, float] = {}
    if check.low == -math.inf and check.high == math.inf:
        return worst
    for value in values:
        if value.depth is None or value.value is None or math.isnan(value.value):
            continue
        excess = min(REACH, max(-REACH, check.excess(value.value)))
        worst[value.depth] = max(excess, worst.get(value.depth, -REACH))
    return worst


def _missing(measured: Measured) -> list[Words]:
    """What was not measured, and why."""
    shown = []
    for model, reasons in measured.missing.items():
        lines = [f"{MEASURES.title(name)}: {why}" for name, why in reasons.items()]
        if lines:
            shown.append(Words(f"{model}: these figures were not measured.", lines))
    return shown


def meanings(names: Iterable[str]) -> Table:
    """The measures with their formulas, units, limits and sources."""
    rows = []
    for name in names:
        measure = known_measure(name)
        if not measure.formula:
            continue
        limits = "; ".join(f"{check.limit}: {word}" for word, check in measure.checks.items())
        rows.append(
            [
                Cell(MEASURES.title(name)),
                Cell(measure.formula),
                cell(measure.unit),
                cell(limits),
                cell(measure.source),
                cell(measure.gauge),
            ]
        )
    columns = ["figure", "formula", "unit", "limits", "source", "why equal functions differ in it"]
    return Table("", [Column(name) for name in columns], rows)


def _column(name: str) -> Column:
    measure = known_measure(name)
    detail = measure.detail and measure.scope != "run"
    return Column(MEASURES.title(name), measure.formula, measure.unit, detail=detail)


def cell_of(value: Value, found: Sequence[Finding] = ()) -> Cell:
    """A value as a cell of a table, marked if it is outside of a limit."""
    measure = known_measure(value.measure)
    if value.value is None:
        return Cell(value.words or "–", None, _mark(value, found))
    if measure.share or measure.decimals is not None or value.error:
        text = measure.shown(value.value, value.error)
    else:
        text = digits(value.value)
    if value.words and measure.scope == "run" and measure.topic:
        text = f"{text} ({value.words})"
    sorted_by = value.value if value.known else None
    return Cell(text, sorted_by, _mark(value, found))


def _mark(value: Value, found: Sequence[Finding]) -> Mark:
    measure = known_measure(value.measure)
    if measure.marked is not None and value.known and float(value.value or 0) > measure.marked:
        return "bad"
    if measure.topic == VERDICTS:
        return _mark_of_verdict(value.words)
    own = [finding for finding in found if finding.check in measure.checks]
    if own:
        return mark_of([asdict(finding) for finding in own])
    return ""


def _mark_of_verdict(word: str) -> Mark:
    """Red for a verdict about the weights as they are, yellow for one about larger weights."""
    marks = [
        SEVERITY_MARKS[check.severity]
        for check in MEASURES.checks("screening").values()
        if check.verdict == word
    ]
    if "bad" in marks:
        return "bad"
    return "note" if marks else ""


def _of_scope(measured: Measured, *scopes: str) -> list[str]:
    """The measures of these scopes, in the order of the table of measures."""
    present = set(measured.measures)
    ordered = [name for name in MEASURES if name in present]
    unknown = [name for name in measured.measures if name not in MEASURES]
    return [name for name in (*ordered, *unknown) if known_measure(name).scope in scopes]


def _run_tables(measured: Measured, *, detail: bool) -> list[Table]:
    """The figures of whole models: few measures as columns, many as rows of one table a topic."""
    names = [name for name in _of_scope(measured, "run") if known_measure(name).detail == detail]
    cells = {
        (value.model, value.measure): cell_of(value, measured.findings.get(value.model, ()))
        for value in measured.values
        if value.measure in names
    }
    models = list(dict.fromkeys(model for model, _ in cells))
    has_verdicts = any(known_measure(name).topic == VERDICTS for name in names)
    few_measures = len(names) <= MANY_MEASURES and not has_verdicts
    if few_measures or len(models) > FEW:
        rows = [
            [Cell(model), *(cells.get((model, name), Cell("–")) for name in names)]
            for model in models
        ]
        columns = [Column("model"), *map(_column, names)]
        return [Table("", columns, rows)] if rows and names else []
    tables = []
    topics = dict.fromkeys(known_measure(name).topic for name in names)
    for topic in sorted(topics, key=lambda topic: topic != VERDICTS):
        own = [name for name in names if known_measure(name).topic == topic]
        limited = any(known_measure(name).checks for name in own)
        rows = [
            [
                Cell(MEASURES.title(name) + ("*" if known_measure(name).gauge else "")),
                Cell(_limits(known_measure(name)) if limited else known_measure(name).formula),
                *(cells.get((model, name), Cell("–")) for model in models),
            ]
            for name in own
        ]
        headings = ["figure", "limits" if limited else "what it is", *models]
        tables.append(Table(topic, [Column(heading) for heading in headings], rows))
    return tables


def _limits(measure: Measure) -> str:
    return "; ".join(f"{check.limit}" for check in measure.checks.values()) or "–"


def _times(measured: Measured, model: str) -> dict[int, float]:
    """The depth-time of each state of a model, where the result says it."""
    return {
        value.depth: value.value
        for value in measured.of("times", model)
        if value.depth is not None and value.value is not None
    }


def _charts(measured: Measured, *, detail: bool) -> list[Plot | ColouredText]:
    """A chart for each measure that has a figure at several places, with its bounds dashed."""
    charts: list[Plot | ColouredText] = []
    if not detail:
        charts += [*_coloured_texts(measured), *_points(measured)]
    for name in _of_scope(measured, *BY_DEPTH, "size", "head"):
        measure = known_measure(name)
        if name == "times" or measure.bounds in measured.measures or measure.detail != detail:
            continue
        lines = [*_lines(measured, name), *_bound_lines(measured, name)]
        drawn = [line for line in lines if len(line.x) > 1 and finite(line.y)]
        if drawn:
            charts.append(_chart(measured, name, drawn))
    return charts


def _bound_lines(measured: Measured, name: str) -> list[Line]:
    """The lines of the bounds on a measure."""
    return [
        replace(line, bound=True)
        for other in measured.measures
        if known_measure(other).bounds == name and not known_measure(other).end
        for line in _lines(measured, other)
    ]


def _coloured_texts(measured: Measured) -> list[ColouredText]:
    """Tokens in the colours of a figure, for each measure of tokens and each model."""
    texts = []
    for name in _of_scope(measured, "token"):
        for model in measured.models:
            values = measured.of(name, model)
            if values:
                texts.append(_coloured_text(f"{model}: {MEASURES.title(name)}", name, values))
    return texts


def _coloured_text(title: str, name: str, values: Sequence[Value]) -> ColouredText:
    known = [-math.inf if value.value is None else value.value for value in values]
    finite_values = sorted(value for value in known if math.isfinite(value))
    scale = "no token reaches it"
    if finite_values:
        scale = f"{digits(finite_values[0])} to {digits(finite_values[-1])}"
    tokens = [
        Token(visible(value.place), colour, digits(figure))
        for value, colour, figure in zip(values, colours(known), known, strict=True)
    ]
    return ColouredText(f"{title}, {scale}", tokens, known_measure(name).formula)


def _points(measured: Measured) -> list[Plot]:
    """Points in a plane, for each measure that is drawn against another, and each model."""
    charts = []
    for name in measured.measures:
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
                charts.append(
                    Plot(title, x, measure.unit, [line], measure.formula, log=False, kind="points")
                )
    return charts


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
        lines,
        measure.formula,
        log=measure.log,
        log_x=measure.log_x,
        kind=measure.drawn,
    )


def _lines(measured: Measured, name: str) -> list[Line]:
    """A line for each model that has the measure, with the ends of its interval where they are
    measured.
    """
    ends = {
        known_measure(other).end: other
        for other in measured.measures
        if known_measure(other).bounds == name and known_measure(other).end
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
        return [value.step or 0.0 for value in values]
    if scope == "head":
        return [float(place) for place in range(len(values))]
    depths = [value.depth or 0 for value in values]
    times = _times(measured, model)
    if scope == "state" and times:
        return [times.get(depth, float(depth)) for depth in depths]
    return [float(depth) for depth in depths]


def _depth_tables(measured: Measured) -> list[Table]:
    """For each model a row for each depth, and a column for each measure along it."""
    tables = []
    for model in measured.models:
        for scope in BY_DEPTH:
            names = [name for name in _of_scope(measured, scope) if measured.of(name, model)]
            if names:
                tables.append(_depth_table(measured, model, scope, names))
    return tables


def _depth_table(measured: Measured, model: str, scope: str, names: Sequence[str]) -> Table:
    cells: dict[tuple[int, str], Cell] = {}
    for name in names:
        for value in measured.of(name, model):
            cells.setdefault((value.depth or 0, name), cell_of(value))
    depths = sorted({depth for depth, _ in cells})
    rows = [
        [cell(depth), *(cells.get((depth, name), Cell("–")) for name in names)] for depth in depths
    ]
    title = model if scope == "state" else f"{model}, by sublayer"
    columns = [Column(AXES[scope]), *map(_column, names)]
    return Table(title, columns, rows, rows_shown=ROWS_SHOWN, alternate=scope == "sublayer")


def _place_tables(measured: Measured) -> list[Table]:
    """For each model the figures that have places in words."""
    tables = []
    for model in measured.models:
        rows = [
            [
                Cell(MEASURES.title(value.measure)),
                Cell(value.place or str(value.depth)),
                cell_of(value),
            ]
            for value in measured.values
            if value.model == model and value.place and known_measure(value.measure).by_place
        ]
        columns = [Column("figure"), Column("place"), Column("value")]
        tables.append(Table(model, columns, rows, rows_shown=ROWS_SHOWN))
    return [table for table in tables if table.rows]

"""How measured values are shown: the answer, the findings, a chart for each measure, tables, and
how to read them.

Every command's result is shown by `view` alone. Titles, units and formulas come from the table of
measures. Two results have code of their own beside it: the growth curves of `ctrans hjb-check`, and
the curves of a training.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict

from ctrans.measure.findings import Check, Finding
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
    sections: list[Section] = []
    for model, model_findings in measured.findings.items():
        title = model if several else ""
        sections.append(Findings([asdict(finding) for finding in model_findings], title))
    return sections


def _remarks(measured: Measured) -> list[Words]:
    several = len(measured.notes) > 1 or len(measured.models) > 1
    remarks = []
    for model, lines in measured.notes.items():
        named = several and bool(model)
        if named and len(lines) > 1:
            remarks.append(Words(f"{model}:", list(lines)))
            continue
        for line in lines:
            if named:
                remarks.append(Words(f"{model}: {line}"))
            else:
                remarks.append(Words(line))
    return remarks


def _reasons(measured: Measured) -> list[Words]:
    """Longer explanations, and the terms in them."""
    paragraphs = [Words(model, list(lines)) for model, lines in measured.reasons.items() if lines]
    text = " ".join(line for lines in measured.reasons.values() for line in lines)
    terms = terms_in(text)
    if terms:
        paragraphs.append(Words("Terms in these sentences:", terms))
    return paragraphs


def _explained(measured: Measured) -> list[Words]:
    """What the verdicts in a word mean, which stand in tables."""
    used = {value.words for value in measured.values if known_measure(value.measure).scope == "run"}
    lines = [f"{word}: {meaning}" for word, meaning in verdicts().items() if word in used]
    if not lines:
        return []
    return [Words("", lines)]


def near(measured: Measured) -> Table:
    """Of each check that found nothing, the value that is closest to its limit, where one is
    close.
    """
    rows = []
    for model in measured.models:
        failed_checks = {finding.check for finding in measured.findings.get(model, ())}
        for name in measured.measures:
            for word, check in known_measure(name).checks.items():
                close = [
                    value
                    for value in measured.of(name, model)
                    if value.value is not None and check.close(value.value)
                ]
                if close and word not in failed_checks:
                    worst = max(close, key=lambda value: check.excess(value.value or 0.0))
                    figure = worst.words or digits(worst.value or 0.0)
                    rows.append([model, word, worst.place, figure, check.limit])
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
                    depths = sorted(worst)
                    lines.append(Line(word, depths, [worst[depth] for depth in depths]))
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
    paragraphs = []
    for model, reasons in measured.missing.items():
        lines = [f"{MEASURES.title(name)}: {why}" for name, why in reasons.items()]
        if lines:
            paragraphs.append(Words(f"{model}: these figures were not measured.", lines))
    return paragraphs


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


def cell_of(value: Value, model_findings: Sequence[Finding] = ()) -> Cell:
    """A value as a cell of a table, marked if it is outside of a limit."""
    measure = known_measure(value.measure)
    if value.value is None:
        return Cell(value.words or "–", None, _mark(value, model_findings))
    if measure.share or measure.decimals is not None or value.error:
        text = measure.shown(value.value, value.error)
    else:
        text = digits(value.value)
    if value.words and measure.scope == "run" and measure.topic:
        text = f"{text} ({value.words})"
    sorted_by = value.value if value.known else None
    return Cell(text, sorted_by, _mark(value, model_findings))


def _mark(value: Value, model_findings: Sequence[Finding]) -> Mark:
    measure = known_measure(value.measure)
    if measure.marked is not None and value.known and float(value.value or 0) > measure.marked:
        return "bad"
    of_measure = [finding for finding in model_findings if finding.check in measure.checks]
    if of_measure:
        return mark_of([asdict(finding) for finding in of_measure])
    return ""


def _of_scope(measured: Measured, *scopes: str) -> list[str]:
    return [name for name in measured.measures if known_measure(name).scope in scopes]


def _run_tables(measured: Measured, *, detail: bool) -> list[Table]:
    """The figures of whole models: few measures as columns, many as rows of one table a topic."""
    names = [name for name in _of_scope(measured, "run") if known_measure(name).detail == detail]
    cells = {
        (value.model, value.measure): cell_of(value, measured.findings.get(value.model, ()))
        for value in measured.values
        if value.measure in names
    }
    models = list(dict.fromkeys(model for model, _ in cells))
    if len(names) <= MANY_MEASURES or len(models) > FEW:
        rows = [
            [Cell(model), *(cells.get((model, name), Cell("–")) for name in names)]
            for model in models
        ]
        columns = [Column("model"), *map(_column, names)]
        if not rows or not names:
            return []
        return [Table("", columns, rows)]
    tables = []
    for topic in dict.fromkeys(known_measure(name).topic for name in names):
        names_of_topic = [name for name in names if known_measure(name).topic == topic]
        limited = any(known_measure(name).checks for name in names_of_topic)
        rows = []
        for name in names_of_topic:
            measure = known_measure(name)
            title = MEASURES.title(name)
            if measure.gauge:
                title += "*"
            about = _limits(measure) if limited else measure.formula
            figures = [cells.get((model, name), Cell("–")) for model in models]
            rows.append([Cell(title), Cell(about), *figures])
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
    bounds = {known_measure(name).bounds: name for name in measured.measures}
    charts: list[Plot | ColouredText] = []
    if not detail:
        charts += [*_coloured_texts(measured), *_points(measured)]
    for name in _of_scope(measured, *BY_DEPTH, "size", "head"):
        measure = known_measure(name)
        if name == "times" or measure.bounds in measured.measures or measure.detail != detail:
            continue
        lines = _lines(measured, name, bound=False)
        if name in bounds:
            lines += _lines(measured, bounds[name], bound=True)
        lines = [line for line in lines if len(line.x) > 1]
        if lines:
            charts.append(_chart(measured, name, lines))
    return charts


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


def _lines(measured: Measured, name: str, *, bound: bool) -> list[Line]:
    scope = known_measure(name).scope
    lines = []
    for model in measured.models:
        values = measured.of(name, model)
        if not values:
            continue
        if scope == "size":
            at = [value.step or 0.0 for value in values]
        elif scope == "head":
            at = [float(head) for head in range(len(values))]
        else:
            times = _times(measured, model) if scope == "state" else {}
            depths = [value.depth or 0 for value in values]
            at = [times.get(depth, float(depth)) for depth in depths]
        figures = [value.value for value in values]
        lines.append(Line(model, at, figures, measured.styles.get(model), bound=bound))
    return lines


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
    title = model
    if scope == "sublayer":
        title = f"{model}, by sublayer"
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

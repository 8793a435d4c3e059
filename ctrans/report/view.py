"""How measured values are shown: the answer, the findings, a chart for each measure, tables, and
how to read them.

Every command's result is shown by `view` alone. Titles, units and formulas come from the table of
measures. Two results have charts with code of their own beside it: the growth curves of `ctrans
hjb-check`, and the curves of `ctrans watch`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace

from ctrans.measure.findings import SEVERITY_MARKS, Check, Finding
from ctrans.measure.measured import Measured, Value
from ctrans.measure.measures import MEASURES, Measure
from ctrans.measure.missing import NOT_APPLICABLE
from ctrans.report.charts import AXES, BY_DEPTH, charts, distances, known_measure, of_scope
from ctrans.report.sections import (
    Cell,
    Chapter,
    Column,
    Findings,
    Mark,
    Section,
    Table,
    Words,
    cell,
    digits,
    mark_of,
)
from ctrans.report.words import terms_in, verdicts

FEW = 3
"""Up to so many models are columns of a table of many measures."""
MANY_MEASURES = 6
"""More measures of whole models than these are the rows of a table, not its columns."""
VERDICTS = "Verdicts"
"""The topic of measures that are a verdict in a word."""
BY_PLACE = ("weight", "size")
"""Scopes of figures whose places have names."""
MODEL = "model"
"""What most figures are of."""
ROWS_SHOWN = 7
"""About so many rows of a table by depth stand on a terminal."""


def view(measured: Measured, picture: str) -> list[Chapter]:
    """The chapters of a page. `picture` names the PNG file of the charts whose measures have none
    of their own.
    """
    chapters = [
        Chapter("Summary", [*measured.answers, *_run_tables(measured, detail=False)]),
        Chapter("Findings, the most severe first", findings(measured, folded=False)),
        Chapter("Remarks", _remarks(measured)),
        Chapter("What the verdicts mean", _explained(measured), glossary=True),
        *_chart_chapters(measured, picture),
        Chapter("Close to a limit", [near(measured)]),
        Chapter("Distance from the limits", distances(measured), folded=True),
        Chapter("Further figures", _run_tables(measured, detail=True), folded=True),
        Chapter("Further charts", charts(measured, detail=True), folded=True),
        Chapter("Notes", findings(measured, folded=True), folded=True),
        Chapter("Figures by depth", _depth_tables(measured), folded=True),
        Chapter("By place", _place_tables(measured), folded=_folded(measured, BY_PLACE)),
        Chapter("Not measured", _missing(measured), folded=True),
        Chapter("Reasons", _reasons(measured), folded=True),
        Chapter("What the figures mean", [meanings(_in_tables(measured))], folded=True),
    ]
    return [chapter.shown for chapter in chapters if chapter.shown.parts]


def _chart_chapters(measured: Measured, picture: str) -> list[Chapter]:
    """The charts, in a chapter for each PNG file."""
    chapters = [Chapter("Charts", charts(measured, detail=False, picture=""), picture=picture)]
    named = dict.fromkeys(known_measure(name).picture for name in measured.measures)
    for own in filter(None, named):
        drawn = charts(measured, detail=False, picture=own)
        chapters.append(Chapter(f"Charts of {own}.png", drawn, picture=own))
    return chapters


def _of_several(measured: Measured) -> bool:
    """Whether several models have values or findings. One that only lacks them all does not
    count, nor does what is no model, such as a series of errors.
    """
    with_values = {
        value.model for value in measured.values if known_measure(value.measure).subject == MODEL
    }
    return len({*with_values, *measured.findings}) > 1


def _folded(measured: Measured, scopes: Sequence[str]) -> bool:
    """Whether figures of these scopes need no place on a terminal: those of several models, which
    the table of the models compares, and those with limits, which the findings judge.
    """
    with_limits = any(known_measure(name).checks for name in of_scope(measured.measures, *scopes))
    return with_limits or _of_several(measured)


def findings(measured: Measured, *, folded: bool) -> list[Section]:
    """The findings of each model, under its name where there are several. Folded are then the notes
    of `ctrans hjb-check`, which its table says of each model already.
    """
    several = _of_several(measured)
    sections: list[Section] = []
    for model, model_findings in measured.findings.items():
        title = model if several else ""
        chosen = [
            asdict(finding)
            for finding in model_findings
            if (several and _is_in_the_table(finding)) == folded
        ]
        if chosen or not (folded or model_findings):
            sections.append(Findings(chosen, title))
    return sections


def _is_in_the_table(finding: Finding) -> bool:
    """Whether it is a note on what a model needs to be well-posed."""
    return finding.severity == "note" and finding.check in MEASURES.checks("control")


def _remarks(measured: Measured) -> list[Words]:
    named = len(measured.notes) > 1 or _of_several(measured)
    remarks = []
    for models, lines in _by_models(measured.notes):
        name = "; ".join(filter(None, models))
        if named and name and len(lines) > 1:
            remarks.append(Words(f"{name}:", lines))
            continue
        for line in lines:
            if named and name:
                remarks.append(Words(f"{name}: {line}"))
            else:
                remarks.append(Words(line))
    return remarks


def _by_models(lines_of: Mapping[str, Sequence[str]]) -> list[tuple[list[str], list[str]]]:
    """Models, and the lines that are said of these models and no others: no line stands twice."""
    models_of: dict[str, list[str]] = {}
    for model, lines in lines_of.items():
        for line in dict.fromkeys(lines):
            models_of.setdefault(line, []).append(model)
    groups: dict[tuple[str, ...], list[str]] = {}
    for line, models in models_of.items():
        groups.setdefault(tuple(models), []).append(line)
    return [(list(models), lines) for models, lines in groups.items()]


def _reasons(measured: Measured) -> list[Words]:
    """Longer explanations, and the terms in them."""
    paragraphs = [Words("; ".join(models), lines) for models, lines in _by_models(measured.reasons)]
    text = " ".join(line for lines in measured.reasons.values() for line in lines)
    terms = terms_in(text)
    if terms:
        paragraphs.append(Words("Terms in these sentences:", terms))
    return paragraphs


def _explained(measured: Measured) -> list[Words]:
    """What the verdicts in a word mean, which stand in tables."""
    used = set()
    for value in measured.values:
        measure = known_measure(value.measure)
        if measure.scope == "run" and not measure.detail:
            used.add(value.words)
    if _without_verdict(measured):
        used.add(NOT_APPLICABLE)
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


def _missing(measured: Measured) -> list[Words]:
    """What was not measured, and why."""
    lines_of = {
        model: [f"{MEASURES.title(name)}: {why}" for name, why in reasons.items()]
        for model, reasons in measured.missing.items()
    }
    return [
        Words(f"{'; '.join(models)}: these figures were not measured.", lines)
        for models, lines in _by_models(lines_of)
    ]


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
    columns = [
        Column("figure"),
        Column("formula", descriptions=True),
        Column("unit"),
        Column("finding if"),
        Column("source"),
        Column("why equal functions differ in it", descriptions=True),
    ]
    return Table("", columns, rows)


def _column(name: str) -> Column:
    measure = known_measure(name)
    detail = measure.detail and measure.scope != "run"
    return Column(MEASURES.title(name), measure.formula, measure.unit, detail=detail)


def cell_of(value: Value, model_findings: Sequence[Finding] = ()) -> Cell:
    """A value as a cell of a table, marked if it is outside of a limit."""
    measure = known_measure(value.measure)
    if value.value is None:
        return Cell(value.words or "–", None, _mark(value, model_findings))
    if measure.shown_by == "words" and value.words:
        return Cell(value.words, None, _mark(value, model_findings))
    if measure.shown_by == "interval" and value.words:
        text = value.words
    elif measure.share or measure.decimals is not None or value.error:
        text = measure.shown(value.value, value.error)
    else:
        text = digits(value.value)
    if value.words and measure.scope == "run" and measure.topic:
        text = f"{text} ({value.words})"
    sorted_by = float(value.value) if value.known else None
    return Cell(text, sorted_by, _mark(value, model_findings))


def _cell_of_several(
    values: Sequence[Value], model_findings: Sequence[Finding] = (), *, with_place: bool
) -> Cell:
    """The cell of a table that has one cell for several values of a measure: the value furthest
    outside the limits, or the largest without limits, and how many there are.
    """
    chosen = _worst(values)
    chosen_cell = cell_of(chosen, model_findings)
    if len(values) == 1:
        return chosen_cell
    which = "largest"
    if known_measure(chosen.measure).checks:
        which = "worst"
    note = f"{which} of {len(values)}"
    if with_place and chosen.place:
        note += f", {chosen.place}"
    return replace(chosen_cell, text=f"{chosen_cell.text} ({note})")


def _worst(values: Sequence[Value]) -> Value:
    """The value furthest outside the limits of its measure; without limits, the largest."""
    checks = known_measure(values[0].measure).checks.values()

    def badness(value: Value) -> float:
        if not value.known:
            return -math.inf
        figure = float(value.value or 0)
        excesses = [check.excess(figure) for check in checks]
        return max(excesses, default=figure)

    return max(values, key=badness)


def _mark(value: Value, model_findings: Sequence[Finding]) -> Mark:
    measure = known_measure(value.measure)
    if measure.marked is not None and value.known and float(value.value or 0) > measure.marked:
        return "bad"
    if measure.topic == VERDICTS:
        return _mark_of_verdict(value.words)
    of_value = [
        finding
        for finding in model_findings
        if finding.check in measure.checks and _may_break(measure.checks[finding.check], value)
    ]
    if of_value:
        return mark_of([asdict(finding) for finding in of_value])
    return ""


def _may_break(check: Check, value: Value) -> bool:
    """Whether a finding may be about a value: other measures have checks of the same name."""
    has_limits = check.low > -math.inf or check.high < math.inf
    if value.value is None or not has_limits:
        return True
    return check.fails(value.value)


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


def _run_tables(measured: Measured, *, detail: bool) -> list[Table]:
    """The figures of whole models, in a table for each topic, the verdicts first."""
    of_models = of_scope(_in_tables(measured), "run")
    names = [name for name in of_models if known_measure(name).detail == detail]
    cells: dict[tuple[str, str], Cell] = {}
    for model in measured.models:
        model_findings = measured.findings.get(model, ())
        for name in names:
            values = measured.of(name, model)
            if values:
                cells[model, name] = _cell_of_several(values, model_findings, with_place=True)
    if not detail:
        cells |= _without_verdict(measured)
    groups: dict[tuple[str, str], list[str]] = {}
    for name in names:
        measure = known_measure(name)
        groups.setdefault((measure.topic, measure.subject), []).append(name)
    in_order = sorted(groups, key=lambda group: (group[0] != VERDICTS, group[1] != MODEL))
    return [_run_table(topic, groups[topic, subject], cells) for topic, subject in in_order]


def _run_table(topic: str, names: Sequence[str], cells: Mapping[tuple[str, str], Cell]) -> Table:
    """A topic's figures. Few models are columns beside each figure's limits, if some have limits
    or the figures are many. Otherwise the figures are columns.
    """
    models = list(dict.fromkeys(model for model, name in cells if name in names))
    limited = any(known_measure(name).checks for name in names)
    are_rows = limited or topic == VERDICTS or len(names) > MANY_MEASURES
    if len(models) > FEW or not are_rows:
        rows = [
            [Cell(model), *(cells.get((model, name), Cell("–")) for name in names)]
            for model in models
        ]
        columns = [Column(known_measure(names[0]).subject), *map(_column, names)]
        return Table(topic, columns, rows)
    rows = []
    for name in names:
        measure = known_measure(name)
        title = MEASURES.title(name)
        if measure.gauge:
            title += "*"
        said = _limits(measure) if limited else measure.formula
        figures = [cells.get((model, name), Cell("–")) for model in models]
        rows.append([Cell(title), Cell(said), *figures])
    about = Column("finding if") if limited else Column("what it is", descriptions=True)
    columns = [Column("figure"), about, *map(Column, models)]
    return Table(topic, columns, rows)


def _in_tables(measured: Measured) -> list[str]:
    """The measures that tables show: those with a value, and first of all the verdicts, those that
    were not reached too.
    """
    not_reached = {name for _, name in _without_verdict(measured)}
    if not not_reached:
        return measured.measures
    names = of_scope({*measured.measures, *not_reached}, "run")
    verdict_names = [name for name in names if known_measure(name).topic == VERDICTS]
    return list(dict.fromkeys((*verdict_names, *measured.measures)))


def _without_verdict(measured: Measured) -> dict[tuple[str, str], Cell]:
    """A cell for each verdict that was not reached, by model and measure."""
    return {
        (model, name): Cell(NOT_APPLICABLE)
        for model, reasons in measured.missing.items()
        for name in reasons
        if known_measure(name).topic == VERDICTS
    }


def _limits(measure: Measure) -> str:
    return "; ".join(f"{check.limit}" for check in measure.checks.values()) or "–"


def _depth_tables(measured: Measured) -> list[Table]:
    """For each model a row for each depth, and a column for each measure along it."""
    tables = []
    for model in measured.models:
        for scope in BY_DEPTH:
            names = [
                name for name in of_scope(measured.measures, scope) if measured.of(name, model)
            ]
            if names:
                tables.append(_depth_table(measured, model, scope, names))
    return tables


def _depth_table(measured: Measured, model: str, scope: str, names: Sequence[str]) -> Table:
    values: dict[tuple[int, str], list[Value]] = {}
    for name in names:
        for value in measured.of(name, model):
            values.setdefault((value.depth or 0, name), []).append(value)
    cells = {key: _cell_of_several(several, with_place=False) for key, several in values.items()}
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
    """For each model the figures that have places in words: a row for each place, and a column for
    each measure.
    """
    points = {(name, known_measure(name).against) for name in measured.measures}
    only_drawn = {name for pair in points if pair[1] for name in pair}
    listed = {name for name in of_scope(measured.measures, *BY_PLACE) if name not in only_drawn}
    tables = []
    for model in measured.models:
        cells: dict[tuple[str, int, str], Cell] = {}
        taken: Counter[tuple[str, str]] = Counter()  # a place may have a measure several times
        for value in measured.values:
            if value.model == model and value.place and value.measure in listed:
                place, name = value.place, value.measure
                cells[place, taken[place, name], name] = cell_of(value)
                taken[place, name] += 1
        names = dict.fromkeys(name for *_, name in cells)
        rows = [
            [Cell(place), *(cells.get((place, count, name), Cell("–")) for name in names)]
            for place, count in dict.fromkeys((place, count) for place, count, _ in cells)
        ]
        columns = [Column("place"), *map(_column, names)]
        if rows:
            tables.append(Table(model, columns, rows, rows_shown=ROWS_SHOWN))
    return tables

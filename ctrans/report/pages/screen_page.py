"""The page of `ctrans screen`: verdicts, quantities with their limits, and what every step measures by depth."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from ctrans.report.pages import diagnose_page
from ctrans.report.sections import Cell, Chapter, Column, Line, Mark, Plot, Table, Words, cell, digits, number, numbers
from ctrans.report.words import SCREENED, Drawn, terms_in, verdicts
from ctrans.stability.diagnosis.words import OF_PARTS
from ctrans.stability.screening.predicted_rate import CAVEAT
from ctrans.stability.screening.screening_checks import CHECKS, STEPS

APART = f"{OF_PARTS}; what is red or yellow above is how the whole behaves, and stands whatever is found here."
Series = tuple[Sequence[Any], Sequence[Any]]


def chapters(models: Mapping[str, Any], result: Mapping[str, Any]) -> list[Chapter]:
    """Verdicts by step and what helps, findings of the diagnosis, quantities, charts, the predicted learning rate, reasons."""
    quantities = result["quantities"]
    found = {name: model["diagnosis"] for name, model in models.items() if model.get("diagnosis")}
    return [
        Chapter(
            "Verdicts",
            [
                _verdicts(models, quantities),
                *_outside(models, quantities),
                _words_used(models),
                Words(
                    "Limits are wide: outside of them a model does nothing, explodes or cannot learn at these weights (red), or "
                    "would grow faster than weights that grow (yellow). Inside of them "
                    "nothing is said of which of two models is better."
                ),
            ],
        ),
        *diagnose_page.findings(found, beside=f" {APART}" if any(models[name]["flags"] for name in found) else ""),
        Chapter("Quantities", [_quantities(models, quantities)]),
        Chapter("What the quantities mean, and their limits", [_limits(models, quantities)], folded=True),
        Chapter("By depth", [chart for chart in _charts(models) if chart.lines]),
        *_rates(models),
        Chapter("Reasons", [*(_reasons(name, model) for name, model in models.items()), _terms(models)], folded=True),
    ]


def _verdicts(models: Mapping[str, Any], quantities: Mapping[str, Any]) -> Table:
    steps = list(dict.fromkeys(step for model in models.values() for step in model["steps"]))
    rows = []
    for name, model in models.items():
        row = [cell(name), _found(model)]
        for step in steps:
            finding = model["steps"].get(step)
            row.append(cell(None) if finding is None else Cell(finding["verdict"], mark=_mark(finding["flags"], quantities)))
        count = len(model["flags"])
        rows.append([*row, Cell(str(count), float(count), _mark(model["flags"], quantities))])
    columns = [
        Column("model"),
        Column("diagnosis", "how many faults of single parts were found; which, stands below"),
        *(Column(step, STEPS[step].question if step in STEPS else "") for step in steps),
        Column("outside", "how many quantities are outside of their limits"),
    ]
    return Table("", columns, rows)


def _found(model: Mapping[str, Any]) -> Cell:
    """How many findings there are by severity, in the colour of the worst."""
    diagnosis = model.get("diagnosis")
    if not diagnosis:
        return cell(None)
    each = [symptom["severity"] for symptom in diagnosis["findings"]]
    if not each:
        return Cell("nothing found", 0.0)
    known = sorted(
        dict.fromkeys(each),
        key=lambda severity: list(diagnose_page.MARKS).index(severity) if severity in diagnose_page.MARKS else len(each),
    )
    return Cell(", ".join(f"{each.count(s)} {s}" for s in known), float(len(each)), diagnose_page.MARKS.get(known[0], ""))


def _outside(models: Mapping[str, Any], quantities: Mapping[str, Any]) -> list[Table]:
    """A row for each quantity outside of its limits, with what helps."""
    rows = []
    for name, model in models.items():
        values = _values(model)
        helps = {CHECKS[f["check"]].quantity: f["remediation"] for f in model["findings"]}
        for quantity in model["flags"]:
            limits = Cell(_sides(quantities[quantity]) if quantity in quantities else "–")
            rows.append(
                [
                    cell(name),
                    Cell(quantity),
                    cell(values.get(quantity), _mark([quantity], quantities)),
                    limits,
                    cell(helps.get(quantity)),
                ]
            )
    columns = [Column(name) for name in ("model", "quantity", "value", "limits", "what helps")]
    return [Table("Outside of their limits", columns, rows)] if rows else []


def _words_used(models: Mapping[str, Any]) -> Words:
    """What the verdicts mean, and what quantities are called."""
    used = {finding["verdict"] for model in models.values() for finding in model["steps"].values()}
    used |= {word for model in models.values() for word in model["flags"].values()}
    return Words("What verdicts mean:", [f"{word}: {meaning}" for word, meaning in verdicts().items() if word in used])


def _terms(models: Mapping[str, Any]) -> Words:
    said = " ".join(line for name, model in models.items() for line in _reasons(name, model).lines)
    return Words("Terms in these sentences:", terms_in(said))


def _mark(flagged: Iterable[str], quantities: Mapping[str, Any]) -> Mark:
    """Red where a quantity outside of its limits is about the weights as they are, and yellow where all are about larger ones."""
    marks = {quantities.get(name, {}).get("mark", "bad") for name in flagged}
    return "bad" if "bad" in marks else "note" if marks else ""


def _shown(name: str, value: Any, quantities: Mapping[str, Any]) -> Cell:
    known = number(value)
    if quantities.get(name, {}).get("share") and known is not None and math.isfinite(known):
        return Cell(f"{known:.0%}", known)
    return cell(value)


def _rates(models: Mapping[str, Any]) -> list[Chapter]:
    """The largest stable learning rate that is predicted of each model, with how good such predictions were."""
    rates = {name: model["rate"] for name, model in models.items() if model.get("rate")}
    if not rates:
        return []
    rows = [[cell(name), *(cell(rate[key]) for key in ("rate", "low", "high", "outside"))] for name, rate in rates.items()]
    first = next(iter(rates.values()))
    sealed = first["sealed"]
    words = (
        f"Learned from short trainings of {first['architectures']} small architectures. Of {sealed['architectures']:g} others "
        f"{sealed['in the interval']:.0%} lay in such an interval and {sealed['within a factor of 3']:.0%} within a factor of 3 of the "
        f"rate. {CAVEAT}"
    )
    columns = [Column(name) for name in ("model", "rate", "from", "to", "outside of what was studied")]
    return [Chapter("Largest stable learning rate of AdamW, predicted", [Table("", columns, rows), Words(words)], folded=True)]


def _quantities(models: Mapping[str, Any], quantities: Mapping[str, Any]) -> Table:
    named = _measured(models, quantities)
    rows = []
    for name, model in models.items():
        values = _values(model)
        row = [cell(name)]
        for quantity in named:
            shown = _shown(quantity, values.get(quantity), quantities)
            word = model["flags"].get(quantity)
            row.append(
                Cell(f"{shown.text} ({word})" if word else shown.text, shown.value, _mark([quantity] if word else [], quantities))
            )
        rows.append(row)
    return Table("", [Column("model"), *(Column(q, quantities[q]["description"]) for q in named)], rows)


def _limits(models: Mapping[str, Any], quantities: Mapping[str, Any]) -> Table:
    rows = []
    for name in _measured(models, quantities):
        quantity = quantities[name]
        rows.append([cell(name), cell(quantity["description"]), Cell(_sides(quantity)), cell(quantity["gauge"])])
    columns = [Column("quantity"), Column("what it is"), Column("limits"), Column("why equal functions may differ in it")]
    return Table("", columns, rows)


def _sides(quantity: Mapping[str, Any]) -> str:
    """A quantity's limits, and what it is called beyond each."""
    sides = [
        f"{word} {digits(limit)}: {quantity[word]}"
        for word, side in (("below", "low"), ("above", "high"))
        if (limit := number(quantity[side])) is not None
    ]
    return "; ".join(sides) or "–"


def _values(model: Mapping[str, Any]) -> dict[str, Any]:
    """Every quantity that was measured, of all steps."""
    return {key: value for finding in model["steps"].values() for key, value in finding["quantities"].items()}


def _measured(models: Mapping[str, Any], quantities: Mapping[str, Any]) -> list[str]:
    known = {key for model in models.values() for key in _values(model)}
    return [name for name in quantities if name in known]


def _result(model: Mapping[str, Any], step: str) -> Mapping[str, Any]:
    return (model["steps"].get(step) or {}).get("result") or {}


def _counted(values: Sequence[Any]) -> Series:
    return range(len(values)), values


def _growth(model: Mapping[str, Any]) -> Series:
    return _counted(_result(model, "forward").get("mean_abs", ()))


def _bound(model: Mapping[str, Any]) -> Series:
    return _counted((_result(model, "forward").get("bounds") or {}).get("mean_abs", ()))


def _added(model: Mapping[str, Any]) -> Series:
    return _counted((_result(model, "forward").get("share") or {}).get("added", ()))


def _apart(model: Mapping[str, Any]) -> Series:
    similarity = numbers((_result(model, "forward").get("share") or {}).get("similarity", ()))
    return _counted([None if value is None else 1 - value for value in similarity])


def _sensitivity(model: Mapping[str, Any]) -> Series:
    return _counted([each.get("value") for each in (_result(model, "backward").get("sensitivity") or {}).get("sublayers", ())])


def _condition(model: Mapping[str, Any]) -> Series:
    return _counted(_result(model, "backward").get("condition", ()))


def _gradients(model: Mapping[str, Any]) -> Series:
    return _counted([each["total"] for each in (_result(model, "backward").get("gradients") or {}).get("sublayers", ())])


def _updates(model: Mapping[str, Any]) -> Series:
    adam = (_result(model, "updates").get("updates") or {}).get("adam") or {"segments": (), "values": ()}
    return adam["segments"], adam["values"]


def _attention(model: Mapping[str, Any]) -> Series:
    layers = _result(model, "attention").get("layers", ())
    known = [(layer["index"], layer["path"]) for layer in layers if layer.get("path") is not None]
    return [k for k, _ in known], [path for _, path in known]


@dataclasses.dataclass(frozen=True)
class ScreenedChart:
    """A chart: its words, what is meant, and what finds the measured line, and its bound, in a model's screening."""

    words: Drawn
    meaning: str
    measured: Callable[[Mapping[str, Any]], Series]
    bound: Callable[[Mapping[str, Any]], Series] | None = None


PANELS = (
    ScreenedChart(SCREENED["growth"], "Dashed: what the placement's theorem allows at most.", _growth, _bound),
    ScreenedChart(SCREENED["added"], "Y is the state without any sublayer: what is left of the embedded text.", _added),
    ScreenedChart(SCREENED["apart"], "Towards 0 all tokens of a sequence become one and the same vector.", _apart),
    ScreenedChart(
        SCREENED["sensitivity"],
        "Largest singular value of a velocity's Jacobian: what a small change of the state can become in a step of length 1.",
        _sensitivity,
    ),
    ScreenedChart(SCREENED["gradients"], "Norm of the loss's gradient by the weights of each sublayer.", _gradients),
    ScreenedChart(
        SCREENED["condition"],
        "|J_i:D| |X_i| / |X_D|: how much a relative change of the state at block i can grow up to the end.",
        _condition,
    ),
    ScreenedChart(
        SCREENED["updates"],
        "By how much of itself one step at learning rate 0.001 on this sublayer's weights moves the state at the end, to first order.",
        _updates,
    ),
    ScreenedChart(
        SCREENED["attention"],
        "How much a relative change of the state grows through the attention rows (softmax) alone.",
        _attention,
    ),
)


def _charts(models: Mapping[str, Any]) -> list[Plot]:
    charts = []
    for panel in PANELS:
        lines = []
        for name, model in models.items():
            for series, is_bound in ((panel.measured, False), (panel.bound, True)):
                at, values = ((), ()) if series is None else series(model)
                if len(values):
                    lines.append(Line(name, [float(k) for k in at], numbers(values), model["placement"], is_bound))
        charts.append(Plot(_titled(panel.words.title), panel.words.x, panel.words.y, lines, panel.meaning))
    return charts


def _titled(words: str) -> str:
    return words[:1].upper() + words[1:]


def _reasons(name: str, model: Mapping[str, Any]) -> Words:
    lines = []
    for step, finding in model["steps"].items():
        lines += [f"{step}: {finding['verdict']}. {finding['why']}", *(f"    {note}" for note in finding["notes"])]
    return Words(name, lines)

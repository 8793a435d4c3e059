"""What `ctrans screen` shows: verdicts, quantities with their limits, and what each step measures
by depth.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ctrans.examine.screening.screening_checks import STEPS, Quantity
from ctrans.measure.findings import SEVERITIES
from ctrans.report.pages import diagnose_page
from ctrans.report.sections import (
    Answer,
    Cell,
    Chapter,
    Column,
    Findings,
    JSONObject,
    Line,
    Mark,
    Plot,
    Table,
    Words,
    cell,
    digits,
    table,
)
from ctrans.report.words import terms_in, verdicts

QUANTITY = {field.name for field in dataclasses.fields(Quantity)}
FEW = 3
"""Up to so many models are columns of a table; more are its rows."""
NAMED = 7
"""Up to so many models have an answer each."""
LIMITS = (
    "The limits are deliberately wide. A model outside them passes its input through unchanged,"
    " diverges, or cannot learn with these weights (red), or would grow faster than weights that"
    " grow (yellow). Within the limits nothing is said about which model is better. Nor does a"
    " screening say which learning rate to take: a sweep by ctrans study measures that."
)
STAR = (
    "Quantities with * are of an optimiser's step, which depends on how weights are scaled; all"
    " others are of the function itself."
)
DRAWN: dict[str, tuple[str, str, str, tuple[str, ...]]] = {
    "Hidden states": (
        "segments done",
        "mean |x| over entries",
        "Dashed: what the placement's theorem allows at most.",
        ("forward", "mean_abs"),
    ),
    "Added by the depth": (
        "segments done",
        "share of the state, |X − Y| / |X|",
        "Y is the state without any sublayer: what is left of the embedded text.",
        ("forward", "share", "added"),
    ),
    "Tokens apart": (
        "segments done",
        "1 − mean cosine of two tokens",
        "Towards 0 all tokens of a sequence become the same vector.",
        ("forward", "share", "similarity"),
    ),
    "Sensitivity of a sublayer": (
        "segment",
        "largest gain, |dv/dX|",
        (
            "Largest singular value of a velocity's Jacobian: what a small change of the state can"
            " become in a step of length 1."
        ),
        ("backward", "sensitivity", "sublayers", "value"),
    ),
    "Gradients": (
        "segment",
        "norm of a sublayer's, |dL/dW|",
        "Norm of the loss's gradient by the weights of each sublayer.",
        ("backward", "gradients", "sublayers", "total"),
    ),
    "What a small change becomes": (
        "block that it is made before",
        "relative gain up to the end",
        (
            "|J_i:D| |X_i| / |X_D|: how much a relative change of the state at block i can grow up"
            " to the end."
        ),
        ("backward", "condition"),
    ),
    "One step of Adam": (
        "segment",
        "relative change of the state at the end",
        (
            "By how much of itself one step at learning rate 0.001 on this sublayer's weights moves"
            " the state at the end, to first order."
        ),
        ("updates", "updates", "adam", "values"),
    ),
    "Attention's rows alone": (
        "segment",
        "relative gain through the softmax",
        "How much a relative change of the state grows through the attention rows (softmax) alone.",
        ("attention", "layers", "path"),
    ),
}
"""By title of a chart: its axes, what it means, and where its figures are among the results of a
step.
"""
PLACES = {
    "updates": ("updates", "updates", "adam", "segments"),
    "attention": ("attention", "layers", "index"),
}
"""Where the segments of a step's figures are, for steps that do not measure all of them."""
BOUND = ("forward", "bounds", "mean_abs")


models = operator.itemgetter("models")


def chapters(models: JSONObject, result: JSONObject) -> list[Chapter]:
    """Verdicts by step, findings, quantities, charts, and reasons."""
    quantities = result["quantities"]
    reasons = [_reasons(name, model) for name, model in models.items()]
    said = " ".join(line for each in reasons for line in each.lines)
    return [
        Chapter("Verdicts", [*_answers(models), _verdicts(models, quantities)]),
        Chapter("Findings, the most severe first", _findings(models)),
        Chapter("What the verdicts mean", [_words_used(models), Words(LIMITS)]),
        Chapter("By depth", [_chart(models, title) for title in DRAWN], picture="screen"),
        Chapter("Quantities", [*_quantities(models, quantities), Words(STAR)], folded=True),
        Chapter("What the quantities mean", [_meanings(models, quantities)], folded=True),
        Chapter(
            "Reasons", [*reasons, Words("Terms in these sentences:", terms_in(said))], folded=True
        ),
    ]


def _answers(models: JSONObject) -> list[Answer]:
    if len(models) <= NAMED:
        return [_answer(name, model) for name, model in models.items()]
    within = sum(not model["flags"] and model["broken"] is None for model in models.values())
    return [
        Answer(
            f"{within} of {len(models)} models have all measured quantities within their limits."
        )
    ]


def _answer(name: str, model: JSONObject) -> Answer:
    """How many quantities are outside of their limits, are unknown, and how much the diagnosis
    found.
    """
    if model["broken"] is not None:
        return Answer(
            f"{name}: the hidden states are not finite from segment {model['broken']} on.", "bad"
        )
    values = _values(model).values()
    known = sum(value is not None and not math.isnan(value) for value in values)
    found = (model.get("diagnosis") or {}).get("findings") or []
    inside = f"{known} of {known} measured quantities within limits"
    outside = f"{len(model['flags'])} of {known} measured quantities outside their limits"
    serious = any(each["severity"] != "note" for each in [*found, *model["findings"]])
    parts = [outside if model["flags"] else inside]
    if known < len(values):
        parts += [f"{len(values) - known} unknown"]
    else:
        parts += []
    parts += [
        (
            f"{diagnose_page.counted(found)} in single parts"
            if found
            else "nothing found in single parts"
        )
    ]
    mark: Mark = "bad" if serious else "note" if found or model["flags"] else "good"
    return Answer(f"{name}: {', '.join(parts)}.", mark)


def _verdicts(models: JSONObject, quantities: JSONObject) -> Table:
    steps = _steps(models)
    cells = {
        name: [
            (
                Cell(found["verdict"], mark=_mark(found["flags"], quantities))
                if (found := model["steps"].get(step))
                else cell(None)
            )
            for step in steps
        ]
        for name, model in models.items()
    }
    questions = [STEPS[step].question if step in STEPS else "" for step in steps]
    return _beside(
        "",
        "step",
        list(map(Column, steps, questions)),
        cells,
        "question",
        [Cell(each) for each in questions],
    )


def _steps(models: JSONObject) -> list[str]:
    """The steps that some model has, in their order."""
    return list(dict.fromkeys(step for model in models.values() for step in model["steps"]))


def _beside(
    title: str,
    what: str,
    items: Sequence[Column],
    cells: Mapping[str, Sequence[Cell]],
    about: str,
    said: Sequence[Cell],
) -> Table:
    """Items against models. A few models are columns, after what is said about each item; many are
    rows.
    """
    if len(cells) > FEW:
        return table(["model", *items], [[name, *row] for name, row in cells.items()], title)
    rows = zip((item.name for item in items), said, *cells.values(), strict=True)
    return table([what, about, *cells], rows, title)


def _findings(models: JSONObject) -> list[Findings]:
    """Of each model what the screening and the diagnosis of single parts found, the most severe
    first.
    """
    found = []
    for name, model in models.items():
        each = [*model["findings"], *((model.get("diagnosis") or {}).get("findings") or ())]
        each.sort(
            key=lambda finding: (
                list(SEVERITIES).index(finding["severity"])
                if finding["severity"] in SEVERITIES
                else 0
            )
        )
        found.append(Findings(each, name if len(models) > 1 else ""))
    return found


def _words_used(models: JSONObject) -> Words:
    used = {finding["verdict"] for model in models.values() for finding in model["steps"].values()}
    used |= {word for model in models.values() for word in model["flags"].values()}
    return Words("", [f"{word}: {meaning}" for word, meaning in verdicts().items() if word in used])


def _mark(flagged: Iterable[str], quantities: JSONObject) -> Mark:
    """Red where a quantity outside of its limits is of the weights as they are, yellow where all
    are of larger weights.
    """
    marks = {quantities.get(name, {}).get("mark", "bad") for name in flagged}
    if "bad" in marks:
        return "bad"
    if marks:
        return "note"
    return ""


def _quantities(models: JSONObject, quantities: JSONObject) -> list[Table]:
    """A table for each step that measured something."""
    tables = []
    for step in _steps(models):
        each = [model["steps"][step] for model in models.values() if step in model["steps"]]
        names = list(dict.fromkeys(quantity for found in each for quantity in found["quantities"]))
        if not names:
            continue
        cells = {
            name: [_value(model, step, quantity, quantities) for quantity in names]
            for name, model in models.items()
        }
        known = [quantities.get(name, {}) for name in names]
        items = [
            Column(name + "*" * bool(each.get("gauge")), each.get("description", ""))
            for name, each in zip(names, known, strict=True)
        ]
        limits = [Cell(_sides(each)) if each else cell(None) for each in known]
        if step in STEPS:
            title = f"{step}: {STEPS[step].question}"
        else:
            title = step
        tables.append(_beside(title, "quantity", items, cells, "limits", limits))
    return tables


def _value(model: JSONObject, step: str, quantity: str, quantities: JSONObject) -> Cell:
    found = model["steps"].get(step)
    if found is None or quantity not in found["quantities"]:
        return cell(None)
    value = found["quantities"][quantity]
    word = found["flags"].get(quantity)
    error = (found.get("errors") or {}).get(quantity)
    known = {name: each for name, each in quantities.get(quantity, {}).items() if name in QUANTITY}
    text = Quantity(**{"description": "", **known}).shown(
        math.nan if value is None else value, error
    )
    return Cell(
        f"{text} ({word})" if word else text, value, _mark([quantity] if word else [], quantities)
    )


def _meanings(models: JSONObject, quantities: JSONObject) -> Table:
    known = {key for model in models.values() for key in _values(model)}
    rows = [
        [name, each["description"], _sides(each), each["gauge"]]
        for name, each in quantities.items()
        if name in known
    ]
    return table(["quantity", "what it is", "limits", "why equal functions may differ in it"], rows)


def _sides(quantity: JSONObject) -> str:
    """A quantity's limits, and what it is called beyond each."""
    sides = [
        f"{word} {digits(limit)}: {quantity[word]}"
        for word, side in (("below", "low"), ("above", "high"))
        if (limit := quantity[side]) is not None
    ]
    return "; ".join(sides) or "–"


def _values(model: JSONObject) -> dict[str, Any]:
    """Every quantity that was measured, of all steps."""
    return {
        key: value
        for finding in model["steps"].values()
        for key, value in finding["quantities"].items()
    }


def _figures(model: JSONObject, path: Sequence[str]) -> list[Any]:
    """The list of figures at that path among the results of a step, empty where they were not
    measured.
    """
    step, *keys = path
    found = (model["steps"].get(step) or {}).get("result")
    for key in keys:
        if found:
            if isinstance(found, list):
                found = [each.get(key) for each in found]
            else:
                found = found.get(key)
    return list(found or [])


def _chart(models: JSONObject, title: str) -> Plot:
    x, y, meaning, path = DRAWN[title]
    lines = []
    for name, model in models.items():
        values = _figures(model, path)
        if path[-1] == "similarity":
            values = [None if value is None else 1 - value for value in values]
        at = _figures(model, PLACES[path[0]]) if path[0] in PLACES else range(len(values))
        lines.append(Line(name, list(at), values, model["placement"]))
        if title == "Hidden states":
            bound = _figures(model, BOUND)[: len(values)]
            lines.append(Line(name, list(range(len(bound))), bound, model["placement"], bound=True))
    return Plot(title, x, y, [line for line in lines if line.y], meaning)


def _reasons(name: str, model: JSONObject) -> Words:
    lines = []
    for step, finding in model["steps"].items():
        lines += [
            f"{step}: {finding['verdict']}. {finding['why']}",
            *dict.fromkeys(finding["notes"]),
        ]
    return Words(name, lines)

"""The page of `ctrans study`: the verdict, what each case came to, and loss by learning rate."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from ctrans.report.pages import other_page
from ctrans.report.sections import Cell, Chapter, Column, Line, Mark, Plot, Table, Words, cell, number, numbers
from ctrans.report.study_report import case_name
from ctrans.report.verdict_report import WORDS
from ctrans.study.presets.claim import NOT_REPRODUCED, REPRODUCED, Effect

MARKS: dict[bool | None, Mark] = {True: "good", False: "bad", None: "note"}
VERDICTS: dict[str, Mark] = {REPRODUCED: "good", NOT_REPRODUCED: "bad"}
OUTCOMES = {
    "runs": "trainings of this case that are done",
    "diverged": "of them, how many diverged; their loss counts as that before the first step",
    "failed": "of them, how many ended for another reason",
    "best loss": "lowest mean over seeds of the validation loss at the end, in nats a token",
    "best learning rate": "the learning rate that has it",
    "largest stable learning rate": "up to here every seed ended within a quarter of what the best gained",
    "sensitivity": "mean over learning rates of the loss above the best, in nats a token: small is easy to tune",
}


def chapters(models: Mapping[str, Any], result: Mapping[str, Any]) -> list[Chapter]:
    """Of each study: how far it is, its verdict and cases; costs and predictions where they were asked for."""
    return [chapter for name, each in models.items() for chapter in _study(f"{name}: " if name else "", each)]


def _study(prefix: str, study: Mapping[str, Any]) -> list[Chapter]:
    done = Words(f"{study['done']:,} of {study['runs']:,} trainings are done.")
    verdict = _verdict(study["verdict"]) if study["verdict"] else []
    chart = _rates(study["losses"])
    found = [
        Chapter(f"{prefix}Verdict" if verdict else f"{prefix}How far it is", [*verdict, done]),
        Chapter(f"{prefix}By case", [_outcomes(study["outcomes"])] if study["outcomes"] else []),
        Chapter(f"{prefix}Learning rates", [chart] if chart.lines else []),
        *(Chapter(f"{prefix}{title}", [other_page.table(study[key])] if study[key] else []) for key, title in MORE.items()),
    ]
    return [chapter for chapter in found if chapter.parts]


MORE = {"cost": "What is left to do costs", "prediction": "Prediction from initial weights"}


def _verdict(verdict: Mapping[str, Any]) -> list[Words | Table]:
    """The claim, what was measured of it, and the verdict."""
    rows = []
    for each in verdict["effects"]:
        mean, low, high = (number(each[key]) for key in ("mean", "low", "high"))
        nan = float("nan")
        known = [nan if value is None else value for value in (mean, low, high)]
        holds = Effect(each["says"], each["figure"], each["seeds"], *known).holds
        interval = f"{cell(low).text} to {cell(high).text}" if mean is not None else "–"
        rows.append(
            [cell(each["says"]), cell(each["figure"]), cell(each["seeds"]), cell(mean), Cell(interval, low), _word(holds)]
        )
    columns = [
        Column("effect", "a difference that is positive where the claim holds"),
        Column("of", "the figure that is compared"),
        Column("seeds"),
        Column("mean", "over the seeds"),
        Column("95% interval", "by bootstrap over the seeds"),
        Column("it", "holds: the interval lies above 0; refuted: below; open: neither"),
    ]
    colour = VERDICTS.get(verdict["verdict"], "note")
    ruled = Table(
        "", [Column("the claim"), Column("verdict here")], [[cell(verdict["claim"]), Cell(verdict["verdict"], mark=colour)]]
    )
    notes = [Words(f"Note: {verdict['notes']}.")] if verdict["notes"] else []
    return [ruled, Words(f"Source: {verdict['source']}."), *notes, Table("", columns, rows)]


def _word(holds: bool | None) -> Cell:
    return Cell(WORDS[holds], mark=MARKS[holds])


def _outcomes(outcomes: Mapping[str, Mapping[str, Any]]) -> Table:
    shown = [name for name in OUTCOMES if any(name in each for each in outcomes.values())]
    rows = [[Cell(case_name(json.loads(case))), *(cell(each.get(name)) for name in shown)] for case, each in outcomes.items()]
    return Table("", [Column("case"), *(Column(name, OUTCOMES[name]) for name in shown)], rows)


def _rates(losses: Mapping[str, Mapping[str, Sequence[Any]]]) -> Plot:
    """Loss by learning rate where there are several rates."""
    lines = []
    for case, each in losses.items():
        varied = json.loads(case)
        if len(each["rates"]) > 1:
            lines.append(
                Line(case_name(varied), [float(r) for r in each["rates"]], numbers(each["mean"]), varied.get("placement"))
            )
    says = "Mean over seeds; a run that diverged counts as its loss before the first step."
    return Plot(
        "Loss by learning rate", "learning rate", "validation loss at the end, nats a token", lines, says, log=False, log_x=True
    )

"""What `ctrans study` shows: a verdict on the claim, what each case came to, and loss by learning
rate.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping

from ctrans.report.sections import (
    Answer,
    Cell,
    Chapter,
    Column,
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
from ctrans.study.outcomes import LEARNED, RULES
from ctrans.study.presets.claim import NOT_REPRODUCED, REPRODUCED, Effect

HOLDS: dict[bool | None, Cell] = {
    True: Cell("holds", mark="good"),
    False: Cell("refuted", mark="bad"),
    None: Cell("open", mark="note"),
}
VERDICTS: dict[str, Mark] = {REPRODUCED: "good", NOT_REPRODUCED: "bad"}
OUTCOMES = {
    "runs": "trainings of this case that are done",
    "diverged": "trainings that diverged; their loss counts as the one before the first step",
    "failed": "trainings that ended with an error",
    "best loss": "lowest mean over seeds of the validation loss at the end, in nats a token",
    "best learning rate": "the learning rate with the best loss",
    "largest stable learning rate": (
        "the highest rate up to which trainings are stable, by the rule below"
    ),
    "sensitivity": (
        "mean over learning rates of the loss above the best, in nats a token; small is easy to"
        " tune"
    ),
}
EFFECTS = (
    Column("effect", "a difference that is positive where the claim holds"),
    Column("figure", "the figure that is compared"),
    "seeds",
    Column("mean", "over the seeds"),
    Column("95% interval", "over the seeds: the wider of bootstrap and Student's t"),
    Column("verdict", "holds: the interval lies above 0; refuted: below 0; open: neither"),
    Column(
        "seeds to decide",
        "where it is open: how many would put 0 outside of the interval, were they like these",
    ),
)
COSTS = {
    "runs": "runs",
    "tokens": "tokens trained on",
    "flops": "floating-point operations",
    "processor_hours": "processor hours",
    "hours": "hours with {} processes",
}
PLACES = {
    "losses": (
        "rates",
        "Loss by learning rate",
        "learning rate",
        "validation loss at the end, nats a token",
    ),
    "curves": ("steps", "Loss by iteration", "iteration", "validation loss, nats a token"),
    "states": (
        "segments",
        "Hidden states after training",
        "segments done",
        "mean |x| over entries",
    ),
}
"""By key of the result: the key of its horizontal axis, and title and axes of its chart."""

FLOORS = {
    "frequencies_loss": ("how often each target comes", "their losses cannot be compared"),
    "depthless_loss": (
        "the current token and its place, as one without depth",
        "their losses say little about depth",
    ),
}
"""By key: what a model of this loss knows, and what follows for cases that reach no lower."""


def chapters(models: JSONObject, result: JSONObject) -> list[Chapter]:
    """The chapters of each study."""
    return [
        chapter
        for name, each in models.items()
        for chapter in _study(f"{name}: " if name else "", each)
    ]


def _study(prefix: str, study: JSONObject) -> list[Chapter]:
    cost = []
    if spent := study["cost"]:
        rows = [
            [words.format(spent["processes"]), spent["all"][key], spent[key]]
            for key, words in COSTS.items()
        ]
        cost = [table(["cost", "in all", "left"], rows, "What it costs on this machine")]
    return [
        Chapter(f"{prefix}Result", [_answer(study), *_claim(study["verdict"]), *cost]),
        Chapter(
            f"{prefix}By case", [_outcomes(study["outcomes"]), *_rule(study), *_plateau(study)]
        ),
        Chapter(f"{prefix}Charts", [_chart(study, key) for key in PLACES], picture="study"),
    ]


def _answer(study: JSONObject) -> Answer:
    left = study["runs"] - study["done"]
    failed = study.get("failed")
    done = (
        f"{study['done']:,} of {study['runs']:,} runs are"
        f" done{f', {failed:,} failed' if failed else ''}"
    )
    if study["cost"]:
        return Answer(
            f"{done}. The rest takes about {digits(study['cost']['processor_hours'])} processor"
            " hours on this machine."
        )
    if left:
        spent = study["study"]["budget"] is not None
        if spent:
            done += "; the budget is spent: give more with --budget"
        else:
            done += "; the same command continues the study"
    verdict = (study["verdict"] or {}).get("verdict")
    if failed == study["runs"]:
        return Answer(f"Every run failed. {done}.", "bad")
    if study["outcomes"] and len(_no_lower(study, "frequencies_loss")) == len(study["outcomes"]):
        return Answer(
            f"No case learned more than how often each token comes: train longer. {done}.", "note"
        )
    if verdict is None:
        return Answer(f"{done}.", "note" if left else "")
    return Answer(f"The claim is {verdict}. {done}.", VERDICTS.get(verdict, "note"))


def _claim(verdict: JSONObject | None) -> list[Words | Table]:
    """The claim, and what was measured of it."""
    if verdict is None:
        return []
    rows = []
    for each in verdict["effects"]:
        effect = Effect(**each)
        if effect.low == effect.high:
            alike = "all seeds alike"
        else:
            alike = f"{digits(effect.low)} to {digits(effect.high)}"
        if math.isnan(effect.low):
            interval = cell(None)
        else:
            interval = Cell(alike, effect.low)
        needed = cell(effect.seeds_to_decide if effect.holds is None else None)
        rows.append(
            [
                effect.says,
                effect.figure,
                effect.seeds,
                effect.mean,
                interval,
                HOLDS[effect.holds],
                needed,
            ]
        )
    if verdict["notes"]:
        notes = [Words(f"Note: {verdict['notes']}.")]
    else:
        notes = []
    return [
        Words(f"Claim: {verdict['claim']} ({verdict['source']})."),
        table(EFFECTS, rows),
        *_learned(verdict),
        *notes,
    ]


def _learned(verdict: JSONObject) -> list[Words]:
    """Whether depth taught enough for the claim to be judged."""
    best = verdict["best_loss"]
    floor = verdict["depthless_loss"]
    if best is None or floor is None:
        return []
    ends = f"The best case ends at {digits(best)} nats, a model without depth at {digits(floor)}"
    return [Words(f"{ends}. The claim is judged only if the best case ends below half of that.")]


def _outcomes(outcomes: Mapping[str, JSONObject]) -> Table:
    columns = ["case", *(Column(name, meaning) for name, meaning in OUTCOMES.items())]
    known = {
        case: {**each, "failed": each.get("failed") or None} for case, each in outcomes.items()
    }  # only where some failed
    return table(
        columns,
        [
            [case_name(case), *(_outcome(name, each) for name in OUTCOMES)]
            for case, each in known.items()
        ],
    )


def _outcome(name: str, case: JSONObject) -> Cell:
    value = case.get(name)
    if name == "largest stable learning rate" and value is not None and case.get("at least"):
        return Cell(f"at least {digits(value)}", value)
    return cell(value)


def _rule(study: JSONObject) -> list[Words]:
    """The rule of the largest stable rates, with its floor, and which cases have none."""
    rule = study.get("stable_rule")
    if rule is None:
        return []
    said = (
        f"Rule of the largest stable learning rate: {rule['rule']}. Up to this rate,"
        f" {RULES[rule['rule']]}"
    )
    if rule["depthless_loss"] is not None:
        said += (
            f", which is {digits(rule['depthless_loss'])} nats. Losses count up to that of a guess,"
            f" {digits(rule['guess_loss'])}"
        )
    none = [f"{case_name(case)}: {reason}" for case, reason in rule["unknown"].items()]
    if len(none) == len(study["outcomes"]) and len(alike := set(rule["unknown"].values())) == 1:
        return [Words(f"{said}. No case has such a rate: {alike.pop()}.")]
    return [Words(f"{said}."), *([Words("These cases have no such rate:", none)] if none else [])]


def _no_lower(study: JSONObject, key: str) -> list[str]:
    """The cases whose best loss is at most LEARNED below this floor; none if the floor is
    unknown.
    """
    if study.get(key) is None:
        return []
    best = {case_name(case): each.get("best loss") for case, each in study["outcomes"].items()}
    return [name for name, loss in best.items() if loss is None or loss > study[key] - LEARNED]


def _plateau(study: JSONObject) -> list[Words]:
    """Which cases ended no lower than a model that knows frequencies only, or the current token
    only.
    """
    said = []
    for key, (knows, follows) in FLOORS.items():
        if study.get(key) is None:
            continue
        known = (
            f"A model that knows only {knows} has a loss of about {digits(study[key])} nats a"
            " target"
        )
        names = _no_lower(study, key)
        above = f"{known}. These cases ended at most {LEARNED:g} below it or above, so {follows}:"
        said.append(
            Words(above, names)
            if names
            else Words(f"{known}. Every case ended more than {LEARNED:g} below it.")
        )
    return said


def _chart(study: JSONObject, key: str) -> Plot:
    """Mean, lowest and highest over runs, for cases that have more than one point."""
    axis, title, x, y = PLACES[key]
    lines = []
    for case, each in (study.get(key) or {}).items():
        if len(each[axis]) > 1:
            placement = json.loads(case).get("placement")
            if isinstance(placement, str):
                known = placement
            else:
                known = None
            lines.append(
                Line(
                    case_name(case),
                    each[axis],
                    each["mean"],
                    known,
                    low=each["lowest"],
                    high=each["highest"],
                )
            )
    meaning = "Mean over runs, from the lowest to the highest one."
    if key == "losses":
        meaning += " A run that diverged counts as its loss before the first step."
    return Plot(title, x, y, lines, meaning, log=key == "states", log_x=key == "losses")


def case_name(case: str) -> str:
    """What varies in a case, from its JSON: "placement pre, dt 0.1"."""
    return ", ".join(f"{name} {value}" for name, value in json.loads(case).items()) or "all"

"""What `ctrans study` measures of its cases, as one table."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from ctrans.base.from_json import from_json
from ctrans.measure.findings import Mark
from ctrans.measure.measured import Answer, Measured, Value
from ctrans.measure.measures import MEASURES, Measure
from ctrans.study.outcomes import DIVERGED, LEARNED, RULES, STATISTICS
from ctrans.study.presets.claim import NOT_REPRODUCED, REPRODUCED, Effect, Verdict

HOLDS = {True: "holds", False: "refuted", None: "open"}
MARKS: dict[str, Mark] = {REPRODUCED: "good", NOT_REPRODUCED: "bad"}
BY_CASE = "By case"
IN_ALL = "Cost in all"
OF_THE_REST = "Cost of the rest"
"""Topics: what the figures of a case, of all runs, and of the runs that are left, answer."""
ENDS: tuple[tuple[str, Literal["low", "high"]], ...] = (("lowest", "low"), ("highest", "high"))
"""The ends of the runs' spread: the statistic, and the end of the interval that it is."""
_SPREAD = "mean over runs, from the lowest to the highest one"

MEASURES.add(
    "ctrans study",
    {
        "case: runs": Measure(
            key="runs", formula="trainings of this case that are done", title="runs", topic=BY_CASE
        ),
        "case: diverged": Measure(
            key="diverged",
            formula=f"trainings that diverged or learned nothing: {DIVERGED}",
            title="diverged or learned nothing",
            topic=BY_CASE,
        ),
        "case: failed": Measure(
            key="failed",
            formula="trainings that ended with an error",
            title="failed",
            topic=BY_CASE,
        ),
        "case: best loss": Measure(
            key="best loss",
            formula="lowest mean over seeds of the validation loss at the end, in nats a token",
            title="best loss",
            topic=BY_CASE,
        ),
        "case: best learning rate": Measure(
            key="best learning rate",
            formula="the learning rate with the best loss",
            title="best learning rate",
            topic=BY_CASE,
        ),
        "case: largest stable learning rate": Measure(
            key="largest stable learning rate",
            formula="the highest rate up to which trainings are stable, by the rule below",
            title="largest stable learning rate",
            topic=BY_CASE,
        ),
        "case: sensitivity": Measure(
            key="sensitivity",
            formula=(
                "mean over learning rates of the loss above the best, in nats a token; small is"
                " easy to tune"
            ),
            title="sensitivity",
            topic=BY_CASE,
        ),
        "cost: runs": Measure(key="runs", formula="runs, in all", title="runs", topic=IN_ALL),
        "cost: tokens trained on": Measure(
            key="tokens",
            formula="tokens trained on, in all",
            title="tokens trained on",
            topic=IN_ALL,
        ),
        "cost: floating-point operations": Measure(
            key="flops",
            formula="floating-point operations, in all",
            title="floating-point operations",
            topic=IN_ALL,
        ),
        "cost: processor hours": Measure(
            key="processor_hours",
            formula="processor hours, in all",
            title="processor hours",
            topic=IN_ALL,
        ),
        "cost: hours with these processes": Measure(
            key="hours",
            formula="hours with these processes, in all",
            title="hours with these processes",
            topic=IN_ALL,
        ),
        "left: runs": Measure(
            key="runs", formula="runs, of the runs that are left", title="runs", topic=OF_THE_REST
        ),
        "left: tokens trained on": Measure(
            key="tokens",
            formula="tokens trained on, of the runs that are left",
            title="tokens trained on",
            topic=OF_THE_REST,
        ),
        "left: floating-point operations": Measure(
            key="flops",
            formula="floating-point operations, of the runs that are left",
            title="floating-point operations",
            topic=OF_THE_REST,
        ),
        "left: processor hours": Measure(
            key="processor_hours",
            formula="processor hours, of the runs that are left",
            title="processor hours",
            topic=OF_THE_REST,
        ),
        "left: hours with these processes": Measure(
            key="hours",
            formula="hours with these processes, of the runs that are left",
            title="hours with these processes",
            topic=OF_THE_REST,
        ),
        "effect": Measure(
            formula="a difference that is positive where the claim holds; mean over the seeds",
            topic="The claim",
        ),
        "95% interval": Measure(
            formula="over the seeds: the wider of bootstrap and Student's t", topic="The claim"
        ),
        "effect's verdict": Measure(
            formula=(
                "holds: the interval lies above 0; refuted: below 0; open: neither, with the number"
                " of seeds that would put 0 outside of it, were they like these"
            ),
            topic="The claim",
        ),
        "loss by learning rate": Measure(
            key="losses",
            formula=(
                f"{_SPREAD}. A run without a finite end counts as its loss before the first step"
            ),
            unit="validation loss at the end, nats a token",
            scope="size",
            over="learning rate",
            log=False,
            log_x=True,
        ),
        "loss by iteration": Measure(
            key="curves",
            formula=_SPREAD,
            unit="validation loss, nats a token",
            scope="size",
            over="iteration",
            log=False,
        ),
        "hidden states after training": Measure(
            key="states",
            formula=_SPREAD,
            unit="mean |x| over entries",
            scope="size",
            over="segments done",
        ),
        **{
            f"{name}, {word}": Measure(
                key=word,
                formula=f"the {word} run",
                scope="size",
                over=over,
                bounds=name,
                end=end,
                log_x=log_x,
            )
            for name, over, log_x in (
                ("loss by learning rate", "learning rate", True),
                ("loss by iteration", "iteration", False),
                ("hidden states after training", "segments done", False),
            )
            for word, end in ENDS
        },
    },
)


def measured(study: Mapping[str, Any]) -> Measured:
    """The table of a study's JSON object. A case stands where other tables have a model, and so
    does an effect of the claim.
    """
    return Measured(
        values=tuple(_values(study)),
        answers=(answer(study),),
        notes={"": notes(study)},
        styles=_styles(study),
    )


def measured_in(result: Mapping[str, Any]) -> Measured:
    """The table of a study's JSON of version 1."""
    return measured(result)


def case_name(case: str) -> str:
    """What varies in a case, from its JSON: "placement pre, dt 0.1"."""
    return ", ".join(f"{name} {value}" for name, value in json.loads(case).items()) or "all"


def _styles(study: Mapping[str, Any]) -> dict[str, str]:
    styles = {}
    cases = {
        case for key in ("outcomes", "losses", "curves", "states") for case in study.get(key) or {}
    }
    for case in sorted(cases):
        placement = json.loads(case).get("placement")
        if isinstance(placement, str):
            styles[case_name(case)] = placement
    return styles


def _values(study: Mapping[str, Any]) -> Iterator[Value]:
    cost = study.get("cost")
    if cost:
        in_all = MEASURES.keyed("ctrans study", topic=IN_ALL)
        of_the_rest = MEASURES.keyed("ctrans study", topic=OF_THE_REST)
        for costs, measures in ((cost["all"], in_all), (cost, of_the_rest)):
            for measure, key in measures.items():
                if key in costs:
                    yield Value("study", measure, costs[key])
    for effect in verdict_of(study).effects if study.get("verdict") else ():
        yield from _of_effect(effect)
    for case, outcome in (study.get("outcomes") or {}).items():
        yield from _of_case(case_name(case), outcome)
    for measure, key in MEASURES.keyed("ctrans study", scope="size").items():
        for case, spread in (study.get(key) or {}).items():
            sizes = _sizes(spread)
            if len(sizes) > 1:
                yield from _of_spread(case_name(case), measure, sizes, spread)


def verdict_of(study: Mapping[str, Any]) -> Verdict:
    """The verdict on a study's claim."""
    verdict = study["verdict"]
    if isinstance(verdict, Verdict):
        return verdict
    return from_json(Verdict, verdict)


def _of_effect(effect: Effect) -> Iterator[Value]:
    figure = effect.figure
    if effect.beyond:
        figure += f" {effect.difference:.3g} beside {effect.beyond:g}"
    name = f"{effect.says} ({figure}, {effect.seeds} seeds)"
    yield Value(name, "effect", effect.mean)
    if not math.isnan(effect.low):
        interval = f"{effect.low:.3g} to {effect.high:.3g}"
        if effect.low == effect.high:
            interval = "all seeds alike"
        yield Value(name, "95% interval", None, words=interval)
    verdict = HOLDS[effect.holds]
    if effect.holds is None and effect.seeds_to_decide is not None:
        verdict = f"open, {effect.seeds_to_decide} seeds would decide"
    yield Value(name, "effect's verdict", None, words=verdict)


def _of_case(name: str, outcome: Mapping[str, Any]) -> Iterator[Value]:
    for measure, key in MEASURES.keyed("ctrans study", topic=BY_CASE).items():
        figure = outcome.get(key)
        if figure is None or (key == "failed" and not figure):
            continue
        words = ""
        if key == "largest stable learning rate" and outcome.get("at least"):
            words = "at least"
        yield Value(name, measure, figure, words=words)


def _sizes(spread: Mapping[str, Any]) -> Sequence[float]:
    """What a spread is along."""
    (axis,) = spread.keys() - STATISTICS.keys()
    sizes: Sequence[float] = spread[axis]
    return sizes


def _of_spread(
    name: str, measure: str, sizes: Sequence[float], spread: Mapping[str, Any]
) -> Iterator[Value]:
    series = {measure: spread["mean"]}
    for end, entry in MEASURES.items():
        if entry.bounds == measure:
            series[end] = spread[entry.key]
    for row, figures in series.items():
        for size, figure in zip(sizes, figures, strict=True):
            yield Value(name, row, figure, step=size)


def answer(study: Mapping[str, Any]) -> Answer:
    """How many runs are done, and what follows for the claim."""
    left = study["runs"] - study["done"]
    failed = study.get("failed")
    done = f"{study['done']:,} of {study['runs']:,} runs are done"
    if failed:
        done += f", {failed:,} failed"
    if study.get("cost"):
        hours = f"{study['cost']['processor_hours']:.3g}"
        return Answer(f"{done}. The rest takes about {hours} processor hours on this machine.")
    if left:
        if study["study"]["budget"] is not None:
            done += "; the budget is spent: give more with --budget"
        else:
            done += "; the same command continues the study"
    if failed == study["runs"]:
        return Answer(f"Every run failed. {done}.", "bad")
    outcomes = study.get("outcomes")
    if outcomes and len(no_lower(study, "frequencies_loss")) == len(outcomes):
        return Answer(
            f"No case learned more than how often each token comes: train longer. {done}.", "note"
        )
    if not study.get("verdict"):
        return Answer(f"{done}.", "note" if left else "")
    verdict = verdict_of(study).verdict
    return Answer(f"The claim is {verdict}. {done}.", MARKS.get(verdict, "note"))


def notes(study: Mapping[str, Any]) -> list[str]:
    """The claim, the rule of the largest stable rates, and which cases learned too little."""
    lines = []
    if study.get("verdict"):
        verdict = verdict_of(study)
        lines.append(f"Claim: {verdict.claim} ({verdict.source}).")
        if verdict.best_loss is not None and verdict.depthless_loss is not None:
            lines.append(
                f"The best case ends at {verdict.best_loss:.3g} nats, a model without depth at"
                f" {verdict.depthless_loss:.3g}. The claim is judged only if the best case ends"
                " below half of that."
            )
        if verdict.notes:
            lines.append(f"Note: {verdict.notes}.")
    return [*lines, *_rule(study), *_plateau(study)]


def _rule(study: Mapping[str, Any]) -> list[str]:
    """The rule of the largest stable rates, with its floor, and which cases have none."""
    rule = study.get("stable_rule")
    if rule is None:
        return []
    text = (
        f"Rule of the largest stable learning rate: {rule['rule']}. Up to this rate,"
        f" {RULES[rule['rule']]}"
    )
    if rule["depthless_loss"] is not None:
        text += (
            f", which is {rule['depthless_loss']:.3g} nats. Losses count up to that of a guess,"
            f" {rule['guess_loss']:.3g}"
        )
    missing = rule["missing"] if "missing" in rule else rule["unknown"]  # as in version 0.3
    reasons = set(missing.values())
    if len(missing) == len(study.get("outcomes") or {}) and len(reasons) == 1:
        return [f"{text}. No case has such a rate: {reasons.pop()}."]
    lines = [f"{text}."]
    lines += [f"{case_name(case)} has no such rate: {why}" for case, why in missing.items()]
    return lines


def no_lower(study: Mapping[str, Any], key: str) -> list[str]:
    """The cases whose best loss is at most LEARNED below this floor; none if the floor is
    unknown.
    """
    floor = study.get(key)
    if floor is None:
        return []
    best = {
        case_name(case): outcome.get("best loss")
        for case, outcome in (study.get("outcomes") or {}).items()
    }
    return [name for name, loss in best.items() if loss is None or loss > floor - LEARNED]


def _plateau(study: Mapping[str, Any]) -> list[str]:
    """Which cases ended no lower than a model that knows frequencies only, or the current token
    only.
    """
    of_frequencies = _floor(
        study,
        "frequencies_loss",
        knows="how often each target comes",
        follows="their losses cannot be compared",
    )
    of_token = _floor(
        study,
        "depthless_loss",
        knows="the current token and its place, as one without depth",
        follows="their losses say little about depth",
    )
    return [*of_frequencies, *of_token]


def _floor(study: Mapping[str, Any], key: str, *, knows: str, follows: str) -> list[str]:
    """Which cases ended no lower than this floor, and what follows; nothing for an unknown one."""
    if study.get(key) is None:
        return []
    known = f"A model that knows only {knows} has a loss of about {study[key]:.3g} nats a target"
    names = no_lower(study, key)
    if not names:
        return [f"{known}. Every case ended more than {LEARNED:g} below it."]
    return [
        f"{known}. These cases ended at most {LEARNED:g} below it or above, so {follows}:"
        f" {', '.join(names)}."
    ]

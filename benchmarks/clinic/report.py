"""The tables of the clinic, from its rows, by the rules of PROTOCOL.md: misses first."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks.clinic.faults import Fault
from benchmarks.clinic.judging import names, outcome, wilson
from benchmarks.clinic.seal import FIRST

Row = Mapping[str, Any]
ARMS = ("advice", "none", "placebo", "restart", "cure")


def fault_of(row: Row) -> Fault:
    return FIRST.fault(row["kind"], row["fault"])


def found(row: Row) -> bool:
    return bool(row["found"])


def first(row: Row) -> bool:
    """Whether the first finding names the right cause."""
    return found(row) and names(fault_of(row).category, row["found"][0][0])


def right(row: Row) -> bool:
    """Whether any finding names the right cause."""
    return any(names(fault_of(row).category, each[0]) for each in row["found"])


def placed(row: Row) -> bool:
    """Whether the finding of the right cause, or the first one, names the right place."""
    own = [each for each in row["found"] if names(fault_of(row).category, each[0])] or row["found"]
    return bool(own) and fault_of(row).place in own[0][2]


def share(hits: int, of: int) -> str:
    low, high = wilson(hits, of)
    return f"{hits} of {of} ({100 * low:.0f} to {100 * high:.0f}%)" if of else "none"


def loud(findings: Sequence[Sequence[Any]]) -> bool:
    """Whether one of the findings is above note."""
    return any(each[1] != "note" for each in findings)


def count(rows: Sequence[Row], test: Callable[[Row], bool]) -> str:
    return share(sum(map(test, rows)), len(rows))


def outcome_of(row: Row, arm: str) -> str:
    """The outcome of an arm; without a finding there is no advice, and that arm is the untreated
    one.
    """
    arms = {name: float("inf") if value is None else value for name, value in row["arms"].items()}
    if arm == "advice" and not found(row):
        arm = "none"
    return outcome(arms[arm], arms["none"], arms["healthy"])


def needs_cure(row: Row) -> bool:
    """Whether the fault is still there at the end if nothing is done."""
    return outcome_of(row, "none") != "healed"


def report(rows: Sequence[Row]) -> list[str]:
    sick = [row for row in rows if row["fault"] and row["ending"] != "does not fit"]
    healthy = [row for row in rows if not row["fault"]]
    lines = [f"{len(sick)} patients, {len(healthy)} healthy trainings and as many healthy models"]
    lines += ["", "Missed: nothing was found", *_by_fault([row for row in sick if not found(row)])]
    lines += [
        "",
        "Found, the right cause not first",
        *_by_fault([row for row in sick if found(row) and not first(row)]),
    ]
    for kind in ("model", "training"):
        own = [row for row in sick if row["kind"] == kind]
        if own:
            lines += ["", f"Faults of a {kind}, with 95% intervals of Wilson", *_detection(own)]
            treated = [row for row in own if row["arms"]]
            lines += _outcomes(treated) if treated else []
    return [
        *lines,
        "",
        *_lead([row for row in sick if row["kind"] == "training"]),
        "",
        *_false(healthy),
        "",
        *_advice([row for row in sick if row["arms"]]),
    ]


def _by_fault(rows: Sequence[Row]) -> list[str]:
    lines = []
    for fault in dict.fromkeys((row["kind"], row["fault"]) for row in rows):
        own = [row for row in rows if (row["kind"], row["fault"]) == fault]
        said = sorted(
            {row["found"][0][0] for row in own if row["found"]}
            | {row["refused"] for row in own if row.get("refused")}
        )
        where = ", ".join(f"{row['architecture']}/{row['task']}" for row in own)
        lines.append(
            f"  {fault[0]}: {fault[1]} ({len(own)}: {where})"
            + (f": first: {'; '.join(said)}" if said else "")
        )
    return lines or ["  none"]


def _detection(rows: Sequence[Row]) -> list[str]:
    placeable = [row for row in rows if fault_of(row).place and found(row)]
    above = [row for row in rows if loud(row["found"])]
    return [
        f"  found                              {count(rows, found)}",
        f"  found above note                   {share(len(above), len(rows))}",
        f"  right cause first                  {count(rows, first)}",
        f"  right cause among the findings     {count(rows, right)}",
        f"  right place, of those found        {count(placeable, placed)}",
    ]


def _outcomes(rows: Sequence[Row]) -> list[str]:
    needing = [row for row in rows if needs_cure(row)]
    told = [row for row in needing if found(row)]
    lines = [
        f"  {len(rows) - len(needing)} of {len(rows)} end healthy untreated; of the other"
        f" {len(needing)}:"
    ]
    for arm in ARMS:
        own = [row for row in needing if row["arms"].get(arm) is not None or arm == "advice"]
        own = [row for row in own if arm != "cure" or row["treatments"]["cure"]]
        harm = sum(outcome_of(row, arm) == "harm" for row in own)
        healed = sum(outcome_of(row, arm) == "healed" for row in own)
        lines.append(f"    {arm:8s} healed {share(healed, len(own))}, harm {share(harm, len(own))}")
    lines.append(f"    found {share(len(told), len(needing))}")
    healed = sum(outcome_of(row, "advice") == "healed" for row in told)
    return [*lines, f"    advice, of the {len(told)} found: healed {share(healed, len(told))}"]


def _lead(rows: Sequence[Row]) -> list[str]:
    lines = ["Steps from the first alarm to the loss that shows the fault (negative: after it)"]
    for word, gradual in (("gradual", True), ("sudden", False)):
        own = [row for row in rows if fault_of(row).gradual == gradual]
        seen = [row for row in own if found(row) and row["shows"] is not None]
        leads = [row["shows"] - row["found"][0][3] for row in seen]
        middle = f"median {statistics.median(leads):.0f}" if leads else "none"
        delays = [row["found"][0][3] - fault_of(row).start for row in own if found(row)]
        later = f"; after the fault began, median {statistics.median(delays):.0f}" if delays else ""
        lines.append(
            f"  {word}: {middle}, of {len(leads)}{later};"
            f" {sum(row['shows'] is None for row in own)} of {len(own)} never show it"
        )
    for name in ("sigma loss", "sigma norm"):
        caught = [row for row in rows if row[name] is not None]
        ahead = [row[name] - row["found"][0][3] for row in caught if found(row)]
        middle = (
            f"; the alarm is ahead of it by a median of {statistics.median(ahead):.0f} steps"
            if ahead
            else ""
        )
        lines.append(
            f"  the 6-sigma rule on {name.removeprefix('sigma ')} sees"
            f" {share(len(caught), len(rows))}{middle}"
        )
    return lines


def _false(rows: Sequence[Row]) -> list[str]:
    lines = ["False alarms on healthy trainings and findings on healthy models"]
    for name, word in (("alarms", "trainings"), ("findings", "models")):
        above = [row for row in rows if loud(row[name])]
        told = share(sum(bool(row[name]) for row in rows), len(rows))
        lines.append(
            f"  {word} with one above note: {share(len(above), len(rows))}; with any: {told}"
        )
        each: dict[str, int] = {}
        for row in rows:
            for check, severity, *_ in row[name]:
                each[f"{check} ({severity})"] = each.get(f"{check} ({severity})", 0) + 1
        lines += [
            f"    {check}: {times}"
            for check, times in sorted(each.items(), key=lambda pair: -pair[1])
        ]
    steps = sum(row["steps"] for row in rows)
    times_told = sum(each[1] != "note" for row in rows for each in row["alarms"])
    lines.append(
        f"  alarms above note for 1,000 healthy steps: {1000 * times_told / max(1, steps):.2f}"
    )
    return lines


def _advice(rows: Sequence[Row]) -> list[str]:
    """For each check that was first: how often its advice healed, and what the others did to the
    same patients.
    """
    lines = [
        "By the first finding: healed by its advice, untreated, by a placebo (of those that need a"
        " cure)"
    ]
    told = [row for row in rows if found(row) and needs_cure(row)]
    for check in sorted({row["found"][0][0] for row in told}):
        own = [row for row in told if row["found"][0][0] == check]
        healed = {
            arm: sum(outcome_of(row, arm) == "healed" for row in own)
            for arm in ("advice", "none", "placebo")
        }
        harm = sum(outcome_of(row, "advice") == "harm" for row in own)
        lines.append(
            f"  {check}: {share(healed['advice'], len(own))}, placebo {healed['placebo']}, harm"
            f" {harm}"
        )
    return lines

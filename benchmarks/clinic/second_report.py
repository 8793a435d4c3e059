"""The tables of the second trial, from its rows, by the rules of PROTOCOL-2.md."""

from __future__ import annotations

import dataclasses
import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks.clinic import second_judging as judge
from benchmarks.clinic.judging import share_of
from benchmarks.clinic.report import loud

Row = Mapping[str, Any]
Test = Callable[[Row], bool]


@dataclasses.dataclass(frozen=True)
class Measure:
    """A share that the issue asks for: how many, of how many, and the target."""

    name: str
    hits: int
    of: int
    target: float
    at_least: bool

    @property
    def verdict(self) -> str:
        return judge.verdict(self.hits, self.of, self.target, at_least=self.at_least)

    @property
    def asked(self) -> str:
        if not self.at_least and self.target == 0:
            return "none"
        return f"{'at least' if self.at_least else 'at most'} {self.target:.0%}"

    @property
    def row(self) -> str:
        """Of a table of a page."""
        share = share_of(self.hits, self.of)
        return f"| {self.name} | {self.asked} | {share} | {self.verdict} |"

    def __str__(self) -> str:
        return f"  {self.name:52} {share_of(self.hits, self.of):32} {self.asked:14} {self.verdict}"


def measure(
    name: str, rows: Sequence[Row], test: Test, target: float, *, at_least: bool
) -> Measure:
    return Measure(name, sum(map(test, rows)), len(rows), target, at_least)


def patients(rows: Sequence[Row]) -> list[Row]:
    return [row for row in rows if judge.is_patient(row)]


def needing(rows: Sequence[Row]) -> list[Row]:
    return [row for row in patients(rows) if judge.needs_fix(row)]


def controls(rows: Sequence[Row]) -> list[Row]:
    return [row for row in rows if not row["fault"]]


def of_kind(rows: Sequence[Row], kind: str) -> list[Row]:
    return [row for row in rows if row["kind"] == kind]


def asked_for(rows: Sequence[Row]) -> list[Measure]:
    """What the issue's "Done when" asks for."""
    sick, healthy = needing(rows), controls(rows)
    told = [row for row in sick if judge.found(row)]
    costly = [row for row in of_kind(sick, "model") if judge.costs(row)]
    return [
        measure("found", sick, judge.found, 0.9, at_least=True),
        measure("right cause first", sick, judge.cause_first, 0.8, at_least=True),
        measure(
            "healed by the advice or the search, of those found",
            told,
            judge.healed,
            0.8,
            at_least=True,
        ),
        measure("harmed, of those found", told, judge.harmed, 0.01, at_least=False),
        measure(
            "healthy trainings with an alarm above note",
            healthy,
            lambda r: loud(r["alarms"]),
            0.02,
            at_least=False,
        ),
        measure(
            "healthy models with a finding above note",
            healthy,
            lambda r: loud(r["findings"]),
            0.02,
            at_least=False,
        ),
        measure(
            "search alone: an edit, of costly model faults",
            costly,
            lambda r: bool(r.get("edits")),
            0.85,
            at_least=True,
        ),
        measure(
            "search alone: an edit in a healthy model",
            healthy,
            lambda r: bool(r["edits"]),
            0.0,
            at_least=False,
        ),
    ]


def report(rows: Sequence[Row]) -> list[str]:
    sick = needing(rows)
    everyone = patients(rows)
    lines = [
        f"{len(everyone)} patients, of which {len(sick)} need a fix; {len(controls(rows))} healthy"
        " trainings and as many healthy models",
        "",
        "What was asked for, of those that need a fix; 95% intervals of Wilson",
        *map(str, asked_for(rows)),
        "",
        "Found, of all patients: " + share(everyone, judge.found),
    ]
    for name, test in GROUPS.items():
        own = [row for row in sick if test(row)]
        if own:
            lines += ["", f"{name}, {len(own)} that need a fix", *detection(own), *outcomes(own)]
    return [
        *lines,
        "",
        *search_alone(sick, controls(rows)),
        "",
        *lead(of_kind(sick, "training")),
        "",
        *false_alarms(controls(rows)),
        "",
        *by_name("Missed, though it needs a fix", [r for r in sick if not judge.found(r)]),
        *by_name(
            "Found, the right cause not first",
            [r for r in sick if judge.found(r) and not judge.cause_first(r)],
        ),
        *by_name("Found, not healed", [r for r in sick if judge.found(r) and not judge.healed(r)]),
        *by_name("Harmed", [r for r in sick if judge.harmed(r)]),
        *by_name("Needs no fix", [r for r in everyone if not judge.needs_fix(r)]),
        *by_name(
            "The trial's or ctrans' code failed", [r for r in everyone if r["ending"] == "failed"]
        ),
    ]


GROUPS: dict[str, Test] = {
    "Faults of models": lambda row: row["kind"] == "model",
    "Faults of trainings": lambda row: row["kind"] == "training",
    "New faults": judge.is_new,
    "Faults of the first trial": lambda row: not judge.is_new(row),
    "Architectures new to the clinic": lambda row: (
        row["architecture"] not in ("gpt", "peri", "moe")
    ),
    "Our own architectures": lambda row: row["architecture"] in ("gpt", "peri", "moe"),
}


def share(rows: Sequence[Row], test: Test) -> str:
    return share_of(sum(map(test, rows)), len(rows))


def detection(rows: Sequence[Row]) -> list[str]:
    told = [row for row in rows if judge.found(row)]
    placeable = [row for row in told if judge.fault_of(row).place]
    return [
        f"  found                                    {share(rows, judge.found)}",
        f"  found above note                         {share(rows, judge.found_above_note)}",
        f"  right cause first                        {share(rows, judge.cause_first)}",
        f"    without checks that name many causes   {share(rows, judge.one_cause_first)}",
        f"  right cause among the findings           {share(rows, judge.cause_named)}",
        f"  right place, of those found that have one {share(placeable, judge.placed)}",
    ]


def outcomes(rows: Sequence[Row]) -> list[str]:
    told = [row for row in rows if judge.found(row)]
    treated = [row for row in rows if row["arms"]]
    lines = [
        f"  healed, of those found                   {share(told, judge.healed)}",
        f"    by the search                          {share(told, judge.restored_by_search)}",
        f"    by the advice                          {share(told, judge.healed_by_advice)}",
        f"  harmed, of those found                   {share(told, judge.harmed)}",
    ]
    for arm in ("none", "placebo", "restart"):
        healed = share(treated, lambda row, arm=arm: judge.after(row, arm) == "healed")
        harmed = share(treated, lambda row, arm=arm: judge.after(row, arm) == "harm")
        lines.append(f"  {arm:8} of all: healed {healed}, harmed {harmed}")
    lasting = [row for row in told if row["arms"] and judge.after(row, "none") != "healed"]
    lines.append(f"  healed, of those found that nothing heals {share(lasting, judge.healed)}")
    return lines


def search_alone(sick: Sequence[Row], healthy: Sequence[Row]) -> list[str]:
    costly = [row for row in of_kind(sick, "model") if judge.costs(row)]
    read = [row for row in costly if not row.get("refused")]
    undoable = [row for row in costly if judge.fault_of(row).undone_by_search]
    edited = [row for row in healthy if row["edits"]]
    opened = [row for row in healthy if not row["refused"]]
    cut = sum(bool(row.get("untried")) for row in [*costly, *healthy])
    return [
        "The search alone, of model faults that raise the loss by more than 0.1 nats",
        f"  an edit                                  {share(costly, lambda r: bool(r.get('edits')))}",
        f"  the loss restored                        {share(costly, judge.restored_by_search)}",
        f"  an edit, of those that were examined     {share(read, lambda r: bool(r.get('edits')))}",
        f"  restored, of those examined              {share(read, judge.restored_by_search)}",
        f"  restored, where an edit can undo it      {share(undoable, judge.restored_by_search)}",
        f"  edits in healthy models                  {share(healthy, lambda r: bool(r['edits']))}",
        f"    of those that were not refused         {share(opened, lambda r: bool(r['edits']))}",
        *(
            f"    {row['architecture']}/{row['task']}/{row['seed']}: {row['edits']}"
            for row in edited
        ),
        f"  searches whose time ended first          {cut}",
    ]


def lead(rows: Sequence[Row]) -> list[str]:
    lines = ["Steps from the first alarm to the loss that shows the fault (negative: after it)"]
    for word, gradual in (("gradual", True), ("sudden", False)):
        own = [row for row in rows if judge.fault_of(row).gradual == gradual and row["arms"]]
        told = [row for row in own if row["found"]]
        leads = [row["shows"] - row["found"][0][3] for row in told if row["shows"] is not None]
        delays = [row["found"][0][3] - judge.fault_of(row).start for row in told]
        if leads:
            lines.append(
                f"  {word}: median {statistics.median(leads):.0f} of {len(leads)}; the alarm comes a"
                f" median of {statistics.median(delays):.0f} steps after the fault begins"
            )
    return lines


def false_alarms(rows: Sequence[Row]) -> list[str]:
    lines = ["Alarms in healthy trainings and findings in healthy models"]
    for name, word in (("alarms", "trainings"), ("findings", "models")):
        above = share(rows, lambda row, name=name: loud(row[name]))
        told = share(rows, lambda row, name=name: bool(row[name]))
        lines.append(f"  {word} with one above note {above}; with any {told}")
        counts = Counter(
            f"{check} ({severity})" for row in rows for check, severity, *_ in row[name]
        )
        lines += [f"    {check}: {count}" for check, count in counts.most_common()]
    steps = sum(row["steps"] for row in rows)
    above_note = sum(each[1] != "note" for row in rows for each in row["alarms"])
    lines.append(
        f"  alarms above note for 1,000 healthy steps: {1000 * above_note / max(1, steps):.2f}"
    )
    lines.append(f"  healthy models that were refused: {sum(bool(row['refused']) for row in rows)}")
    return lines


def by_name(title: str, rows: Sequence[Row]) -> list[str]:
    lines = [f"{title}: {len(rows)}"]
    for kind, fault in dict.fromkeys((row["kind"], row["fault"]) for row in rows):
        own = [row for row in rows if (row["kind"], row["fault"]) == (kind, fault)]
        where = ", ".join(f"{row['architecture']}/{row['task']}" for row in own)
        said = sorted({row["found"][0][0] for row in own if row["found"]})
        refusals = sorted({row["refused"] for row in own if row.get("refused")})
        lines.append(
            f"  {kind}: {fault} ({len(own)}: {where})"
            + (f"; first: {', '.join(said)}" if said else "")
            + (f"; {refusals[0][:120]}" if refusals else "")
        )
    return [*lines, ""]

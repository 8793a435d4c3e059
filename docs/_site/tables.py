"""Writes the tables of measures, limits, verdicts and model families into their pages: `python -m
docs._site.tables`, after a change of the words of a measure or check, or of `FAMILIES`.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.bench.report import newest
from benchmarks.bench.report import table as measured_table
from ctrans.cli import generate
from ctrans.control import control_checks
from ctrans.examine import (
    certified,
    compared,
    converged,
    diagnosed,
    principled,
    screened,
    simulated,
    valued,
    verified,
)
from ctrans.examine.diagnosis.diagnostic_checks import CHECKS
from ctrans.examine.diagnosis.low_precision import PRECISION_CHECKS
from ctrans.examine.diagnosis.weight_checks import CHANGE_CHECKS, WEIGHT_CHECKS
from ctrans.examine.screening.screening_checks import QUESTIONS
from ctrans.interop.families import FAMILIES, FoundFamily, found_family
from ctrans.interop.transformers_library import quiet
from ctrans.measure.findings import SEVERITIES, Check
from ctrans.measure.measures import MEASURES
from ctrans.report.words import verdicts
from ctrans.study import studied
from ctrans.theory import theory_checks
from ctrans.training import compared_runs, degeneracy, trained, transferred
from ctrans.training.monitor.alarms import ALARMS

DOCS = Path(__file__).parents[1]
ROOMS_OF_MEASURES = (
    certified,
    compared,
    compared_runs,
    control_checks,
    converged,
    degeneracy,
    diagnosed,
    generate,
    principled,
    screened,
    simulated,
    studied,
    theory_checks,
    trained,
    transferred,
    valued,
    verified,
)
"""Modules that register measures when they are imported."""
MEASURED_BY = {
    "--weight-decay": "ctrans diagnose --weight-decay",
    "InFormats": "ctrans.low_precision",
    "Sensitivities": "ctrans diagnose",
    "a probe": "the monitor",
    "a walk, a trajectory, or a training's hooks": "several commands, and the monitor",
    "ctrans.simulate": "ctrans simulate",
    "weight_readings": "ctrans diagnose",
    "weights": "ctrans diagnose --weights-only",
}
"""For a reader, what measures a figure, where the table of measures names a part of it."""
MEANING_OF_SEVERITY = {
    "broken": "a part computes nothing, a figure is not finite, or the loss means nothing",
    "serious": "it probably costs quality, or breaks a training",
    "note": "worth knowing, and often intended",
}
SCOPES = {
    "run": "the whole run",
    "state": "each state",
    "sublayer": "each sublayer",
    "head": "each head",
    "weight": "each weight",
    "token": "each token",
    "size": "each size",
}


ADVICE = re.compile(
    r"; its advice, carried out on (\d+) runs? of the clinic's open half: healed (\d+), harmed (\d+)$"
)
"""The end of a check's source, where the clinic tried its advice."""
USUAL = {"window": 6, "ahead": 4, "fit": 0.8, "reports": 1}
"""Limits of alarms that the page names once."""
TESTED = (
    "our choice, set on one half of the runs of benchmarks/warning_study.py and tested on the other"
)


def limits_table(checks: Mapping[str, Check]) -> str:
    """The checks as a table in Markdown."""
    cells = [[name, c.severity, c.description, c.limit, c.source] for name, c in checks.items()]
    rows = ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in cells]
    return "\n".join(
        [
            "| finding | severity | what is measured | limit | source |",
            "| --- | --- | --- | --- | --- |",
            *rows,
        ]
    )


def severities_table(checks: Mapping[str, Check]) -> str:
    """What each severity means, and the checks that have it, as a table in Markdown."""
    rows = [
        [word, meaning, ", ".join(name for name, c in checks.items() if c.severity == word)]
        for word, meaning in MEANING_OF_SEVERITY.items()
    ]
    return markdown_table(["severity", "what it means", "findings"], rows)


def limits_by_severity(columns: Mapping[str, Mapping[str, Check]]) -> str:
    """Checks and their limits by severity, one column for each title. The formulas are in All
    measures.
    """
    rows = []
    for severity in SEVERITIES:
        cells = [
            ", ".join(
                f"{name} ({check.limit})"
                for name, check in checks.items()
                if check.severity == severity
            )
            for checks in columns.values()
        ]
        rows.append([severity, *cells])
    return markdown_table(["severity", *columns], rows)


def alarms_tables() -> list[str]:
    """The alarms: the serious ones with the broken, then the notes."""
    serious: list[list[str]] = []
    notes: list[list[str]] = []
    for name, check in ALARMS.items():
        limits = ", ".join(
            f"{key} {value:g}" for key, value in check.limits.items() if USUAL.get(key) != value
        )
        row = [name, check.description, limits, source_and_trial(check)]
        rows = notes if check.severity == "note" else serious
        rows.append(row)
    columns = ["what is measured", "limit", "source; advice"]
    return [
        markdown_table(["serious alarm", *columns], serious),
        markdown_table(["note", *columns], notes),
    ]


def source_and_trial(check: Check) -> str:
    """Who set a limit, without the reasons, and how often its advice healed a run of the clinic."""
    source = ADVICE.sub("", check.source).replace(TESTED, "ours, tested")
    source = re.sub(r"(limits?|this one): ", "", source)
    words = [part.split(": ")[0].replace("our choice", "ours") for part in source.split("; ")]
    if trial := ADVICE.search(check.source):
        tried, healed, harmed = trial.groups()
        words.append(f"healed {healed} of {tried}")
        if harmed != "0":
            words.append(f"harmed {harmed}")
    return "; ".join(words)


def verdicts_table() -> str:
    """What every verdict of a screening means, as a table in Markdown."""
    rows = [
        f"| *{word}* | {meaning.replace('|', chr(92) + '|')} |"
        for word, meaning in verdicts().items()
    ]
    return "\n".join(["| verdict | what it means |", "| --- | --- |", *rows])


def measures_table() -> str:
    """All measures of ctrans, by what measures them, as a table in Markdown."""
    columns = ["measured by", "measure", "formula", "unit", "value for", "limits", "source"]
    rows = []
    for name, measure in MEASURES.items():
        step = name.removeprefix("verdict: ")
        is_of_a_plugin = step != name and step not in QUESTIONS
        if is_of_a_plugin:
            continue
        limits = [
            f"{word}: {check.limit}" if check.limit else word
            for word, check in measure.checks.items()
        ]
        row = [MEASURED_BY.get(measure.measured_by, measure.measured_by), name]
        row += [measure.formula, measure.unit, SCOPES[measure.scope]]
        row += ["; ".join(limits), measure.source]
        rows.append([cell.replace("*", "\\*") for cell in row])
    rows.sort(key=lambda row: row[0])  # within one, formulas refer to the row before
    return markdown_table(columns, rows)


def family_tables(families: Sequence[FoundFamily]) -> list[str]:
    """What ctrans recognises in each family, what it does not and why, and which it reads in part.
    Families of which it says the same share a row.
    """
    opened = [family for family in families if family.supported]
    refused = [family for family in families if not family.supported]
    recognised = {
        family.family: [family.reads, placement_of(family), family.norm or "", known(family)]
        for family in opened
    }
    unknown: dict[str, list[str]] = {}
    for family in opened:
        reasons = [re.sub(r", \d+ of \d+:", ":", reason) for reason in family.unread]
        for reason in without_repetition(reasons):
            unknown.setdefault(reason, []).append(f"`{family.family}`")
    return [
        markdown_table(
            ["families", "read", "placement", "norm", "known of their maps"], shared(recognised)
        ),
        markdown_table(
            ["what is not known, and why", "families"],
            [[reason, ", ".join(names)] for reason, names in unknown.items()],
        ),
        markdown_table(
            ["read in part", "why"],
            [[f"`{family.family}`", family.refused or ""] for family in refused],
        ),
    ]


def known(family: FoundFamily) -> str:
    """What ctrans knows of a family's maps, by the words that the page explains."""
    words = {
        "scores": family.theta,
        "size": family.bounds,
        "weights": family.matrices,
        "last map": family.last,
    }
    found = [word for word, is_known in words.items() if is_known]
    if len(found) == len(words):
        return "all"
    return ", ".join(found) or "none"


def without_repetition(reasons: Sequence[str]) -> list[str]:
    """Reasons that differ in their numbers alone, once, with the largest."""
    kept: dict[str, str] = {}
    for reason in reasons:
        words = re.sub(r"[\d.]+", "", reason)
        kept[words] = max(reason, kept.get(words, ""))
    return list(kept.values())


def shared(rows: Mapping[str, list[str]]) -> list[list[str]]:
    """Rows by family, with equal ones in one row, where the first of them stood."""
    names: dict[tuple[str, ...], list[str]] = {}
    for family, cells in rows.items():
        names.setdefault(tuple(cells), []).append(f"`{family}`")
    return [[", ".join(families), *cells] for cells, families in names.items()]


def placement_of(family: FoundFamily) -> str:
    """The placement, with parallel maps and lengths of steps other than 1."""
    words = [family.placement or ""]
    if family.parallel:
        words.append("at once")
    if family.lengths != (1.0,):
        words += [f"dt {length:g}" for length in family.lengths]
    return " ".join(words)


def markdown_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown."""
    escaped = [[cell.replace("|", "\\|").replace("<", "&lt;") for cell in row] for row in rows]
    lines = [columns, ["---"] * len(columns), *escaped]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


TABLES = {
    "measures.md": [measures_table()],
    "howto/alarms.md": alarms_tables(),
    "commands/diagnose.md": [severities_table(CHECKS)],
    "commands/screen.md": [verdicts_table()],
    "howto/gate.md": [
        limits_by_severity(
            {"of a checkpoint": WEIGHT_CHECKS, "of two, now over before": CHANGE_CHECKS}
        )
    ],
    "howto/precision.md": [limits_by_severity({"findings, with their limits": PRECISION_CHECKS})],
}

measured = newest(DOCS.parent / "benchmarks" / "results")
if measured is not None:
    TABLES["why/speed.md"] = [measured_table(measured)]

if __name__ == "__main__":
    with quiet():
        TABLES["howto/model-families.md"] = family_tables([found_family(name) for name in FAMILIES])
    for name, tables in TABLES.items():
        path = DOCS / name
        page, done = path.read_text(encoding="utf-8"), ""
        for table in tables:
            heading = table.strip().splitlines()[0]
            before, _, rest = page.partition(heading)
            end = rest.find("\n\n")
            page = "\n" if end == -1 else rest[end:]  # a table may end the page
            done += before + table.strip()
        path.write_text(done + page, encoding="utf-8")

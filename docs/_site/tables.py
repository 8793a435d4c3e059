"""Writes the tables of checks, verdicts and model families into their pages: `python -m
docs._site.tables`, after a change of a check's words or of `FAMILIES`.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.bench.report import newest
from benchmarks.bench.report import table as measured_table
from ctrans.examine.diagnosis.diagnostic_checks import CHECKS
from ctrans.examine.diagnosis.low_precision import PRECISION_CHECKS
from ctrans.examine.diagnosis.weight_checks import CHANGE_CHECKS, WEIGHT_CHECKS
from ctrans.interop.families import FAMILIES, FoundFamily, found_family
from ctrans.interop.transformers_library import quiet
from ctrans.measure.findings import Check
from ctrans.report.words import verdicts
from ctrans.training.monitor.alarms import ALARMS
from ctrans.training.monitor.training_measures import GAUGES

DOCS = Path(__file__).parents[1]


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


def verdicts_table() -> str:
    """What every verdict of a screening means, as a table in Markdown."""
    rows = [
        f"| *{word}* | {meaning.replace('|', chr(92) + '|')} |"
        for word, meaning in verdicts().items()
    ]
    return "\n".join(["| verdict | what it means |", "| --- | --- |", *rows])


def gauges_table() -> str:
    """What the monitor measures, as a table in Markdown."""
    rows = [
        f"| `{name}` | {gauge.formula.replace('|', chr(92) + '|')} |"
        for name, gauge in GAUGES.items()
    ]
    return "\n".join(["| name | what is measured |", "| --- | --- |", *rows])


def family_tables(families: Sequence[FoundFamily]) -> list[str]:
    """What ctrans recognises in each family, what it does not and why, and which it refuses."""
    opened = [family for family in families if family.supported]
    refused = [family for family in families if not family.supported]
    recognised = [
        [
            f"`{family.family}`",
            family.reads,
            placement_of(family),
            family.norm or "",
            *(
                "yes" if known else "no"
                for known in (family.theta, family.bounds, family.matrices, family.last)
            ),
        ]
        for family in opened
    ]
    unknown = [
        [f"`{family.family}`", "; ".join(family.unread)] for family in opened if family.unread
    ]
    columns = ["family", "reads", "placement", "norm", "scores", "size", "weights", "last map"]
    return [
        markdown_table(columns, recognised),
        markdown_table(["family", "what is not known, and why"], unknown),
        markdown_table(
            ["refused", "why"], [[f"`{family.family}`", family.refused or ""] for family in refused]
        ),
    ]


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
    "howto/alarms.md": [limits_table(ALARMS), gauges_table()],
    "commands/diagnose.md": [limits_table(CHECKS)],
    "commands/screen.md": [verdicts_table()],
    "howto/gate.md": [limits_table(WEIGHT_CHECKS), limits_table(CHANGE_CHECKS)],
    "howto/precision.md": [limits_table(PRECISION_CHECKS)],
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
            done, page = done + before + table.strip(), rest[rest.index("\n\n") :]
        path.write_text(done + page, encoding="utf-8")

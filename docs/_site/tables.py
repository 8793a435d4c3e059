"""Writes the tables of checks and verdicts into their pages: `python -m docs._site.tables`, after a
change of a check's words.
"""

from collections.abc import Mapping
from pathlib import Path

from benchmarks.bench.report import newest
from benchmarks.bench.report import table as measured_table
from ctrans.examine.diagnosis.diagnostic_checks import CHECKS
from ctrans.examine.diagnosis.low_precision import PRECISION_CHECKS
from ctrans.examine.diagnosis.weight_checks import CHANGE_CHECKS, WEIGHT_CHECKS
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
    for name, tables in TABLES.items():
        path = DOCS / name
        page, done = path.read_text(encoding="utf-8"), ""
        for table in tables:
            heading = table.strip().splitlines()[0]
            before, _, rest = page.partition(heading)
            done, page = done + before + table.strip(), rest[rest.index("\n\n") :]
        path.write_text(done + page, encoding="utf-8")

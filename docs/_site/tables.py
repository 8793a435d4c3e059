"""Writes the tables of checks and verdicts into their pages: `python docs/_site/tables.py`, after a change of a check's words."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[0] = str(ROOT)

from benchmarks.bench.report import newest  # noqa: E402
from benchmarks.bench.report import table as measured_table  # noqa: E402
from ctrans.findings import limits_table  # noqa: E402
from ctrans.report.words import verdicts_table  # noqa: E402
from ctrans.stability.diagnosis.diagnostic_checks import CHECKS  # noqa: E402
from ctrans.stability.diagnosis.weight_checks import CHANGE_CHECKS, WEIGHT_CHECKS  # noqa: E402

TABLES = {
    "commands/diagnose.md": [limits_table(CHECKS)],
    "commands/screen.md": [verdicts_table()],
    "howto/gate.md": [limits_table(WEIGHT_CHECKS), limits_table(CHANGE_CHECKS)],
}

measured = newest(ROOT / "benchmarks" / "results")
if measured is not None:
    TABLES["why/speed.md"] = [measured_table(measured)]

for name, tables in TABLES.items():
    path = ROOT / "docs" / name
    page, done = path.read_text(encoding="utf-8"), ""
    for table in tables:
        heading = table.strip().splitlines()[0]
        before, _, rest = page.partition(heading)
        done, page = done + before + table.strip(), rest[rest.index("\n\n") :]
    path.write_text(done + page, encoding="utf-8")

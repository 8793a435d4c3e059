"""Writes the tables of checks and verdicts into their pages: `python docs/_site/tables.py`, after a change of a check's words."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[0] = str(ROOT)

from ctrans.findings import limits_table  # noqa: E402
from ctrans.report.words import verdicts_table  # noqa: E402
from ctrans.stability.diagnosis.diagnostic_checks import CHECKS  # noqa: E402

TABLES = {"diagnose.md": limits_table(CHECKS), "screen.md": verdicts_table()}

for name, table in TABLES.items():
    path = ROOT / "docs" / "commands" / name
    page, heading = path.read_text(encoding="utf-8"), table.strip().splitlines()[0]
    before, _, rest = page.partition(heading)
    after = rest[rest.index("\n\n") :]
    path.write_text(before + table.strip() + after, encoding="utf-8")

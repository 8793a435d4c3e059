"""Puts the statements of `ctrans verify` into THEORY.md, between its marker comments: `python -m
docs._site.theory`, after `ctrans verify --cases 200`.
"""

import json
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

START, END = "<!-- ctrans verify: start -->", "<!-- ctrans verify: end -->"
ROOT = Path(__file__).parents[2]
VERDICTS = ("new", "as printed", "sharpened", "corrected", "violated")


def markdown_table(statements: Mapping[str, Any]) -> str:
    """The statements of verify.json as a Markdown table, without times, so that it changes only
    when a finding does.
    """
    rows = [
        "| § | statement | source | what holds | printed form | reached | tolerance | cases |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name, each in statements.items():
        found = each["corrected"]
        cells = [
            str(each["section"]),
            f"`{name}`",
            _literal(each["source"]),
            (
                _literal(each["says"])
                if found["holds"]
                else f"{_literal(each['says'])}. **Violated:** {_literal(found['words'])}"
            ),
            _printed(each),
            f"{found['excess']:.1e}",
            f"{found['tolerance']:.2g}",
            str(found["cases"]),
        ]
        rows.append("| " + " | ".join(cells) + " |")
    counts = Counter(each["verdict"] for each in statements.values())
    words = ", ".join(f"{counts[verdict]} {verdict}" for verdict in VERDICTS if counts[verdict])
    return "\n".join([*rows, "", f"{len(statements)} statements: {words}."]) + "\n"


def _printed(each: Mapping[str, Any]) -> str:
    """The printed form and whether it holds, as Markdown."""
    seed = each["seed"]
    if seed is None:
        return "none"
    if not each["printed"]:
        return "as it is"
    fate = "**holds**" if seed["holds"] else f"**fails:** {_literal(seed['words'])}"
    return f"{_literal(each['printed'])}. {fate}"


def _literal(text: str) -> str:
    """The text with the characters of Markdown's syntax escaped."""
    return re.sub(r"([\\`*_<>|\[\]])", r"\\\1", text)


def between_markers(text: str, table: str) -> str:
    """The text with the table between the markers. Raises ValueError if it lacks one."""
    before, rest = text.split(START)
    _, after = rest.split(END)
    return f"{before}{START}\n\n{table}\n{END}{after}"


if __name__ == "__main__":
    page, result = (
        ROOT / "THEORY.md",
        json.loads((ROOT / "out" / "verify" / "verify.json").read_text(encoding="utf-8")),
    )
    page.write_text(
        between_markers(page.read_text(encoding="utf-8"), markdown_table(result["statements"])),
        encoding="utf-8",
    )

"""Tables of verified statements, for the terminal and as Markdown."""

from __future__ import annotations

import re
from collections.abc import Sequence

from rich import box
from rich.markup import escape
from rich.table import Table

from ctrans.verify.run import Result
from ctrans.verify.table import SECTIONS

START, END = "<!-- ctrans verify: start -->", "<!-- ctrans verify: end -->"
"""What stands around the table in a Markdown file."""

STYLES = {"new": "cyan", "as printed": "green", "sharpened": "green", "corrected": "yellow", "violated": "bold red"}


def verify_table(results: Sequence[Result], section: int) -> Table:
    """The statements of one section: what holds, what became of the printed form, verdict, worst distance and cases."""
    table = Table(
        title=f"{section}. {SECTIONS[section]}", title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, expand=True
    )
    table.add_column("statement", ratio=1, overflow="fold")
    table.add_column("verdict", no_wrap=True)
    for name in ("reached", "cases", "s"):
        table.add_column(name, justify="right", no_wrap=True)
    for r in (r for r in results if r.section == section):
        printed = f"\n[dim]printed: {escape(r.printed)}[/]\n{escape(seed_words(r))}" if r.printed else ""
        table.add_row(
            f"[bold]{r.name}[/]  [dim]{escape(r.source)}[/]\n{escape(r.says)}{printed}",
            f"[{STYLES[r.verdict]}]{r.verdict}[/]",
            f"{r.corrected.excess:.1e}",
            str(r.corrected.cases),
            f"{r.seconds:.1f}",
            end_section=True,
        )
    return table


def seed_words(r: Result) -> str:
    """What became of the printed form."""
    if r.seed is None:
        return "-"
    return "holds" if r.seed.holds else f"fails: {r.seed.words}"


def summary(results: Sequence[Result]) -> str:
    """How many statements have which verdict."""
    counts = {verdict: sum(r.verdict == verdict for r in results) for verdict in STYLES}
    words = ", ".join(f"{count} {verdict}" for verdict, count in counts.items() if count)
    return f"{len(results)} statements: {words}"


def failure(r: Result) -> str:
    """The case that violates a corrected form."""
    found = r.corrected
    return (
        f"{r.name} ({r.source}): {r.says}\n"
        f"  violated by {found.excess:.6g} > {found.tolerance:g} in case {found.case} of {found.cases}: {found.words}"
    )


def markdown_table(results: Sequence[Result]) -> str:
    """The statements as a Markdown table, without times, so that it changes only when a finding does."""
    rows = [
        "| § | statement | source | what holds | printed form | reached | tolerance | cases |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for r in results:
        found = r.corrected
        cells = [
            str(r.section),
            f"`{r.name}`",
            _literal(r.source),
            _literal(r.says) if found.holds else f"{_literal(r.says)}. **Violated:** {_literal(found.words)}",
            _printed(r),
            f"{found.excess:.1e}",
            f"{found.tolerance:.2g}",
            str(found.cases),
        ]
        rows.append("| " + " | ".join(cells) + " |")
    return "\n".join([*rows, "", f"{summary(results)}."]) + "\n"


def _printed(r: Result) -> str:
    """The printed form and what became of it, as Markdown."""
    if r.seed is None:
        return "none"
    if not r.printed:
        return "as it is"
    fate = "**holds**" if r.seed.holds else f"**fails:** {_literal(r.seed.words)}"
    return f"{_literal(r.printed)}. {fate}"


def _literal(text: str) -> str:
    """The text with nothing in it that Markdown would take for markup."""
    return re.sub(r"([\\`*_<>|\[\]])", r"\\\1", text)


def between_markers(text: str, table: str) -> str | None:
    """The text with the table put between the markers; None where it does not have both."""
    before, start, rest = text.partition(START)
    _, end, after = rest.partition(END)
    return f"{before}{START}\n\n{table}\n{END}{after}" if start and end else None

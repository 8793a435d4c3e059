"""Verified statements as a Markdown table."""

from __future__ import annotations

import re
from collections.abc import Sequence

from ctrans.verify.run import Result

VERDICTS = ("new", "as printed", "sharpened", "corrected", "violated")


def summary(results: Sequence[Result]) -> str:
    """How many statements have which verdict."""
    counts = {verdict: sum(r.verdict == verdict for r in results) for verdict in VERDICTS}
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
    """The statements as a Markdown table, without times, so that it changes only when a finding
    does.
    """
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
    """The printed form and whether it holds, as Markdown."""
    if r.seed is None:
        return "none"
    if not r.printed:
        return "as it is"
    fate = "**holds**" if r.seed.holds else f"**fails:** {_literal(r.seed.words)}"
    return f"{_literal(r.printed)}. {fate}"


def _literal(text: str) -> str:
    """The text with the characters of Markdown's syntax escaped."""
    return re.sub(r"([\\`*_<>|\[\]])", r"\\\1", text)

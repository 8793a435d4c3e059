"""A page on a terminal: the answer, tables, then how to read them."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from typing import Any

from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from ctrans.base.printable import printable
from ctrans.report.fit import folded_widths, groups_of, shown_rows
from ctrans.report.sections import (
    EMPTY,
    SEVERITY_MARKS,
    Answer,
    ColouredText,
    Findings,
    Mark,
    Page,
    Plot,
    Section,
    Table,
    Words,
    finding_rows,
)

STYLES: dict[Mark, str] = {"": "", "bad": "bold red", "note": "yellow", "good": "green"}
FURTHER = "further columns"
"""Title of a table with the columns that did not fit."""
HEADING = 10
"""Letters of a heading's line, at least."""
READING_LINES = 4
"""Lines that explain figures, at most, without --explain."""
LONGEST_NAME = 24
"""Letters of a row's name that is never broken, at most."""


def show(
    page: Page,
    console: Console,
    *,
    looked_at: str | None = None,
    verbose: bool = False,
    explain: bool = False,
) -> None:
    """Prints the page. `looked_at` is printed below the answers: which models were recognised, and
    what they read.

    Folded chapters, formulas and columns of detail need `verbose`. What figures and verdicts mean
    is cut to a few lines without `explain`.
    """
    for answer in page.answers:
        console.print(Text(answer.text, STYLES[answer.mark] or "bold"))
    if looked_at is not None:
        console.print(printable(looked_at), markup=False, soft_wrap=True)
    legend: dict[str, str] = {}
    for i, chapter in enumerate(page.chapters):
        parts = [part for part in chapter.parts if not isinstance(part, Answer | Plot)]
        hidden = chapter.folded and not verbose
        if chapter.glossary:
            hidden = not explain
        if not parts or hidden:
            continue
        console.print()
        if i:
            console.print(Text(chapter.title, "bold"))
        for previous, part in zip((None, *parts), parts, strict=False):
            if isinstance(previous, Table) and isinstance(part, Table):
                console.print()
            _show(part, console, legend, verbose=verbose)
    is_cut = _show_legend(legend, console, explain=explain or verbose)
    folded = [
        chapter.title
        for chapter in page.chapters
        if chapter.folded and any(not isinstance(part, Plot) for part in chapter.parts)
    ]
    is_cut = is_cut or any(chapter.glossary for chapter in page.chapters)
    more = []
    if is_cut and not explain:
        more.append("--explain shows what each figure means.")
    if folded and not verbose:
        more.append(f"--verbose also shows: {', '.join(folded)}.")
    if more:
        console.print(Text("\n" + " ".join(more)))
    if page.subject:
        console.print(Text(page.subject))


def _show_legend(legend: dict[str, str], console: Console, *, explain: bool) -> bool:
    """Prints what the columns mean, without `explain` in a sentence each and as many as fit in a
    few lines. Returns whether something was left out.
    """
    lines: list[Text] = []
    used = 0
    is_cut = False
    for meaning in dict.fromkeys(legend.values()):
        names = " and ".join(name for name in legend if legend[name] == meaning)
        sentence = meaning
        if not explain:
            sentence = meaning.partition(". ")[0]
            needed = len(textwrap.wrap(f"{names}: {sentence}", console.width))
            if used + needed > READING_LINES:
                is_cut = True
                continue
            used += needed
            is_cut = is_cut or sentence != meaning
        lines.append(Text.assemble((names, "italic"), ": ", sentence))
    if lines:
        console.print(Text("\nHow to read it", "bold"))
    for line in lines:
        console.print(line)
    return is_cut


def _show(part: Section, console: Console, legend: dict[str, str], *, verbose: bool) -> None:
    if isinstance(part, Words):
        for line in filter(None, (part.text, *(f"- {line}" for line in part.lines))):
            console.print(Text(line))
    elif isinstance(part, Table):
        details = (False, True) if verbose else (False,)
        table = part.only(*details)
        for piece in _fitted(table, console.width, verbose=verbose):
            console.print(piece)
        if part.meaning:
            console.print(Text(part.meaning))
        for column in table.columns:
            meaning = column.legend if verbose else column.meaning
            if meaning:
                legend[column.name] = meaning
    elif isinstance(part, ColouredText):
        console.print(Text(part.title, "bold"))
        tokens = Text(no_wrap=False)
        for token in part.tokens:
            tokens.append(token.text, style=f"black on {token.colour}")
        console.print(tokens)
        console.print(Text(part.meaning))
    elif isinstance(part, Findings):
        console.print(_findings(part))


def _fitted(table: Table, width: int, *, verbose: bool) -> Iterator[RichTable]:
    """The table, or where its columns do not fit, several with the same rows: each begins with the
    table's first columns, up to the first of numbers.
    """
    rows = [
        row
        for row in table.rows
        if len(row) == 1 or any(cell.text not in EMPTY for cell in row[1:])
    ]
    if rows and table.rows_shown and not verbose:
        indices = shown_rows(len(rows), table.rows_shown, alternate=table.alternate)
        rows = [rows[i] for i in indices]
    headings = list[str]()
    styles = list[dict[str, Any]]()
    needs = list[int]()
    full = list[int]()
    for k, column in enumerate(table.columns):
        cells = [row[k] for row in table.rows if row[k].text not in EMPTY]
        widest = max((len(cell.text) for cell in cells), default=1)
        headings.append(
            "\n".join(textwrap.wrap(column.name, max(HEADING, widest), break_long_words=False))
        )
        has_figures = k > 0 and all(cell.value is not None for cell in cells)
        is_unbroken = has_figures or (k == 0 and widest <= LONGEST_NAME)
        style: dict[str, Any]
        if has_figures:
            style = {"justify": "right", "overflow": "ellipsis", "no_wrap": is_unbroken}
        else:
            style = {"justify": "left", "overflow": "fold", "no_wrap": is_unbroken}
        styles.append(style)
        texts = (headings[-1], *(row[k].text for row in rows))
        lines = [line for text in texts for line in text.splitlines()]
        words = [word for line in lines for word in line.split()]
        full.append(max(map(cell_len, lines), default=0))
        if is_unbroken:
            needs.append(full[-1])
        else:
            needs.append(max(map(cell_len, words), default=0))
    lead = next((k for k, style in enumerate(styles) if style["justify"] == "right"), 1)
    for i, group in enumerate(groups_of(needs, lead, width)):
        titles = [table.title] if table.title else []
        if i:
            titles.append(FURTHER)
        piece = RichTable(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
        if titles:
            piece.title = Text(", ".join(titles))
        piece.title_style = "bold"
        piece.title_justify = "left"
        piece.show_edge = False
        widths: Sequence[int | None] | None = folded_widths(
            [full[k] for k in group], [needs[k] for k in group], width
        )
        for k, column_width in zip(group, widths or [None] * len(group), strict=True):
            piece.add_column(Text(headings[k]), width=column_width, **styles[k])
        for row in rows:
            piece.add_row(*(Text(row[k].text, STYLES[row[k].mark]) for k in group))
        yield piece


def _findings(part: Findings) -> RichTable:
    """A paragraph for each finding, which any width holds."""
    grid = RichTable.grid(padding=(0, 1, 0, 0))
    if part.heading:
        grid.title = Text(part.heading)
    grid.title_justify = "left"
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    for i, finding in enumerate(part.findings, 1):
        style = STYLES[SEVERITY_MARKS.get(finding["severity"], "")]
        grid.add_row(
            f"{i}.",
            Text.assemble(
                (str(finding["check"]), "bold"), " (", (str(finding["severity"]), style), ")"
            ),
        )
        for name, text in finding_rows(finding).items():
            grid.add_row(name, Text(text))
        grid.add_row("", "")
    return grid

"""A page on a terminal: the answer, tables, then how to read them."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from typing import Any

from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from ctrans.base.printable import printable
from ctrans.report.fit import groups_of, shown_rows
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
HEADING, LONGEST_NAME = 10, 24
"""Letters of a heading's line at least, and of a row's name that is never broken."""


def show(
    page: Page, console: Console, *, looked_at: str | None = None, verbose: bool = False
) -> None:
    """Prints the page. `looked_at` is printed below the answers: which models were recognised, and
    what they read.

    Folded chapters, formulas and columns of detail need `verbose`.
    """
    for answer in page.answers:
        console.print(Text(answer.text, STYLES[answer.mark] or "bold"))
    if looked_at is not None:
        console.print(printable(looked_at), markup=False, soft_wrap=True)
    legend: dict[str, str] = {}
    for i, chapter in enumerate(page.chapters):
        parts = [part for part in chapter.parts if not isinstance(part, Answer | Plot)]
        if not parts or (chapter.folded and not verbose):
            continue
        console.print()
        if i:
            console.print(Text(chapter.title, "bold"))
        for part in parts:
            _show(part, console, legend, verbose=verbose)
    if legend:
        console.print(Text("\nHow to read it", "bold"))
        for meaning in dict.fromkeys(legend.values()):
            names = " and ".join(name for name, other in legend.items() if other == meaning)
            console.print(Text.assemble((names, "italic"), ": ", meaning))
    folded = [
        each.title
        for each in page.chapters
        if each.folded and any(not isinstance(part, Plot) for part in each.parts)
    ]
    if folded and not verbose:
        console.print(Text(f"\n--verbose also shows: {', '.join(folded)}."))
    if page.asked:
        console.print(Text(page.asked))


def _show(part: Section, console: Console, legend: dict[str, str], *, verbose: bool) -> None:
    if isinstance(part, Words):
        for line in filter(None, (part.text, *(f"- {line}" for line in part.lines))):
            console.print(Text(line))
    elif isinstance(part, Table):
        table = part.only(False, verbose)
        for piece in _fitted(table, console.width, verbose=verbose):
            console.print(piece)
        if part.meaning:
            console.print(Text(part.meaning))
        meanings = {
            column.name: column.legend if verbose else column.meaning for column in table.columns
        }
        legend |= {name: meaning for name, meaning in meanings.items() if meaning}
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
    if table.rows_shown and not verbose:
        wanted = table.rows_shown
    else:
        wanted = len(rows)
    if rows:
        shown = [rows[i] for i in shown_rows(len(rows), wanted, alternate=table.alternate)]
    else:
        shown = []
    headings = list[str]()
    styles = list[dict[str, Any]]()
    needs = list[int]()
    for k, column in enumerate(table.columns):
        known = [row[k] for row in table.rows if row[k].text not in EMPTY]
        widest = max((len(cell.text) for cell in known), default=1)
        headings.append(
            "\n".join(textwrap.wrap(column.name, max(HEADING, widest), break_long_words=False))
        )
        figures = k > 0 and all(cell.value is not None for cell in known)
        whole = figures or (k == 0 and widest <= LONGEST_NAME)
        styles.append(
            {
                "justify": "right" if figures else "left",
                "overflow": "ellipsis" if figures else "fold",
                "no_wrap": whole,
            }
        )
        texts = [headings[-1], *(row[k].text for row in shown)]
        needs.append(
            max(
                (
                    cell_len(part)
                    for text in texts
                    for part in (text.splitlines() if whole else text.split())
                ),
                default=0,
            )
        )
    lead = next((k for k, style in enumerate(styles) if style["justify"] == "right"), 1)
    for i, group in enumerate(groups_of(needs, lead, width)):
        title = ", ".join(filter(None, (table.title, FURTHER if i else "")))
        made = RichTable(
            title=Text(title) if title else None,
            box=box.SIMPLE_HEAD,
            padding=(0, 1, 0, 0),
            pad_edge=False,
        )
        made.title_style = "bold"
        made.title_justify = "left"
        made.show_edge = False
        for k in group:
            made.add_column(Text(headings[k]), **styles[k])
        for row in shown:
            made.add_row(*(Text(row[k].text, STYLES[row[k].mark]) for k in group))
        yield made


def _findings(part: Findings) -> RichTable:
    """A paragraph for each finding, which any width holds."""
    made = RichTable.grid(padding=(0, 1, 0, 0))
    if part.title:
        made.title = Text(part.title)
    else:
        made.title = None
    made.title_justify = "left"
    made.add_column(no_wrap=True)
    made.add_column(overflow="fold")
    for i, finding in enumerate(part.found, 1):
        style = STYLES[SEVERITY_MARKS.get(finding["severity"], "")]
        made.add_row(
            f"{i}.",
            Text.assemble(
                (str(finding["check"]), "bold"), " (", (str(finding["severity"]), style), ")"
            ),
        )
        for name, text in finding_rows(finding).items():
            made.add_row(name, Text(text))
        made.add_row("", "")
    return made

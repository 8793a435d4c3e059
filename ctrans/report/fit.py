"""How a table fits its terminal: by fewer rows, evenly spread, and by columns that go on below. No
number is ever cut.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence

from rich.table import Column, Table
from rich.text import Text

FURTHER = "further columns"
"""Title of a table with the columns that did not fit."""


def shown_rows(count: int, wanted: int, *, alternate: bool = False) -> list[int]:
    """Indices of rows from 0 to count - 1: all of up to twice as many as wanted, else every so
    many-th, and the last.

    Steps are the whole number that divides the way and is nearest to what was wanted, where one
    within a factor of two does. With `alternate` they are odd, so that rows of two kinds in turn
    are both seen.
    """
    way = count - 1
    if count <= 2 * wanted:
        return list(range(count))
    least = math.ceil(way / (2 * wanted))
    steps = [step for step in range(least, 4 * least + 1) if not (alternate and step % 2 == 0)]
    even = [step for step in steps if way % step == 0]
    step = min(even or steps, key=lambda step: abs(math.log(way / step / (wanted - 1))))
    return sorted({*range(0, count, step), way})


def fitted(table: Table, width: int) -> list[Table]:
    """The table; or where its columns do not fit, several with the same rows: each begins with the
    table's own first columns.

    Those are the ones that are aligned left, or the first. A column that may fold takes no more
    than its longest word.
    """
    needs = [_need(column) for column in table.columns]
    lead = next((i for i, column in enumerate(table.columns) if column.justify == "right"), 1) or 1
    groups, own = [list[int]()], list(range(lead))
    for i in range(lead, len(needs)):
        if groups[-1] and _width(table, needs, [*own, *groups[-1], i]) > width:
            groups.append([])
        groups[-1].append(i)
    if len(groups) == 1:
        return [table]
    parts = [_part(table, [*own, *group]) for group in groups]
    for part in parts[1:]:
        part.title = FURTHER if table.title is None else f"{table.title}, {FURTHER}"
    for part in parts[:-1]:
        part.caption = None
    return parts


def _part(table: Table, chosen: Sequence[int]) -> Table:
    part = copy.copy(table)
    part.columns = [copy.copy(table.columns[i]) for i in chosen]
    for place, column in enumerate(part.columns):
        column._index = place
    return part


def _need(column: Column) -> int:
    """The least width of the column."""
    every = (column.header, *column.cells)
    texts = [each if isinstance(each, Text) else Text.from_markup(str(each)) for each in every]
    if column.no_wrap:
        return max(line.cell_len for text in texts for line in text.split(allow_blank=True))
    return max([column.min_width or 0, *(len(word) for text in texts for word in text.plain.split())])


def _width(table: Table, needs: Sequence[int], chosen: Sequence[int]) -> int:
    _, right, _, left = table.padding
    between = (len(chosen) - 1) + 2 * table.show_edge if table.box is not None else 0
    return sum(needs[i] + left + right for i in chosen) + between

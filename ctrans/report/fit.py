"""How a table fits its terminal: by fewer rows, evenly spread, by columns that go on below, and by
texts that fold between words. A number is cut only where its column alone is too wide, and then
ends in "…".
"""

from __future__ import annotations

import math
from collections.abc import Sequence

GAP = 2
"""Characters between two columns."""


def shown_rows(count: int, target: int, *, alternate: bool = False) -> list[int]:
    """Indices of rows from 0 to count - 1: all of up to twice `target`, else every so
    many-th, and the last.

    Steps are the whole number that divides the way and is nearest to `target` rows, where one
    within a factor of two does. With `alternate` they are odd, so that rows of two kinds in turn
    are both seen.
    """
    way = count - 1
    if count <= 2 * target:
        return list(range(count))
    least = math.ceil(way / (2 * target))
    steps = [step for step in range(least, 4 * least + 1) if not (alternate and step % 2 == 0)]
    even = [step for step in steps if way % step == 0]
    step = min(even or steps, key=lambda step: abs(math.log(way / step / (target - 1))))
    return sorted({*range(0, count, step), way})


def groups_of(needs: Sequence[int], lead: int, width: int) -> list[list[int]]:
    """Columns of these least widths in groups that fit a terminal: all of them, or several groups
    that each begin with the first `lead` columns, or with fewer where these leave no room. A column
    that may fold needs its longest word.
    """
    while lead > 1 and sum(needs[:lead]) + GAP * lead + max(needs[lead:], default=0) > width:
        lead -= 1
    groups = [list[int]()]
    lead_columns = list(range(lead))
    for i in range(lead, len(needs)):
        columns = (*lead_columns, *groups[-1], i)
        if groups[-1] and sum(needs[k] + GAP for k in columns) > width + 1:
            groups.append([])
        groups[-1].append(i)
    return [[*lead_columns, *group] for group in groups]


def folded_widths(full: Sequence[int], needs: Sequence[int], width: int) -> list[int] | None:
    """The widths of columns that fit a terminal: the widest fold first, none below its need.

    None where the columns fit in full, or do not fit even in the widths that they need.
    """
    room = width - GAP * (len(full) - 1)
    if sum(full) <= room or sum(needs) > room:
        return None
    widths = list(full)
    while sum(widths) > room:
        foldable = [i for i in range(len(widths)) if widths[i] > needs[i]]
        widest = max(foldable, key=lambda i: widths[i])
        widths[widest] -= 1
    return widths

"""What is known of families of models, as a table and in words."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.markup import escape
from rich.table import Table

from ctrans.interop.families import FoundFamily

KNOWN = {"theta": "theta", "bounds": "bound", "matrices": "weights", "last": "last"}
"""What may be known of a family, and its column."""


def families_table(found: Sequence[FoundFamily]) -> Table:
    """A line for each family: what it reads, where its norms act, and what is known of its maps."""
    table = Table(box=None, pad_edge=False)
    for column in ("family", "reads", "placement", *KNOWN.values()):
        table.add_column(column, no_wrap=True)
    for each in found:
        placement = "refused" if not each.supported else each.placement or ""
        placement += " at once" if each.parallel else ""
        placement += "".join(f" dt {length:g}" for length in each.lengths if each.lengths != (1.0,))
        known = ["" if not each.supported else "yes" if getattr(each, name) else "no" for name in KNOWN]
        table.add_row(each.family, each.reads, escape(placement), *known)
    return table


def family_words(each: FoundFamily) -> Iterator[str]:
    """What was opened, of which maps it is made, and what is not known and why."""
    yield ""
    if not each.supported:
        yield f"{each.family}: refused. {escape(str(each.refused))}"
        return
    how = " and ".join(name for name in (each.attention, each.ffn) if name and name != "none")
    yield f"{each.family}: {each.opened}, {escape(how)}{' at once, as one segment' if each.parallel else ''}, {each.norm}"
    for why in each.unread:
        yield f"  not known: {escape(why)}"

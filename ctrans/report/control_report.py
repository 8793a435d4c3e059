"""How the maximum principle by depth is shown in a terminal."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from rich import box
from rich.markup import escape
from rich.table import Table

from ctrans.control.attained import Attained
from ctrans.control.costate import ZERO_GRADIENT
from ctrans.control.maximum_principle import MaximumPrinciple
from ctrans.report.fit import shown_rows
from ctrans.report.placement_style import equation
from ctrans.report.simulate_report import number


def control_table(name: str, reading: MaximumPrinciple, rows: int = 12) -> Table:
    """A row for each segment, evenly thinned to about that many; the ends are always shown."""
    r = reading
    return _by_segment(
        f"{name}: {equation(name)}",
        f"loss {r.loss:.4f}; align: " + "; ".join(ALIGNMENTS[measure] for measure in dict.fromkeys(r.measures)),
        {
            "seg": str,
            "sublayer": lambda k: r.kinds[k],
            "t": lambda k: number(r.times[k]),
            "|P|": lambda k: number(r.costate_norm[k]),
            "|v|": lambda k: number(r.velocity_norm[k]),
            "<P,v>": lambda k: number(r.product[k]),
            "drift": lambda k: number(r.drift[k]),
            "H": lambda k: number(r.hamiltonian[k]),
            "gap": lambda k: number(r.gap[k]),
            "align": lambda k: number(r.alignment[k]),
        },
        len(r.times),
        rows,
    )


def control_notes(reading: MaximumPrinciple, instead: str | None) -> list[str]:
    """What could not be had and what serves in its place, each with an empty line after it."""
    lines = [] if instead is None else [instead]
    lines += [f"{segment} is skipped: {why}" for segment, why in reading.skipped.items()]
    lines += [] if any(reading.costate_norm) else [ZERO_GRADIENT]
    return [escape("\n".join(lines)), ""] if lines else []


def attained_table(name: str, found: Attained, rows: int = 12) -> Table:
    """What the shared weights leave, a row for each segment, evenly thinned to about that many."""
    return _by_segment(
        f"{name}, discrete model: what training attains",
        "dt<P,v> = <th, dL/dth>, th the last factor: 0 at a critical point of the loss on this text. Left of that loss, to first "
        "order: by velocities free at each token; by th within its norm; by all parameters within theirs, from below, as ascents "
        "found it; and its first-order condition, which holds at a saddle too",
        {
            "seg": str,
            "sublayer": lambda k: found.kinds[k],
            "dt<P,v>": lambda k: number(found.work[k]),
            "<th,dL/dth>": lambda k: number(found.radial[k]),
            "free": lambda k: number(found.pointwise_gap[k]),
            "last": lambda k: number(found.last_gap[k]),
            "all": lambda k: number(found.shared_gap[k]),
            "condition": lambda k: number(found.first_order[k]),
        },
        len(found.times),
        rows,
    )


def _by_segment(title: str, caption: str, columns: Mapping[str, Callable[[int], str]], segments: int, rows: int) -> Table:
    """Columns as functions of the segment's number, in about so many rows that are evenly spread from the first to the last."""
    table = Table(title=title, caption=caption, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    table.title_style, table.title_justify, table.caption_justify = "bold", "left", "left"
    for column in columns:
        table.add_column(column, justify="left" if column == "sublayer" else "right", no_wrap=True)
    for k in shown_rows(segments, rows, alternate=True):
        table.add_row(*(value(k) for value in columns.values()))
    return table


ALIGNMENTS = {
    "gap": "share of the steepest descent that v achieves of what its norm allows token by token",
    "cosine": "cos(-P, v), as no norm at the output bounds velocities",
}
"""What the alignment is, by the measure it was taken with."""

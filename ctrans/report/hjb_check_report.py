"""How a well-posedness check is shown: a table with a row for each placement, what stands behind it in words, and H against R."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich import box
from rich.markup import escape
from rich.table import Table

from ctrans.control.admissible import Posedness
from ctrans.control.costate import ZERO_GRADIENT
from ctrans.control.model_check import ModelCheck, SegmentCheck
from ctrans.placement import PLACEMENTS
from ctrans.report.axes import legend_below, show_at_least_a_decade
from ctrans.report.placement_style import colour, marker

LARGEST, SMALLEST, SMALLER_BY = 11.0, 2.0, 1.2
"""Sizes of marks: each placement's are smaller than those of the one before it in the table."""


def mark_size(placement: str) -> float:
    """How large the placement's marks are, so that curves that coincide show as marks inside each other."""
    place = list(PLACEMENTS).index(placement) if placement in PLACEMENTS else 0
    return max(SMALLEST, LARGEST - SMALLER_BY * place)


def size(value: float | None) -> str:
    """Five significant digits in little room, or a dash."""
    if value is None:
        return "–"
    return f"{value:.5g}" if value in (0, math.inf) or 0.1 <= abs(value) < 1e5 else f"{value:.1e}"


def power(value: float | None) -> str:
    """The order of magnitude of what should be 0, or a dash."""
    return "–" if value is None else f"{value:.0e}"


def exponent(value: float | None) -> str:
    """Two decimals, without a sign on zero, or a dash."""
    return "–" if value is None else f"{round(value, 2) + 0.0:.2f}"


def verdict(check: ModelCheck, of: Posedness) -> str:
    """The verdict with what it needs to stay as it is, and a question mark where the evidence disagrees."""
    words = of.replace("the rest fixed", f"{'+'.join(check.held)} fixed") if check.held else of
    return words if check.agrees else f"{words}?"


def supremum(segment: SegmentCheck) -> str:
    """H under what the verdict assumes: a number, from what was found to what is proven where its maximiser is the best that was
    found, or what is known of it under the weight decay asked about.
    """
    known, ceiling = segment.hamiltonian, segment.certificate.ceiling
    if known is not None:
        return size(known) if ceiling is None or segment.decayed else f"{size(known)}..{size(ceiling)}"
    return "open" if segment.verdict == "open" else "finite"


def found(segment: SegmentCheck) -> float | None:
    """The best value that an ascent found: over velocities, or within the largest bound on the last map's weights.

    None where a weight decay decides: that ascent pays for none.
    """
    if segment.decayed:
        return None
    certificate = segment.certificate
    if certificate.velocities is not None:
        return certificate.velocities.best
    return None if certificate.growth is None else certificate.growth.values[-1]


def decay(check: ModelCheck) -> str:
    """dt lam*, from what was found to what is proven where these differ, or a dash."""
    threshold = check.training_threshold
    if threshold is None:
        return "–"
    low, high, power = f"{threshold.lower:.2g}", f"{threshold.upper:.2g}", ""
    if 0 < threshold.upper < 0.1:  # one power for both takes less room
        k = math.floor(math.log10(threshold.upper))
        low, high, power = f"{threshold.lower / 10**k:.1f}", f"{threshold.upper / 10**k:.1f}", f"e{k}"
    return f"{low}{power}" if low == high else f"{low}-{high}{power}"


COLUMNS: dict[str, Callable[[ModelCheck], str]] = {
    "seg": lambda c: str(c.largest.segment),
    "H": lambda c: supremum(c.largest),
    "found": lambda c: size(found(c.largest)),
    "Kan's": lambda c: size(c.largest.ellipsoid),
    "gap": lambda c: power(c.evidence["gap"]),
    "W gap": lambda c: power(c.evidence["weights"]),
    "KKT": lambda c: power(c.evidence["kkt"]),
    "apart": lambda c: power(c.evidence["uniqueness"]),
    "R^k": lambda c: exponent(c.evidence["exponent"]),
    "g^k": lambda c: exponent(c.evidence["gained"]),
    "dt lam*": decay,
}

KEY = """ODE: each segment's velocities with its own norm; step: what X_k+1 - X_k can be. No ODE: a norm around the state that is no \
projection on a surface (dyt, derf, clipping); all columns are then the step's.
Well-posed for bounded gains: H is finite for the norm's gains and offsets as they are, and grows in proportion to them; where they are \
trained without decay or bound, the supremum over them is infinite.
The rest fixed: finite where only the maps that pay are free.
Degenerate: H is infinite: not the norms but something else has to hold the weights. That is no verdict on the model.

At the segment (seg) with the largest costate P = dL/dX, of the ODE:
H: in closed form. found: the best that an ascent found (degenerate: within the largest bound R tried). Kan's: his value for LayerNorm.
The worst of all segments:
gap: from H to the best velocities. W gap: to the best last-layer weights W. KKT: residual of the maximiser. apart: distance between \
maximisers from different starts. R^k: k of value ~ R^k with |W| <= R. g^k: the same with W, gains and offsets bounded by R together.
dt lam*: with a smaller penalty lam/2 |W|^2 of every matrix in the loss (not AdamW's decoupled decay), H is infinite on some segment; \
with a larger one it is finite on all, at this text, these weights, attention rows, input gains and biases (found-proven). Where \
--weight-decay decides, H is that with it; no other column pays for it.
Sets of velocities: f_j is what the sublayer puts out for token j, u_j a point of the norm's sphere."""


def verdict_table(norm: str, checks: Sequence[ModelCheck], refused: Mapping[str, str]) -> Table:
    """Both verdicts of each placement, those that do not take the remedy last."""
    segments = len(checks[0].segments) + len(checks[0].skipped)
    table = _table(f"{norm}: {segments} segments, {checks[0].tokens} token{'s' * (checks[0].tokens != 1)}")
    table.add_column("placement", no_wrap=True)
    for name in ("ODE", "step"):
        table.add_column(name, overflow="fold")
    for c in checks:
        table.add_row(c.placement, verdict(c, c.verdict) if c.has_ode else "no ODE", verdict(c, c.step_verdict))
    for placement in refused:
        table.add_row(placement, "n/a", "n/a")
    return table


def evidence_table(checks: Sequence[ModelCheck]) -> Table:
    """What stands behind the ODE's verdicts, a row for each placement."""
    table = _table(None)
    table.add_column("placement", no_wrap=True)
    # a column is for those who have something in it
    columns = {name: cell for name, cell in COLUMNS.items() if any(cell(c) != "–" for c in checks)}
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    for c in checks:
        table.add_row(c.placement, *(cell(c) for cell in columns.values()))
    return table


def _table(title: str | None) -> Table:
    table = Table(title=title, box=box.SIMPLE_HEAD, padding=0, show_edge=False)
    table.title_style, table.title_justify = "bold", "left"
    return table


def check_notes(checks: Sequence[ModelCheck]) -> str:
    """The admissible sets in words, each with the models that have a segment with it; what a weight decay does; where velocities tie."""
    sets: dict[str, list[str]] = {}
    for c in checks:
        for words in dict.fromkeys(segment.certificate.words for segment in c.segments):
            sets.setdefault(words, []).append(c.placement)
    lines = [f"{', '.join(names)}: {words}" for words, names in sets.items()]
    lines += [f"{c.placement}: {c.instead}" for c in checks if c.instead is not None]
    lines += [f"{c.placement}: {segment} is skipped: {why}" for c in checks for segment, why in c.skipped.items()]
    lines += [line for c in checks for line in decay_notes(c)]
    lines += [
        f"{c.placement}: {ZERO_GRADIENT}; the verdict is of any other costate" for c in checks if not c.largest.costate_norm
    ]
    for c in checks:
        ties = sum(segment.certificate.ties for segment in c.segments)
        if ties:
            lines.append(
                f"{c.placement}: a tie, more than one velocity is optimal, for {ties} of {len(c.segments) * c.tokens} tokens"
            )
    return escape("\n".join(lines))


def decay_notes(check: ModelCheck) -> list[str]:
    """What the weight decay asked about does to a placement without a bound, and what no weight decay mends."""
    threshold, asked = check.training_threshold, check.largest.weight_decay
    if asked is None:
        return []
    if threshold is None:
        open_ = sum(segment.verdict == "open" for segment in check.segments)
        without = "shows no path of two factors (a gate or a scale by channel makes a third), so that no threshold of the decay is known"
        return [f"{check.placement}: {open_} of {len(check.segments)} segments have a map that {without}"] if open_ else []
    lines = []
    if asked < threshold.lower:
        times = threshold.lower / asked
        lines.append(f"a penalty of {asked:g} is {times:.3g} times too small for a finite H: dt lam* is {decay(check)}")
    elif asked < threshold.upper:
        lines.append(
            f"a penalty of {asked:g} is between the dt lam* that was found and what is proven to suffice: {decay(check)}"
        )
    else:
        lines.append(f"a penalty of {asked:g} keeps both factors from running away: dt lam* is {decay(check)}")
    if threshold.bias > 0:
        lines.append(
            f"biases that do not decay make H infinite whatever it is, as dt |sum_j p_j| = {threshold.bias:.2g} is not 0"
        )
    if threshold.gains:
        lines.append("so do the input norm's gains: trained, they are a third factor, and the value grows like R^3")
    return [f"{check.placement}: {line}" for line in lines]


def key(refused: Mapping[str, str]) -> str:
    """What the columns mean, and why a remedy does not apply where it does not."""
    return escape("\n".join([KEY, *(f"n/a: {reason}" for reason in refused.values())]))


def check_figure(checks: Mapping[str, Sequence[ModelCheck]]) -> Figure:
    """The best value with |W|_F <= R against R, one panel for each norm, at the segment with the largest costate.

    Found by ascent solid, closed forms dashed. R is in units of the R_0 that makes the optimal velocity out of the features, well
    above eps, or velocities of root mean square 1 where there is none. Gains are as they are.
    """
    figure = Figure(figsize=(6.4 * len(checks), 5.2), layout="constrained")
    panels = figure.subplots(1, len(checks), sharey=True, squeeze=False)[0]
    for axes, (norm, row) in zip(panels, checks.items(), strict=True):
        for c in row:
            _draw(axes, c.largest, c.placement)
        axes.plot([], [], "k--", linewidth=1, label="closed form")
        axes.set(xscale="log", yscale="log", xlabel=r"bound on the last linear map's weights, $R/R_0$", title=norm)
        axes.grid(alpha=0.25)
    show_at_least_a_decade(panels[0])
    panels[0].set_ylabel("how fast the loss could fall:\n" + r"best $-\langle P, f\rangle$ with $|W|_F \leq R$, less any penalty")
    legend_below(figure, *panels[0].get_legend_handles_labels(), most=4 * len(checks))
    undecayed = any(segment.weight_decay for row in checks.values() for c in row for segment in c.segments)
    title = "At gains as they are, without weight decay" if undecayed else "At gains as they are"
    figure.suptitle(f"{title}. Bounded: saturates at H. Degenerate: grows with R")
    return figure


def _draw(axes: Axes, segment: SegmentCheck, placement: str) -> None:
    certificate, shade = segment.certificate, colour(placement)
    if certificate.growth is None:
        axes.axhline(certificate.hamiltonian, linestyle="--", color=shade, label=placement)
        return
    radii = np.array(certificate.growth.radii)
    share = radii / np.sqrt(radii[0] * radii[-1])
    mark: dict[str, Any] = {"marker": marker(placement), "markersize": mark_size(placement), "markerfacecolor": "none"}
    axes.plot(share, certificate.growth.values, color=shade, linewidth=1.4, label=placement, **mark)
    closed = np.full_like(radii, certificate.hamiltonian) if segment.slope is None else segment.slope * radii
    axes.plot(share, closed, "k--", linewidth=1)

"""How exponents by token, spectra of matrix products and contributions of sublayers are shown, for `ctrans simulate`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure
from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from ctrans.report.fit import shown_rows
from ctrans.report.simulate_report import number
from ctrans.report.token_colours import coloured_text
from ctrans.stability.backward.token_exponents import TokenExponents
from ctrans.stability.forward.contributions import ContributionsByDepth
from ctrans.stability.forward.spectra import SpectrumFigures

NO_SPECTRA = "no map of this model shows its heads or its matrices, so that there are no spectra"


def exponents_text(name: str, found: TokenExponents, words: Sequence[str]) -> Group:
    """The sequence, each token on the colour of its exponent, and the two ends of the scale."""
    finite = sorted(v for v in found.exponents if v > -float("inf"))
    ends = f"{number(finite[0])} to {number(finite[-1])}" if finite else "none reaches it"
    title = (
        f"{name}: Lyapunov exponents by input token, log|dX_T[{found.reader}]/dX_0[j]|/T, {ends}; red grows, blue decays, grey does "
        "not get there"
    )
    return Group(Text(title, style="bold"), coloured_text(words, found.exponents), Text())


def spectra_table(name: str, spectra: Sequence[SpectrumFigures], rows: int = 7) -> Table | str:
    """By segment and product, over heads and experts: largest singular value and eigenvalue, and what share is positive."""
    if not spectra:
        return f"{name}: {NO_SPECTRA}\n"
    table = _table(f"{name}: spectra of products of matrices, largest over heads or experts")
    for column in ("seg", "product", "sigma max", "|lambda| max", "positive"):
        table.add_column(column, justify="right", no_wrap=True)
    groups = by_product(spectra)
    for i in shown_rows(len(groups), rows, alternate=True):
        (segment, product), each = list(groups.items())[i]
        positive = sum(s.positive for s in each) / len(each)
        sizes = (number(max(s.singular[0] for s in each)), number(max(s.radius for s in each)))
        table.add_row(str(segment), product, *sizes, f"{positive:.0%}")
    return table


def by_product(spectra: Sequence[SpectrumFigures]) -> Mapping[tuple[int, str], list[SpectrumFigures]]:
    """The spectra of each segment's product, of all its heads or experts."""
    groups: dict[tuple[int, str], list[SpectrumFigures]] = {}
    for each in spectra:
        groups.setdefault((each.segment, each.product), []).append(each)
    return groups


def spectra_figure(found: Mapping[str, Sequence[SpectrumFigures]], title: str) -> Figure:
    """Eigenvalues in the complex plane by product, a colour for each depth; one row a model."""
    figure = Figure(figsize=(13, 4.4 * len(found)), layout="constrained")
    every = figure.subplots(len(found), 3, squeeze=False)
    for row, (name, spectra) in zip(every, found.items(), strict=True):
        deepest = max((s.segment for s in spectra), default=1) or 1
        for axes, product in zip(row, ("QK", "OV", "W_2 W_1"), strict=True):
            own = [s for s in spectra if s.product == product]
            points = axes.scatter(
                [x for s in own for x in s.real],
                [y for s in own for y in s.imaginary],
                c=[s.segment for s in own for _ in s.real],
                s=6,
                vmin=0,
                vmax=deepest,
                cmap="viridis",
            )
            axes.set(title=f"{name}: eigenvalues of {product}", xlabel="real part", ylabel="imaginary part")
            axes.axvline(0, color="0.7", linewidth=0.8)
            axes.grid(alpha=0.25)
        figure.colorbar(points, ax=row[-1], label="segment")
    figure.suptitle(title)
    return figure


def contributions_table(name: str, found: ContributionsByDepth, rows: int = 13) -> Table:
    """Each part's share of the last state and of the target's logit; the ends are always shown."""
    table = _table(f"{name}: contributions to the last state and to the target's logit, means over tokens", found.note)
    for column in ("part", "<part, X>/|X|^2", "|part|/|X|", "logit"):
        table.add_column(column, justify="right", no_wrap=True)
    for i in shown_rows(len(found.names), rows):
        logit = None if found.logit is None else found.logit[i]
        table.add_row(found.names[i], number(found.state[i]), number(found.size[i]), number(logit))
    total = None if found.logit is None else sum(found.logit)
    table.add_row("sum of all", number(sum(found.state)), "", number(total))
    return table


def contributions_figure(found: Mapping[str, ContributionsByDepth], title: str) -> Figure:
    """Bars by depth, the embedding first and offsets last: shares of the last state, and of the logit where that is known."""
    figure = Figure(figsize=(13, 4.4), layout="constrained")
    panels = figure.subplots(1, 2)
    for axes, what, label in (
        (panels[0], "state", "share of the last state"),
        (panels[1], "logit", "added to the target's logit"),
    ):
        for i, (name, each) in enumerate(found.items()):
            values: list[Any] = getattr(each, what) or []
            width = 0.8 / len(found)
            axes.bar([k + i * width for k in range(len(values))], values, width, label=name)
        axes.set(title=label, xlabel="embedding, sublayers in order, offsets")
        axes.axhline(0, color="0.5", linewidth=0.8)
        axes.grid(alpha=0.25)
    panels[0].legend(frameon=False)
    figure.suptitle(title)
    return figure


def _table(title: str, caption: str = "") -> Table:
    table = Table(title=title, caption=caption or None, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    table.title_style, table.title_justify, table.caption_justify = "bold", "left", "left"
    return table

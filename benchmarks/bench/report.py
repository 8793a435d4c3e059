"""The kept result of `make bench` as text, and as one page with bars."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.bench.parts import PARTS

Result = dict[str, Any]


def text(result: Result) -> list[str]:
    """The machine, and a table for each part. A ratio is ours over the peer's: below 1 ours is
    faster.
    """
    lines = [
        *([result["words"]] if result["words"] else []),
        (
            f"{result['date']}: {result['processor']}, {result['processors']} processors, Python"
            f" {result['python']}, torch {result['torch']}"
        ),
        (
            "Seconds are medians. Ratio: time of ours over the peer's, median of pairs (quartiles)."
            " CPU: the same of processor time."
        ),
        (
            "Limit: what the machine needs for the words beside it, so that no version could be"
            " faster. Load: before and after the part."
        ),
    ]
    for name, part in result["parts"].items():
        load = " to ".join(f"{each:.1f}" for each in part["load"])
        lines += [
            "",
            (
                f"{PARTS[name].title} ({part['seconds']:.0f} s, load {load}, {part['threads']}"
                f" threads, commit {part['commit']})"
            ),
        ]
        if part["failure"]:
            lines.append(f"  not measured: {part['failure']}")
        elif name == "growth":
            lines += growth_lines(part["rows"])
        else:
            lines += [line for row in part["rows"] for line in row_lines(row)]
    return lines


def row_lines(row: dict[str, Any]) -> list[str]:
    """A row's figures, and its note."""
    first = (
        f"  {row['name']}: ours"
        f" {shown(row['seconds'])}{' (extrapolated)' if row['estimated'] else ''}"
    )
    if row["peer_seconds"] is not None:
        first += (
            f", {row['peer']} {shown(row['peer_seconds'])}, ratio {spread(row['ratio'])}, CPU"
            f" {spread(row['processor_ratio'])}"
        )
        first += f", aim {row['aim']:.2f}" if row["aim"] is not None else ""
        first += f", {row['pairs']} pairs"
    more = (
        [
            f"limit {shown(row['limit'])} ({row['limit_is']}), ours"
            f" {row['seconds'] / row['limit']:.2f} times it"
        ]
        if row["limit"]
        else []
    )
    more += [row["note"]] if row["note"] else []
    return [first, *(f"    {each}" for each in more)]


def growth_lines(rows: list[dict[str, Any]]) -> list[str]:
    """Exponents, and what is steeper than it should be."""
    lines = [f"  {'':26}{'axis':8}{'sizes':>20}{'time':>8}{'products':>10}{'at most':>9}"]
    for row in rows:
        steeper = row["exponent"] > row["highest"] + 0.15
        sizes = " ".join(map(str, row["sizes"]))
        lines.append(
            f"  {row['command']:26}{row['axis']:8}{sizes:>20}{row['exponent']:8.2f}{row['products']:10.2f}{row['highest']:9.1f}"
            f"{'  steeper than it should be' if steeper else ''}"
        )
    return lines


def shown(seconds: float) -> str:
    """With a unit, to three digits."""
    if seconds >= 100:
        return f"{seconds / 60:.1f} min"
    return f"{seconds:.3g} s" if seconds >= 0.1 else f"{1e3 * seconds:.3g} ms"


def spread(ratio: list[float]) -> str:
    low, middle, high = ratio
    return f"{middle:.2f} ({low:.2f} to {high:.2f})"


def compared(result: Result) -> list[dict[str, Any]]:
    """All rows that have a peer."""
    return [
        row
        for name, part in result["parts"].items()
        if name != "growth"
        for row in part["rows"]
        if row["peer_seconds"] is not None
    ]


LIBRARIES = ("torchdiffeq", "torchode", "diffrax")
"""Peers of which `table` takes the methods together."""


def table(result: Result) -> str:
    """Ours over each peer's time, for the site: one row for each piece of work and peer, in which
    the medians of several methods or sizes are a range.
    """
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in compared(result):
        groups.setdefault(work_and_peer(row), []).append(row)
    lines = ["| work | peer | time of ours over the peer's |", "| --- | --- | --- |"]
    for (work, peer), rows in groups.items():
        medians = [row["ratio"][1] for row in rows]
        several = f"{min(medians):.2f} to {max(medians):.2f}, {len(rows)} rows"
        ratio = several if len(rows) > 1 else spread(rows[0]["ratio"])
        lines.append(f"| {work} | {peer} | {ratio} |")
    return "\n".join(lines)


def work_and_peer(row: dict[str, Any]) -> tuple[str, str]:
    """The two cells that rows of one group share: a solver's shape without its method, a training
    step without its size.
    """
    work, _, details = row["name"].partition(": ")
    of_each_row = ", each row by itself" if details.startswith("each row") else ""
    of_the_gradient = ", gradient" if "gradient" in details else ""
    compiled = ", compiled" if details.endswith(", compiled") else ""
    library = next((name for name in LIBRARIES if row["peer"].startswith(name)), row["peer"])
    return work + of_each_row + of_the_gradient + compiled, library


def newest(directory: Path) -> Result | None:
    """The latest whole result that is kept there; without one the latest of `--quick`."""
    kept = sorted(
        directory.glob("bench-*.json"), key=lambda path: ("quick" not in path.name, path.name)
    )
    return json.loads(kept[-1].read_text()) if kept else None


def draw(result: Result, path: Path) -> None:
    """Bars of ours over each peer's time with quartiles, and marks at the limit and the aim, on a
    logarithmic axis.
    """
    import matplotlib.pyplot as plt

    rows = compared(result)[::-1]
    if not rows:
        return
    figure, axes = plt.subplots(figsize=(11, 1.5 + 0.32 * len(rows)), layout="constrained")
    for k, row in enumerate(rows):
        low, middle, high = row["ratio"]
        axes.barh(k, middle, color="tab:blue" if middle <= 1 else "tab:orange", height=0.6)
        axes.errorbar(middle, k, xerr=[[middle - low], [high - middle]], color="black", linewidth=1)
        if row["limit"]:
            axes.plot(
                row["limit"] / row["peer_seconds"], k, marker="|", markersize=12, color="tab:green"
            )
        if row["aim"] is not None:
            axes.plot(row["aim"], k, marker="x", color="tab:red")
    axes.set_yticks(
        range(len(rows)), [f"{row['name']}  /  {row['peer']}" for row in rows], fontsize=7
    )
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set(xscale="log", xlabel="time of ctrans over the peer's; | limit of the machine, x aim")
    axes.set_title(
        f"{result['date']}, {result['processor']}, {result['processors']}"
        f" processors{'; ' + result['words'] if result['words'] else ''}",
        fontsize=8,
    )
    figure.savefig(path, dpi=120)
    plt.close(figure)

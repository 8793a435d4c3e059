"""The tables of the study, from the rows of its runs, by the rules of PROTOCOL.md."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from scipy.stats import rankdata, spearmanr

from benchmarks.reach.cases import PLACEMENTS, STUDIED, architectures
from ctrans.study.outcomes import Floor, StableRate, rate_by_floor
from ctrans.training.tasks import TASKS

Rates = Mapping[str, StableRate]
DRAWS = 2000


def report(rows: Sequence[Mapping[str, Any]], early: Sequence[Mapping[str, Any]]) -> None:
    """Prints the tables of the runs and their early figures."""
    found = {task: largest_rates(task, rows) for task in STUDIED}
    logs = {task: logs_of(rates) for task, rates in found.items()}
    lines = [
        *_table(found),
        "",
        "H1: largest stable rates",
        *between(logs),
        "",
        *_lengths(found),
        "",
        *_remedies(found, rows),
        "",
    ]
    lines += ["H4: largest stable rates", *_early(logs, early, placed=True)]
    for title, outcome in (
        ("rates from 0.03 on, less the mean loss", _high),
        ("best mean losses", _best),
    ):
        other = {task: outcome(task, rows) for task in STUDIED}
        lines += ["", f"Not registered: {title}", *between(other), *_early(other, early)]
    for task in STUDIED:
        lowest = [min(of, key=of.__getitem__) == min(of) for of in _means(task, rows).values()]
        lines.append(
            f"  {task}: the lowest rate has the best mean loss for {sum(lowest)} of {len(lowest)}"
            " architectures"
        )
    print("\n".join(lines))


def _means(task: str, rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[float, float]]:
    """The mean loss by name and rate; a loss that is not finite counts as a guess."""
    guess = TASKS[task].data().guess_loss()
    return {
        name: {
            rate: float(np.mean([x if math.isfinite(x) else guess for x in losses]))
            for rate, losses in each.items()
        }
        for name, each in ends(task, rows).items()
    }


def _high(task: str, rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    return {
        name: -float(np.mean([x for rate, x in of.items() if rate > 0.03]))
        for name, of in _means(task, rows).items()
    }


def _best(task: str, rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    return {name: min(of.values()) for name, of in _means(task, rows).items()}


def ends(task: str, rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[float, list[float]]]:
    """The losses by name and rate. A run that diverged is a nan, which counts as a guess; a failed
    one is an error.
    """
    made: dict[str, dict[float, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        if row["task"] == task:
            assert row["ending"] != "failed", row
            made[row["name"]][row["rate"]].append(math.nan if row["loss"] is None else row["loss"])
    return made


def largest_rates(task: str, rows: Sequence[Mapping[str, Any]]) -> dict[str, StableRate]:
    """The largest stable rate of each architecture with at least two rates."""
    data = TASKS[task].data()
    floor = Floor(data.depthless_loss(), data.guess_loss())
    return {
        name: rate_by_floor(each, floor) for name, each in ends(task, rows).items() if len(each) > 1
    }


def _table(found: Mapping[str, Rates]) -> list[str]:
    def cell(rate: StableRate | None) -> str:
        return (
            "-"
            if rate is None or rate.rate is None
            else f"{'>=' if rate.at_least else ''}{rate.rate:.3g}"
        )

    lines = [f"{'largest stable rate':28s}" + "".join(f"{task:>12s}" for task in found)]
    return lines + [
        f"{name:28s}" + "".join(f"{cell(found[task].get(name)):>12s}" for task in found)
        for name in architectures()
    ]


def logs_of(rates: Rates) -> dict[str, float]:
    return {name: math.log10(each.rate) for name, each in rates.items() if each.rate is not None}


def rho(x: Sequence[float], y: Sequence[float]) -> tuple[float, float, float]:
    """Spearman's correlation with the 95% interval of a bootstrap over architectures, seed 0."""
    draws, pairs = np.random.default_rng(0), np.array([x, y])
    drawn = np.stack([draws.integers(0, len(x), len(x)) for _ in range(DRAWS)])
    first, second = (rankdata(values[drawn], axis=1) - (len(x) + 1) / 2 for values in pairs)
    with np.errstate(invalid="ignore"):  # a draw of equal values has no correlation
        again = (first * second).sum(1) / np.sqrt((first**2).sum(1) * (second**2).sum(1))
    low, high = np.nanquantile(again, (0.025, 0.975))
    return float(spearmanr(x, y)[0]), float(low), float(high)


def between(found: Mapping[str, Mapping[str, float]]) -> list[str]:
    """rho of an outcome between tasks, in words."""
    lines = ["Spearman's rho over architectures, between tasks"]
    for one, other in itertools.combinations(found, 2):
        x, y = found[one], found[other]
        both = sorted(x.keys() & y.keys())
        if len(both) > 4:
            value, low, high = rho([x[name] for name in both], [y[name] for name in both])
            lines.append(
                f"  {one} and {other}: {value:.2f} ({low:.2f} to {high:.2f}), {len(both)}"
                " architectures"
            )
    return lines


def _lengths(found: Mapping[str, Rates]) -> list[str]:
    """The exponent of T = 2 D dt at D = 4, dt from 0.1 to 3, by least squares."""
    lines = ["H2: exponent of the rate in T at 4 blocks, T = 0.8 to 24"]
    for task, placement in itertools.product(found, PLACEMENTS):
        points = [
            (math.log10(8 * dt), logs_of(found[task]).get(f"{placement} D=4 dt={dt:g}"))
            for dt in (0.1, 0.3, 1.0, 3.0)
        ]
        known = [(x, y) for x, y in points if y is not None]
        if len(known) > 2:
            slope = np.polyfit(*zip(*known, strict=True), 1)[0]
            lines.append(f"  {task}, {placement}: {slope:+.2f} ({len(known)} points)")
    return lines


def _remedies(found: Mapping[str, Rates], rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """The rate of each option over that of the plain model, and the difference of their best mean
    losses in nats.
    """
    lines = [
        "H3: options beside the plain model: ratio of largest stable rates, difference of best"
        " losses in nats"
    ]
    for task in found:
        best = {
            name: min(
                float(np.mean([x if math.isfinite(x) else math.inf for x in losses]))
                for losses in each.values()
            )
            for name, each in ends(task, rows).items()
        }
        logs = logs_of(found[task])
        for name in architectures():
            option, *around = name.split(" ")
            plain = (
                f"{around[0]} D=4 {around[1]}"
                if len(around) == 2 and "D=" not in around[0] and option not in PLACEMENTS
                else None
            )
            if plain in logs and name in logs:
                lines.append(
                    f"  {task}, {name}: {10 ** (logs[name] - logs[plain]):.2f},"
                    f" {best[name] - best[plain]:+.2f}"
                )
    return lines


def _early(
    found: Mapping[str, Mapping[str, float]],
    early: Sequence[Mapping[str, Any]],
    *,
    placed: bool = False,
) -> list[str]:
    """rho of each figure, a mean over seeds, with the outcome; and if `placed` that of the other
    models of the placement, their median.
    """
    lines = ["rho of early figures with it, with 95% intervals over architectures"]
    for task, logs in found.items():
        values: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
        for row in early:
            if row["task"] == task and row["name"] in logs:
                for figure, value in row["figures"].items():
                    values[figure][row["name"]].append(math.nan if value is None else value)
        means = {
            figure: {name: float(np.mean(each)) for name, each in of.items()}
            for figure, of in values.items()
        }
        if placed:
            means["placement"] = of_placement(logs)
        for figure, of in means.items():
            known = [name for name, value in of.items() if math.isfinite(value)]
            if len(known) > 4 and len({of[name] for name in known}) > 1:
                value, low, high = rho([of[name] for name in known], [logs[name] for name in known])
                inside = "".join(
                    f"; within {placement} {_within(placement, of, logs):.2f}"
                    for placement in ("pre", "peri")
                )
                lines.append(
                    f"  {task}, {figure}: {value:.2f} ({low:.2f} to {high:.2f}), {len(known)}"
                    f" architectures{inside}"
                )
    return lines


def _within(placement: str, of: Mapping[str, float], values: Mapping[str, float]) -> float:
    """rho over the architectures of a placement."""
    own = [
        name
        for name, value in of.items()
        if math.isfinite(value) and architectures()[name]["placement"] == placement
    ]
    return (
        float(spearmanr([of[name] for name in own], [values[name] for name in own])[0])
        if len(own) > 4 and len({of[name] for name in own}) > 1
        else math.nan
    )


def of_placement(values: Mapping[str, float]) -> dict[str, float]:
    """The median of the other architectures of the same placement."""
    placed = {name: architectures()[name]["placement"] for name in values}
    others = {
        name: [values[one] for one in values if placed[one] == placed[name] and one != name]
        for name in values
    }
    return {name: float(np.median(each)) for name, each in others.items() if each}

"""What the kept study of prediction finds by other rules: tolerances, families as the unit, seeds,
one bit, placement against dt.

    python benchmarks/prediction/checks.py [DIRECTORY]     # of study.sqlite and, in placement-and-dt/, of the trainings that cross the two

Every rate is computed anew from the runs, and nothing is read of what the study kept as its
evaluation. All of it was done after the seal was broken.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[2])

from ctrans.base.threads import wait_passively

wait_passively()

import numpy as np

from benchmarks.prediction.architectures import RATES, SEEDS, families, sealed
from benchmarks.prediction.evaluation import FACTOR, spearman
from benchmarks.prediction.predicted_rate import read_predictor
from benchmarks.prediction.protocol import (
    KEPT,
    LEARNED_IN,
    NEVER,
    PLATEAU,
    cases,
    kept_predictors,
    unpack,
)
from benchmarks.record import keep
from ctrans.study.database import Finished, open_store
from ctrans.study.outcomes import LEARNED, SHARE, by_rate, end_loss
from ctrans.training.data_sources import read_source

DRAWS = 2000
Tolerance = Callable[[float, float], float]
"""The highest loss that counts as stable, of the best and the first."""
TOLERANCES: dict[str, Tolerance] = {
    "5% of the gain": lambda best, first: best + 0.05 * (first - best),
    "10% (the study's)": lambda best, first: best + SHARE * (first - best),
    "10%, and below 3.15": lambda best, first: min(
        best + SHARE * (first - best), PLATEAU - LEARNED
    ),
    "20% of the gain": lambda best, first: best + 0.2 * (first - best),
    "0.1 nats": lambda best, first: best + 0.1,
    "0.2 nats": lambda best, first: best + 0.2,
    "0.3 nats": lambda best, first: best + 0.3,
}
STUDYS = TOLERANCES["10% (the study's)"]


@dataclasses.dataclass(frozen=True)
class Architecture:
    """One of the study, with its runs."""

    family: str
    placement: str
    dt: float
    infinite: float
    predicted: float
    runs: Sequence[Finished]

    def log_rate(self, tolerance: Tolerance = STUDYS, seeds: Sequence[int] = SEEDS) -> float:
        """log10 of the largest stable rate by that rule and of these seeds; nan of one that learned
        nothing.
        """
        ends = {
            rate: [
                end_loss(run)
                for run in self.runs
                if run.run.training.learning_rate == rate and run.run.training.seed in seeds
            ]
            for rate in RATES[LEARNED_IN]
        }
        means = {rate: statistics.fmean(each) for rate, each in ends.items()}
        best = min(means, key=means.__getitem__)
        if means[best] > PLATEAU - LEARNED:
            return math.nan
        first = statistics.fmean(run.first for run in self.runs if run.first is not None)
        found = math.log10(min(means)) - NEVER
        for rate in sorted(each for each in means if each >= best):
            if max(ends[rate]) > tolerance(means[best], first):
                break
            found = math.log10(rate)
        return found


def architectures(directory: Path) -> Iterator[Architecture]:
    """All that are done in that store."""
    predictor, known = read_predictor(), cases()
    with open_store(directory, write=False) as store:
        figures, runs = kept_predictors(store), store.runs()
    for case, mine in itertools.groupby(
        sorted(runs, key=lambda run: run.run.case), lambda run: run.run.case
    ):
        each = [
            run
            for run in mine
            if run.run.training.warmup == 20 and run.run.training.optimiser == "adamw"
        ]
        fields, have = json.loads(case), figures.get(case, {})
        if len(each) == len(RATES[LEARNED_IN]) * len(SEEDS):
            yield Architecture(
                known.get(case, ""),
                str(fields["placement"]),
                fields.get("dt", 1.0),
                math.nan if not have else have["segments with infinite H"] or 0.0,
                math.nan if not have else predictor.log_rate(have),
                each,
            )


def rho(x: Sequence[float], y: Sequence[float]) -> float:
    """Spearman's, of those that are known."""
    pairs = np.array([(a, b) for a, b in zip(x, y, strict=True) if not math.isnan(a + b)]).reshape(
        -1, 2
    )
    return float(spearman(pairs)) if len(pairs) > 2 else math.nan


def within(guess: Sequence[float], rate: Sequence[float]) -> float:
    """The share within the factor."""
    errors = [abs(a - b) for a, b in zip(guess, rate, strict=True) if not math.isnan(a + b)]
    return statistics.fmean(error <= math.log10(FACTOR) + 1e-9 for error in errors)


def usual(
    mine: Architecture, build: Sequence[Architecture], tolerance: Tolerance = STUDYS
) -> float:
    """The median rate of other families' architectures of its placement in the two thirds, or of
    all where there is none.
    """
    others = [
        (each.placement, each.log_rate(tolerance)) for each in build if each.family != mine.family
    ]
    rates = [
        rate for placement, rate in others if placement == mine.placement and not math.isnan(rate)
    ]
    return statistics.median(rates or [rate for _, rate in others if not math.isnan(rate)])


def tolerances(parts: dict[str, list[Architecture]]) -> Iterator[str]:
    """What becomes of the finding when "stable" is asked otherwise."""
    yield (
        "rho of the share of infinite H, of the predictor, and median largest stable rates where H"
        " is finite / infinite"
    )
    for name, tolerance in TOLERANCES.items():
        cells = []
        for each in parts.values():
            rates = [mine.log_rate(tolerance) for mine in each]
            medians = [
                10
                ** statistics.median(
                    rate
                    for mine, rate in zip(each, rates, strict=True)
                    if mine.infinite == kind and rate == rate
                )
                for kind in (0.0, 1.0)
            ]
            h, predictor = (
                rho([getattr(mine, what) for mine in each], rates)
                for what in ("infinite", "predicted")
            )
            cells.append(f"{h:6.2f} {predictor:5.2f}  {medians[0]:.3g} / {medians[1]:.3g}")
        yield f"  {name:22s}" + "".join(f"{cell:32s}" for cell in cells)


def one_bit(parts: dict[str, list[Architecture]]) -> Iterator[str]:
    """The predictor beside 0.3 where H is finite and 0.01 where it is not, and beside the
    placement's median.
    """
    build, third = parts.values()
    for name, mine in (
        ("all", third),
        ("without `output`", [each for each in third if each.placement != "output"]),
    ):
        rates = [each.log_rate() for each in mine]
        guesses = {
            "predictor": [each.predicted for each in mine],
            "placement": [usual(each, build) for each in mine],
            "one bit": [math.log10(0.01 if each.infinite else 0.3) for each in mine],
        }
        known = sum(not math.isnan(rate) for rate in rates)
        yield f"  sealed, {name} ({known}): " + "; ".join(
            f"{what} rho {rho(guess, rates):.3f}, within {FACTOR:g} {within(guess, rates):.0%}"
            for what, guess in guesses.items()
        )
    capped = [min(each.predicted, math.log10(max(RATES[LEARNED_IN]))) for each in third]
    yield (
        f"  predictions capped at the largest rate: within {FACTOR:g}"
        f" {within(capped, [each.log_rate() for each in third]):.0%}"
    )


def by_family(parts: dict[str, list[Architecture]]) -> Iterator[str]:
    """Intervals with families drawn, which are the unit of the split."""
    build, third = parts.values()
    groups: dict[str, list[tuple[float, float, float, float]]] = {}
    for each in third:
        groups.setdefault(each.family, []).append(
            (each.predicted, usual(each, build), -each.infinite, each.log_rate())
        )
    generator, names = np.random.default_rng(0), list(groups)
    found = []
    for _ in range(DRAWS):
        rows = [
            row for i in generator.integers(0, len(names), len(names)) for row in groups[names[i]]
        ]
        predicted, placed, finite, rate = zip(*rows, strict=True)
        found.append(
            [rho(guess, rate) for guess in (predicted, placed, finite)]
            + [within(predicted, rate) - within(placed, rate)]
        )
    draws = np.array(found)
    for what, values in (
        ("predictor's rho", draws[:, 0]),
        ("placement's rho", draws[:, 1]),
        ("finite H's rho", draws[:, 2]),
        ("predictor's less placement's rho", draws[:, 0] - draws[:, 1]),
        ("predictor's less finite H's rho", draws[:, 0] - draws[:, 2]),
        ("predictor's less placement's share within", draws[:, 3]),
    ):
        low, high = np.nanquantile(values, [0.025, 0.975])
        yield f"  {what}: {low:.2f} to {high:.2f}, {len(names)} families drawn"


def by_seed(parts: dict[str, list[Architecture]]) -> Iterator[str]:
    """How far one seed's rate says the other's: no figure can say more."""
    every = [each for part in parts.values() for each in part]
    for name, mine in (
        ("all", every),
        *((p, [each for each in every if each.placement == p]) for p in ("pre", "peri")),
    ):
        rates = [[each.log_rate(seeds=[seed]) for each in mine] for seed in SEEDS]
        top = math.log10(max(RATES[LEARNED_IN]))
        ends = statistics.fmean(abs(each.log_rate() - top) < 1e-9 for each in mine)
        yield (
            f"  {name} ({len(mine)}): rho of seed 0's and seed 1's rate {rho(*rates):.2f};"
            f" {ends:.0%} at the largest rate"
        )


def placement_and_dt(
    parts: dict[str, list[Architecture]], crossed: list[Architecture]
) -> Iterator[str]:
    """The study's options stand around pre at dt 1 and peri at dt 0.3; here placements alone at
    each dt, and options crossed.
    """
    every = [each for part in parts.values() for each in part]
    for placement in ("none", "pre", "post", "pre_post", "deepnorm", "peri", "output"):
        mine = sorted(
            (each for each in every if each.family == f"placement {placement}"),
            key=lambda each: -each.dt,
        )
        yield f"  {placement}: " + ", ".join(
            f"dt {each.dt:g} {10 ** each.log_rate():.3g}" for each in mine
        )
    if not crossed:
        return
    options = {
        json.dumps(
            {
                k: v
                for k, v in json.loads(each.runs[0].run.case).items()
                if k not in ("placement", "dt")
            }
        )
        for each in crossed
    }
    both = [each for each in every if json.dumps(_options(each)) in options] + crossed
    yield (
        f"  {len(options)} options of the two thirds around each, median largest stable rate"
        " (learned of all)"
    )
    for placement, dt in itertools.product(("pre", "peri"), (1.0, 0.3)):
        mine = [each for each in both if (each.placement, each.dt) == (placement, dt)]
        rates = [each.log_rate() for each in mine]
        learned = [rate for rate in rates if not math.isnan(rate)]
        share = within([each.predicted for each in mine], rates)
        yield (
            f"    {placement} at dt {dt:g}: {10 ** statistics.median(learned):.3g} ({len(learned)}"
            f" of {len(rates)}); predicted within {FACTOR:g}: {share:.0%}"
        )


def _options(each: Architecture) -> dict[str, object]:
    return {
        k: v for k, v in json.loads(each.runs[0].run.case).items() if k not in ("placement", "dt")
    }


def without_depth(every: Sequence[Architecture]) -> Iterator[str]:
    """How many runs, and how many architectures in the mean of their seeds, ended lower than a
    table of pairs of bytes.
    """
    table = read_source({"file": None, "bin": None}, 64).depthless_loss()
    ends = [run.last for each in every for run in each.runs if run.last is not None]
    best = [
        min(statistics.fmean(map(end_loss, same)) for same in by_rate(each.runs).values())
        for each in every
    ]
    yield f"a table of pairs of bytes has {table:.3f} nats on this Python's text"
    yield (
        f"{sum(end < table for end in ends)} of {len(ends)} finished runs ended lower, at best"
        f" {min(ends):.3f}"
    )
    yield (
        f"{sum(loss < table for loss in best)} of {len(best)} architectures did at their best rate"
    )


def main() -> None:
    """Prints and keeps all of it."""
    with tempfile.TemporaryDirectory() as place:
        directory = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(place)
        if directory == Path(place):
            for part in ("", "placement-and-dt"):
                unpack(directory / part, KEPT / part)
        _check(directory)


def _check(directory: Path) -> None:
    every = list(architectures(directory))
    parts = {
        "two thirds": [e for e in every if not sealed(e.family)],
        "sealed": [e for e in every if sealed(e.family)],
    }
    crossed = (
        list(architectures(directory / "placement-and-dt"))
        if (directory / "placement-and-dt").is_dir()
        else []
    )
    counted = {name: len({each.family for each in part}) for name, part in parts.items()}
    lines = [f"{len(every)} architectures of {len(families())} families: {counted}", ""]
    for title, section in (
        ("by tolerance, two thirds and sealed", tolerances(parts)),
        ("the predictor beside simpler ones", one_bit(parts)),
        ("intervals by family", by_family(parts)),
        ("seeds", by_seed(parts)),
        ("beside a model without depth", without_depth(every)),
        ("placement and dt", placement_and_dt(parts, crossed)),
    ):
        lines += [title, *section, ""]
    keep("prediction-checks", lines)


if __name__ == "__main__":
    main()

"""Does what `hjb-check` calls degenerate show in a training before it fails?

    python benchmarks/before_failure.py [SEEDS]            # runs and their healthy twins
    python benchmarks/before_failure.py order [SEEDS]      # runs at one rate
    python benchmarks/before_failure.py picture PATH       # of the first question's runs

Written down before the first run with these seeds; others had shown which rates make runs fail. A
run trains on recall with a learning rate that rises in a line to a rate at which its placement
fails. It has *failed* at the first step from which the mean loss of `SMOOTHED` steps stays within
`NEAR` nats of a guess, after it was below by `LEARNED`. Its healthy twin has the same seed, weights
and batches, and a tenth of the rate. Each figure is measured every `EVERY` steps on the same held
sequences.

A figure *warns* at the first step at which it leaves the range that all healthy twins of its
placement have had so far, widened by `BEYOND` of that range on both sides, and is outside for
`IN_A_ROW` measurements in a row. Its lead is from there to the failure. The range has all twins, so
that no figure warns of a twin. Rivals are the training loss, the norm of the gradient before it is
clipped, and the learning rate itself, which leaves the twins' range at once: a figure that says no
more than the rate has its lead.

Held: the median lead of a figure is larger than those of the loss and of the gradient's norm, by an
interval over runs that excludes 0. The interval is of the mean difference (`mean_interval`).

All figures warned as soon as the rate did (seeds 20 to 25): against twins at a lower rate they say
no more than the rate. So the second question is of runs at the same rate, with other seeds (30 on),
again written down before the first of them. Of two runs of a placement, does the one with the
larger figure at step `ORDER_AT` fail sooner? A run that did not fail is later than all. The share
of pairs for which it does is 0.5 by chance. In the first runs it was 0.67 to 0.73 for log10 sup |v|
and log10 |P_0|/|P_T|, and about 0.5 for the loss and the gradient's norm. Held: the share of one
of these two has an interval above 0.5, from 2,000 draws of runs.
"""

from __future__ import annotations

import datetime
import gzip
import itertools
import json
import math
import random
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path[0] = str(Path(__file__).resolve().parents[1])

from ctrans.base.threads import wait_passively

wait_passively()

import torch
from torch import Tensor

from benchmarks.record import RESULTS, hardware, keep
from ctrans.control.costate import costate
from ctrans.control.maximum_principle import maximum_principle
from ctrans.measure.attention.by_depth import AttentionByDepth
from ctrans.measure.walk import walk
from ctrans.model.gpt import GPT
from ctrans.study.bootstrap import mean_interval
from ctrans.study.description import Study
from ctrans.study.population import Population, update
from ctrans.study.presets.bases import DEEP
from ctrans.study.training import begin
from ctrans.training.data_sources import read_source
from solvers import ConfigError, SolveError

TOP_RATES = {"none": 0.03, "pre": 0.1, "peri": 0.1, "post": 0.03}
HEALTHY = 0.1
"""A twin's rate over that of the run."""
STEPS = 1000
EVERY = 20
SMOOTHED = 20
NEAR = 0.1
LEARNED = 0.3
BEYOND = 0.5
IN_A_ROW = 2
FIRST_SEED = 20
FIRST_SEED_OF_ORDER = 30
ORDER_AT = 300
DRAWS = 2000
SEQUENCES = 8
"""Held sequences on which figures are measured."""
RIVALS = ("loss", "gradient norm", "learning rate")
Row = dict[str, float]


@torch.no_grad()
def gains(model: GPT) -> float:
    """The largest |gamma| of the norms of sublayers, by which velocities reach as far as they do."""
    sizes = [
        float(weight.abs().max())
        for name, weight in model.depth.named_parameters()
        if "norm" in name and name.endswith("weight")
    ]
    return max(sizes, default=math.nan)


@torch.no_grad()
def largest_weight(model: GPT) -> float:
    """The largest Frobenius norm of a matrix of a sublayer."""
    return max(float(weight.norm()) for weight in model.depth.parameters() if weight.dim() == 2)


def log10(value: float) -> float:
    if not value > 0:
        return math.nan
    return math.log10(value)


def figures_of(model: GPT, tokens: Tensor, targets: Tensor) -> Row:
    """The figures at one step; nan where states are not finite."""
    row = {"log10 largest weight": log10(largest_weight(model)), "log10 gain": log10(gains(model))}
    try:
        path = costate(model, tokens, targets)
        principle = maximum_principle(model.depth, path, measure="cosine")
        (attention,) = walk(model, tokens, instruments=[AttentionByDepth()])
    except (ConfigError, SolveError):
        return row
    first, last = path.costates[0], path.costates[-1]
    state = path.states[-1]
    velocities = [v for v in principle.velocity_norm if v is not None]
    products = [p for p in principle.product if p is not None]
    alignments = [a for a in principle.alignment if a is not None]
    mean_token = state.mean((0, 1))
    row |= {
        "log10 |X_T|": log10(float(state.square().mean().sqrt())),
        "log10 largest entry": log10(float(state.abs().max())),
        "common share": float(mean_token.square().sum() / state.square().sum(-1).mean()),
        "log10 sup |v|": log10(max(velocities, default=math.nan)),
        "-<P, v>, mean": -statistics.fmean(products) if products else math.nan,
        "alignment, mean": statistics.fmean(alignments) if alignments else math.nan,
        "log10 |P_0|/|P_T|": log10(float(first.norm() / last.norm())),
        "log10 S, largest": max(log10(layer.S) for layer in attention),
    }
    return row


def trained(placement: str, rate: float, seeds: Sequence[int]) -> list[list[Row]]:
    """For each seed the rows of all steps, with the figures where they were measured."""
    base = DEEP | {
        "placement": placement,
        "learning_rate": rate,
        "min_learning_rate": rate,
        "iterations": STEPS,
        "warmup": STEPS,
        "eval_every": STEPS,
    }
    study = Study("before", base, seeds=seeds, source={"task": "recall"})
    runs = study.runs()
    data = read_source(study.source, runs[0].model.context)
    tokens, targets = data.validation_windows(SEQUENCES)
    rows: list[list[Row]] = [[] for _ in runs]
    with tempfile.TemporaryDirectory() as place:
        members = [begin(run, data, Path(place) / str(i)) for i, run in enumerate(runs)]
        population = Population(members)
        for step in range(STEPS):
            losses = population.differentiate(step)
            for i, member in enumerate(population.members):
                row = update(member, step, losses[i])
                figures = {
                    "loss": row["loss"],
                    "gradient norm": row["gradient_norm"],
                    "learning rate": row["learning_rate"],
                }
                if (step + 1) % EVERY == 0:
                    figures |= figures_of(member.model, tokens, targets)
                rows[i].append(figures)
    return rows


def guess(placement: str) -> float:
    """ln of the number of answers: the loss of a guess."""
    study = Study("before", DEEP | {"placement": placement}, source={"task": "recall"})
    return read_source(study.source, study.runs()[0].model.context).guess_loss()


def smoothed(losses: Sequence[float]) -> list[float]:
    """The mean of the last `SMOOTHED` losses at each step; inf where one is not finite."""
    means = []
    for i in range(len(losses)):
        window = losses[max(0, i + 1 - SMOOTHED) : i + 1]
        means.append(statistics.fmean(window) if all(map(math.isfinite, window)) else math.inf)
    return means


def failure(losses: Sequence[float], of_guess: float) -> int | None:
    """The step of the failure; None for a run that did not fail, or did not learn before."""
    means = smoothed(losses)
    above = [mean > of_guess - NEAR for mean in means]
    start = next((i for i in range(len(means)) if all(above[i:])), None)
    if start is None or min(means[:start], default=math.inf) > of_guess - LEARNED:
        return None
    return start


def series(rows: Sequence[Row], name: str) -> dict[int, float]:
    """The figure by step, where it was measured; of the loss its smoothed value."""
    if name == "loss":
        means = smoothed([row["loss"] for row in rows])
        return {step: means[step] for step in range(EVERY - 1, len(rows), EVERY)}
    return {
        step: row.get(name, math.nan) for step, row in enumerate(rows) if (step + 1) % EVERY == 0
    }


def warning(of_run: Mapping[int, float], of_twins: Sequence[Mapping[int, float]]) -> int | None:
    """The step at which the figure leaves the range of the twins so far. A figure that is not
    finite has left it.
    """
    outside = 0
    lowest, highest = math.inf, -math.inf
    for step, value in of_run.items():
        others = [twin[step] for twin in of_twins if math.isfinite(twin.get(step, math.nan))]
        lowest = min([lowest, *others])
        highest = max([highest, *others])
        if not math.isfinite(lowest):
            continue
        margin = BEYOND * (highest - lowest)
        inside = lowest - margin <= value <= highest + margin
        outside = 0 if inside else outside + 1
        if outside == IN_A_ROW:
            return step - (IN_A_ROW - 1) * EVERY
    return None


def leads(
    runs: Sequence[Sequence[Row]], twins: Sequence[Sequence[Row]], failures: Sequence[int | None]
) -> dict[str, list[float]]:
    """For each figure the lead of each run that failed: 0 if it did not warn before."""
    names = sorted({name for rows in runs for row in rows for name in row})
    found: dict[str, list[float]] = {name: [] for name in names}
    for rows, failed in zip(runs, failures, strict=True):
        if failed is None:
            continue
        for name in names:
            step = warning(series(rows, name), [series(twin, name) for twin in twins])
            early = 0.0
            if step is not None and step < failed:
                early = float(failed - step)
            found[name].append(early)
    return found


def sooner(
    values: Sequence[float], ends: Sequence[float], chosen: Sequence[int]
) -> tuple[int, int]:
    """Of the pairs of chosen runs that differ in figure and end, those in which the one with the
    larger figure fails sooner; and the number of such pairs.
    """
    right = count = 0
    for a, b in itertools.combinations(chosen, 2):
        if values[a] == values[b] or ends[a] == ends[b] or math.isnan(values[a] + values[b]):
            continue
        count += 1
        right += (values[a] > values[b]) == (ends[a] < ends[b])
    return right, count


def order(count: int) -> None:
    """The second question: the share of pairs in the right order, by figure."""
    seeds = list(range(FIRST_SEED_OF_ORDER, FIRST_SEED_OF_ORDER + count))
    lines = [f"seeds {seeds[0]} to {seeds[-1]}, figures at step {ORDER_AT}"]
    by_placement: list[tuple[dict[str, list[float]], list[float]]] = []
    for placement, rate in TOP_RATES.items():
        of_guess = guess(placement)
        runs = trained(placement, rate, seeds)
        failures = [failure([row["loss"] for row in rows], of_guess) for rows in runs]
        alive = [i for i, failed in enumerate(failures) if failed is None or failed >= ORDER_AT]
        names = sorted({name for rows in runs for row in rows for name in row})
        values = {name: [series(runs[i], name)[ORDER_AT - 1] for i in alive] for name in names}
        ends = [math.inf if failures[i] is None else float(failures[i] or 0) for i in alive]
        by_placement.append((values, ends))
        failed = sum(map(math.isfinite, ends))
        lines.append(
            f"{placement}, to a rate of {rate:g}: {failed} of {count} runs failed after they had"
            f" learned, {count - len(alive)} before step {ORDER_AT}"
        )
        print(lines[-1], flush=True)
    lines.append("share of pairs of one placement in which the run with more of it fails sooner")
    generator = random.Random(0)
    for name in sorted(by_placement[0][0]):
        pairs = [sooner(values[name], ends, range(len(ends))) for values, ends in by_placement]
        total = sum(number for _, number in pairs)
        if not total:
            continue
        share = sum(right for right, _ in pairs) / total
        draws = []
        for _ in range(DRAWS):
            drawn = [
                sooner(values[name], ends, generator.choices(range(len(ends)), k=len(ends)))
                for values, ends in by_placement
                if ends
            ]
            number = sum(each for _, each in drawn)
            if number:
                draws.append(sum(right for right, _ in drawn) / number)
        draws.sort()
        low, high = draws[int(0.025 * len(draws))], draws[int(0.975 * len(draws))]
        lines.append(f"    {name:24} {share:.2f} ({low:.2f} to {high:.2f}) of {total} pairs")
    keep("before-failure-order", lines)


SHOWN = {
    "loss": "training loss, in nats",
    "log10 sup |v|": "log10 of the largest |v|",
    "log10 |P_0|/|P_T|": "log10 of |P_0|/|P_T|",
}
"""The figures of the picture, with their labels."""
NAMES = {"none": "no norm", "pre": "Pre-LN", "post": "Post-LN"}


def picture(path: Path) -> None:
    """Draws the kept runs that failed, and their healthy twins, by step."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    (kept,) = sorted(RESULTS.glob("before-failure-*.json.gz"))[-1:]
    runs = json.loads(gzip.decompress(kept.read_bytes()))
    steps = range(EVERY, STEPS + 1, EVERY)
    figure, axes = plt.subplots(
        len(NAMES), len(SHOWN), figsize=(10, 7), sharex=True, layout="constrained"
    )
    for row, (placement, said) in enumerate(NAMES.items()):
        for column, (name, label) in enumerate(SHOWN.items()):
            axis = axes[row, column]
            for run in runs:
                if run["placement"] != placement or name not in run["series"]:
                    continue
                failed = run["kind"] == "run"
                axis.plot(
                    steps,
                    run["series"][name],
                    color="tab:red" if failed else "tab:blue",
                    linewidth=0.9,
                )
                if failed and run["failed"] is not None:
                    axis.axvline(run["failed"], color="tab:red", linewidth=0.4, alpha=0.5)
            axis.set_ylabel(label)
            if column == 0:
                axis.set_title(said, loc="left")
            if row == len(NAMES) - 1:
                axis.set_xlabel("step")
    axes[0, 1].set_title("red: the rate rises until the run fails; blue: a tenth of the rate")
    figure.savefig(path, dpi=110)


def words(name: str, values: Sequence[float], rivals: Mapping[str, Sequence[float]]) -> str:
    """A line on a figure's lead."""
    line = f"    {name:24} {statistics.median(values):6.0f} steps"
    if name in RIVALS or len(values) < 3:
        return line
    for rival in ("loss", "gradient norm"):
        apart = [a - b for a, b in zip(values, rivals[rival], strict=True)]
        low, high = mean_interval(apart)
        mean = statistics.fmean(apart)
        line += f"; beyond the {rival} {mean:.0f} ({low:.0f} to {high:.0f})"
    return line


def main(count: int) -> None:
    seeds = list(range(FIRST_SEED, FIRST_SEED + count))
    lines = [f"seeds {seeds[0]} to {seeds[-1]}, {STEPS} steps, figures every {EVERY}"]
    kept: list[dict[str, Any]] = []
    together: dict[str, list[float]] = {}
    for placement, rate in TOP_RATES.items():
        of_guess = guess(placement)
        runs = trained(placement, rate, seeds)
        twins = trained(placement, HEALTHY * rate, seeds)
        failures = [failure([row["loss"] for row in rows], of_guess) for rows in runs]
        of_twins = [failure([row["loss"] for row in rows], of_guess) for rows in twins]
        found = leads(runs, twins, failures)
        for name, values in found.items():
            together.setdefault(name, []).extend(values)
        steps = [failed for failed in failures if failed is not None]
        lines.append(
            f"{placement}, to a rate of {rate:g}: {len(steps)} of {count} runs failed after they had"
            f" learned{f', at steps {steps}' if steps else ''};"
            f" {sum(step is not None for step in of_twins)} twins did"
        )
        if steps:
            order = sorted(found, key=lambda name: -statistics.median(found[name]))
            lines += [words(name, found[name], found) for name in order]
        for kind, several in (("run", runs), ("twin", twins)):
            for seed, rows, failed in zip(seeds, several, failures, strict=True):
                kept.append(
                    {
                        "placement": placement,
                        "kind": kind,
                        "seed": seed,
                        "failed": failed if kind == "run" else None,
                        "series": {
                            name: [float(f"{x:.5g}") for x in series(rows, name).values()]
                            for name in sorted({name for row in rows for name in row})
                        },
                    }
                )
        print("\n".join(lines[-1:]), flush=True)
    if any(together.values()):
        lines.append(f"all {len(together['loss'])} runs that failed")
        order = sorted(together, key=lambda name: -statistics.median(together[name]))
        lines += [words(name, together[name], together) for name in order]
    today = datetime.date.today().isoformat()
    path = RESULTS / f"before-failure-{today}-{hardware()}.json.gz"
    path.write_bytes(gzip.compress(json.dumps(kept).encode(), mtime=0))
    keep("before-failure", lines)


if __name__ == "__main__":
    asked = sys.argv[1:]
    if asked[:1] == ["order"]:
        order(int(asked[1]) if len(asked) > 1 else 12)
    elif asked[:1] == ["picture"]:
        picture(Path(asked[1]))
    else:
        main(int(asked[0]) if asked else 6)

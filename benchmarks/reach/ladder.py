"""How often `ctrans rate` is right, by its cost: `python -m benchmarks.reach.ladder --minutes 20`,
then `--report`.

For each architecture and task of the study: the answer from five trainings that together cost 5%,
20%, 100% and 500% of one whole training, at a seed that the study does not use (500%: every third
architecture). It is compared with the largest stable rate of the study's whole trainings. So are
rivals: a constant (the median of the task's other architectures, and one for all tasks), the
study's ramp with the rules of lr_find and fastai, the prediction of `benchmarks.prediction` from a
quick screening, and the study's whole sweep of one other seed. A ladder's loss is a mean over the
last fifth of the steps; at 500% over the last tenth, as `largest_rate` has now.
"""

from __future__ import annotations

import argparse
import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from benchmarks.prediction.predicted_rate import predicted_rate
from benchmarks.reach.__main__ import FIGURES, FILE, add, data, rows
from benchmarks.reach.cases import RATES, SEEDS, SETTINGS, STUDIED, architectures
from benchmarks.reach.report import DRAWS, ends, of_placement, rho
from ctrans import screen
from ctrans.model.config import GPTConfig
from ctrans.model.gpt import GPT
from ctrans.study.outcomes import Floor, rate_by_floor
from ctrans.training.monitor import largest_rate
from ctrans.training.settings import TrainConfig
from ctrans.training.tasks import TASKS
from solvers import ConfigError

ROWS = FILE.with_name("ladders.jsonl")
BUDGETS = (0.05, 0.2, 1.0, 5.0)
SEED = 14
FACTOR = 2.0


def climb(job: tuple[str, str, float]) -> dict[str, Any]:
    """One estimate as a row."""
    torch.set_num_threads(1)
    task, name, budget = job
    model = GPT(GPTConfig(**TASKS[task].architecture, **architectures()[name]), seed=SEED)
    settings = TrainConfig(**{**SETTINGS, "warmup": 0}, seed=SEED)
    steps = round(budget * settings.iterations / 5)
    batches = [data(task).batch(step, 0, batch=settings.batch, seed=SEED) for step in range(steps)]
    found = largest_rate(model, batches, settings.make_optimiser(model.parameters()), steps=steps)
    return {
        "task": task,
        "name": name,
        "budget": budget,
        "losses": {
            f"{rung.rate:.4g}": rung.loss if math.isfinite(rung.loss) else None
            for rung in found.rungs
        },
        "gives_way": found.gives_way,
    }


def floor_of(task: str) -> Floor:
    return Floor(data(task).depthless_loss(), data(task).guess_loss())


def answer(row: Mapping[str, Any]) -> float | None:
    """The rate of a ladder by the rule of `ctrans rate`."""
    losses = {
        float(rate): [math.nan if loss is None else loss] for rate, loss in row["losses"].items()
    }
    return rate_by_floor(losses, floor_of(row["task"])).rate


def sweeps(task: str, runs: Sequence[Mapping[str, Any]], seeds: Sequence[int]) -> dict[str, float]:
    """The largest stable rates of the half decades, by architecture, over these seeds."""
    chosen = [
        row
        for row in runs
        if row["seed"] in seeds
        and any(math.isclose(row["rate"], rate, rel_tol=1e-3) for rate in RATES[:5])
    ]
    found = {
        name: rate_by_floor(each, floor_of(task))
        for name, each in ends(task, chosen).items()
        if len(each) > 1
    }
    return {name: each.rate for name, each in found.items() if each.rate is not None}


def predicted(task: str) -> dict[str, float]:
    """What the committed predictor says of the initial weights."""
    found = {}
    tokens, targets = data(task).batch(0, 0, batch=4, seed=SEEDS[0])
    for name, fields in architectures().items():
        model = GPT(GPTConfig(**TASKS[task].architecture, **fields), seed=SEEDS[0])
        steps = screen(model, tokens, targets, effort="quick").steps.values()
        try:
            found[name] = predicted_rate(
                {figure: value for step in steps for figure, value in step.quantities.items()}
            ).rate
        except ConfigError:  # a figure that it needs is unknown
            continue
    return found


def rivals(
    task: str, runs: Sequence[Mapping[str, Any]], truth: Mapping[str, Mapping[str, float]]
) -> dict[str, dict[str, float]]:
    """The estimates of one task, by method and architecture."""
    here = truth[task]
    all_tasks = statistics.median([rate for each in truth.values() for rate in each.values()])
    made: dict[str, dict[str, float]] = {
        "constant of the task": {
            name: statistics.median([here[one] for one in here if one != name]) for name in here
        },
        "one constant": dict.fromkeys(here, all_tasks),
        "median of the placement": of_placement(here),
        "predicted from a screening": predicted(task),
    }
    for row in rows(ROWS):
        if row["task"] == task and (rate := answer(row)) is not None:
            made.setdefault(f"ctrans rate, {row['budget']:.0%}", {})[row["name"]] = rate
    for row, rule in itertools.product(rows(FIGURES), ("lr_find", "fastai's valley")):
        if row["task"] == task and row["seed"] == SEEDS[0] and row["figures"].get(rule) is not None:
            made.setdefault(rule, {})[row["name"]] = row["figures"][rule]
    return made


def line(estimates: Mapping[str, float], truth: Mapping[str, float]) -> str:
    """The share within a factor of 2 with its 95% bootstrap interval, the same after one factor for
    all, and rho.
    """
    both = sorted(estimates.keys() & truth.keys())
    if len(both) < 5:
        return f"{len(both)} architectures only"
    off = np.log([estimates[name] / truth[name] for name in both])
    right = np.abs(off) <= math.log(FACTOR)
    draws = np.random.default_rng(0)
    low, high = np.quantile(
        [right[draws.integers(0, len(right), len(right))].mean() for _ in range(DRAWS)],
        (0.025, 0.975),
    )
    scaled = np.mean(np.abs(off - np.median(off)) <= math.log(FACTOR))
    x, y = [estimates[name] for name in both], [truth[name] for name in both]
    order = "rho {:.2f} ({:.2f} to {:.2f})".format(*rho(x, y)) if len(set(x)) > 1 else "no order"
    return (
        f"{right.mean():.0%} ({low:.0%} to {high:.0%}); after one factor {scaled:.0%}; {order};"
        f" {len(both)}"
    )


def report() -> None:
    runs = rows(FILE)
    truth = {task: sweeps(task, runs, SEEDS) for task in STUDIED}
    print("Within a factor of 2 of the largest stable rate of whole trainings; rho; architectures")
    for task in STUDIED:
        for method, estimates in rivals(task, runs, truth).items():
            print(f"  {task}, {method}: {line(estimates, truth[task])}")
        for seed in SEEDS:
            others = [each for each in SEEDS if each != seed]
            print(
                f"  {task}, sweep of seed {seed}:"
                f" {line(sweeps(task, runs, [seed]), sweeps(task, runs, others))}"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--report", action="store_true", help="train nothing")
    options = parser.parse_args()
    if not options.report:
        done = {(row["task"], row["name"], row["budget"]) for row in rows(ROWS)}
        names = list(architectures())
        jobs = [
            (task, name, budget)
            for budget in BUDGETS
            for task in STUDIED
            for name in (names[::3] if budget > 1 else names)
        ]
        add(ROWS, climb, [job for job in jobs if job not in done], options)
    report()


if __name__ == "__main__":
    main()

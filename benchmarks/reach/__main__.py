"""The registered study of PROTOCOL.md: `python -m benchmarks.reach --minutes 60` trains, goes on
where it was stopped, and reports.

Each run is a line of benchmarks/results/study-reach/runs.jsonl, with its loss at the end.
`--figures` computes the early figures of H4, in lines of figures.jsonl. `--report` prints the
tables from these lines. `--exploration` prints H1 for the exploration before the registration, from
exploration.jsonl beside them: a line for each architecture, with two losses for each rate.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import math
import multiprocessing
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

from benchmarks.reach.cases import SEEDS, STUDIED, architectures, planned
from benchmarks.reach.figures import FIGURES as EARLY
from benchmarks.reach.figures import Case, figures
from benchmarks.reach.report import between, largest_rates, logs_of, report
from ctrans.model.config import GPTConfig
from ctrans.study.training import train_run
from ctrans.training.tasks import TASKS

FILE = Path(__file__).parents[1] / "results" / "study-reach" / "runs.jsonl"
FIGURES = FILE.with_name("figures.jsonl")
KEYS = ("task", "name", "rate", "seed")


def rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a file; a last line that was cut off is none."""
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("}")]


def explored() -> list[dict[str, Any]]:
    """The runs of the exploration, as rows."""
    cases = [
        json.loads(line) for line in FILE.with_name("exploration.jsonl").read_text().splitlines()
    ]
    return [
        {
            "task": case["task"],
            "name": case["name"],
            "rate": float(rate),
            "seed": seed,
            "loss": loss,
            "ending": "finished",
        }
        for case in cases
        for rate, losses in case["losses"].items()
        for seed, loss in enumerate(losses)
    ]


def key(task: str, name: str, rate: float, seed: int) -> tuple[str, str, str, int]:
    return task, name, f"{rate:.4g}", seed


data = functools.cache(lambda task: TASKS[task].data())


def train(job: tuple[str, str, Any]) -> dict[str, Any]:
    """One run as a row. A loss of null is one that is not finite or was not reached."""
    torch.set_num_threads(1)
    task, name, run = job
    result = train_run(run, data(task))
    loss = result.evaluations[-1]["validation_loss"] if result.ending == "finished" else None
    kept = loss if loss is not None and math.isfinite(loss) else None
    about = {"ending": result.ending, "seconds": round(result.seconds, 2)} | (
        {"message": result.message} if kept is None else {}
    )
    return {
        "task": task,
        "name": name,
        "rate": run.training.learning_rate,
        "seed": run.training.seed,
        "loss": kept,
        **about,
    }


def figure(job: tuple[str, str, int, list[str]]) -> dict[str, Any]:
    """These early figures of one model as a row."""
    torch.set_num_threads(1)
    task, name, seed, names = job
    case = Case(GPTConfig(**TASKS[task].architecture, **architectures()[name]), data(task), seed)
    found = {
        key: value if math.isfinite(value) else None for key, value in figures(case, names).items()
    }
    return {"task": task, "name": name, "seed": seed, "figures": found}


def in_time(work: Callable[[Any], dict[str, Any]], end: float, job: Any) -> dict[str, Any] | None:
    """The row of a job that begins before `end`, a time of the monotonic clock."""
    return work(job) if time.monotonic() < end else None


def add(
    path: Path,
    work: Callable[[Any], dict[str, Any]],
    jobs: Sequence[Any],
    options: argparse.Namespace,
) -> None:
    """Appends the rows of jobs to a file. No job begins when the time is over. Those in progress
    end: a pool that is stopped may hang.
    """
    timed = functools.partial(in_time, work, time.monotonic() + 60 * options.minutes)
    path.parent.mkdir(parents=True, exist_ok=True)
    with multiprocessing.get_context("fork").Pool(options.workers) as pool, path.open("a") as file:
        for number, row in enumerate(pool.imap(timed, jobs), 1):
            if row is None:
                continue
            file.write(f"{json.dumps(row)}\n")
            file.flush()
            print(f"\r{number} of {len(jobs)}", end="", flush=True)
        pool.close()
        pool.join()
    print()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=60, help="no run begins after them")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--report", action="store_true", help="train nothing")
    parser.add_argument(
        "--figures", action="store_true", help="the early figures of H4 in place of trainings"
    )
    parser.add_argument(
        "--exploration", action="store_true", help="H1 for the runs before the registration"
    )
    options = parser.parse_args()
    if options.exploration:
        print(
            "\n".join(
                between({task: logs_of(largest_rates(task, explored())) for task in STUDIED[:2]})
            )
        )
        return
    if not options.report and not options.figures:
        done = {key(*(row[each] for each in KEYS)) for row in rows(FILE)}
        left = [
            job
            for job in planned()
            if key(job[0], job[1], job[2].training.learning_rate, job[2].training.seed) not in done
        ]
        add(FILE, train, left, options)
    elif options.figures:
        known = {
            (row["task"], row["name"], row["seed"], each)
            for row in rows(FIGURES)
            for each in row["figures"]
        }
        cases = itertools.product(STUDIED, architectures(), SEEDS[:1])
        jobs = [(*case, [each for each in EARLY if (*case, each) not in known]) for case in cases]
        add(FIGURES, figure, [job for job in jobs if job[-1]], options)
    report(rows(FILE), rows(FIGURES))


if __name__ == "__main__":
    main()

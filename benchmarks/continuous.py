"""A model trained as a discrete Transformer, by finer Euler steps, or as an ODE: what does each
lose when it is run another way?

`python -m benchmarks.continuous --minutes 30`, then `--report`, which also draws continuous.png.
Tasks that need depth, `pre` and `peri` at dt 1 with 4 blocks, the batches and iterations of the
registered study (docs/why/prediction.md), seeds 20 to 22. The learning rate of a task is the best
half decade of that study's seeds 10 and 11. The rows are in results/continuous.jsonl.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ctrans.base.threads import wait_passively

wait_passively()

import torch

from ctrans.model.config import GPTConfig
from ctrans.model.gpt import GPT
from ctrans.study.description import PlannedRun
from ctrans.study.training import begin
from ctrans.training.data import Data
from ctrans.training.evaluation import evaluate
from ctrans.training.loop import carry_out
from ctrans.training.objective import Objective
from ctrans.training.processes import Processes
from ctrans.training.settings import TrainConfig
from ctrans.training.tasks import TASKS

ROWS = Path(__file__).parent / "results" / "continuous.jsonl"
BASE: dict[str, Any] = {"depth": 4, "width": 32, "heads": 2, "embedding_std": 0.1}
SETTINGS: dict[str, Any] = {
    "iterations": 600,
    "warmup": 60,
    "batch": 16,
    "eval_every": 600,
    "eval_windows": 512,
}
RATES = {"recall": 0.01, "sorting": 10**-2.5}
"""The best half decade of both placements, over seeds 10 and 11 of the study."""
SEEDS = (20, 21, 22)
ADAPTIVE: dict[str, Any] = {"method": "tsit5", "rtol": 1e-3, "atol": 1e-4, "gradient": "checkpoint"}
TRAINED: dict[str, dict[str, Any]] = {
    "discrete": {},
    "Euler, 2 steps": {"steps": 2},
    "discrete, then Euler, 2 steps": {"steps": 2, "iterations": 300, "warmup": 30},
    "ODE": ADAPTIVE,
}
"""How a model is trained. The third starts from the discrete model's weights, with a third of the
rate.
"""
RUN: dict[str, dict[str, Any]] = {
    "1 step": {},
    "2 steps": {"steps": 2},
    "4 steps": {"steps": 4},
    "16 steps": {"steps": 16},
    "ODE": {**ADAPTIVE, "rtol": 1e-6, "atol": 1e-8},
}
"""How a trained model is run: Euler with so many steps for each sublayer, or the ODE to six digits.
"""


def rows() -> list[dict[str, Any]]:
    """The rows of the file; a last line that was cut off is none."""
    if not ROWS.exists():
        return []
    return [json.loads(line) for line in ROWS.read_text().splitlines() if line.endswith("}")]


def add(jobs: Sequence[tuple[str, str, int]], minutes: float, workers: int) -> None:
    """Appends a row for each job to the file. No job begins when the time is over. Those in
    progress end: a pool that is stopped may hang.
    """
    case_in_time = functools.partial(in_time, end=time.monotonic() + 60 * minutes)
    with multiprocessing.get_context("fork").Pool(workers) as pool, ROWS.open("a") as file:
        for number, row in enumerate(pool.imap(case_in_time, jobs), 1):
            if row is None:
                continue
            file.write(f"{json.dumps(row)}\n")
            file.flush()
            print(f"\r{number} of {len(jobs)}", end="", flush=True)
        pool.close()
        pool.join()
    print()


def in_time(job: tuple[str, str, int], end: float) -> dict[str, Any] | None:
    """The row of a job that begins before `end`, a time of the monotonic clock."""
    if time.monotonic() < end:
        return case(job)
    return None


@functools.cache
def data(task: str) -> Data:
    return TASKS[task].data()


def settings(task: str, seed: int, way: dict[str, Any], share: float = 1.0) -> TrainConfig:
    return TrainConfig(**{**SETTINGS, **way}, learning_rate=RATES[task] * share, seed=seed)


def case(job: tuple[str, str, int]) -> dict[str, Any]:
    """The losses of one model, trained each way and run each way, with the cost of each
    training.
    """
    torch.set_num_threads(1)
    task, placement, seed = job
    config = GPTConfig(**TASKS[task].architecture, **{**BASE, "placement": placement})
    found: dict[str, Any] = {}
    weights: dict[str, torch.Tensor] = {}
    for name, way in TRAINED.items():
        started = time.process_time()
        after = "iterations" in way
        plan = PlannedRun(config, settings(task, seed, way, 1 / 3 if after else 1.0), {})
        with tempfile.TemporaryDirectory() as place:
            run = begin(plan, data(task), Path(place))
            if after:
                run.model.load_state_dict(weights)
            outcome = carry_out(run, run.state.progress)
        if name == "discrete":
            weights = {key: value.clone() for key, value in run.model.state_dict().items()}
        seconds = time.process_time() - started
        losses = {how: run_as(run.model, task, seed, how) for how in RUN}
        found[name] = {
            "ending": outcome.ending.value,
            "seconds": seconds,
            "evaluations": evaluations(run.model, task, seed, way),
            "losses": losses,
        }
    return {"task": task, "placement": placement, "seed": seed, "trained": found}


def run_as(model: GPT, task: str, seed: int, how: str) -> float:
    """The validation loss of a model that is run another way."""
    objective = Objective(model, settings(task, seed, RUN[how]))
    return evaluate(objective, data(task), 128, 16, Processes(torch.device("cpu")))[
        "validation_loss"
    ]


@torch.no_grad()
def evaluations(model: GPT, task: str, seed: int, way: dict[str, Any]) -> float:
    """Evaluations of fields in one forward pass of the trained model, over its segments."""
    options = dataclasses.asdict(settings(task, seed, way).scheme)
    tokens = data(task).batch(0, 0, batch=16, seed=seed)[0]
    return model.trajectory(tokens, **options).stats.evaluations / model.config.segments


def report() -> list[str]:
    """Mean losses over seeds, with the lowest and the highest."""
    lines = ["Validation losses in nats, mean over seeds (lowest to highest)"]
    found = rows()
    for task, placement in dict.fromkeys((row["task"], row["placement"]) for row in found):
        each = [
            row["trained"] for row in found if (row["task"], row["placement"]) == (task, placement)
        ]
        floor = data(task).depthless_loss()
        lines.append(f"{task}, {placement}, {len(each)} seeds; without depth {floor:.2f}")
        for name in TRAINED:
            cells = []
            for how in RUN:
                losses = [one[name]["losses"][how] for one in each]
                cells.append(
                    f"{how} {statistics.fmean(losses):.2f} ({min(losses):.2f} to {max(losses):.2f})"
                )
            cost = statistics.fmean(one[name]["seconds"] for one in each)
            calls = statistics.fmean(one[name]["evaluations"] for one in each)
            broken = sum(one[name]["ending"] != "finished" for one in each)
            about = f"{cost:.0f} s, {calls:.1f} evaluations a sublayer" + (
                f", {broken} broke off" if broken else ""
            )
            lines.append(f"  trained as {name} ({about}): run with {'; '.join(cells)}")
    return lines


def draw(path: Path) -> None:
    """Losses against how the model is run, one line for each way of training, one panel for each
    task and placement.
    """
    import matplotlib.pyplot as plt

    found = rows()
    cases = list(dict.fromkeys((row["task"], row["placement"]) for row in found))
    figure, axes = plt.subplots(
        1, len(cases), figsize=(2.9 * len(cases), 3.6), layout="constrained", squeeze=False
    )
    for place, (task, placement) in zip(axes[0], cases, strict=True):
        each = [
            row["trained"] for row in found if (row["task"], row["placement"]) == (task, placement)
        ]
        for name in TRAINED:
            losses = [[one[name]["losses"][how] for one in each] for how in RUN]
            means = [statistics.fmean(values) for values in losses]
            (line,) = place.plot(list(RUN), means, marker="o", label=name)
            place.fill_between(
                list(RUN),
                list(map(min, losses)),
                list(map(max, losses)),
                color=line.get_color(),
                alpha=0.15,
            )
        place.axhline(
            data(task).depthless_loss(), color="grey", linestyle=":", label="without depth"
        )
        place.set(
            title=f"{task}, {placement}",
            xlabel="how it is run",
            ylabel="validation loss, nats",
            ylim=(0, None),
        )
        place.tick_params(axis="x", labelrotation=60)
    lines, names = axes[0][0].get_legend_handles_labels()
    figure.legend(
        lines,
        [f"trained as {n}" if n in TRAINED else n for n in names],
        loc="outside lower center",
        ncols=len(names),
    )
    figure.savefig(path, dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--report", action="store_true", help="train nothing")
    parser.add_argument("--out", type=Path, default=Path("continuous.png"))
    options = parser.parse_args()
    if not options.report:
        done = {(row["task"], row["placement"], row["seed"]) for row in rows()}
        jobs = [
            (task, placement, seed)
            for seed in SEEDS
            for task in RATES
            for placement in ("pre", "peri")
        ]
        add([job for job in jobs if job not in done], options.minutes, options.workers)
    print("\n".join(report()))
    draw(options.out)


if __name__ == "__main__":
    main()

"""The trial of TREATMENT.md: `python -m benchmarks.clinic.treatment --minutes 25`, and `--report` for its table.

Each patient is a line of benchmarks/results/clinic/treatment.jsonl.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import math
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from torch import Tensor

from benchmarks.clinic.acts import Act, acts_for
from benchmarks.clinic.course import STEPS, Course, course
from benchmarks.clinic.examine import MORE, findings_of, number, trained_on
from benchmarks.clinic.faults import MODEL_FAULTS
from benchmarks.clinic.judging import outcome, wilson
from benchmarks.clinic.seal import of_half, task_of
from ctrans.stability.diagnosis.weights_only import BLOCK
from solvers import ConfigError

ROWS = Path(__file__).parents[1] / "results" / "clinic" / "treatment.jsonl"
SEEDS = (30, 31)
MODELS = ("a gain of 100", "attention output 50 times too large", "FFN output 50 times too large", "a massive channel")


def drawn(key: str, below: int) -> int:
    return int(hashlib.sha256(f"treatment:{key}".encode()).hexdigest(), 16) % below


@functools.lru_cache(2)
def healthy(architecture: str, task: str, seed: int) -> tuple[float, dict[str, Any]]:
    made = course(architecture, task, seed)
    return made.run(STEPS).evaluate(), {name: each.clone() for name, each in made.body.model.state_dict().items()}


def as_trained(architecture: str, task: str, seed: int) -> Course:
    made = course(architecture, task, seed)
    made.body.model.load_state_dict(healthy(architecture, task, seed)[1])
    made.step = STEPS
    made.make_optimiser()
    return made


def checks_of(made: Course) -> list[Any]:
    torch.manual_seed(0)
    try:
        return findings_of(made)
    except ConfigError:
        return []


@functools.lru_cache(2)
def known(architecture: str, task: str, seed: int) -> tuple[frozenset[str], float]:
    """What `diagnose` finds in the healthy model, and its loss after `MORE` steps."""
    made = as_trained(architecture, task, seed)
    return frozenset(each.check for each in checks_of(made)), trained_on(made).evaluate()


def acts(made: Course, found: list[Any]) -> list[Act]:
    weights = {name: functools.partial(Tensor.clone, each) for name, each in made.body.model.state_dict().items()}
    return acts_for(found, weights)


@torch.no_grad()
def put(made: Course, changes: list[Act]) -> Course:
    state = made.body.model.state_dict()
    for act in changes:
        state[act.weight].copy_(act.new)
    return made


@torch.no_grad()
def elsewhere(made: Course, changes: list[Act], key: str) -> Course:
    """The same factors on the same weights of another block."""
    state = made.body.model.state_dict()
    for act in changes:
        kind = BLOCK.sub(".", act.weight, count=1)
        others = [each for each in state if each != act.weight and BLOCK.sub(".", each, count=1) == kind]
        if others:
            factor = act.new / torch.where(state[act.weight] == 0, 1.0, state[act.weight])
            state[others[drawn(key, len(others))]].mul_(factor)
    return made


def model(fault: str, architecture: str, task: str, seed: int) -> dict[str, Any]:
    own = MODEL_FAULTS[fault]
    if not own.fits(course(architecture, task, seed)):
        return {"ending": "does not fit"}

    def ill() -> Course:
        made = as_trained(architecture, task, seed)
        own.put(made)
        return made

    usual, base = known(architecture, task, seed)
    made = ill()
    found = [each for each in checks_of(made) if each.check not in usual]
    changes = acts(made, found)
    none = trained_on(ill()).evaluate()
    arms: dict[str, float] = {"none": none}
    if outcome(none, none, base) != "healed":
        arms["treatment"] = trained_on(put(ill(), changes)).evaluate() if changes else none
        arms["placebo"] = trained_on(elsewhere(ill(), changes, f"{fault}/{architecture}/{seed}")).evaluate() if changes else none
        arms["restart"] = course(architecture, task, seed + 50).run(MORE).evaluate()
    return {
        "healthy": number(base),
        "found": [each.check for each in found][:6],
        "arms": {name: number(value) for name, value in arms.items()},
        "acts": [f"{act.weight}: {act.words}" for act in changes],
    }


def planned() -> Iterator[tuple[str, str, str, str, int]]:
    """By seeds, then architectures, then faults."""
    where = [(own, task_of(own, seed, "treatment"), seed) for seed in SEEDS for own in of_half("sealed")["architecture"]]
    yield from (("model", fault, *each) for each in where for fault in MODELS)


def rows() -> list[dict[str, Any]]:
    return [json.loads(line) for line in ROWS.read_text().splitlines() if line.endswith("}")] if ROWS.exists() else []


def result(row: dict[str, Any], arm: str) -> str | None:
    """The outcome of an arm; a loss that is None is not finite."""
    if arm not in row["arms"]:
        return None
    value, none = (math.inf if row["arms"][name] is None else row["arms"][name] for name in (arm, "none"))
    return outcome(value, none, row["healthy"])


def kinds(kept: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """By kind: its patients that do not heal without treatment."""
    found: dict[str, list[dict[str, Any]]] = {}
    for row in kept:
        if "arms" in row and result(row, "none") != "healed":
            usual = "gain too large" if row["fault"] == MODELS[0] else "sublayer output too large"
            found.setdefault(usual, []).append(row)
    return found


def share(results: list[str | None], wanted: str) -> str:
    hits, of = results.count(wanted), len(results)
    low, high = wilson(hits, of)
    return f"{hits} of {of} ({100 * low:.0f} to {100 * high:.0f}%)"


def passes(treated: list[str | None], placebo: list[str | None]) -> bool:
    """The rule of TREATMENT.md, without its line on healthy controls."""
    return (
        len(treated) >= 8 and wilson(treated.count("healed"), len(treated))[0] > wilson(placebo.count("healed"), len(placebo))[1]
    )


def report(kept: list[dict[str, Any]]) -> list[str]:
    lines = ["| kind | did not act | healed | harmed | placebo healed | restart healed | passes |", "| --- " * 7 + "|"]
    for name, patients in kinds(kept).items():
        acted = [row for row in patients if row["acts"]]
        arms = {arm: [result(row, arm) for row in acted if arm in row["arms"]] for arm in ("treatment", "placebo", "restart")}
        counted = (("treatment", "healed"), ("treatment", "harm"), ("placebo", "healed"), ("restart", "healed"))
        shares = [share(arms[arm], which) for arm, which in counted]
        told = "yes" if passes(arms["treatment"], arms["placebo"]) else "no"
        lines.append(f"| {name} | {len(patients) - len(acted)} of {len(patients)} | {' | '.join(shares)} | {told} |")
    lines.append(f"healthy without treatment: {sum(result(row, 'none') == 'healed' for row in kept if 'arms' in row)}")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=25)
    parser.add_argument("--report", action="store_true", help="examine nothing")
    options = parser.parse_args()
    torch.set_num_threads(1)
    end, names = time.monotonic() + 60 * options.minutes, ("kind", "fault", "architecture", "task", "seed")
    done = {tuple(row[name] for name in names) for row in rows()}
    for patient in () if options.report else planned():
        if patient in done or time.monotonic() > end:
            continue
        started = time.process_time()
        row = dict(zip(names, patient, strict=True)) | model(*patient[1:]) | {"seconds": round(time.process_time() - started, 2)}
        with ROWS.open("a") as file:
            file.write(f"{json.dumps(row)}\n")
    print("\n".join(report(rows())))


if __name__ == "__main__":
    main()

"""The trial of TREATMENT.md: `python -m benchmarks.clinic.treatment --minutes 25`, and `--report`
for its tables.

Each patient and each healthy training is a line of benchmarks/results/clinic/treatment.jsonl.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import math
import os
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from torch import Tensor

from benchmarks.clinic import seal
from benchmarks.clinic.acts import Act, acts_for
from benchmarks.clinic.course import EVERY, STEPS, Course, course
from benchmarks.clinic.examine import MORE, findings_of, number, trained_on
from benchmarks.clinic.faults import MODEL_FAULTS, TRAINING_FAULTS
from benchmarks.clinic.judging import outcome, wilson
from ctrans.interop.weight_names import BLOCK
from ctrans.training.monitor import Monitor
from solvers import ConfigError

ROWS = Path(__file__).parents[1] / "results" / "clinic" / "treatment.jsonl"
SEEDS = (30, 31)
MODELS = (
    "a gain of 100",
    "attention output 50 times too large",
    "FFN output 50 times too large",
    "a massive channel",
)
FAULT = "nan in one batch"
"""The fault of a training on which `skip` is tried."""
FIRST, SECOND = (30, 31, 32), (33, 34, 35)
"""The seeds of the first trial of reactions, and of the second one."""
Where = tuple[str, str, int]
"""Architecture, task and seed."""


def drawn(key: str, below: int) -> int:
    return int(hashlib.sha256(f"treatment:{key}".encode()).hexdigest(), 16) % below


@functools.lru_cache(2)
def copies(architecture: str, task: str, seed: int) -> list[Course]:
    """The healthy training at each tenth step from 0 on."""
    kept = [course(architecture, task, seed)]
    while kept[-1].step < STEPS:
        kept.append(kept[-1].copy().run(10 * len(kept)))
    return kept


def until(step: int, *where: Any) -> Course:
    """The healthy training at a step."""
    return copies(*where)[step // 10].copy().run(step)


def healthy(*where: Any) -> tuple[float, dict[str, Any]]:
    """Its loss at the end, and its weights."""
    made = copies(*where)[-1]
    return made.evaluate(), made.body.model.state_dict()


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
    weights = {
        name: functools.partial(Tensor.clone, each)
        for name, each in made.body.model.state_dict().items()
    }
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
        others = [
            each for each in state if each != act.weight and BLOCK.sub(".", each, count=1) == kind
        ]
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
        arms["placebo"] = (
            trained_on(elsewhere(ill(), changes, f"{fault}/{architecture}/{seed}")).evaluate()
            if changes
            else none
        )
        arms["restart"] = course(architecture, task, seed + 50).run(MORE).evaluate()
    return {
        "healthy": number(base),
        "found": [each.check for each in found][:6],
        "arms": {name: number(value) for name, value in arms.items()},
        "acts": [f"{act.weight}: {act.words}" for act in changes],
    }


def skipping(made: Course) -> tuple[Course, list[str]]:
    """Trains to the end with the reaction `skip`, or to three losses in a row that are not finite;
    what it did.
    """
    options: dict[str, Any] = (
        {} if made.body.example is None else {"example": made.body.example, "loss": made.body.loss}
    )
    monitor = Monitor(made.body.model, every=EVERY, clip=made.clip, react=["skip"], **options)
    while made.step < STEPS and (made.step < 3 or any(map(math.isfinite, made.losses[-3:]))):
        made.advance(monitor)
    monitor.close()
    return made, [f"{step}: skip" for step in monitor.reactions.skipped]


def placebo(made: Course) -> Course:
    """The same act at this step."""
    kept = made.copy()
    made.advance()
    made.body.model.load_state_dict(kept.body.model.state_dict())
    made.optimiser.load_state_dict(kept.optimiser.state_dict())
    return made.run(STEPS)


def training(fault: str, *where: Any) -> dict[str, Any]:
    """The step of the placebo is drawn from those before the fault. Up to it, the training is a
    copy of the healthy one.
    """
    own = TRAINING_FAULTS[fault]
    base, _ = healthy(*where)
    step = drawn("/".join(map(str, (fault, *where))), own.start)
    begun = until(step, *where)
    own.put(begun)
    kept = begun.copy()
    none = begun.run(STEPS).evaluate()
    arms, acts = {"none": none}, list[str]()
    if outcome(none, none, base) != "healed":
        made = course(*where)
        own.put(made)
        made, acts = skipping(made)
        arms["treatment"] = made.evaluate()
        if acts:
            arms["placebo"] = placebo(kept).evaluate()
    return {
        "reaction": "skip",
        "healthy": number(base),
        "arms": {name: number(value) for name, value in arms.items()},
        "acts": acts,
        "placebo at": step + 1,
    }


def in_health(_: str, *where: Any) -> dict[str, Any]:
    """What `skip` does in a training without a fault, and whether the weights have the same bits at
    the end.
    """
    base, weights = healthy(*where)
    made, acts = skipping(course(*where))
    same = all(
        torch.equal(each, weights[name]) for name, each in made.body.model.state_dict().items()
    )
    return {
        "healthy": number(base),
        "reactions": {"skip": {"loss": number(made.evaluate()), "acts": acts, "same bits": same}},
    }


def where(seeds: Iterable[int]) -> list[Where]:
    """Each sealed architecture with its task, by seeds."""
    return [
        (own, seal.FIRST.task_of(own, seed, "treatment"), seed)
        for seed in seeds
        for own in seal.FIRST.of_half("sealed")["architecture"]
    ]


def planned() -> Iterator[tuple[str, str, str, str, int]]:
    """All models, the trainings of the first trial, and those of the second."""
    yield from (("model", fault, *each) for each in where(SEEDS) for fault in MODELS)
    for each in where((*FIRST, *SECOND)):
        yield "training", FAULT, *each
        yield "healthy", "", *each


def rows() -> list[dict[str, Any]]:
    return (
        [json.loads(line) for line in ROWS.read_text().splitlines() if line.endswith("}")]
        if ROWS.exists()
        else []
    )


def result(row: dict[str, Any], arm: str) -> str | None:
    """The outcome of an arm; a loss that is None is not finite."""
    if arm not in row["arms"]:
        return None
    value, none = (
        math.inf if row["arms"][name] is None else row["arms"][name] for name in (arm, "none")
    )
    return outcome(value, none, row["healthy"])


def kinds(kept: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """By kind: its models that do not heal without treatment."""
    found: dict[str, list[dict[str, Any]]] = {}
    for row in kept:
        if row["kind"] == "model" and "arms" in row and result(row, "none") != "healed":
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
        len(treated) >= 8
        and wilson(treated.count("healed"), len(treated))[0]
        > wilson(placebo.count("healed"), len(placebo))[1]
    )


def report(kept: list[dict[str, Any]]) -> list[str]:
    lines = [
        "| kind | did not act | healed | harmed | placebo healed | restart healed | passes |",
        "| --- " * 7 + "|",
    ]
    for name, patients in kinds(kept).items():
        acted = [row for row in patients if row["acts"]]
        arms = {
            arm: [result(row, arm) for row in acted if arm in row["arms"]]
            for arm in ("treatment", "placebo", "restart")
        }
        counted = (
            ("treatment", "healed"),
            ("treatment", "harm"),
            ("placebo", "healed"),
            ("restart", "healed"),
        )
        shares = [share(arms[arm], which) for arm, which in counted]
        told = "yes" if passes(arms["treatment"], arms["placebo"]) else "no"
        lines.append(
            f"| {name} | {len(patients) - len(acted)} of {len(patients)} | {' | '.join(shares)} |"
            f" {told} |"
        )
    lines.append(
        "healthy without treatment:"
        f" {sum(result(row, 'none') == 'healed' for row in kept if row['kind'] == 'model' and 'arms' in row)}"
    )
    return lines


def report_reactions(kept: list[dict[str, Any]]) -> list[str]:
    """The reactions by fault, and what they do in healthy trainings."""
    lines = [
        (
            "| reaction | fault | healed without | did not act | healed | harmed | placebo healed |"
            " passes |"
        ),
        "| --- " * 8 + "|",
    ]
    below = [
        "| reaction | healthy trainings | acted | same bits where it did not act | harmed |",
        "| --- " * 5 + "|",
    ]
    well = [row for row in kept if row["kind"] == "healthy"]
    for react in dict.fromkeys(row["reaction"] for row in kept if row["kind"] == "training"):
        told = [(row["reactions"][react], row["healthy"]) for row in well]
        acted = [(own, base) for own, base in told if own["acts"]]
        harms = [
            "harm" if outcome(own["loss"] or math.inf, base, base) != "healed" else "no change"
            for own, base in told
        ]
        quiet = [str(own["same bits"]) for own, _ in told if not own["acts"]]
        below.append(
            f"| `{react}` | {len(told)} |"
            f" {share(['acted'] * len(acted) + [''] * (len(told) - len(acted)), 'acted')} |"
            f" {quiet.count('True')} of {len(quiet)} | {share(harms, 'harm')} |"
        )
        faults = list(dict.fromkeys(row["fault"] for row in kept if row.get("reaction") == react))
        for group in [[fault] for fault in faults] + [faults] * (len(faults) > 1):
            own_rows = [row for row in kept if row["kind"] == "training" and row["fault"] in group]
            lines.append(
                f"| `{react}` | {group[0] if len(group) == 1 else 'all'} | {_counts(own_rows)} "
                f"| {'' if group != faults else 'yes' if _offered(own_rows, harms) else 'no'} |"
            )
    return [*lines, "", *below]


def _acted(rows: list[dict[str, Any]], arm: str) -> list[str | None]:
    return [result(row, arm) for row in rows if row["acts"]]


def _counts(rows: list[dict[str, Any]]) -> str:
    ill = [row for row in rows if result(row, "none") != "healed"]
    shares = [
        share(_acted(ill, arm), which)
        for arm, which in (("treatment", "healed"), ("treatment", "harm"), ("placebo", "healed"))
    ]
    idle = sum(not row["acts"] for row in ill)
    return f"{len(rows) - len(ill)} of {len(rows)} | {idle} of {len(ill)} | {' | '.join(shares)}"


def _offered(rows: list[dict[str, Any]], harms: list[str]) -> bool:
    """The rule of TREATMENT.md."""
    return passes(_acted(rows, "treatment"), _acted(rows, "placebo")) and "harm" not in harms


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=25)
    parser.add_argument("--report", action="store_true", help="examine nothing")
    options = parser.parse_args()
    torch.set_num_threads(1)
    end, names = (
        time.monotonic() + 60 * options.minutes,
        (
            "kind",
            "fault",
            "architecture",
            "task",
            "seed",
        ),
    )
    done = {tuple(row[name] for name in names) for row in rows()}
    for patient in () if options.report else planned():
        if patient in done or time.monotonic() > end:
            continue
        started = time.process_time()
        found = {"model": model, "training": training, "healthy": in_health}[patient[0]](
            *patient[1:]
        )
        row = (
            dict(zip(names, patient, strict=True))
            | found
            | {"seconds": round(time.process_time() - started, 2)}
        )
        with ROWS.open("a") as file:
            file.write(f"{json.dumps(row)}\n")
    trials = (
        [row for row in rows() if (row["seed"] in SECOND) is later] for later in (False, True)
    )
    print(
        "\n".join(
            [*report(rows()), *(line for each in trials for line in ("", *report_reactions(each)))]
        )
    )


if __name__ == "__main__":
    main()

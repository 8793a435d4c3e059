"""Which faults, architectures and seeds are open: half of each, by the hash of their names."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from benchmarks.clinic.architectures import FIRST
from benchmarks.clinic.faults import MODEL_FAULTS, TRAINING_FAULTS

SALT = "clinic of ctrans, 2026-11-25"
SEEDS = (20, 21, 22, 23)
TASKS = ("text", "counting", "sorting", "recall", "digits")
"""The tasks that are learned in the steps of a training here. `modular` is not."""


def digest(*words: object) -> str:
    return hashlib.sha256(":".join([SALT, *map(str, words)]).encode()).hexdigest()


def halves(kind: str, names: Iterable[object]) -> tuple[list[str], list[str]]:
    """Open and sealed names: those of the smaller hashes are open. An odd one is sealed."""
    order = sorted(map(str, names), key=lambda name: digest(kind, name))
    return order[: len(order) // 2], order[len(order) // 2 :]


class Patient(NamedTuple):
    """What names a patient; `kind` is "model" or "training". A fault of "" is a healthy control."""

    kind: str
    fault: str
    architecture: str
    task: str
    seed: int


def of_half(half: str) -> dict[str, list[str]]:
    which = ("open", "sealed").index(half)
    kinds = {
        "architecture": ARCHITECTURES,
        "model": MODEL_FAULTS,
        "training": TRAINING_FAULTS,
        "seed": SEEDS,
    }
    return {kind: halves(kind, names)[which] for kind, names in kinds.items()}


def task_of(architecture: str, seed: int, *words: object) -> str:
    """One task for each patient, by a hash."""
    fitting = [task for task in TASKS if task in ARCHITECTURES[architecture][1]]
    return fitting[int(digest("task", architecture, seed, *words), 16) % len(fitting)]


def controls(half: str) -> Iterator[Patient]:
    """Healthy controls without end: each architecture and task, on the seeds of the half and then
    on further ones.
    """
    names = of_half(half)
    for turn in itertools.count():
        for seed, task, architecture in itertools.product(
            names["seed"], TASKS, names["architecture"]
        ):
            if task in ARCHITECTURES[architecture][1]:
                yield Patient("training", "", architecture, task, int(seed) + 100 * turn)


def planned(half: str) -> list[Patient]:
    """Controls and patients, in the order of examination: each fault once, then again on the next
    architecture.

    With each pair of a model and a training goes a control, which is a healthy training and then a
    healthy model.
    """
    names = of_half(half)
    patients = [
        Patient(kind, fault, own, task_of(own, int(seed), fault), int(seed))
        for seed, turn in itertools.product(names["seed"], range(len(names["architecture"])))
        for kind in ("model", "training")
        for number, fault in enumerate(names[kind])
        for own in (names["architecture"][(turn + number) % len(names["architecture"])],)
    ]
    healthy = itertools.islice(controls(half), (len(patients) + 1) // 2)
    pairs = itertools.zip_longest(healthy, patients[::2], patients[1::2])
    return [each for row in pairs for each in row if each is not None]

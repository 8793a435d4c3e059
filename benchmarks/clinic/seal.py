"""Which faults, architectures and seeds of a trial are open: half of each, by the hash of their
names.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from benchmarks.clinic import architectures, faults, second_faults
from benchmarks.clinic.faults import Fault


class Patient(NamedTuple):
    """What names a patient; `kind` is "model" or "training". A fault of "" is a healthy control."""

    kind: str
    fault: str
    architecture: str
    task: str
    seed: int


@dataclasses.dataclass(frozen=True)
class Trial:
    """What a trial examines. `salt` decides what is sealed."""

    salt: str
    seeds: tuple[int, ...]
    tasks: tuple[str, ...]
    architectures: Mapping[str, tuple[Callable[..., Any], tuple[str, ...]]]
    model: Mapping[str, Fault]
    training: Mapping[str, Fault]

    def fault(self, kind: str, name: str) -> Fault:
        return (self.model if kind == "model" else self.training)[name]

    def digest(self, *words: object) -> str:
        return hashlib.sha256(":".join([self.salt, *map(str, words)]).encode()).hexdigest()

    def halves(self, kind: str, names: Iterable[object]) -> tuple[list[str], list[str]]:
        """Open and sealed names: those of the smaller hashes are open. An odd one is sealed."""
        order = sorted(map(str, names), key=lambda name: self.digest(kind, name))
        return order[: len(order) // 2], order[len(order) // 2 :]

    def of_half(self, half: str) -> dict[str, list[str]]:
        which = ("open", "sealed").index(half)
        kinds: dict[str, Iterable[object]] = {
            "architecture": self.architectures,
            "model": self.model,
            "training": self.training,
            "seed": self.seeds,
        }
        return {kind: self.halves(kind, names)[which] for kind, names in kinds.items()}

    def tasks_of(self, architecture: str) -> list[str]:
        return [task for task in self.tasks if task in self.architectures[architecture][1]]

    def task_of(self, architecture: str, seed: int, *words: object) -> str:
        """One task for each patient, by a hash."""
        fitting = self.tasks_of(architecture)
        return fitting[int(self.digest("task", architecture, seed, *words), 16) % len(fitting)]

    def controls(self, half: str) -> Iterator[Patient]:
        """Healthy controls without end: each architecture and task, on the seeds of the half and
        then on further ones.
        """
        names = self.of_half(half)
        for turn in itertools.count():
            for seed, task, architecture in itertools.product(
                names["seed"], self.tasks, names["architecture"]
            ):
                if task in self.tasks_of(architecture):
                    yield Patient("training", "", architecture, task, int(seed) + 100 * turn)

    def planned(self, half: str) -> list[Patient]:
        """Controls and patients, in the order of examination: each fault once, then again on the
        next architecture.

        With each pair of a model and a training goes a control, which is a healthy training and
        then a healthy model.
        """
        names = self.of_half(half)
        patients = [
            Patient(kind, fault, own, self.task_of(own, int(seed), fault), int(seed))
            for seed, turn in itertools.product(names["seed"], range(len(names["architecture"])))
            for kind in ("model", "training")
            for number, fault in enumerate(names[kind])
            for own in (names["architecture"][(turn + number) % len(names["architecture"])],)
        ]
        healthy = itertools.islice(self.controls(half), (len(patients) + 1) // 2)
        pairs = itertools.zip_longest(healthy, patients[::2], patients[1::2])
        return [each for row in pairs for each in row if each is not None]


FIRST = Trial(
    "clinic of ctrans, 2026-11-25",
    seeds=(20, 21, 22, 23),
    # the tasks that are learned in the steps of a training here, which `modular` is not
    tasks=("text", "counting", "sorting", "recall", "digits"),
    architectures=architectures.FIRST,
    model=faults.MODEL_FAULTS,
    training=faults.TRAINING_FAULTS,
)
SECOND = Trial(
    "second trial of the clinic of ctrans, 2026-11-30",
    seeds=(40, 41, 42, 43),
    tasks=("text", "counting", "digits"),
    architectures=architectures.SECOND,
    model=second_faults.MODEL_FAULTS,
    training=second_faults.TRAINING_FAULTS,
)
HALVES = {
    "open": (FIRST, "open"),
    "sealed": (FIRST, "sealed"),
    "second-open": (SECOND, "open"),
    "second-sealed": (SECOND, "sealed"),
}

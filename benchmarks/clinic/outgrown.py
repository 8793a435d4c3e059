"""How the note *sublayer outgrows its past* does: `python -m benchmarks.clinic.outgrown open`, or
`sealed`.

One healthy training for each architecture and seed of the half, and the same with the last weights
of an FFN or an attention times 50 before step 130. It prints the alarms of each, and the largest
figure of the note.
"""

from __future__ import annotations

import os
import sys

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

from benchmarks.clinic.course import STEPS, course
from benchmarks.clinic.examine import monitor_of
from benchmarks.clinic.faults import EVENT, MODEL_FAULTS
from benchmarks.clinic.seal import FIRST
from ctrans.training.monitor.past_checks import outgrown

FAULTS = ("", "FFN output 50 times too large", "attention output 50 times too large")


def train(architecture: str, task: str, seed: int, fault: str) -> tuple[list[str], float]:
    """The alarms with their steps, and the largest figure."""
    made, alarms, largest = course(architecture, task, seed), list[str](), 0.0
    monitor = monitor_of(made)
    while made.step < STEPS:
        if fault and made.step == EVENT:
            with torch.no_grad():
                MODEL_FAULTS[fault].put(made)
        alarms += [f"{alarm.check} ({alarm.step})" for alarm in made.advance(monitor)]
        seen = outgrown(monitor.past, {"limit": 0.0, "reports": 2, "least": 12})
        largest = max(largest, 0.0 if seen is None else seen.value)
    monitor.close()
    return alarms, largest


def main() -> None:
    names = FIRST.of_half(sys.argv[1])
    for seed in map(int, names["seed"]):
        for architecture in names["architecture"]:
            task = FIRST.task_of(architecture, seed)
            for fault in FAULTS:
                alarms, largest = train(architecture, task, seed, fault)
                print(
                    f"{architecture} on {task}, seed {seed}, {fault or 'healthy'}: {largest:.2f};"
                    f" {', '.join(alarms) or 'no alarm'}",
                    flush=True,
                )


if __name__ == "__main__":
    main()

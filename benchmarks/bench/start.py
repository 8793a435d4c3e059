"""How long a command takes to start, by processor time of whole processes."""

from __future__ import annotations

import dataclasses
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.bench.measure import Pair, Row, Sample, environment, of_process, row_of_pairs

ROOT = Path(__file__).resolve().parents[2]
SIMULATE = ["simulate", "--placement", "peri", "--dt", "0.1", "--out", "{}"]
HJB_CHECK = ["hjb-check", "--out", "{}/hjb"]
TWICE = """
import contextlib, sys, time
from ctrans.cli import main
for _ in range(2):
    wall, processor = time.perf_counter(), time.process_time()
    with contextlib.suppress(SystemExit):
        main(sys.argv[1:])
    wall, processor = time.perf_counter() - wall, time.process_time() - processor
print(wall, processor, file=sys.stderr)
"""
"""The second run in one process has all imports behind it, so that it is the computation and its
picture.
"""


def start(*, quick: bool) -> list[Row]:
    python, own = sys.executable, environment(PYTHONPATH=str(ROOT))
    with tempfile.TemporaryDirectory() as scratch:
        simulate = [each.format(scratch) for each in SIMULATE]
        help_ = _process_pairs(
            [python, "-m", "ctrans", "--help"],
            [python, "-c", "import click"],
            own,
            5 if quick else 20,
        )
        whole = _process_pairs(
            [python, "-m", "ctrans", *simulate],
            [python, "-c", "import torch"],
            own,
            3 if quick else 8,
        )
        check = [each.format(scratch) for each in HJB_CHECK]
        checked = _process_pairs(
            [python, "-m", "ctrans", *check],
            [python, "-c", "import torch"],
            own,
            2 if quick else 5,
        )
        computed = [
            _second_run([python, "-c", TWICE, *simulate], own) for _ in range(1 if quick else 5)
        ]
    first = row_of_pairs("ctrans --help", "python -c 'import click'", help_)
    processor = statistics.median(sample.processor for sample in computed)
    wall = statistics.median(sample.wall for sample in computed)
    starting = [(ours.processor - processor) / theirs.processor for ours, theirs in whole]
    imported = statistics.median(theirs.processor for _, theirs in whole)
    whole_ratio = statistics.median(ours.processor / theirs.processor for ours, theirs in whole)
    note = (
        f"processor time {first.processor:.3f} s, aim 0.08",
        (
            f"processor time {whole_ratio:.1f} times import torch, aim 2.5: import torch"
            f" {imported:.2f} s, its computation and picture"
            f" {processor:.2f} s, so that its start is {statistics.median(starting):.2f} times"
            " import torch; aim 1.30"
        ),
    )
    third = row_of_pairs("ctrans hjb-check", "python -c 'import torch'", checked)
    of_import = [ours.processor / theirs.processor for ours, theirs in checked]
    second = row_of_pairs(
        "ctrans simulate --placement peri --dt 0.1", "python -c 'import torch'", whole
    )
    return [
        dataclasses.replace(first, note=note[0]),
        dataclasses.replace(
            second,
            note=note[1],
            limit=second.peer_seconds + wall,
            limit_is="import torch and its computation",
        ),
        dataclasses.replace(
            third,
            note=(
                f"all placements, both norms. Processor time: {statistics.median(of_import):.1f}"
                " times import torch; aim 8"
            ),
        ),
    ]


def _process_pairs(
    ours: list[str], peer: list[str], own: dict[str, str], rounds: int
) -> list[Pair]:
    """After one pair that fills caches of files."""
    found = [(of_process(ours, own), of_process(peer, own)) for _ in range(rounds + 1)]
    return found[1:]


def _second_run(command: list[str], own: dict[str, str]) -> Sample:
    done = subprocess.run(command, env=own, check=True, capture_output=True, text=True)
    wall, processor = map(float, done.stderr.split()[-2:])
    return Sample(wall, processor)

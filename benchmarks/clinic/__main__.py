"""The clinic of PROTOCOL.md: `python -m benchmarks.clinic --minutes 20` examines, goes on where it
was stopped, and reports.

Each control and each patient is a line of benchmarks/results/clinic/HALF.jsonl. The second trial's
halves are second-open and second-sealed (PROTOCOL-2.md). `--report` prints the tables from these
lines. Trained controls are kept in out/clinic.
"""

from __future__ import annotations

import argparse
import functools
import json
import multiprocessing
import os
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

from benchmarks.clinic import examine, peer_report, second_examine, second_report
from benchmarks.clinic.picture import draw
from benchmarks.clinic.report import report
from benchmarks.clinic.seal import FIRST, HALVES, Patient

RESULTS = Path(__file__).parents[1] / "results" / "clinic"
PEERS = RESULTS / "second-peers.jsonl"
"""What other tools said of the patients of the second trial (`peers.py`)."""


def rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a file; a last line that was cut off is none."""
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("}")]


def key(row: dict[str, Any]) -> Patient:
    return Patient(*(row[name] for name in Patient._fields))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--half", choices=list(HALVES), default="open")
    parser.add_argument(
        "--minutes", type=float, default=20, help="then the patients in progress are dropped"
    )
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--report", action="store_true", help="examine nothing")
    parser.add_argument(
        "--only", nargs="*", default=[], help="patients with all of these in their names"
    )
    parser.add_argument(
        "--as-told",
        action="store_true",
        help="open a model with its inputs as example=, as a refusal says; second trial",
    )
    parser.add_argument("--detect", action="store_true", help="find only: no advice is carried out")
    parser.add_argument("--picture", type=Path, help="draw the second trial's shares there")
    parser.add_argument(
        "--name",
        default="",
        help="another name of the file, for a run after a change of the checks",
    )
    options = parser.parse_args()
    trial, half = HALVES[options.half]
    examine_one = functools.partial(second_examine.examine, as_told=options.as_told)
    if trial is FIRST:
        examine_one = functools.partial(examine.examine, arms=not options.detect)
    path = RESULTS / f"{options.name or options.half}.jsonl"
    if not options.report:
        done = {key(row) for row in rows(path)}
        left = [
            each
            for each in trial.planned(half)
            if each not in done and all(words in "/".join(map(str, each)) for words in options.only)
        ]
        end = time.monotonic() + 60 * options.minutes
        path.parent.mkdir(parents=True, exist_ok=True)
        with (
            multiprocessing.get_context("fork").Pool(options.workers) as pool,
            path.open("a") as file,
        ):
            for count, row in enumerate(pool.imap(examine_one, left), 1):
                file.write(f"{json.dumps(row)}\n")
                file.flush()
                print(f"\r{count} of {len(left)}", end="", flush=True)
                if time.monotonic() > end:
                    break
        print()
    if trial is FIRST:
        print("\n".join(report(rows(path))))
        return
    lines = [*second_report.report(rows(path)), *peer_report.report(rows(path), rows(PEERS))]
    print("\n".join(lines))
    if options.picture:
        draw(rows(path), rows(PEERS), options.picture)


if __name__ == "__main__":
    main()

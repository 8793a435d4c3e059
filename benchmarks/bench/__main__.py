"""Measures ctrans next to its peers and next to the machine's limit: python -m benchmarks.bench, or
make bench.

It takes half an hour on two quiet processors, with --quick a few minutes. Each part is a process of
its own. The result is kept after each part, in benchmarks/results/bench-DATE-HARDWARE.json, .txt
and .png, and a part that this commit has there already is not run again. It reports and does not
judge: the exit code is 1 only if a part failed. NANOGPT=PATH names a checkout of nanoGPT to train
beside.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from ctrans.base.threads import wait_passively

wait_passively()

import torch

from benchmarks.bench.parts import PARTS, QUICK
from benchmarks.bench.report import Result, draw, text
from benchmarks.record import RESULTS, hardware, processor

ROOT = Path(__file__).resolve().parents[2]


def commit() -> str:
    """The sources' commit, with a mark if they differ from it; "unknown" outside of git."""
    done = subprocess.run(
        ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=9"],
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout.strip() or "unknown"


def started(path: Path) -> Result:
    """What is kept there already, or a new result of today."""
    if path.exists():
        return dict(json.loads(path.read_text()))
    return {
        "date": datetime.date.today().isoformat(),
        "words": "",
        "processor": processor(),
        "processors": os.cpu_count(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "parts": {},
    }


def run(name: str, *, quick: bool) -> dict[str, Any]:
    """The part in a process of its own."""
    before, start = os.getloadavg()[0], time.perf_counter()
    command = [
        sys.executable,
        "-m",
        "benchmarks.bench",
        "--one",
        name,
        *(["--quick"] if quick else []),
    ]
    # one thread for jax too, where torch has one
    alone = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
    threads = PARTS[name].threads or torch.get_num_threads()
    # set for all parts, it would stop `choose_threads`
    flags = {"OMP_NUM_THREADS": str(threads)} if PARTS[name].threads else {}
    flags |= {"XLA_FLAGS": alone} if threads == 1 else {}
    paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, **flags, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=False,
    )
    failure = (
        ""
        if done.returncode == 0
        else next(iter(done.stderr.strip().splitlines()[-1:]), f"exit code {done.returncode}")
    )
    return {
        "rows": [] if failure else json.loads(done.stdout.splitlines()[-1]),
        "failure": failure,
        "seconds": time.perf_counter() - start,
        "load": [before, os.getloadavg()[0]],
        "threads": threads,
        "quick": quick,
        "commit": commit(),
    }


def keep(result: Result, path: Path) -> None:
    """JSON, text and page. The parts are in the order of the table."""
    result["parts"] = {name: result["parts"][name] for name in PARTS if name in result["parts"]}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")
    path.with_suffix(".txt").write_text("\n".join(text(result)) + "\n")
    draw(result, path.with_suffix(".png"))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"these alone: {', '.join(PARTS)}")
    parser.add_argument(
        "--quick", action="store_true", help=f"a few minutes, smaller sizes: {', '.join(QUICK)}"
    )
    parser.add_argument("--again", action="store_true", help="run parts again that are kept")
    parser.add_argument(
        "--out",
        type=Path,
        help="where the result goes; benchmarks/results, or out/bench with --quick",
    )
    parser.add_argument(
        "--words", default="", help="a line on the machine that is kept with the result"
    )
    parser.add_argument("--one", choices=[*PARTS], help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one is not None:
        print(json.dumps(PARTS[given.one].measure(given.quick)))
        return
    names = given.parts or (list(QUICK) if given.quick else list(PARTS))
    unknown = [name for name in names if name not in PARTS]
    if unknown:
        parser.error(f"unknown part {unknown[0]!r}: choose from {', '.join(PARTS)}")
    directory = given.out or (ROOT / "out" / "bench" if given.quick else RESULTS)
    path = (
        directory
        / f"bench-{'quick-' if given.quick else ''}{datetime.date.today().isoformat()}-{hardware()}.json"
    )
    result, now = started(path), commit()
    result["words"] = given.words or result["words"]
    for name in names:
        kept = result["parts"].get(name)
        if kept and kept["commit"] == now and not kept["failure"] and not given.again:
            print(f"{name}: kept from before", flush=True)
            continue
        print(
            f"{name}: about {PARTS[name].seconds:.0f} s on two quiet processors", end="", flush=True
        )
        result["parts"][name] = run(name, quick=given.quick)
        keep(result, path)
        print(
            f"; {result['parts'][name]['seconds']:.0f} s {result['parts'][name]['failure']}",
            flush=True,
        )
    print("\n".join(text(result)))
    print(f"\nKept in {path}, and beside it as .txt and .png")
    failed = [name for name in names if result["parts"][name]["failure"]]
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()

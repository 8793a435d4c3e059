"""Runs everything that only a GPU can confirm, in one command. Each part is a process of its own,
with its own time limit.

python benchmarks/gpu.py [--nanogpt PATH] [--only PART ...] [--rehearse] [--results DIRECTORY]        # or: make gpu

It runs from a bare source tree on what is installed, and downloads nothing. If a part fails, or
lacks a package, it shows its last lines, and the others continue. The exit code is then 1. Without
a GPU, or with --rehearse, every part runs on the CPU at a small size. This only shows that the
script works. The parts are in benchmarks/gpu_parts.py.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib.metadata
import importlib.util
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# in place of this file's own folder, as in the other benchmarks
sys.path[0] = str(ROOT)

from ctrans.base.threads import wait_passively

wait_passively()

import torch

from benchmarks.gpu_parts import PARTS, Part, Request
from benchmarks.record import RESULTS, write

TOTAL = 580.0
"""Seconds for all parts together."""
PATIENCE = 5
"""How many times as long a rehearsal may take: processors are slow, and others use them."""
KEPT_LINES = 40
"""Of what a failed part said last."""
PACKAGES = (
    "torch",
    "torchdiffeq",
    "jaxtyping",
    "numpy",
    "scipy",
    "click",
    "rich",
    "matplotlib",
    "safetensors",
    "transformers",
)
TEST_PACKAGES = ("pytest", "hypothesis", "beartype")
GRACE = 5.0
"""Seconds that a part has to end its own processes when its time is up."""


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a part went: why it failed, if it did, and its lines."""

    part: Part
    seconds: float
    failure: str | None
    lines: list[str]

    def __str__(self) -> str:
        word = "ok" if self.failure is None else f"FAILED: {self.failure}"
        return "\n".join(
            [
                f"{self.part.name}: {self.part.title}: {word} ({self.seconds:.1f} s)",
                *("    " + line for line in self.lines),
            ]
        )


def installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def run(part: Part, request: Request, limit: float) -> Outcome:
    """The part in a process of its own, for at most so many seconds."""
    missing = [package for package in part.needs if not installed(package)]
    if missing:
        return Outcome(part, 0.0, f"missing here: {', '.join(missing)}", [])
    if limit <= 0:
        return Outcome(part, 0.0, "the time for all parts is used up", [])
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if request.rehearsal else {}
    paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    start = time.perf_counter()
    with tempfile.TemporaryFile("w+") as said, tempfile.TemporaryFile("w+") as complained:
        process = subprocess.Popen(
            [sys.executable, __file__, "--part", part.name, *request.words()],
            cwd=ROOT,
            env={**os.environ, **hidden, "PYTHONPATH": paths, "PYTHONUNBUFFERED": "1"},
            stdout=said,
            stderr=complained,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            code = process.wait(limit)
            failure = None if code == 0 else f"exit code {code}"
        except subprocess.TimeoutExpired:
            failure = f"not done after {limit:.0f} s"
        finally:
            end(process)
        seconds = time.perf_counter() - start
        texts = []
        for file in (said, complained):
            file.seek(0)
            texts.append(file.read().splitlines())
    return Outcome(
        part,
        seconds,
        failure,
        texts[0] if failure is None else [line for text in texts for line in text[-KEPT_LINES:]],
    )


def end(process: subprocess.Popen[bytes]) -> None:
    """Ends the part's process and those that it started: torchrun ends its own when it is asked
    to.
    """
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
            os.killpg(process.pid, number)
            process.wait(GRACE)


def machine(request: Request) -> list[str]:
    """What it runs on, and with what."""
    lines = (
        ["Rehearsal on the CPU, small sizes: it shows that the parts run, and nothing about a GPU."]
        if request.rehearsal
        else []
    )
    if not request.rehearsal:
        for k in range(torch.cuda.device_count()):
            of = torch.cuda.get_device_properties(k)
            lines.append(
                f"Device {k}: {of.name}, {of.total_memory / 2**30:.0f} GiB, capability"
                f" {of.major}.{of.minor}"
            )
        nccl = (
            ".".join(map(str, torch.cuda.nccl.version()))
            if torch.distributed.is_nccl_available()
            else "missing"
        )
        lines.append(f"CUDA {torch.version.cuda}, NCCL {nccl}")
    there = [name for name in (*PACKAGES, *TEST_PACKAGES) if installed(name)]
    lines.append(
        "Installed: " + ", ".join(f"{name} {importlib.metadata.version(name)}" for name in there)
    )
    missing = [name for name in (*PACKAGES, *TEST_PACKAGES) if name not in there]
    if missing:
        without = " (tests run without checking annotations)" if "beartype" in missing else ""
        lines.append(f"Missing: {', '.join(missing)}{without}")
    return lines


def all_parts(request: Request, names: list[str], directory: Path) -> list[Outcome]:
    """Each part in turn; what is known is written after each, since the next may bring the machine
    down.
    """
    start, patience = time.perf_counter(), PATIENCE if request.rehearsal else 1
    outcomes: list[Outcome] = []
    for name in names:
        left = patience * TOTAL - (time.perf_counter() - start)
        outcomes.append(run(PARTS[name], request, min(patience * PARTS[name].seconds, left)))
        print(f"{outcomes[-1]}\n", flush=True)
        passed = sum(outcome.failure is None for outcome in outcomes)
        summary = f"{passed} of {len(names)} parts passed in {time.perf_counter() - start:.0f} s."
        path = write("gpu", [*machine(request), "", *map(str, outcomes), "", summary], directory)
    print(f"{summary} Kept in {path}")
    return outcomes


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--nanogpt", type=Path, help="a checkout of nanoGPT to train beside; NANOGPT names one too"
    )
    parser.add_argument(
        "--only", action="append", choices=[*PARTS], help="repeatable: these parts alone"
    )
    parser.add_argument(
        "--rehearse", action="store_true", help="on the CPU, at small sizes, though there is a GPU"
    )
    parser.add_argument(
        "--results",
        type=Path,
        help="where the result goes; benchmarks/results, or out/gpu for a rehearsal",
    )
    parser.add_argument("--part", choices=[*PARTS], help=argparse.SUPPRESS)
    given = parser.parse_args()
    path = given.nanogpt or os.environ.get("NANOGPT") or None
    request = Request(
        given.rehearse or not torch.cuda.is_available(),
        None if path is None else Path(path).resolve(),
    )
    if given.part is not None:
        for line in PARTS[given.part].run(request):
            print(line, flush=True)
        return
    directory = given.results or (ROOT / "out" / "gpu" if request.rehearsal else RESULTS)
    outcomes = all_parts(request, given.only or [*PARTS], directory)
    failed = [
        f"{outcome.part.name} ({outcome.failure})"
        for outcome in outcomes
        if outcome.failure is not None
    ]
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()

"""The papers' headlines at 12 blocks of width 256 on a text, on a GPU: which placement fails at
which learning rate and initial variance?

    python benchmarks/papers_gpu.py [--bin DIRECTORY] [--minutes 12] [--rehearse]   # or: make papers-gpu

Written down before the first run. A cell is one training of 45 million tokens in bfloat16. It has
*diverged* by the rule of `ctrans study` (`ctrans.study.outcomes`), and it has learned if its last
validation loss is below that of a table of trigrams. The claims:

- Xiong: at 3e-3 and above Post-LN diverges or ends more than 0.1 nats above Pre-LN.
- Kim: from variance 0.02^2 to 10/d Pre-LN's loss at 1e-3 rises by more than 0.1 nats, and
  Peri-LN's by at most 0.1.
- Kim: Peri-LN's lowest loss over the rates is below Pre-LN's.

One seed: a claim is not decided here, and each cell is what the next seed is to be compared with.

The cells come in the order of what they tell. Each row is written when its training ends, and
trainings that have no time left are not begun. `make text` writes the text; another one in
nanoGPT's format does as well. With --rehearse the cells are small and run on the CPU.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path[0] = str(Path(__file__).resolve().parents[1])

from ctrans.base.threads import wait_passively

wait_passively()

import torch

from benchmarks.record import RESULTS, hardware, write
from ctrans.model.config import GPTConfig
from ctrans.study.description import PlannedRun
from ctrans.study.finished import Finished
from ctrans.study.outcomes import has_diverged
from ctrans.study.training import train_run
from ctrans.training.data import Data, from_bin
from ctrans.training.settings import TrainConfig

TEXT = Path("out/dictionaries")
TOKENS = 45_000_000
"""Of one training."""
PLACEMENTS = ("pre", "peri", "post")
RATES = (1e-3, 3e-3, 1e-2, 3e-2)
INITIAL = {"0.02^2": "gpt2", "10/d": "large"}
"""Initial variances of the entries of matrices, by name."""
TELLING = (
    ("post", "0.02^2", 3e-3),
    ("pre", "0.02^2", 3e-3),
    ("pre", "10/d", 1e-3),
    ("pre", "0.02^2", 1e-3),
    ("peri", "10/d", 1e-3),
    ("peri", "0.02^2", 1e-3),
    ("peri", "0.02^2", 3e-3),
    ("post", "0.02^2", 1e-3),
    ("pre", "0.02^2", 1e-2),
    ("peri", "0.02^2", 1e-2),
)
"""The cells that decide most, in this order, before the others."""


@dataclasses.dataclass(frozen=True)
class Size:
    """The size of the trainings."""

    depth: int = 12
    width: int = 256
    heads: int = 8
    context: int = 256
    batch: int = 64
    iterations: int = TOKENS // (64 * 256)
    warmup: int = 100
    dtype: str = "bfloat16"
    compile: bool = True


REHEARSAL = Size(
    depth=2,
    width=16,
    heads=2,
    context=16,
    batch=4,
    iterations=6,
    warmup=2,
    dtype="float32",
    compile=False,
)


def cells() -> Iterator[tuple[str, str, float]]:
    """All cells: placement, initial variance and learning rate."""
    yield from TELLING
    for rate in RATES:
        for initial in INITIAL:
            for placement in PLACEMENTS:
                if (placement, initial, rate) not in TELLING:
                    yield placement, initial, rate


def planned(placement: str, initial: str, rate: float, size: Size, vocabulary: int) -> PlannedRun:
    model = GPTConfig(
        vocab_size=vocabulary,
        context=size.context,
        depth=size.depth,
        width=size.width,
        heads=size.heads,
        placement=placement,
        initialisation=INITIAL[initial],
        bias=False,
    )
    training = TrainConfig(
        batch=size.batch,
        iterations=size.iterations,
        warmup=size.warmup,
        learning_rate=rate,
        weight_decay=0.1,
        beta2=0.95,
        dtype=size.dtype,
        compile=size.compile,
        eval_every=max(1, size.iterations // 10),
        eval_windows=4 * size.batch,
    )
    return PlannedRun(model, training, {"placement": placement, "initial variance": initial})


def trained(run: PlannedRun, data: Data, device: torch.device) -> dict[str, Any]:
    """The row of a cell."""
    begun = time.perf_counter()
    result = train_run(run, data, device)
    finished = Finished("", run, result, commit(), "")
    return {
        **run.varied,
        "rate": run.training.learning_rate,
        "ending": result.ending,
        "message": result.message,
        "diverged": has_diverged(finished),
        "last": finished.last,
        "best": finished.best,
        "seconds": round(time.perf_counter() - begun, 1),
        "curve": [[row["step"], row["validation_loss"]] for row in result.evaluations],
    }


def commit() -> str:
    """The commit of the source tree; "" outside of one."""
    done = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    return done.stdout.strip()


def in_words(row: dict[str, Any]) -> str:
    loss = "no end" if row["last"] is None else f"{row['last']:.3f}"
    fate = {True: "diverged", False: "trained", None: row["message"]}[row["diverged"]]
    return (
        f"{row['placement']:>4}, variance {row['initial variance']:>6}, rate {row['rate']:g}:"
        f" {loss} nats, {fate}, {row['seconds']:.0f} s"
    )


def main(source: Path, minutes: float, results: Path, *, rehearsal: bool) -> None:
    begun = time.perf_counter()
    size, device = Size(), torch.device("cuda")
    if rehearsal:
        size, device = REHEARSAL, torch.device("cpu")
    described = json.loads((source / "text.json").read_text())
    data = from_bin(source, size.context)
    rows = results / f"papers-{hardware()}{'-rehearsal' * rehearsal}.jsonl"
    results.mkdir(parents=True, exist_ok=True)
    floors = described["nats_per_token"]
    lines = [
        f"{size}",
        "floors in nats a token: "
        + ", ".join(f"{name} {loss:.3f}" for name, loss in floors.items()),
    ]
    if rehearsal:
        lines = ["Rehearsal on the CPU, small: it shows that the cells run, and no more.", *lines]
    print("\n".join(lines), flush=True)
    longest = 0.0
    skipped = 0
    with rows.open("w") as file:
        for placement, initial, rate in cells():
            if time.perf_counter() - begun + longest > 60 * minutes:
                skipped += 1
                continue
            run = planned(placement, initial, rate, size, described["vocabulary"])
            row = trained(run, data, device)
            longest = max(longest, row["seconds"])
            file.write(json.dumps(row) + "\n")
            file.flush()
            lines.append(in_words(row))
            print(lines[-1], flush=True)
    if skipped:
        lines.append(f"{skipped} cells had no time left")
    print(f"Kept in {write('papers' + '-rehearsal' * rehearsal, lines, results)} and {rows}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--bin", type=Path, default=TEXT, help="a directory with train.bin, val.bin and text.json"
    )
    parser.add_argument(
        "--minutes", type=float, default=12, help="after which no cell begins that would not end"
    )
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--rehearse", action="store_true", help="small cells, on the CPU")
    arguments = parser.parse_args()
    main(arguments.bin, arguments.minutes, arguments.results, rehearsal=arguments.rehearse)

"""Trains every named architecture for 200 steps, in turns with plain pre-LN: loss, speed, memory.

python benchmarks/architectures.py                      # all of them, a few minutes on two quiet cores
python benchmarks/architectures.py llama mixtral        # some
python benchmarks/architectures.py --keep out/arch.jsonl  # continues where it stopped

It uses the loop of `ctrans train`: 4 blocks, width 64, context 64, batch 8, float32. It writes each
row when it is known, and the table at the end.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

# in place of this file's own folder, so that imports find the packages
sys.path[0] = str(Path(__file__).resolve().parents[1])

from ctrans.base.threads import wait_passively

wait_passively()

import torch

from benchmarks.memory import peak_bytes
from benchmarks.record import keep
from ctrans.model.architectures import ARCHITECTURES, PLAIN, differences
from ctrans.model.config import GPTConfig
from ctrans.model.gpt import GPT
from ctrans.model.text import default_text
from ctrans.training.data import Data, from_text
from ctrans.training.evaluation import evaluate
from ctrans.training.loop import TrainingRun
from ctrans.training.parallel import get_parallel
from ctrans.training.processes import Processes
from ctrans.training.run_directory import RunDirectory
from ctrans.training.run_start import anew
from ctrans.training.settings import TrainConfig

BLOCKS, STEPS, TURN = 4, 200, 10
"""Steps that each is trained for, and how many are taken before the other has its turn."""
WINDOWS = 32
SIZE = {
    "context": 64,
    "depth": BLOCKS,
    "width": 64,
    "heads": 4,
    "initialisation": "xavier",
    "embedding_std": 0.1,
}
ALONE = Processes(torch.device("cpu"))


@dataclasses.dataclass(frozen=True)
class Row:
    """`rate` is the median over turns of tokens per second over plain pre-LN's; `peak` what an
    iteration holds above what stays.
    """

    name: str
    weights: int
    loss: float
    plain: float
    rate: float
    peak: int
    plain_peak: int


def begun(name: str, steps: int, data: Data, directory: Path) -> TrainingRun:
    """A run of that architecture, `plain` of none of its differences."""
    fields = {} if name == "plain" else differences(name, BLOCKS)
    config = TrainConfig(iterations=steps, warmup=20, learning_rate=2e-3, eval_windows=WINDOWS)
    model = GPT(GPTConfig(256, **{**SIZE, **PLAIN, **fields}), seed=0)
    return anew(
        model,
        config,
        data,
        RunDirectory(directory / name),
        get_parallel("none", config),
        ALONE,
        source={},
        overwrite=True,
    )[0]


def trained(name: str, steps: int, data: Data) -> Row:
    """Both in turns, so that a slow moment of the machine hits both; the first turn, which warms
    up, is not timed.
    """
    with tempfile.TemporaryDirectory() as directory:
        runs = {each: begun(each, steps, data, Path(directory)) for each in (name, "plain")}
        seconds: dict[str, list[float]] = {each: [] for each in runs}
        for start in range(0, steps, TURN):
            for each, run in runs.items():
                before = time.perf_counter()
                for step in range(start, min(start + TURN, steps)):
                    run.iterate(step)
                seconds[each].append(time.perf_counter() - before)
        losses = {
            each: evaluate(run.module, data, WINDOWS, run.config.batch, ALONE)["validation_loss"]
            for each, run in runs.items()
        }
        peaks = {
            each: peak_bytes(lambda run=run: run.iterate(steps - 1)) for each, run in runs.items()
        }  # type: ignore[misc]
    rate = statistics.median(
        b / a for a, b in list(zip(seconds[name], seconds["plain"], strict=True))[1:]
    )
    weights = sum(weight.numel() for weight in runs[name].model.parameters())
    return Row(name, weights, losses[name], losses["plain"], rate, peaks[name], peaks["plain"])


def table(rows: list[Row], steps: int) -> list[str]:
    """The table, in the order of `ARCHITECTURES`."""
    lines = [
        (
            f"{BLOCKS} blocks, width {SIZE['width']}, context {SIZE['context']}, batch 8, float32;"
            f" {torch.get_num_threads()} threads; {steps} steps of AdamW."
        ),
        (
            "loss: of the validation text afterwards, in nats, and less plain pre-LN's (one seed:"
            " differences of 0.02 mean nothing)."
        ),
        (
            f"speed: tokens per second over plain pre-LN's, the median of turns of {TURN} steps."
            " peak: MiB an iteration holds above what"
        ),
        "stays, and over plain pre-LN's.",
        "",
        f"{'architecture':26} {'weights':>9} {'loss':>7} {'':>7} {'speed':>6} {'peak':>6} {'':>5}",
    ]
    order = {name: i for i, name in enumerate(ARCHITECTURES)}
    for row in sorted(rows, key=lambda row: order[row.name]):
        lines.append(
            f"{row.name:26} {row.weights:9} {row.loss:7.3f} {row.loss - row.plain:+7.3f}"
            f" {row.rate:6.2f} {row.peak / 2**20:6.1f} {row.peak / row.plain_peak:5.2f}"
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help="architectures; all if none is given"
    )
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument(
        "--keep",
        type=Path,
        default=Path("out/architectures.jsonl"),
        help="rows so far, which are not made again",
    )
    given = parser.parse_args()
    names = given.names or list(ARCHITECTURES)
    known = {}
    if given.keep.exists():
        known = {
            row.name: row
            for steps, row in map(_read, given.keep.read_text().splitlines())
            if steps == given.steps
        }
    given.keep.parent.mkdir(parents=True, exist_ok=True)
    data = from_text(default_text(), SIZE["context"])
    for name in names:
        if name not in known:
            known[name] = row = trained(name, given.steps, data)
            with given.keep.open("a") as file:
                file.write(json.dumps({"steps": given.steps, **dataclasses.asdict(row)}) + "\n")
            print(f"{name}: loss {row.loss:.3f}, speed {row.rate:.2f}", flush=True)
    keep("architectures", table([known[name] for name in names], given.steps))


def _read(line: str) -> tuple[int, Row]:
    fields = json.loads(line)
    return fields.pop("steps"), Row(**fields)


if __name__ == "__main__":
    main()

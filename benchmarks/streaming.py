"""Models larger than memory: seconds and peak memory of forward pass, costate and backward
sensitivity with weights on demand.

Every measurement is a process of its own. Its memory is the peak of the resident set, less the size
when the libraries are loaded. The target is 1.5 times the largest block and the hidden states.
"shards:" first writes the files of a model, and reads them by memory map.

    python benchmarks/streaming.py [[shards:]NAME:BLOCKS[:WORK,WORK] ...]
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

# in place of this file's own folder, where `import solvers` would find a benchmark
sys.path[0] = str(Path(__file__).resolve().parents[1])

from ctrans.base.threads import wait_passively

wait_passively()

import torch
from torch import Tensor

from benchmarks.record import keep
from ctrans.control import costate
from ctrans.interop import Imported, from_architecture, from_transformers
from ctrans.interop.anatomy import Anatomy
from ctrans.interop.architecture import skeleton
from ctrans.interop.find_blocks import find_blocks
from ctrans.measure.backward.sensitivity import backward_sensitivity
from ctrans.model.text import default_text, to_tokens

TOKENS = 32
CASES = ("llama-7b:32", "llama-70b:8:forward,costate", "shards:llama-7b:4")
"""Sensitivities of eight blocks of 70B take as long as those of all of 7B."""

WORK: dict[str, Callable[[Imported, Tensor, Tensor], object]] = {
    "forward": lambda model, tokens, targets: model.trajectory(tokens),
    "costate": costate,
    "sensitivity": lambda model, tokens, targets: backward_sensitivity(
        model.depth, model.embed(tokens), tolerance=0.01, starts=0
    ),
}


def measure(work: str, source: str, blocks: int) -> dict[str, float]:
    """In this process."""
    text = to_tokens(default_text(), batch=1, length=TOKENS + 1)
    shape = skeleton(source, blocks=1)
    block = sum(
        parameter.numel() * 4 for parameter in find_blocks(shape, Anatomy())[0].parameters()
    )
    before, start = resident("VmRSS"), time.perf_counter()
    model = (
        from_transformers(source, on_demand=True)
        if Path(source).exists()
        else from_architecture(source, blocks=blocks, on_demand=True)
    )
    made = time.perf_counter()
    with torch.no_grad():
        WORK[work](model, text[:, :-1], text[:, 1:])
    end = time.perf_counter()
    allowed = block + (2 * blocks + 1) * TOKENS * model.config.width * 4
    return {
        "made": made - start,
        "seconds": end - made,
        "peak": resident("VmHWM") - before,
        "allowed": allowed,
    }


def resident(what: str) -> float:
    """The resident set in bytes, as /proc/self/status says: VmRSS now, VmHWM its peak (getrusage's
    is that of the parent too).
    """
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(float(line.split()[1]) * 1024 for line in lines if line.startswith(what))


def apart(work: str, source: str, blocks: int) -> str:
    """`measure` in a process of its own, as a line."""
    run = subprocess.run(
        [sys.executable, __file__, "--one", work, source, str(blocks)],
        capture_output=True,
        text=True,
        check=True,
    )
    found = json.loads(run.stdout.splitlines()[-1])
    return (
        f"  {work:12} {found['seconds']:8.1f} s (and {found['made']:.1f} s to make the model)  "
        f" peak {found['peak'] / 1e9:.3f} GB, largest block and states {found['allowed'] / 1e9:.3f}"
        f" GB, ratio {found['peak'] / found['allowed']:.2f}"
    )


def main(cases: list[str]) -> None:
    lines = [f"{TOKENS} tokens, float32, {torch.get_num_threads()} threads; ratio: target 1.5", ""]
    for case in cases:
        shards = case.startswith("shards:")
        name, blocks, *chosen = case.removeprefix("shards:").split(":")
        lines.append(
            f"{name}, {blocks} blocks, weights {'read from shards' if shards else 'drawn'}"
        )
        with tempfile.TemporaryDirectory() as directory:
            if shards:
                from_architecture(name, blocks=int(blocks), on_demand=False).model.save_pretrained(
                    directory
                )
            for work in chosen[0].split(",") if chosen else WORK:
                lines.append(apart(work, directory if shards else name, int(blocks)))
                print(lines[-1], file=sys.stderr)
        lines.append("")
    keep("streaming", lines)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        print(json.dumps(measure(sys.argv[2], sys.argv[3], int(sys.argv[4]))))
    else:
        main(sys.argv[1:] or list(CASES))

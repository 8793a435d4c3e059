"""Compares the JSON of 41 commands before and after a change of the code: every figure must be the
same to the last bit.

    python benchmarks/unchanged.py keep DIRECTORY [CHECKOUT]   # run the commands with the code of CHECKOUT (default: this one)
    python benchmarks/unchanged.py compare BEFORE AFTER        # list what differs

It first looks for a figure under its own key. If keys were renamed, it looks for the figure
anywhere in the same file. So it reports a renamed key as renamed, and not as a lost figure. Times
and the environment are left out. One thread.
"""

from __future__ import annotations

import collections
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# in place of this file's own folder, as in the other benchmarks
sys.path[0] = str(Path(__file__).resolve().parents[1])

IGNORED = frozenset({"seconds", "environment"})
PLACEMENTS = ("none", "pre", "peri", "output", "post", "pre_post", "deepnorm")
FAMILIES: dict[str, dict[str, Any]] = {
    "gpt2": {
        "model_type": "gpt2",
        "n_layer": 4,
        "n_embd": 64,
        "n_head": 4,
        "vocab_size": 256,
        "n_positions": 128,
    },
    "llama": {
        "model_type": "llama",
        "num_hidden_layers": 4,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 160,
        "vocab_size": 256,
        "max_position_embeddings": 128,
    },
}
FULL = "--depth 4 --width 64 --context 64 --init xavier --embedding-std 1"
SMALL = "--depth 3 --width 32 --heads 2 --context 24 --batch 2"
TINY = "--depth 2 --width 16 --heads 2 --context 16 --batch 2"


def commands(configs: Path) -> Iterator[tuple[str, str]]:
    """Names and arguments. `train` comes before what reads its run."""
    for family in FAMILIES:
        source = f"--architecture {configs / family}.json --tokens 64"
        yield f"screen-{family}", f"screen {source} --quick"
        yield f"screen-stream-{family}", f"screen {source} --quick --stream"
        yield f"simulate-{family}", f"simulate {source}"
        yield f"diagnose-{family}", f"diagnose {source}"
        yield f"hjb-check-{family}", f"hjb-check {source} --batch 1"
    for placement in PLACEMENTS:
        yield f"screen-{placement}", f"screen --placement {placement} --quick"
    yield "screen-compare", f"screen --compare pre,llama,mixtral,post:swiglu:dt=0.1 --quick {SMALL}"
    yield "screen-full-peri", f"screen --placement peri {FULL}"
    yield "screen-full-pre", f"screen --placement pre --norm rmsnorm {FULL}"
    yield "simulate-all", "simulate --placement all --dt 0.1"
    yield "simulate-tsit5", f"simulate --placement peri --method tsit5 --rtol 1e-6 {SMALL}"
    yield (
        "simulate-parts",
        f"simulate --placement pre --lyapunov 8 --spectra --contributions {SMALL}",
    )
    yield "hjb-check-all", f"hjb-check --placement all {TINY}"
    yield "hjb-check-rmsnorm", f"hjb-check --placement all --norm rmsnorm {TINY}"
    yield "hjb-check-decay", f"hjb-check --placement pre --placement peri --weight-decay 0.1 {TINY}"
    yield "hjb-check-dyt", f"hjb-check --placement pre --placement output --norm dyt {TINY}"
    yield "principle-peri", f"hjb-check --principle --placement peri {TINY}"
    yield "principle-all", f"hjb-check --principle --placement all --dt 0.1 {TINY}"
    yield "orders-pre", "simulate --orders euler --orders rk4 --placement pre"
    yield (
        "coordinate-check",
        "coordinate-check --widths 16 --widths 32 --widths 64 --depth 2 --context 16",
    )
    yield "verify-3", "verify --only 3 --cases 20"
    yield "verify-4", "verify --only 4 --cases 20"
    yield "verify-9", "verify --only 9 --cases 20"
    yield "train", f"train --iterations 30 --eval-every 10 --threads 1 --monitor --every 5 {SMALL}"
    yield "watch", "watch {run} --once"
    yield "generate", "generate --checkpoint {run} --prompt the --tokens 20"
    yield "diagnose-run", "diagnose {run} --batch 2"
    yield "screen-run", "screen {run} --quick --batch 2"
    yield "verify-6", "verify --only 6 --cases 20"


def run_all(directory: Path, checkout: Path) -> None:
    """Runs all commands with the code of a checkout. A command that fails is kept as its message,
    which counts as its result.
    """
    directory.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(checkout)}
    with tempfile.TemporaryDirectory() as place:
        run = f"{place}/run"
        for family, config in FAMILIES.items():
            (Path(place) / f"{family}.json").write_text(json.dumps(config))
        for name, arguments in commands(Path(place)):
            out = run if name == "train" else f"{place}/{name}"
            words = [
                *arguments.format(run=run).split(),
                "--json",
                str(directory.resolve() / f"{name}.json"),
            ]
            words += [] if arguments.split()[0] in ("watch", "generate") else ["--out", out]
            done = subprocess.run(
                [sys.executable, "-m", "ctrans", *words],
                env=environment,
                cwd=checkout,
                capture_output=True,
                text=True,
            )
            (directory / f"{name}.txt").write_text(done.stdout.replace(place, "."))
            if done.returncode:
                print(name, done.returncode, done.stderr.strip()[-300:])


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Every number, text and truth of a JSON value with its path."""
    if isinstance(value, dict):
        for key, item in value.items():
            if key not in IGNORED:
                yield from leaves(item, f"{path}/{key}")
    elif isinstance(value, list):
        for i, item in enumerate(value):
            yield from leaves(item, f"{path}[{i}]")
    else:
        yield path, value


def compare_file(before: Any, after: Any) -> tuple[int, list[str], list[str]]:
    """How many figures there were; those under another key now; those that are nowhere, or
    differ.
    """
    old, new = dict(leaves(before)), dict(leaves(after))
    elsewhere = collections.Counter(repr(value) for path, value in new.items() if path not in old)
    moved, lost, count = [], [], 0
    for path, value in old.items():
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        count += number
        if path in new and new[path] == value:
            continue
        if elsewhere[repr(value)] > 0:
            elsewhere[repr(value)] -= 1
            moved.append(f"{path}: {value!r:.80}")
        elif number or value in ("inf", "-inf", "nan"):
            lost.append(f"{path}: {value!r:.80} -> {new.get(path, 'absent')!r:.80}")
        elif path in new:
            moved.append(f"{path}: words {value!r:.60} -> {new[path]!r:.60}")
        else:
            moved.append(f"{path}: words {value!r:.80} -> absent")
    return count, moved, lost


def compare(before: Path, after: Path) -> list[str]:
    """A line a file, then every figure that is lost or differs, then what has another key."""
    lines, details, total = [], [], 0
    for file in sorted(before.glob("*.json")):
        if not (after / file.name).exists():
            lines.append(f"{file.stem}: no result")
            continue
        count, moved, lost = compare_file(
            json.loads(file.read_text()), json.loads((after / file.name).read_text())
        )
        total += count
        lines.append(
            f"{file.stem}: {count} figures, {len(lost)} differ or are lost, {len(moved)} texts or"
            " keys changed"
        )
        details += [f"{file.stem}{line}" for line in lost] + [
            f"  key or text {file.stem}{line}" for line in moved
        ]
    return [f"{total} figures in {len(lines)} results", *lines, *details]


if __name__ == "__main__":
    if sys.argv[1:2] == ["keep"]:
        run_all(
            Path(sys.argv[2]),
            Path(sys.argv[3]).resolve() if len(sys.argv) > 3 else Path(sys.path[0]),
        )
    else:
        print("\n".join(compare(Path(sys.argv[2]), Path(sys.argv[3]))))

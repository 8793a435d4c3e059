"""Whether the JSON of commands says the same as before a change: every figure within 1e-9, relative, of the one kept.

    python benchmarks/unchanged.py keep DIRECTORY      # run the commands, with the code as it is
    python benchmarks/unchanged.py compare BEFORE AFTER

`screen --quick` and `simulate` for every placement, two screenings in full, and two imported families, in memory and with weights on
demand; one thread.
"""

from __future__ import annotations

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

from ctrans.threads import wait_passively

wait_passively()

from benchmarks.record import keep

TOLERANCE = 1e-9
IGNORED = frozenset({"seconds", "environment"})
PLACEMENTS = ("none", "pre", "peri", "output", "post", "pre_post", "deepnorm")
FAMILIES: dict[str, dict[str, Any]] = {
    "gpt2": {"model_type": "gpt2", "n_layer": 4, "n_embd": 64, "n_head": 4, "vocab_size": 256, "n_positions": 128},
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


def commands(configs: Path) -> Iterator[tuple[str, str]]:
    """Names and arguments."""
    for family in FAMILIES:
        source = f"--architecture {configs / family}.json --tokens 64"
        yield f"screen-{family}", f"screen {source} --quick"
        yield f"screen-stream-{family}", f"screen {source} --quick --stream"
        yield f"simulate-{family}", f"simulate {source}"
    for placement in PLACEMENTS:
        yield f"screen-{placement}", f"screen --placement {placement} --quick"
    yield "simulate-all", "simulate --placement all --dt 0.1"
    yield "screen-full-peri", f"screen --placement peri {FULL}"
    yield "screen-full-pre", f"screen --placement pre --norm rmsnorm {FULL}"


def run_all(directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": sys.path[0]}
    with tempfile.TemporaryDirectory() as place:
        for family, config in FAMILIES.items():
            (Path(place) / f"{family}.json").write_text(json.dumps(config))
        for name, arguments in commands(Path(place)):
            output = ["--out", f"{place}/out", "--json", str(directory.resolve() / f"{name}.json")]
            subprocess.run([sys.executable, "-m", "ctrans", *arguments.split(), *output], env=environment, check=True)


def differences(before: Any, after: Any, path: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Every leaf with its two values, equal or not."""
    if isinstance(before, dict) and isinstance(after, dict):
        for key in sorted((before.keys() | after.keys()) - IGNORED):
            yield from differences(before.get(key, "absent"), after.get(key, "absent"), f"{path}/{key}")
    elif isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        for i, (one, other) in enumerate(zip(before, after, strict=True)):
            yield from differences(one, other, f"{path}[{i}]")
    else:
        yield path, before, after


def compare(before: Path, after: Path) -> list[str]:
    """A line for every figure and text that is not the same, and how many there are."""
    lines, figures, worst = [], 0, 0.0
    for file in sorted(before.glob("*.json")):
        for path, one, other in differences(json.loads(file.read_text()), json.loads((after / file.name).read_text())):
            numbers = all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in (one, other))
            figures += numbers
            apart = abs(one - other) / max(abs(one), abs(other)) if numbers and one != other else 0.0
            if (numbers and apart > TOLERANCE) or (not numbers and one != other):
                lines.append(f"{file.stem}{path}: {one!r:.120} -> {other!r:.120}")
            else:
                worst = max(worst, apart)
    return [f"{figures} figures, {len(lines)} differences; the equal ones differ by {worst:.1e} at most", *lines]


if __name__ == "__main__":
    if sys.argv[1:2] == ["keep"]:
        run_all(Path(sys.argv[2]))
    else:
        keep("unchanged", compare(Path(sys.argv[2]), Path(sys.argv[3])))

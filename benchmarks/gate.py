"""The gate of a continuous integration: seconds and peak memory of `ctrans diagnose --weights-only
--fail-on serious`.

It writes sharded checkpoints of random numbers in bfloat16, plants a dead gain in the last block of
some, and gates each in a process of its own. The processor's seconds count where other work shares
the machine. The memory is the peak of that process's resident set, with Python, torch and mapped
files. Targets: a checkpoint of 7B parameters in 5 minutes and 2 GB. The files are removed at the
end.

    python benchmarks/gate.py [NAME ...]
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

# in place of this file's own folder, where `import solvers` would find a benchmark
sys.path[0] = str(Path(__file__).resolve().parents[1])

from ctrans.base.threads import wait_passively

wait_passively()

import torch
from safetensors.torch import save_file
from torch import Tensor

from benchmarks.record import keep

SHAPES = {"1b": (22, 2048, 5632, 32000, 256), "7b": (32, 4096, 11008, 32000, 4096)}
"""Blocks, width, hidden width, vocabulary, width of keys: TinyLlama's and Llama's."""
RUN = """
import json, resource, subprocess, sys
done = subprocess.run(sys.argv[1:], capture_output=True, text=True)
used = resource.getrusage(resource.RUSAGE_CHILDREN)
print(json.dumps([done.returncode, used.ru_maxrss * 1024, used.ru_utime + used.ru_stime, done.stdout, done.stderr]))
"""
"""A small process around the measured one: the peak of a child counts its parent's memory at the
fork.
"""


def weights(pool: Tensor, block: int, width: int, hidden: int, keys: int) -> dict[str, Tensor]:
    """The weights of a block, cut from the pool at places of its own."""

    def cut(rows: int, columns: int, place: int) -> Tensor:
        start = (7919 * (8 * block + place)) % (len(pool) - rows * columns)
        return pool[start : start + rows * columns].view(rows, columns).clone()

    name = f"model.layers.{block}."
    shapes = {
        "self_attn.q_proj": (width, width),
        "self_attn.k_proj": (keys, width),
        "self_attn.v_proj": (keys, width),
        "self_attn.o_proj": (width, width),
        "mlp.gate_proj": (hidden, width),
        "mlp.up_proj": (hidden, width),
        "mlp.down_proj": (width, hidden),
    }
    made = {
        f"{name}{part}.weight": cut(*shape, place)
        for place, (part, shape) in enumerate(shapes.items())
    }
    norms = ("input_layernorm", "post_attention_layernorm")
    return made | {
        f"{name}{norm}.weight": torch.ones(width, dtype=torch.bfloat16) for norm in norms
    }


def shards(size: str, *, dead: bool) -> Iterator[dict[str, Tensor]]:
    """The weights, a shard for each block and one for the rest. With `dead` a gain of the last
    block is 0.
    """
    blocks, width, hidden, vocabulary, keys = SHAPES[size]
    pool = torch.empty(2**27 + 2**24, dtype=torch.bfloat16).normal_(
        0, 0.02, generator=torch.Generator().manual_seed(0)
    )
    for block in range(blocks):
        made = weights(pool, block, width, hidden, keys)
        if dead and block == blocks - 1:
            made[f"model.layers.{block}.input_layernorm.weight"][5] = 0
        yield made
    table = pool[: vocabulary * width].view(vocabulary, width)
    gains = torch.ones(width, dtype=torch.bfloat16)
    yield {
        "model.embed_tokens.weight": table.clone(),
        "lm_head.weight": table.clone(),
        "model.norm.weight": gains,
    }


def write(directory: Path, size: str, *, dead: bool) -> tuple[int, int]:
    """Writes the shards and their index. Returns the numbers of parameters and of bytes."""
    directory.mkdir()
    index, numbers = dict[str, str](), 0
    for i, shard in enumerate(shards(size, dead=dead)):
        name = f"model-{i + 1:05d}.safetensors"
        save_file(shard, directory / name, {"format": "pt"})
        index |= dict.fromkeys(shard, name)
        numbers += sum(value.numel() for value in shard.values())
    (directory / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": index})
    )
    return numbers, sum(path.stat().st_size for path in directory.iterdir())


def gate(*words: str) -> str:
    """Runs the gate, and what it took in words."""
    command = [
        sys.executable,
        "-m",
        "ctrans",
        "diagnose",
        *words,
        "--weights-only",
        "--fail-on",
        "serious",
    ]
    start = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-c", RUN, *command], capture_output=True, text=True, check=True
    )
    code, peak, cpu, out, err = json.loads(done.stdout)
    answers = " ".join(out.partition("\n\n")[0].split())
    said = [line for line in err.splitlines() if "--fail-on" in line]
    taken = f"{time.perf_counter() - start:6.1f} s, {cpu:6.1f} s of a processor"
    return f"{taken}, peak {peak / 1e9:.2f} GB, exit code {code}; {' '.join([answers, *said])}"


def main(sizes: list[str]) -> None:
    lines = [
        (
            f"{torch.get_num_threads()} threads; load average at the start"
            f" {Path('/proc/loadavg').read_text().split()[0]}"
        ),
        "",
    ]
    for size in sizes:
        with tempfile.TemporaryDirectory() as place:
            one, other, out = (Path(place) / name for name in ("healthy", "dead", "out"))
            numbers, held = write(one, size, dead=False)
            lines.append(
                f"{size}: {numbers / 1e9:.2f} billion parameters, {held / 1e9:.2f} GB in"
                f" {SHAPES[size][0] + 1} shards"
            )
            files = [
                "--out",
                str(out),
                "--sarif",
                str(out / "it.sarif"),
                "--junit",
                str(out / "it.xml"),
            ]
            lines.append(f"  healthy            {gate(str(one), *files)}")
            print(lines[-1], file=sys.stderr)
            if size != "7b":
                write(other, size, dead=True)
                lines.append(f"  a dead gain        {gate(str(other), *files)}")
                lines.append(
                    "  with its baseline "
                    f" {gate(str(other), *files, '--baseline', str(healthy(one, out)))}"
                )
                lines.append(f"  the two compared   {gate(str(one), str(other), *files)}")
        lines.append("")
    keep("gate", lines)


def healthy(directory: Path, out: Path) -> Path:
    """The JSON of the healthy checkpoint."""
    gate(str(directory), "--out", str(out / "healthy"))
    return out / "healthy" / "diagnose.json"


if __name__ == "__main__":
    main(sys.argv[1:] or list(SHAPES))

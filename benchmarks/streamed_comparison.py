"""Two checkpoints whose weights are read on demand, compared: seconds, peak memory and the answer.

The first is a Llama of random weights in bfloat16. The second is a copy with one transposed matrix,
or one in which some weights are rounded to float8. Each comparison is a process of its own, on
demand, and of the small shape also in memory. Its memory is the peak of the resident set, less the
size when the libraries are loaded, and so includes pages of files that are mapped. What is done is
kept after each comparison.

    python benchmarks/streamed_comparison.py [SHAPE]

SHAPE is small (4 GB of disk) or 7b (41 GB).
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

# in place of this file's own folder, where `import solvers` would find a benchmark
sys.path[0] = str(Path(__file__).resolve().parents[1])

from ctrans.base.threads import wait_passively

wait_passively()

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import LlamaConfig

from benchmarks.record import keep
from benchmarks.streaming import TOKENS, resident
from ctrans.dynamics.weights.on_demand import readers_of, watch
from ctrans.examine.compared import answer
from ctrans.examine.comparison.compare import compare
from ctrans.interop import from_transformers
from ctrans.model.text import default_text, to_tokens

DRAWN = 2**24 + 7
"""So many random numbers are drawn once, and each weight has them in another order."""


@dataclass(frozen=True)
class LlamaShape:
    """A Llama, the dtype that it computes in, and its comparisons: the second model, and whether
    weights are read on demand.
    """

    width: int
    hidden: int
    vocabulary: int
    blocks: int
    heads: int
    dtype: torch.dtype
    comparisons: tuple[tuple[str, bool], ...]


SHAPES = {
    "small": LlamaShape(
        width=2048,
        hidden=5504,
        vocabulary=8192,
        blocks=12,
        heads=16,
        dtype=torch.float32,
        comparisons=(("transposed", True), ("rounded", True), ("transposed", False)),
    ),
    "7b": LlamaShape(
        width=4096,
        hidden=11008,
        vocabulary=32000,
        blocks=32,
        heads=32,
        dtype=torch.bfloat16,
        comparisons=(("transposed", True), ("rounded", True)),
    ),
}


def save(directory: Path, shape: LlamaShape) -> int:
    """Saves the model and its copies, a block in memory at a time; the entries of the model."""
    config = LlamaConfig(
        vocab_size=shape.vocabulary,
        hidden_size=shape.width,
        intermediate_size=shape.hidden,
        num_hidden_layers=shape.blocks,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.heads,
        max_position_embeddings=2048,
        architectures=["LlamaForCausalLM"],
    )
    names = ("first", "transposed", "rounded")
    for name in names:
        config.save_pretrained(directory / name)
    index = {}
    entries = 0
    for number, weights in enumerate(pieces_of(shape)):
        file = f"model-{number:05d}.safetensors"
        index |= dict.fromkeys(weights, file)
        entries += sum(weight.numel() for weight in weights.values())
        save_file(weights, directory / "first" / file)
        changed = dict(weights)
        rounded = dict(weights)
        if number == shape.blocks // 2:
            name = f"model.layers.{number}.self_attn.o_proj.weight"
            changed[name] = weights[name].t().contiguous()
            name = f"model.layers.{number}.mlp.down_proj.weight"
            rounded[name] = weights[name].to(torch.float8_e4m3fn).to(weights[name].dtype)
        save_file(changed, directory / "transposed" / file)
        save_file(rounded, directory / "rounded" / file)
    for name in names:
        text = json.dumps({"metadata": {}, "weight_map": index})
        (directory / name / "model.safetensors.index.json").write_text(text)
    return entries


def pieces_of(shape: LlamaShape) -> Iterator[dict[str, Tensor]]:
    """The weights of each block, and then those outside of the blocks."""
    generator = torch.Generator().manual_seed(0)
    drawn = (0.02 * torch.randn(DRAWN, generator=generator)).bfloat16()

    def weight(*size: int) -> Tensor:
        start = int(torch.randint(DRAWN, (1,), generator=generator))
        count = math.prod(size)
        return drawn.roll(start).repeat(count // DRAWN + 1)[:count].reshape(size).clone()

    width, hidden = shape.width, shape.hidden
    gains = torch.ones(width, dtype=torch.bfloat16)
    for block in range(shape.blocks):
        maps = {
            **{f"self_attn.{name}_proj": weight(width, width) for name in "qkvo"},
            "mlp.gate_proj": weight(hidden, width),
            "mlp.up_proj": weight(hidden, width),
            "mlp.down_proj": weight(width, hidden),
            "input_layernorm": gains,
            "post_attention_layernorm": gains.clone(),
        }
        yield {f"model.layers.{block}.{name}.weight": value for name, value in maps.items()}
    yield {
        "model.embed_tokens.weight": weight(shape.vocabulary, width),
        "model.norm.weight": gains,
        "lm_head.weight": weight(shape.vocabulary, width),
    }


def measure(
    directory: Path, second: str, dtype: torch.dtype, *, on_demand: bool
) -> dict[str, object]:
    """In this process."""
    text = to_tokens(default_text(), batch=1, length=TOKENS + 1)
    before = resident("VmRSS")
    first, other = (
        from_transformers(directory / name, dtype=dtype, on_demand=on_demand)
        for name in ("first", second)
    )
    pieces: list[str] = []
    if on_demand:
        watch(first, pieces.append)
        watch(other, pieces.append)
    start = time.perf_counter()
    found = compare(first, other, text[:, :-1], text[:, 1:])
    seconds = time.perf_counter() - start
    peak = resident("VmHWM") - before
    sizes: dict[object, int] = {}
    for _, weight in readers_of(first.model):
        piece = weight.key if isinstance(weight.key, int) else weight.key[0]
        sizes[piece] = sizes.get(piece, 0) + weight.read().nbytes
    return {
        "seconds": seconds,
        "peak": peak,
        "piece": max(sizes.values()),
        "read": len(pieces),
        "answer": answer("first", second, found).text,
        "missing": found.missing,
    }


def apart(directory: str, second: str, shape: str, *, on_demand: bool) -> list[str]:
    """`measure` in a process of its own, as lines."""
    run = subprocess.run(
        [sys.executable, __file__, "--one", directory, second, shape, str(int(on_demand))],
        capture_output=True,
        text=True,
        check=True,
    )
    found = json.loads(run.stdout.splitlines()[-1])
    how = "in memory"
    if on_demand:
        how = f"on demand, {found['read']} sublayers, embeddings and heads read"
    lines = [f"{second}, {how}: {found['seconds']:.0f} s, peak {found['peak'] / 1e9:.2f} GB"]
    if on_demand:
        lines[0] += f", {found['peak'] / found['piece']:.1f} times the largest"
        lines[0] += f" ({found['piece'] / 1e9:.3f} GB)"
    return [*lines, f"  {found['answer']}", f"  missing: {found['missing'] or 'nothing'}", ""]


def main(name: str) -> None:
    shape = SHAPES[name]
    with tempfile.TemporaryDirectory() as directory:
        entries = save(Path(directory), shape)
        dtype = str(shape.dtype).removeprefix("torch.")
        lines = [
            f"Llama of {shape.blocks} blocks, width {shape.width}: {entries / 1e6:.0f} million"
            f" weights, {2 * entries / 1e9:.2f} GB in bfloat16.",
            f"{TOKENS} tokens, computed in {dtype}, {torch.get_num_threads()} threads.",
            "",
        ]
        for second, on_demand in shape.comparisons:
            lines += apart(directory, second, name, on_demand=on_demand)
            keep(f"streamed-comparison-{name}", lines)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        _, _, directory, second, name, on_demand = sys.argv
        result = measure(Path(directory), second, SHAPES[name].dtype, on_demand=on_demand == "1")
        print(json.dumps(result))
    else:
        main(sys.argv[1] if len(sys.argv) > 1 else "small")

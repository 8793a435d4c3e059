"""Two checkpoints whose weights are read on demand, compared: seconds, peak memory and the answer.

The first is a Llama of random weights in bfloat16. The second is a copy with one transposed matrix,
or in float8 rounded and stored again in bfloat16. Each comparison is a process of its own, on demand,
and of the first also in memory. Its memory is the peak of the resident set, less the size when the
libraries are loaded, and so includes pages of files that are mapped. What is done is kept after
each comparison.

    python benchmarks/streamed_comparison.py [BLOCKS]
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

# in place of this file's own folder, where `import solvers` would find a benchmark
sys.path[0] = str(Path(__file__).resolve().parents[1])

from ctrans.base.threads import wait_passively

wait_passively()

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.record import keep
from benchmarks.streaming import TOKENS, resident
from ctrans.dynamics.weights.on_demand import readers_of, watch
from ctrans.examine.compared import answer
from ctrans.examine.comparison.compare import compare
from ctrans.interop import from_transformers
from ctrans.model.text import default_text, to_tokens

WIDTH, HIDDEN, VOCABULARY = 2048, 5504, 8192
BLOCKS = 12


def save(directory: Path, blocks: int) -> int:
    """Saves the model and its copies; the entries of the model."""
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=HIDDEN,
        num_hidden_layers=blocks,
        num_attention_heads=16,
        num_key_value_heads=16,
        max_position_embeddings=2048,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).bfloat16()
    model.save_pretrained(directory / "first")
    with torch.no_grad():
        matrix = model.model.layers[blocks // 2].self_attn.o_proj.weight
        matrix.copy_(matrix.t().clone())
        model.save_pretrained(directory / "transposed")
        matrix.copy_(matrix.t().clone())
        for weight in model.parameters():
            weight.copy_(weight.to(torch.float8_e4m3fn).to(weight.dtype))
    model.save_pretrained(directory / "rounded")
    return sum(parameter.numel() for parameter in model.parameters())


def measure(directory: Path, second: str, *, on_demand: bool) -> dict[str, object]:
    """In this process."""
    text = to_tokens(default_text(), batch=1, length=TOKENS + 1)
    before = resident("VmRSS")
    first, other = (
        from_transformers(directory / name, dtype=torch.float32, on_demand=on_demand)
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


def apart(directory: str, second: str, *, on_demand: bool) -> list[str]:
    """`measure` in a process of its own, as lines."""
    run = subprocess.run(
        [sys.executable, __file__, "--one", directory, second, str(int(on_demand))],
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


def main(blocks: int) -> None:
    with tempfile.TemporaryDirectory() as directory:
        entries = save(Path(directory), blocks)
        lines = [
            f"Llama of {blocks} blocks, width {WIDTH}: {entries / 1e6:.0f} million weights,"
            f" {2 * entries / 1e9:.2f} GB in bfloat16, {4 * entries / 1e9:.2f} GB in float32.",
            f"{TOKENS} tokens, computed in float32, {torch.get_num_threads()} threads.",
            "",
        ]
        for second, on_demand in (("transposed", True), ("rounded", True), ("transposed", False)):
            lines += apart(directory, second, on_demand=on_demand)
            keep("streamed-comparison", lines)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        result = measure(Path(sys.argv[2]), sys.argv[3], on_demand=sys.argv[4] == "1")
        print(json.dumps(result))
    else:
        main(int(sys.argv[1]) if len(sys.argv) > 1 else BLOCKS)

"""What a screening costs: how often it uses the weights of each sublayer, and where the seconds go,
in memory and with weights on demand.

Each case is a process of its own. The time of drawing weights is measured inside the run. torch's
flop counter counts products in a run of few blocks. Both are compared with what this machine does
on a matrix of that size when it is idle.

    python benchmarks/screening.py [meets | gpt2 | NAME:BLOCKS ...]
"""

from __future__ import annotations

import collections
import dataclasses
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

# in place of this file's own folder, as in the other benchmarks
sys.path[0] = str(Path(__file__).resolve().parents[1])

from ctrans.base.threads import wait_passively

wait_passively()

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from benchmarks.record import keep
from benchmarks.streaming import resident
from ctrans import GPT, GPTConfig
from ctrans.dynamics.weights.on_demand import OnDemand, Piece, watch
from ctrans.examine.screening.screen import screen
from ctrans.interop import from_architecture
from ctrans.model.text import default_text, to_tokens

CASES = ("meets", "gpt2", "llama-7b:2", "llama-70b:2")
SMALL = {
    "model_type": "llama",
    "num_hidden_layers": 6,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 160,
    "vocab_size": 256,
}


class Flops(TorchDispatchMode):
    """Those of every operation inside. torch's own counter also follows modules, by hooks that
    gradients of leaves do not bear.
    """

    total = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        made = function(*args, **(kwargs or {}))
        count = flop_registry.get(function._overloadpacket)
        if count is not None:
            self.total += count(*args, **(kwargs or {}), out_val=made)
        return made


def text(count: int, length: int) -> tuple[torch.Tensor, ...]:
    """Tokens, targets and another text."""
    rows = to_tokens(default_text(), 2 * count, length + 1)
    return rows[::2, :-1], rows[::2, 1:], rows[1::2, :-1]


def meets() -> list[str]:
    """How often each sublayer's weights are made in a screening."""
    lines = []
    for effort in ("quick", "full"):
        model = from_architecture(SMALL, on_demand=True).requires_grad_(requires_grad=False).eval()
        made: collections.Counter[str] = collections.Counter()
        watch(model, lambda name, made=made: made.update([name]))
        tokens, targets, other = text(2, 64)
        screen(model, tokens, targets, effort, other=other)
        sublayers = {name: count for name, count in made.items() if ".layers." in name}
        rest = {name: count for name, count in made.items() if name not in sublayers}
        lines.append(
            f"  {effort:6} each sublayer's {max(sublayers.values())} times at most; {rest}"
        )
    return lines


def gpt2() -> dict[str, float]:
    """GPT-2's shape, all of it, as `ctrans screen` does by default but in float32."""
    config = GPTConfig(256, context=256, depth=12, width=768, heads=12, placement="pre")
    model = GPT(config).requires_grad_(requires_grad=False).eval()
    tokens, targets, other = text(4, 256)
    before, start = resident("VmRSS"), time.perf_counter()
    screen(model, tokens, targets, "full", other=other)
    return {"seconds": time.perf_counter() - start, "peak": resident("VmHWM") - before}


def streamed(name: str, blocks: int) -> dict[str, float]:
    """A quick screening with weights drawn: seconds, those of drawing, flops and the peak of
    memory.
    """
    model = (
        from_architecture(name, blocks=blocks, on_demand=True)
        .requires_grad_(requires_grad=False)
        .eval()
    )
    spent = {"draw": 0.0, "numbers": 0.0}
    parts = [part for part in model.modules() if isinstance(part, OnDemand)]
    timed: dict[Piece, Piece] = {}
    for part in parts:
        for key, (piece, own) in part.place.names.items():
            part.place.names[key] = timed.setdefault(piece, _timed(piece, spent)), own
    largest = max(sum(p.numel() for p in block) for block in _blocks(model, name)) * 4
    tokens, targets, other = text(4, 32)
    before, start = resident("VmRSS"), time.perf_counter()
    with Flops() as flops:
        screen(model, tokens, targets, "quick", other=other)
    seconds = time.perf_counter() - start
    return {
        "seconds": seconds,
        **spent,
        "flops": float(flops.total),
        "peak": resident("VmHWM") - before,
        "block": float(largest),
        **limits(model.config.width),
    }


def _blocks(model: object, name: str) -> list[list[torch.Tensor]]:
    from ctrans.interop.architecture import skeleton

    return [list(block.parameters()) for block in skeleton(name, blocks=1).model.layers]


def _timed(piece: Piece, spent: dict[str, float]) -> Piece:
    def make() -> dict[str, torch.Tensor]:
        start = time.perf_counter()
        made = piece.make()
        spent["draw"] += time.perf_counter() - start
        spent["numbers"] += sum(weight.numel() for weight in made.values())
        return made

    return dataclasses.replace(piece, make=make)


def limits(width: int) -> dict[str, float]:
    """Normal numbers a second, and flops a second of 32 tokens through a square matrix."""
    weight, x = torch.empty(width, width), torch.randn(32, width)
    draw, product = [], []
    for _ in range(3):
        start = time.perf_counter()
        weight.normal_()
        draw.append(time.perf_counter() - start)
        start = time.perf_counter()
        torch.mm(x, weight.T)
        product.append(time.perf_counter() - start)
    return {"draw_limit": width**2 / min(draw), "product_limit": 2 * 32 * width**2 / min(product)}


def described(case: str, found: dict[str, float]) -> list[str]:
    lines = [f"  {found['seconds']:.1f} s, peak {found['peak'] / 1e9:.2f} GB"]
    if "draw" in found:
        rest = found["seconds"] - found["draw"]
        lines[0] += f", {found['peak'] / found['block']:.2f} blocks"
        lines += [
            (
                f"  drawing {found['draw']:.1f} s: {found['numbers'] / found['draw'] / 1e6:.0f}"
                f" million numbers a second (limit {found['draw_limit'] / 1e6:.0f})"
            ),
            (
                f"  all else {rest:.1f} s: {found['flops'] / rest / 1e9:.0f} Gflop/s (limit with 32"
                f" tokens {found['product_limit'] / 1e9:.0f})"
            ),
        ]
    return lines


def main(cases: list[str]) -> None:
    lines = [f"{torch.get_num_threads()} threads; quick: 4 sequences of 32 tokens, float32", ""]
    for case in cases:
        lines.append(case)
        if case == "meets":
            lines += meets()
        else:
            run = subprocess.run(
                [sys.executable, __file__, "--one", case],
                capture_output=True,
                text=True,
                check=True,
            )
            lines += described(case, json.loads(run.stdout.splitlines()[-1]))
        print("\n".join(lines[-4:]), file=sys.stderr)
    keep("screening", lines)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        name, _, blocks = sys.argv[2].partition(":")
        print(json.dumps(gpt2() if name == "gpt2" else streamed(name, int(blocks))))
    else:
        main(sys.argv[1:] or list(CASES))

"""Compares our Llama-shaped GPT with Hugging Face's Llama: logits, losses and tokens per second.

Both have the same weights, batches, loss and optimiser. The same few lines step both, so only the
models differ.

python benchmarks/llama.py [--rounds 15]

On the CPU: 4 blocks, width 128, 4 heads of which 2 pairs share keys, context 64, batch 12, float32.
On a GPU: 12 blocks, width 768, context 1024, batch 12, bfloat16.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

# in place of this file's own folder, so that imports find the packages
sys.path[0] = str(Path(__file__).resolve().parents[1])

from ctrans.base.threads import wait_passively

wait_passively()

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.record import keep
from ctrans.interop import to_gpt, to_transformers
from ctrans.model.config import GPTConfig
from ctrans.model.gpt import GPT
from ctrans.model.text import default_text
from ctrans.training.data import from_text

ROUNDS, ITERATIONS, BATCH = 15, 10, 12
SHAPE = {
    "placement": "pre",
    "norm": "rmsnorm",
    "positions": "rotary",
    "ffn": "swiglu",
    "bias": False,
    "kv_heads": 2,
}
Step = Callable[[int], float]


def config(device: torch.device) -> GPTConfig:
    if device.type == "cuda":
        return GPTConfig(
            vocab_size=50304,
            context=1024,
            depth=12,
            width=768,
            heads=12,
            **{**SHAPE, "kv_heads": 4},
        )
    return GPTConfig(vocab_size=256, context=64, depth=4, width=128, heads=4, **SHAPE)


def stepping(
    model: nn.Module,
    logits: Callable[[Tensor], Tensor],
    batch: Callable[[int], tuple[Tensor, Tensor]],
) -> Step:
    """One iteration of training, the same for both: forward, cross-entropy, backward, clipping,
    AdamW.
    """
    optimiser = torch.optim.AdamW(
        model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, fused=True
    )
    device = next(model.parameters()).device
    precision = (
        torch.autocast("cuda", torch.bfloat16)
        if device.type == "cuda"
        else contextlib.nullcontext()
    )

    def step(i: int) -> float:
        tokens, targets = (part.to(device) for part in batch(i))
        with precision:
            loss = F.cross_entropy(logits(tokens).flatten(0, 1).float(), targets.flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)
        return float(loss.detach())

    return step


def compare(rounds: int) -> list[str]:
    """Logits both ways, losses and tokens a second of ours and theirs."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    shape = config(device)
    data = from_text(default_text(), shape.context)
    ours = GPT(shape, seed=0).to(device)
    theirs = to_transformers(ours).to(device).train()
    back = to_gpt(theirs)

    def batch(i: int) -> tuple[Tensor, Tensor]:
        return data.batch(i, 0, batch=BATCH, seed=0)

    tokens = batch(0)[0].to(device)
    with torch.no_grad():
        expected = theirs(tokens).logits
        gaps = [
            float((found - expected).abs().max() / expected.abs().max())
            for found in (ours(tokens)[0], back(tokens)[0])
        ]
    steps = {
        "ctrans": stepping(ours, lambda x: ours(x)[0], batch),
        "transformers": stepping(theirs, lambda x: theirs(x, use_cache=False).logits, batch),
    }
    losses: dict[str, list[float]] = {name: [] for name in steps}
    rates: dict[str, list[float]] = {name: [] for name in steps}
    for round_ in range(rounds + 1):
        for name, step in steps.items():
            start = time.perf_counter()
            losses[name] += [step(round_ * ITERATIONS + i) for i in range(ITERATIONS)]
            if round_:  # the first warms up
                rates[name].append(
                    ITERATIONS * BATCH * shape.context / (time.perf_counter() - start)
                )
    lines = [
        (
            f"{shape.depth} Llama blocks, width {shape.width}, {shape.heads} heads on"
            f" {shape.kv_heads} keys, context {shape.context}, batch {BATCH}, {device.type};"
            f" {torch.get_num_threads()} threads."
        ),
        (
            f"Logits against theirs, relative: ours written as Llama {gaps[0]:.1e}, Llama read as"
            f" ours {gaps[1]:.1e}."
        ),
    ]
    for name, found in rates.items():
        lines.append(
            f"{name:>12}: {statistics.median(found):10.0f} tokens/s ({min(found):.0f} to"
            f" {max(found):.0f}), loss {losses[name][0]:.6f} to {losses[name][-1]:.6f}"
        )
    ratios = [a / b for a, b in zip(*rates.values(), strict=True)]
    gap = max(
        abs(a - b) for a, b in zip(*(each[:ITERATIONS] for each in losses.values()), strict=True)
    )
    lines.append(
        f"Largest difference of the losses of {ITERATIONS} steps: {gap:.1e}. Tokens per second,"
        f" ours over theirs: median of {rounds} pairs {statistics.median(ratios):.3f}"
        f" ({min(ratios):.3f} to {max(ratios):.3f})."
    )
    return lines


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    keep("llama", compare(parser.parse_args().rounds))

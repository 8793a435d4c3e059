"""How long theta takes for the attention of a whole model, how narrow its brackets are, and how
loose theorem 5.1 is.

python benchmarks/attention.py
"""

from __future__ import annotations

import math
import sys
import time
from pathlib import Path

# in place of this file's own folder, as in the other benchmarks
sys.path[0] = str(Path(__file__).resolve().parents[1])

from ctrans.base.threads import wait_passively

wait_passively()

import torch

from benchmarks.record import keep
from ctrans.measure.attention.balanced_mass import balanced_mass
from ctrans.measure.attention.by_depth import attention_layers
from ctrans.model.config import GPTConfig
from ctrans.model.gpt import GPT

LAYERS, HEADS, TOKENS = 12, 12, 1024
# standard deviations of the logits, from a fresh model's nearly even rows to sharp ones
SPREADS = (0.02, 0.05, 0.3, 1.0, 1.0, 1.0, 1.0, 2.0, 2.0, 3.0, 4.0, 8.0)
ROWS, LENGTHS = 10_000, (31, 32, 33, 35, 37, 40, 45, 51, 64, 128, 1024)


def causal_model() -> list[str]:
    """theta of every row of 12 x 12 causal heads of 1024 tokens, float32, layer by layer."""
    later = torch.ones(TOKENS, TOKENS, dtype=torch.bool).triu(1)
    generator = torch.Generator().manual_seed(0)
    lines, total, wide = (
        [f"{'logits':>8} {'seconds':>8} {'widest':>9} {'> 1e-9':>7} {'theta < 1 - 1e-9':>17}"],
        0.0,
        0,
    )
    for spread in SPREADS:
        logits = spread * torch.randn(HEADS, TOKENS, TOKENS, generator=generator)
        p = logits.masked_fill(later, -math.inf).softmax(-1)
        start = time.perf_counter()
        found = balanced_mass(p)
        seconds = time.perf_counter() - start
        total += seconds
        over = int((found.width > 1e-9).sum())
        wide += over
        low = int((found.upper < 1 - 1e-9).sum())
        lines.append(
            f"{spread:8g} {seconds:8.2f} {float(found.width.max()):9.1e} {over:7d} {low:17d}"
        )
    rows = LAYERS * HEADS * TOKENS
    return [
        (
            f"{rows} causal rows of 1 to {TOKENS} entries, {torch.get_num_threads()} threads:"
            f" {total:.1f} s, {wide} rows wider than 1e-9."
        ),
        *lines,
    ]


def widths() -> list[str]:
    """The widest bracket of many rows, and how many are wider than 1e-9, by length and spread of
    normal logits.
    """
    generator = torch.Generator().manual_seed(1)
    spreads = (0.02, 0.03, 0.04, 0.05, 0.3, 1.0, 1.5, 2.0, 4.0)
    lines = [
        "Rows wider than 1e-9 (widest bracket) by entries and standard deviation of the logits:"
    ]
    lines.append(f"{'entries':>8} {'rows':>6} " + " ".join(f"{spread:>12g}" for spread in spreads))
    for length in LENGTHS:
        rows = ROWS if length < 64 else ROWS // 10
        cells = []
        for spread in spreads:
            logits = spread * torch.randn(rows, length, dtype=torch.float64, generator=generator)
            width = balanced_mass(logits.softmax(-1)).width
            cells.append(f"{int((width > 1e-9).sum()):4d} ({float(width.max()):.0e})")
        lines.append(f"{length:8d} {rows:6d} " + " ".join(f"{cell:>12}" for cell in cells))
    return lines


def looseness() -> list[str]:
    """Theorem 5.1 over the local value of attention, by width."""
    lines = [
        "Theorem 5.1 at initialisation (Xavier, pre, 4 heads, 64 tokens): bound, local value found,"
        " ratio, seconds"
    ]
    for width in (16, 32, 64, 128):
        config = GPTConfig(
            context=64,
            depth=1,
            width=width,
            heads=4,
            placement="pre",
            initialisation="xavier",
            embedding_std=1.0,
        )
        model = GPT(config).double().requires_grad_(requires_grad=False)
        tokens = torch.randint(
            config.vocab_size, (1, 64), generator=torch.Generator().manual_seed(0)
        )
        start = time.perf_counter()
        (layer,) = attention_layers(model.depth, model.trajectory(tokens).states)
        seconds = time.perf_counter() - start
        lines.append(
            f"width {width:4d}: {layer.bound:10.4g} {layer.measured:8.4g} {layer.ratio:8.4g}"
            f" {seconds:6.2f}"
        )
    return lines


if __name__ == "__main__":
    keep("attention", [*causal_model(), "", *widths(), "", *looseness()])

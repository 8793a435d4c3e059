"""Base configurations of the presets: a small one for a laptop, and those of the papers."""

from __future__ import annotations

SMALL = {
    "depth": 4,
    "width": 32,
    "heads": 2,
    "embedding_std": 0.1,
    "iterations": 1800,
    "warmup": 120,
    "batch": 16,
    "eval_every": 300,
    "eval_windows": 512,
    "weight_decay": 0.1,
    "learning_rate": 3e-3,
}
"""The usual base of `small`, for `TASK`: its best cases end below half of the depthless floor. A
run took 12 s on one processor.
"""
DEEP = SMALL | {"depth": 8, "iterations": 1000}
"""Twice as deep, where placements part."""
XIONG = DEEP | {
    "initialisation": "xavier",
    "activation": "relu",
    "beta2": 0.98,
    "weight_decay": 0.0,
    "iterations": 1200,
}
"""Post-LN's cliff, at one rate: each case at its best rate would hide it."""
TEXT = {
    "vocab_size": 8192,
    "context": 128,
    "depth": 24,
    "width": 128,
    "heads": 4,
    "iterations": 3000,
    "warmup": 100,
    "batch": 8,
    "eval_every": 250,
    "eval_windows": 256,
    "weight_decay": 0.1,
    "beta2": 0.95,
    "learning_rate": 3e-3,
    "dtype": "bfloat16",
    "compile": True,
}
"""The base of `small` for a text of 8,192 tokens (`make text`): as deep as Kim's models, as narrow
as 6 million weights are.
"""
GPT2 = {
    "vocab_size": 50304,
    "context": 1024,
    "depth": 12,
    "width": 768,
    "heads": 12,
    "dtype": "bfloat16",
    "iterations": 20_000,
    "batch": 12,
    "accumulate": 40,
    "warmup": 700,
    "eval_every": 1000,
    "learning_rate": 6e-4,
}
"""Kan's base: GPT-2 of 124M parameters on OpenWebText (nanoGPT's files, with --bin), 20,000
iterations.
"""
XL = {**GPT2, "depth": 48, "width": 1600, "heads": 25}
KIM = {
    **GPT2,
    "depth": 24,
    "width": 1024,
    "heads": 16,
    "context": 2048,
    "norm": "rmsnorm",
    "iterations": 30_000,
}
"""Kim's 400M models: 30 billion tokens."""
DIGITS = {
    "depth": 6,
    "width": 32,
    "heads": 4,
    "weight_decay": 0.1,
    "learning_rate": 3e-3,
    "iterations": 300,
    "batch": 8,
    "warmup": 30,
    "eval_every": 100,
    "eval_windows": 120,
}
"""The base of `small` for digits. A task fixes vocabulary and context."""

"""The architectures of both trials by name, and how a model of one is made."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.clinic.bodies import (
    SIZES,
    Body,
    Encoder,
    Stranger,
    Vision,
    bert_parts,
    encoder_parts,
    gpt,
    llama_parts,
    of_transformers,
    plain_parts,
)
from benchmarks.clinic.foreign_bodies import (
    Nano,
    OneFile,
    grouped_parts,
    modernbert_parts,
    nano_parts,
    neox_parts,
    one_file_parts,
    timm_parts,
    timm_vit,
)

CAUSAL = ("text", "counting", "sorting", "recall", "modular")
IMAGE = torch.zeros(2, 1, 8, 8)
Made = Callable[[str], Body]
FIRST: dict[str, tuple[Made, tuple[str, ...]]] = {
    "gpt": (gpt, CAUSAL),
    "peri": (lambda task: gpt(task, placement="peri", norm="rmsnorm", dt=0.5, tied=False), CAUSAL),
    "moe": (lambda task: gpt(task, ffn="moe"), CAUSAL),
    "llama": (lambda task: Body(of_transformers(task, "Llama"), llama_parts, causal=True), CAUSAL),
    "bert": (
        lambda task: Body(of_transformers(task, "Bert"), bert_parts, causal=False),
        ("text", "counting"),
    ),
    "torch": (lambda task: Body(Encoder(*SIZES[task]), encoder_parts, causal=True), CAUSAL),
    "stranger": (lambda task: Body(Stranger(*SIZES[task]), plain_parts, causal=True), CAUSAL),
    "vit": (
        lambda task: Body(
            Vision(),
            plain_parts,
            causal=False,
            example=IMAGE,
            loss=F.cross_entropy,
        ),
        ("digits",),
    ),
}
"""Those of the first trial by name: how to make it, and the tasks that it can learn."""
ALL_CHANNELS = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0}
BOTH_WAYS = ("text", "counting")
SECOND: dict[str, tuple[Made, tuple[str, ...]]] = {
    "gpt": FIRST["gpt"],
    "peri": FIRST["peri"],
    "moe": FIRST["moe"],
    "llama grouped": (
        lambda task: Body(
            of_transformers(task, "Llama", num_key_value_heads=2), grouped_parts, causal=True
        ),
        CAUSAL,
    ),
    "qwen3": (
        lambda task: Body(
            of_transformers(
                task, "Qwen3", num_key_value_heads=2, head_dim=8, tie_word_embeddings=True
            ),
            grouped_parts,
            causal=True,
        ),
        CAUSAL,
    ),
    "neox": (
        lambda task: Body(
            of_transformers(task, "GPTNeoX", rope_parameters=ALL_CHANNELS),
            neox_parts,
            causal=True,
        ),
        CAUSAL,
    ),
    "modernbert": (
        lambda task: Body(of_transformers(task, "ModernBert"), modernbert_parts, causal=False),
        BOTH_WAYS,
    ),
    "nanochat": (lambda task: Body(Nano(SIZES[task][0]), nano_parts, causal=True), CAUSAL),
    "one file": (lambda task: Body(OneFile(SIZES[task][0]), one_file_parts, causal=True), CAUSAL),
    "timm": (
        lambda task: Body(
            timm_vit(), timm_parts, causal=False, example=IMAGE, loss=F.cross_entropy
        ),
        ("digits",),
    ),
}
"""Those of the second trial. The last seven are new to the clinic."""
ARCHITECTURES = FIRST | SECOND


def make(architecture: str, task: str, seed: int) -> Body:
    torch.manual_seed(seed)
    body = ARCHITECTURES[architecture][0](task)
    body.model.eval()  # no dropout anywhere: a training of the clinic repeats to the bit
    for part in body.model.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.0
    return body

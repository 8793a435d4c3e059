"""Seven small models for `parting.py`: five of transformers, torchvision's ViT's form, and a
stranger's module. Weights are drawn with a deviation of 0.1, so that all parts matter.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

VOCABULARY, WIDTH, BLOCKS, HEADS, TOKENS = 97, 64, 4, 4, 24
SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "num_hidden_layers": BLOCKS,
    "num_attention_heads": HEADS,
    "intermediate_size": 128,
    "initializer_range": 0.1,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def of_library(kind: str, config: str, **settings: Any) -> nn.Module:
    torch.manual_seed(0)
    chosen = getattr(transformers, config)(**settings)
    model: nn.Module = getattr(transformers, kind)(chosen).eval()
    gains = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            noise = 0.1 * torch.randn(parameter.shape, generator=gains)
            parameter.data += noise.to(parameter.dtype)
    return model


def gpt2(**changes: Any) -> nn.Module:
    settings = {
        "vocab_size": VOCABULARY,
        "n_embd": WIDTH,
        "n_layer": BLOCKS,
        "n_head": HEADS,
        "n_positions": 64,
        "initializer_range": 0.1,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    return of_library("GPT2LMHeadModel", "GPT2Config", **settings | changes)


def llama(**changes: Any) -> nn.Module:
    settings = {**SMALL, "num_key_value_heads": 2, "attention_bias": True}
    return of_library("LlamaForCausalLM", "LlamaConfig", **settings | changes)


def gemma2(**changes: Any) -> nn.Module:
    settings = {
        **SMALL,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "sliding_window": 8,
        "attn_implementation": "eager",
    }
    return of_library("Gemma2ForCausalLM", "Gemma2Config", **settings | changes)


def bert(**changes: Any) -> nn.Module:
    settings = {**SMALL, "max_position_embeddings": 64}
    return of_library("BertForMaskedLM", "BertConfig", **settings | changes)


def vit(**changes: Any) -> nn.Module:
    settings = {
        "hidden_size": WIDTH,
        "num_hidden_layers": BLOCKS,
        "num_attention_heads": HEADS,
        "intermediate_size": 128,
        "initializer_range": 0.1,
        "image_size": 16,
        "patch_size": 4,
        "num_labels": 10,
    }
    return of_library("ViTForImageClassification", "ViTConfig", **settings | changes)


def mixtral(**changes: Any) -> nn.Module:
    settings = {**SMALL, "num_key_value_heads": 2, "num_local_experts": 4}
    return of_library("MixtralForCausalLM", "MixtralConfig", **settings | changes)


class StrangeAttention(nn.Module):
    """Rotary attention, written out, with the settings that people get wrong."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.heads = HEADS
        self.base = 10000.0
        self.first = 0
        self.pairs = False
        self.power = 0.5
        self.diagonal = 1
        self.half = False
        self.dropout = 0.0

    def turned(self, x: Tensor) -> Tensor:
        size = x.shape[-1]
        rates = self.base ** (-torch.arange(0, size, 2, dtype=x.dtype) / size)
        positions = torch.arange(x.shape[-2], dtype=x.dtype) + self.first
        angles = positions[:, None] * rates
        cos, sin = angles.cos(), angles.sin()
        if self.pairs:
            a, b = x[..., 0::2], x[..., 1::2]
            return torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(-2)
        a, b = x.chunk(2, -1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        q, k, v = (
            part.view(batch, tokens, self.heads, -1).transpose(1, 2)
            for part in self.qkv(x).chunk(3, -1)
        )
        q, k = self.turned(q), self.turned(k)
        scores = q @ k.transpose(-2, -1) / q.shape[-1] ** self.power
        later = torch.ones(tokens, tokens, dtype=torch.bool).triu(self.diagonal)
        scores = scores.masked_fill(later, float("-inf"))
        if self.half:
            rows = scores.bfloat16().softmax(-1).to(x.dtype)
        else:
            rows = scores.softmax(-1)
        rows = F.dropout(rows, self.dropout)
        return self.out((rows @ v).transpose(1, 2).reshape(batch, tokens, width))


class StrangeBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(WIDTH)
        self.norm2 = nn.LayerNorm(WIDTH)
        self.attention = StrangeAttention()
        self.up = nn.Linear(WIDTH, 256)
        self.down = nn.Linear(128, WIDTH)
        self.approximate = "none"
        self.scale = 1.0
        self.interleaved = False
        self.swapped = False

    def ffn(self, x: Tensor) -> Tensor:
        if self.interleaved:
            gate, up = self.up(x)[..., 0::2], self.up(x)[..., 1::2]
        else:
            gate, up = self.up(x).chunk(2, -1)
        if self.swapped:
            gate, up = up, gate
        hidden: Tensor = F.gelu(gate, approximate=self.approximate) * up
        return self.down(hidden)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.scale * self.attention(self.norm1(x))
        return x + self.scale * self.ffn(self.norm2(x))


class Stranger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(StrangeBlock() for _ in range(BLOCKS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight
        self.cap = 0.0

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        if self.cap:
            logits = self.cap * (logits / self.cap).tanh()
        return logits


def stranger() -> Stranger:
    torch.manual_seed(0)
    model = Stranger().eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            drawn = 0.1 * torch.randn(parameter.shape, generator=generator)
            parameter.copy_(drawn if parameter.dim() > 1 else parameter + drawn)
    return model


FAMILIES = {
    "gpt2": gpt2,
    "llama": llama,
    "gemma2": gemma2,
    "bert": bert,
    "vit": vit,
    "mixtral": mixtral,
    "stranger": stranger,
}


def inputs(family: str, rows: int = 2) -> Tensor:
    generator = torch.Generator().manual_seed(2)
    if family == "vit":
        return torch.randn(rows, 3, 16, 16, generator=generator)
    return torch.randint(3, VOCABULARY, (rows, TOKENS), generator=generator)

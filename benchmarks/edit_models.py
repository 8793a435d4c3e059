"""Models for the trial of the search over edits: two of plain torch, two of `transformers`, each
trained on text; and faults that happen when models are ported and loaded.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ctrans.model.text import default_text

WIDTH, HEADS, GROUPS, BLOCKS, CONTEXT, BYTES = 64, 8, 4, 4, 48, 256
TEXT = torch.frombuffer(bytearray(default_text()), dtype=torch.uint8).long()
CACHE = Path("out/edits")
HELD_OUT = 0.1


def windows(text: Tensor, rows: int, seed: int) -> tuple[Tensor, Tensor]:
    """Tokens and next tokens at random places of a text."""
    generator = torch.Generator().manual_seed(seed)
    places = torch.randint(0, len(text) - CONTEXT - 1, (rows,), generator=generator)
    cut = torch.stack([text[place : place + CONTEXT + 1] for place in places.tolist()])
    return cut[:, :-1], cut[:, 1:]


class RMSNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * self.weight


class RotaryAttention(nn.Module):
    """Grouped heads with rotary positions. Its flags are what a port may get wrong."""

    base, pairs, neighbours, scaled, causal = 1000.0, True, True, True, True

    def __init__(self, width: int = WIDTH, heads: int = HEADS, groups: int = GROUPS) -> None:
        super().__init__()
        self.size = width // heads
        self.queries_of_a_key = heads // groups
        self.wq = nn.Linear(width, width, bias=False)
        self.wk = nn.Linear(width, groups * self.size, bias=False)
        self.wv = nn.Linear(width, groups * self.size, bias=False)
        self.wo = nn.Linear(width, width, bias=False)

    def turned(self, x: Tensor) -> Tensor:
        frequencies = self.base ** (-torch.arange(0, self.size, 2).float() / self.size)
        angles = torch.outer(torch.arange(x.shape[2]).float(), frequencies)
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        if self.pairs:
            a, b = x[..., 0::2], x[..., 1::2]
            return torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(-2)
        a, b = x.chunk(2, -1)
        return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            linear(x).unflatten(-1, (-1, self.size)).transpose(1, 2)
            for linear in (self.wq, self.wk, self.wv)
        )
        q, k = self.turned(q), self.turned(k)
        each = self.queries_of_a_key
        if self.neighbours:
            k, v = k.repeat_interleave(each, 1), v.repeat_interleave(each, 1)
        else:
            k, v = k.repeat(1, each, 1, 1), v.repeat(1, each, 1, 1)
        scores = q @ k.transpose(-1, -2)
        if self.scaled:
            scores = scores / math.sqrt(self.size)
        if self.causal:
            later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
            scores = scores.masked_fill(later, -1e9)
        return self.wo((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


class RotaryBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.n1, self.n2 = RMSNorm(), RMSNorm()
        self.attn = RotaryAttention()
        self.gate = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.up = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.down = nn.Linear(3 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.n1(x))
        y = self.n2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class RotaryGPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(BYTES, WIDTH)
        self.layers = nn.ModuleList([RotaryBlock() for _ in range(BLOCKS)])
        self.norm = RMSNorm()
        self.head = nn.Linear(WIDTH, BYTES, bias=False)
        nn.init.normal_(self.embedding.weight, std=0.5)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


class JoinedBlock(nn.Module):
    causal = True

    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.n_head = 4
        self.c_attn = nn.Linear(WIDTH, 3 * WIDTH)
        self.c_proj = nn.Linear(WIDTH, WIDTH)
        self.c_fc = nn.Linear(WIDTH, 4 * WIDTH)
        self.proj = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.c_attn(self.ln_1(x)).chunk(3, -1)
        q, k, v = (part.unflatten(-1, (self.n_head, -1)).transpose(1, 2) for part in parts)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        x = x + self.c_proj(y.transpose(1, 2).flatten(2))
        return x + self.proj(F.gelu(self.c_fc(self.ln_2(x))))


class JoinedGPT(nn.Module):
    """Queries, keys and values in one matrix, and learned positions."""

    def __init__(self) -> None:
        super().__init__()
        self.wte = nn.Embedding(BYTES, WIDTH)
        self.wpe = nn.Embedding(64, WIDTH)
        self.h = nn.ModuleList([JoinedBlock() for _ in range(BLOCKS)])
        self.ln_f = nn.LayerNorm(WIDTH)
        self.lm_head = nn.Linear(WIDTH, BYTES, bias=False)
        nn.init.normal_(self.wte.weight, std=0.1)
        nn.init.normal_(self.wpe.weight, std=0.1)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.wte(ids) + self.wpe(torch.arange(ids.shape[1]))
        for block in self.h:
            x = block(x)
        return self.lm_head(self.ln_f(x))


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=BYTES,
            hidden_size=WIDTH,
            intermediate_size=160,
            num_hidden_layers=BLOCKS,
            num_attention_heads=HEADS,
            num_key_value_heads=GROUPS,
            max_position_embeddings=64,
            bos_token_id=0,
            eos_token_id=0,
        )
    )


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=BYTES,
            n_embd=WIDTH,
            n_layer=BLOCKS,
            n_head=4,
            n_positions=64,
            bos_token_id=0,
            eos_token_id=0,
            resid_pdrop=0,
            embd_pdrop=0,
            attn_pdrop=0,
        )
    )


@dataclasses.dataclass
class Anatomy:
    """Where the parts of a model are: paths of its weights in a block, and outside."""

    make: Callable[[], nn.Module]
    blocks: Callable[[Any], nn.ModuleList]
    embedding: Callable[[Any], Tensor]
    queries: str
    output: str
    down: str
    gains: str
    joined: bool
    head: Callable[[Any], Tensor] | None = None
    positions: Callable[[Any], Tensor] | None = None
    keys: str = ""
    values: str = ""
    gate: str = ""
    up: str = ""


MODELS = {
    "rotary": Anatomy(
        RotaryGPT,
        lambda m: m.layers,
        lambda m: m.embedding.weight,
        "attn.wq.weight",
        "attn.wo.weight",
        "down.weight",
        "n1.weight",
        joined=False,
        head=lambda m: m.head.weight,
        keys="attn.wk.weight",
        values="attn.wv.weight",
        gate="gate.weight",
        up="up.weight",
    ),
    "joined": Anatomy(
        JoinedGPT,
        lambda m: m.h,
        lambda m: m.wte.weight,
        "c_attn.weight",
        "c_proj.weight",
        "proj.weight",
        "ln_1.weight",
        joined=True,
        head=lambda m: m.lm_head.weight,
        positions=lambda m: m.wpe.weight,
    ),
    "llama": Anatomy(
        llama,
        lambda m: m.model.layers,
        lambda m: m.model.embed_tokens.weight,
        "self_attn.q_proj.weight",
        "self_attn.o_proj.weight",
        "mlp.down_proj.weight",
        "input_layernorm.weight",
        joined=False,
        head=lambda m: m.lm_head.weight,
        keys="self_attn.k_proj.weight",
        values="self_attn.v_proj.weight",
        gate="mlp.gate_proj.weight",
        up="mlp.up_proj.weight",
    ),
    "gpt2": Anatomy(
        gpt2,
        lambda m: m.transformer.h,
        lambda m: m.transformer.wte.weight,
        "attn.c_attn.weight",
        "attn.c_proj.weight",
        "mlp.c_proj.weight",
        "ln_1.weight",
        joined=True,
        positions=lambda m: m.transformer.wpe.weight,
    ),
}


def logits(model: nn.Module, ids: Tensor) -> Tensor:
    output = model(ids)
    return getattr(output, "logits", output)


def trained(name: str, steps: int, seed: int = 0) -> nn.Module:
    """A model after so many steps of AdamW on the text, kept in `CACHE`."""
    path = CACHE / f"{name}-{steps}-{seed}.pt"
    torch.manual_seed(seed)
    model = MODELS[name].make()
    if path.exists():
        model.load_state_dict(torch.load(path, weights_only=True))
        return model.eval()
    text = TEXT[: int(len(TEXT) * (1 - HELD_OUT))]
    optimiser = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.05)

    def rate(step: int) -> float:
        return min(1.0, (step + 1) / 50) * (0.55 + 0.45 * math.cos(math.pi * step / steps))

    schedule = torch.optim.lr_scheduler.LambdaLR(optimiser, rate)
    for step in range(steps):
        tokens, targets = windows(text, 16, seed=1000 * seed + step)
        loss = F.cross_entropy(logits(model, tokens).flatten(0, 1), targets.flatten())
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        schedule.step()
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(model.state_dict(), path)
    return model.eval()

"""The architectures of the second trial that the first one did not have, as their own authors would
write them.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.clinic.bodies import BLOCKS, HEADS, INNER, WIDTH, Parts, joined, single

SIZE = WIDTH // HEADS
"""The width of a head."""


def frequencies(size: int, base: float = 10000.0) -> Tensor:
    """The angle by which each pair of a head's channels turns from one token to the next."""
    return base ** (-torch.arange(0, size, 2).float() / size)


class NanoAttention(nn.Module):
    """Rotary positions, then queries and keys of length sqrt(size): norms without gains."""

    def __init__(self) -> None:
        super().__init__()
        self.c_q, self.c_k, self.c_v = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.c_proj = nn.Linear(WIDTH, WIDTH, bias=False)
        self.register_buffer("inv_freq", frequencies(SIZE), persistent=False)
        self.causal, self.ahead, self.softmax_axis, self.scale = True, 0, -1, SIZE**-0.5

    def rotated(self, x: Tensor) -> Tensor:
        angles = torch.outer(torch.arange(x.shape[-2]).float(), self.inv_freq.float())
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        a, b = x.chunk(2, -1)
        return torch.cat([a * cos + b * sin, b * cos - a * sin], -1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            each(x).unflatten(-1, (HEADS, SIZE)).transpose(1, 2)
            for each in (self.c_q, self.c_k, self.c_v)
        )
        q, k = (F.rms_norm(self.rotated(each), (SIZE,)) for each in (q, k))
        scores = q @ k.transpose(-1, -2) * self.scale
        if self.causal:
            later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1 + self.ahead)
            scores = scores.masked_fill(later, -math.inf)
        mixed = scores.softmax(self.softmax_axis).nan_to_num() @ v
        found: Tensor = self.c_proj(mixed.transpose(1, 2).flatten(2))
        return found


class NanoMLP(nn.Module):
    """Squares of a ReLU."""

    def __init__(self) -> None:
        super().__init__()
        self.c_fc = nn.Linear(WIDTH, INNER, bias=False)
        self.c_proj = nn.Linear(INNER, WIDTH, bias=False)
        self.power = 2

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.c_proj(F.relu(self.c_fc(x)) ** self.power)
        return found


class NanoBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn, self.mlp = NanoAttention(), NanoMLP()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(F.rms_norm(x, (WIDTH,)))
        return x + self.mlp(F.rms_norm(x, (WIDTH,)))


class Nano(nn.Module):
    """x = a x + b x0 before each block, x0 the normalised embedding; logits bounded by 15 tanh."""

    def __init__(self, vocabulary: int):
        super().__init__()
        self.wte = nn.Embedding(vocabulary, WIDTH)
        self.h = nn.ModuleList(NanoBlock() for _ in range(BLOCKS))
        self.resid_lambdas = nn.Parameter(torch.ones(BLOCKS))
        self.x0_lambdas = nn.Parameter(0.1 * torch.ones(BLOCKS))
        self.lm_head = nn.Linear(WIDTH, vocabulary, bias=False)
        nn.init.normal_(self.lm_head.weight, std=0.02)
        for block in self.h:
            for linear in (block.attn.c_proj, block.mlp.c_proj):
                nn.init.normal_(linear.weight, std=0.02)

    def forward(self, idx: Tensor) -> Tensor:
        x = x0 = F.rms_norm(self.wte(idx), (WIDTH,))
        for i, block in enumerate(self.h):
            x = block(self.resid_lambdas[i] * x + self.x0_lambdas[i] * x0)
        logits = self.lm_head(F.rms_norm(x, (WIDTH,)))
        found: Tensor = 15 * torch.tanh(logits / 15)
        return found


def nano_parts(model: Any) -> dict[str, Any]:
    blocks = [
        Parts(
            each.attn,
            each.mlp,
            [],
            *(single(part) for part in (each.attn.c_q, each.attn.c_k, each.attn.c_v)),
            each.attn.c_proj,
            each.mlp.c_fc,
            each.mlp.c_proj,
            whole=each,
        )
        for each in model.h
    ]
    attentions = [each.attn for each in model.h]
    return {
        "blocks": blocks,
        "embedding": model.wte.weight,
        "head": model.lm_head.weight,
        "tied": False,
        "masked": attentions,
        "rotary": attentions,
        "scaled": [(each, "scale") for each in attentions],
        "activations": [(each.mlp, "power", 1) for each in model.h],
        "residual": [model.resid_lambdas, model.x0_lambdas],
    }


class Gain(nn.Module):
    """x over its root mean square, times a gain that is called g."""

    def __init__(self) -> None:
        super().__init__()
        self.g, self.eps = nn.Parameter(torch.ones(WIDTH)), 1e-6

    @property
    def weight(self) -> Tensor:
        return self.g

    def forward(self, x: Tensor) -> Tensor:
        return self.g * x * (x.square().mean(-1, keepdim=True) + self.eps).rsqrt()


class Everything(nn.Module):
    """Attention by einsum with ALiBi, and the FFN, in one class."""

    def __init__(self) -> None:
        super().__init__()
        self.Q, self.K, self.V = (
            nn.Parameter(torch.randn(HEADS, SIZE, WIDTH) * WIDTH**-0.5) for _ in range(3)
        )
        self.O = nn.Linear(WIDTH, WIDTH)  # a stranger's name
        self.wide, self.narrow = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)
        self.pre, self.mid = Gain(), Gain()
        self.register_buffer("slopes", 2.0 ** -torch.arange(1, HEADS + 1).float())
        self.causal, self.ahead, self.softmax_axis, self.scale = True, 0, -1, SIZE**-0.5
        self.nonlinear = F.gelu

    def attend(self, x: Tensor) -> Tensor:
        q = torch.einsum("bid,hed->bhie", x, self.Q)
        k = torch.einsum("bjd,hed->bhje", x, self.K)
        v = torch.einsum("bjd,hed->bhje", x, self.V)
        where = torch.arange(x.shape[1])
        away = (where[None] - where[:, None]).to(x.dtype)
        a = torch.einsum("bhie,bhje->bhij", q, k) * self.scale
        a = a + self.slopes[:, None, None] * away
        if self.causal:
            a = torch.where(away > self.ahead, torch.tensor(-1e9, dtype=x.dtype), a)
        a = a.softmax(self.softmax_axis)
        found: Tensor = self.O(torch.einsum("bhij,bhje->bihe", a, v).flatten(2))
        return found

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attend(self.pre(x))
        return x + self.narrow(self.nonlinear(self.wide(self.mid(x))))


class OneFile(nn.Module):
    """A language model in one person's style, its layers in a plain loop."""

    def __init__(self, vocabulary: int):
        super().__init__()
        self.E = nn.Embedding(vocabulary, WIDTH)
        self.tower = nn.ModuleList([Everything() for _ in range(BLOCKS)])
        self.end, self.U = Gain(), nn.Linear(WIDTH, vocabulary)

    def forward(self, s: Tensor) -> Tensor:
        x = self.E(s)
        for floor in self.tower:
            x = floor(x)
        found: Tensor = self.U(self.end(x))
        return found


def one_file_parts(model: Any) -> dict[str, Any]:
    blocks = [
        Parts(
            each,
            each,
            [each.pre, each.mid],
            [each.Q.detach()],
            [each.K.detach()],
            [each.V.detach()],
            each.O,
            each.wide,
            each.narrow,
            whole=each,
        )
        for each in model.tower
    ]
    return {
        "blocks": blocks,
        "embedding": model.E.weight,
        "final_norm": model.end,
        "head": model.U.weight,
        "tied": False,
        "masked": list(model.tower),
        "slopes": [each.slopes for each in model.tower],
        "scaled": [(each, "scale") for each in model.tower],
        "activations": [(each, "nonlinear", F.relu) for each in model.tower],
    }


def grouped_parts(model: Any) -> dict[str, Any]:
    """Of Llama and Qwen3, also with fewer keys than queries."""
    layers, inner = list(model.model.layers), model.model
    blocks = [
        Parts(
            each.self_attn,
            each.mlp,
            [each.input_layernorm, each.post_attention_layernorm],
            *(single(getattr(each.self_attn, f"{name}_proj")) for name in "qkv"),
            each.self_attn.o_proj,
            each.mlp.gate_proj,
            each.mlp.down_proj,
            whole=each,
            gate=(each.mlp.gate_proj, each.mlp.up_proj),
            groups=each.self_attn.config.num_key_value_heads,
        )
        for each in layers
    ]
    return {
        "blocks": blocks,
        "embedding": inner.embed_tokens.weight,
        "final_norm": inner.norm,
        "final norm owner": (inner, "norm"),
        "head": model.lm_head.weight,
        "tied": model.lm_head.weight is inner.embed_tokens.weight,
        "head owner": model.lm_head if model.config.tie_word_embeddings else None,
        "rotary": [inner.rotary_emb],
        "scaled": [(each.self_attn, "scaling") for each in layers],
        "activations": [(each.mlp, "act_fn", nn.ReLU()) for each in layers],
    }


def of_each_head(linear: Any) -> list[list[Tensor]]:
    """Queries, keys and values that alternate from head to head, as views."""
    weight = linear.weight.detach().view(HEADS, 3, SIZE, -1)
    bias = linear.bias.detach().view(HEADS, 3, SIZE)
    return [[weight[:, i], bias[:, i]] for i in range(3)]


def neox_parts(model: Any) -> dict[str, Any]:
    inner = model.gpt_neox
    blocks = [
        Parts(
            each.attention,
            each.mlp,
            [each.input_layernorm, each.post_attention_layernorm],
            *of_each_head(each.attention.query_key_value),
            each.attention.dense,
            each.mlp.dense_h_to_4h,
            each.mlp.dense_4h_to_h,
            whole=each,
        )
        for each in inner.layers
    ]
    return {
        "blocks": blocks,
        "embedding": inner.embed_in.weight,
        "final_norm": inner.final_layer_norm,
        "final norm owner": (inner, "final_layer_norm"),
        "head": model.lm_head.weight,
        "tied": False,
        "rotary": [inner.rotary_emb],
        "scaled": [(each.attention, "scaling") for each in inner.layers],
        "activations": [(each.mlp, "act", nn.ReLU()) for each in inner.layers],
        "fused": [each.attention.query_key_value for each in inner.layers],
        "by head": True,
    }


def modernbert_parts(model: Any) -> dict[str, Any]:
    inner = model.model
    blocks = [
        Parts(
            each.attn,
            each.mlp,
            [norm for norm in (each.attn_norm, each.mlp_norm) if hasattr(norm, "weight")],
            *joined(each.attn.Wqkv),
            each.attn.Wo,
            each.mlp.Wi,
            each.mlp.Wo,
            whole=each,
        )
        for each in inner.layers
    ]
    return {
        "blocks": blocks,
        "embedding": inner.embeddings.tok_embeddings.weight,
        "final_norm": inner.final_norm,
        "final norm owner": (inner, "final_norm"),
        "head": model.decoder.weight,
        "tied": True,
        "head owner": model.decoder,
        "activations": [(each.mlp, "act", nn.ReLU()) for each in inner.layers],
        "fused": [each.attn.Wqkv for each in inner.layers],
    }


def timm_vit() -> nn.Module:
    from timm.models.vision_transformer import VisionTransformer

    made: nn.Module = VisionTransformer(
        img_size=8,
        patch_size=2,
        in_chans=1,
        num_classes=10,
        embed_dim=WIDTH,
        depth=BLOCKS,
        num_heads=HEADS,
        mlp_ratio=INNER / WIDTH,
    )
    return made


def timm_parts(model: Any) -> dict[str, Any]:
    blocks = [
        Parts(
            each.attn,
            each.mlp,
            [each.norm1, each.norm2],
            *joined(each.attn.qkv),
            each.attn.proj,
            each.mlp.fc1,
            each.mlp.fc2,
            whole=each,
        )
        for each in model.blocks
    ]
    return {
        "blocks": blocks,
        "embedding": model.patch_embed.proj.weight,
        "positions": model.pos_embed,
        "final_norm": model.norm,
        "final norm owner": (model, "norm"),
        "head": model.head.weight,
        "tied": False,
        "activations": [(each.mlp, "act", nn.ReLU()) for each in model.blocks],
        "fused": [each.attn.qkv for each in model.blocks],
    }

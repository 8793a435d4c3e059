"""A nanoGPT written down plainly: as functions of a state dict, and as modules with its names, to
be made continuous.
"""

import math

import torch
import torch.nn.functional as F
from torch import nn

from tests.model.plain_gpt import gelu, layer_norm


def weights(depth=2, width=16, vocabulary=11, context=12, bias=True):
    """A state dict with nanoGPT's names and random entries."""
    generator = torch.Generator().manual_seed(0)
    shapes = {
        "transformer.wte": (vocabulary, width),
        "transformer.wpe": (context, width),
        "transformer.ln_f": (width,),
    }
    for i in range(depth):
        block = f"transformer.h.{i}"
        shapes |= {f"{block}.ln_1": (width,), f"{block}.ln_2": (width,)}
        shapes |= {
            f"{block}.attn.c_attn": (3 * width, width),
            f"{block}.attn.c_proj": (width, width),
        }
        shapes |= {
            f"{block}.mlp.c_fc": (4 * width, width),
            f"{block}.mlp.c_proj": (width, 4 * width),
        }
    found = {
        f"{name}.weight": torch.randn(shape, generator=generator) / math.sqrt(width)
        for name, shape in shapes.items()
    }
    if bias:
        biased = [
            name for name in shapes if not name.startswith(("transformer.wte", "transformer.wpe"))
        ]
        found |= {
            f"{name}.bias": 0.1 * torch.randn(shapes[name][0], generator=generator)
            for name in biased
        }
    return found | {"lm_head.weight": found["transformer.wte.weight"]}


def logits(w, tokens, heads):
    """Logits of every position, for a batch of token ids."""

    def normed(x, name):
        return layer_norm(x, w[f"{name}.weight"], w.get(f"{name}.bias", 0.0))

    def affine(x, name):
        return x @ w[f"{name}.weight"].T + w.get(f"{name}.bias", 0.0)

    length = tokens.shape[1]
    x = w["transformer.wte.weight"][tokens] + w["transformer.wpe.weight"][:length]
    later = torch.ones(length, length).triu(1) == 1
    for i in range(len({name.split(".")[2] for name in w if ".h." in name})):
        block = f"transformer.h.{i}"
        q, k, v = affine(normed(x, f"{block}.ln_1"), f"{block}.attn.c_attn").chunk(3, dim=-1)
        mixed = []
        for qh, kh, vh in zip(*(part.chunk(heads, dim=-1) for part in (q, k, v)), strict=True):
            scores = torch.einsum("bid,bjd->bij", qh, kh) / math.sqrt(qh.shape[-1])
            mixed.append(scores.masked_fill(later, -math.inf).softmax(-1) @ vh)
        x = x + affine(torch.cat(mixed, dim=-1), f"{block}.attn.c_proj")
        x = x + affine(
            gelu(affine(normed(x, f"{block}.ln_2"), f"{block}.mlp.c_fc")), f"{block}.mlp.c_proj"
        )
    return normed(x, "transformer.ln_f") @ w["lm_head.weight"].T


class Norm(nn.Module):
    """LayerNorm that keeps no eps."""

    def __init__(self, width):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))

    def forward(self, x):
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, 1e-5)


class SelfAttention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.c_attn, self.c_proj, self.heads = (
            nn.Linear(width, 3 * width),
            nn.Linear(width, width),
            heads,
        )

    def forward(self, x):
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in self.c_attn(x).chunk(3, dim=-1)
        )
        return self.c_proj(
            F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        )


class MLP(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.c_fc, self.c_proj = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return self.c_proj(F.gelu(self.c_fc(x)))


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.ln_1, self.attn, self.ln_2, self.mlp = (
            Norm(width),
            SelfAttention(width, heads),
            Norm(width),
            MLP(width),
        )

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class NanoGPT(nn.Module):
    """Called as nanoGPT is: logits, loss = model(idx, targets)."""

    def __init__(self, depth=2, width=16, heads=2, vocabulary=11, context=12):
        super().__init__()
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(vocabulary, width),
                "wpe": nn.Embedding(context, width),
                "h": nn.ModuleList([Block(width, heads) for _ in range(depth)]),
                "ln_f": Norm(width),
            }
        )
        self.lm_head = nn.Linear(width, vocabulary, bias=False)
        self.lm_head.weight = self.transformer["wte"].weight

    def forward(self, idx, targets=None):
        x = self.transformer["wte"](idx) + self.transformer["wpe"](torch.arange(idx.shape[1]))
        for block in self.transformer["h"]:
            x = block(x)
        logits = self.lm_head(self.transformer["ln_f"](x))
        return logits, (
            None if targets is None else F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        )

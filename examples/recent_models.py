"""Fifteen models as people have built them since 2022, for `any_model.py`."""

import math
import sys
from pathlib import Path

import torch
from torch import nn

sys.path.append(str(Path(__file__).parent))  # this file's folder, wherever it is run from

from recent_blocks import (
    DEPTH,
    WIDTH,
    DeepNormBlock,
    DifferentialBlock,
    ExpertBlock,
    KeelBlock,
    LinearBlock,
    MemoryBlock,
    NanochatBlock,
    NormalisedBlock,
    ParallelBlock,
    ReorderedBlock,
    ScaledBlock,
    SinkBlock,
    SpeedrunBlock,
    T5Block,
    rms,
)
from unlike_models import classified, pictures, sentences, tokens, translated

VOCABULARY = 97


class Nanochat(nn.Module):
    """Norms without gains, one behind the embedding too; each block reads a x + b x0; logits pass
    15 tanh(./15).
    """

    def __init__(self):
        super().__init__()
        self.wte = nn.Embedding(VOCABULARY, WIDTH)
        self.h = nn.ModuleList([NanochatBlock() for _ in range(DEPTH)])
        self.resid = nn.Parameter(torch.full((DEPTH,), 0.9))
        self.first = nn.Parameter(torch.full((DEPTH,), 0.1))
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids):
        x = x0 = rms(self.wte(ids))
        for i, block in enumerate(self.h):
            x = block(self.resid[i] * x + self.first[i] * x0)
        return 15 * torch.tanh(self.lm_head(rms(x)) / 15)


class Speedrun(nn.Module):
    """A skip from the first half of the blocks to the second, weighted."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.value_embeds = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList([SpeedrunBlock() for _ in range(4)])
        self.skip_weights = nn.Parameter(torch.full((2,), 0.5))
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids):
        x = x0 = rms(self.embed(ids))
        ve = self.value_embeds(ids)
        skips = []
        for i, block in enumerate(self.blocks):
            if i >= 2:
                x = x + self.skip_weights[i - 2] * skips.pop()
            x = block(x, x0, ve)
            if i < 2:
                skips.append(x)
        return 30 * torch.sigmoid(self.lm_head(rms(x)) / 7.5)


class Language(nn.Module):
    """Blocks between an embedding and a head."""

    def __init__(self, blocks, norm=None):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(blocks)
        self.norm = norm or nn.RMSNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


class LayerMemory(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList([MemoryBlock(i) for i in range(DEPTH)])
        self.norm = nn.RMSNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids):
        states = [self.embed(ids)]
        for layer in self.layers:
            states.append(layer(states))
        return self.head(self.norm(states[-1]))


class Registers(nn.Module):
    """A vision transformer with a class token and four registers."""

    def __init__(self):
        super().__init__()
        self.patches = nn.Conv2d(3, WIDTH, 4, 4)
        self.cls = nn.Parameter(torch.randn(1, 1, WIDTH))
        self.registers = nn.Parameter(torch.randn(1, 4, WIDTH))
        self.positions = nn.Parameter(torch.randn(1, 17, WIDTH))
        self.blocks = nn.ModuleList([ScaledBlock() for _ in range(DEPTH)])
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(2 * WIDTH, 10)

    def forward(self, images):
        x = self.patches(images).flatten(2).mT
        x = torch.cat([self.cls.expand(len(x), -1, -1), x], 1) + self.positions
        x = torch.cat([x[:, :1], self.registers.expand(len(x), -1, -1), x[:, 1:]], 1)
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        return self.head(torch.cat([x[:, 0], x[:, 5:].mean(1)], -1))


class T5(nn.Module):
    def __init__(self):
        super().__init__()
        self.shared = nn.Embedding(VOCABULARY, WIDTH)
        self.encoder = nn.ModuleList([T5Block(is_decoder=False) for _ in range(DEPTH)])
        self.decoder = nn.ModuleList([T5Block(is_decoder=True) for _ in range(DEPTH)])
        self.norm = nn.RMSNorm(WIDTH)
        self.last = nn.RMSNorm(WIDTH)

    def forward(self, tgt, src):
        context = self.shared(src)
        for block in self.encoder:
            context = block(context)
        context = self.norm(context)
        x = self.shared(tgt)
        for block in self.decoder:
            x = block(x, context)
        return self.last(x) @ self.shared.weight.T / math.sqrt(WIDTH)


# functions for --python


def reordered():
    return Language([ReorderedBlock(inside=False) for _ in range(DEPTH)])


def peri():
    return Language([ReorderedBlock(inside=True) for _ in range(DEPTH)])


def keel():
    return Language([KeelBlock() for _ in range(DEPTH)])


def deepnorm():
    return Language([DeepNormBlock() for _ in range(DEPTH)], nn.Identity())


def ngpt():
    return Language([NormalisedBlock() for _ in range(DEPTH)], nn.Identity())


def parallel():
    return Language([ParallelBlock() for _ in range(DEPTH)])


def differential():
    return Language([DifferentialBlock() for _ in range(DEPTH)])


def linear():
    return Language([LinearBlock() for _ in range(DEPTH)])


def experts():
    return Language([ExpertBlock() for _ in range(DEPTH)])


def sinks():
    return Language([SinkBlock() for _ in range(DEPTH)])


RECENT = {
    "nanochat": (Nanochat, tokens, None),
    "modded-nanogpt": (Speedrun, tokens, None),
    "norms behind each map, as in OLMo 2": (reordered, tokens, None),
    "Peri-LN with norms of queries and keys": (peri, tokens, None),
    "Keel": (keel, tokens, None),
    "DeepNorm": (deepnorm, tokens, None),
    "nGPT": (ngpt, tokens, None),
    "parallel sublayers, as in PaLM": (parallel, tokens, None),
    "differential attention": (differential, tokens, None),
    "gated linear attention": (linear, tokens, None),
    "latent attention and shared experts": (experts, tokens, None),
    "sinks and windows, as in gpt-oss": (sinks, tokens, None),
    "keys and values of all layers": (LayerMemory, tokens, None),
    "a ViT with registers": (Registers, pictures, classified),
    "T5": (T5, sentences, translated),
}
"""Each as it is made, its example with targets, and its loss if it is not the usual one."""

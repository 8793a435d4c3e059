"""Modules of unusual but plausible shape, as a third stranger wrote them: what is read is no row of
token ids, blocks do not stand in a plain list, weights are wrapped, or the module is.
"""

import math

import torch
import torch.nn.functional as F
from torch import nn

VOCABULARY, WIDTH, HEADS = 23, 16, 2


class Attend(nn.Module):
    """Queries from a map, keys and values from another; rows by hand, with whatever is added to the
    scores.
    """

    def __init__(self, width=WIDTH, causal=False):
        super().__init__()
        self.q, self.kv, self.o, self.causal = (
            nn.Linear(width, width),
            nn.Linear(width, 2 * width),
            nn.Linear(width, width),
            causal,
        )

    def forward(self, x, bias=None):
        heads = (*x.shape[:2], HEADS, -1)
        q = self.q(x).view(heads).transpose(1, 2)
        k, v = (part.view(heads).transpose(1, 2) for part in self.kv(x).chunk(2, -1))
        scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
        if bias is not None:
            scores = scores + bias
        if self.causal:
            scores = scores.masked_fill(
                torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -math.inf
            )
        return self.o((scores.softmax(-1) @ v).transpose(1, 2).flatten(-2))


def ffn(width=WIDTH):
    return nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))


class Block(nn.Module):
    def __init__(self, causal=True):
        super().__init__()
        self.n1, self.n2, self.mix, self.think = (
            nn.LayerNorm(WIDTH),
            nn.LayerNorm(WIDTH),
            Attend(causal=causal),
            ffn(),
        )

    def forward(self, x, bias=None):
        x = x + self.mix(self.n1(x), bias)
        return x + self.think(self.n2(x))


class PerceiverEncoder(nn.Module):
    """Latents read a long input once by cross-attention; a latent transformer follows."""

    def __init__(self):
        super().__init__()
        self.latents = nn.Parameter(torch.randn(5, WIDTH))
        self.embed = nn.Linear(3, WIDTH)
        self.read = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
        self.tower = nn.ModuleList([Block(causal=False) for _ in range(3)])
        self.answer = nn.Linear(WIDTH, 4)

    def forward(self, points):
        keys = self.embed(points)
        x = self.latents.expand(len(points), -1, -1)
        x = x + self.read(x, keys, keys, need_weights=False)[0]
        for block in self.tower:
            x = block(x)
        return self.answer(x.mean(1))


class DecisionTransformer(nn.Module):
    """Returns, states and actions in turn; predicts actions."""

    def __init__(self):
        super().__init__()
        self.ret, self.state, self.act = (
            nn.Linear(1, WIDTH),
            nn.Linear(4, WIDTH),
            nn.Embedding(6, WIDTH),
        )
        self.time = nn.Embedding(32, WIDTH)
        self.layers = nn.ModuleList([Block() for _ in range(3)])
        self.norm, self.policy = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 6)

    def forward(self, states, actions, returns, timesteps):
        t = self.time(timesteps)
        each = [self.ret(returns) + t, self.state(states) + t, self.act(actions) + t]
        x = torch.stack(each, 2).flatten(1, 2)
        for layer in self.layers:
            x = layer(x)
        return self.policy(self.norm(x)[:, 1::3])


class SpeechClassifier(nn.Module):
    """A convolutional front over a wave form, a class token, and blocks in an nn.Sequential."""

    def __init__(self):
        super().__init__()
        self.front = nn.Sequential(
            nn.Conv1d(1, 8, 8, 4), nn.GELU(), nn.Conv1d(8, WIDTH, 4, 2), nn.GELU()
        )
        self.cls = nn.Parameter(torch.randn(1, 1, WIDTH))
        self.body = nn.Sequential(*[Block(causal=False) for _ in range(2)])
        self.out = nn.Linear(WIDTH, 7)

    def forward(self, wave):
        x = self.front(wave[:, None]).transpose(1, 2)
        return self.out(self.body(torch.cat([self.cls.expand(len(x), -1, -1), x], 1))[:, 0])


class EdgeTransformer(nn.Module):
    """A graph: node features, and a bias of the scores from edge features, which every block is
    given.
    """

    def __init__(self):
        super().__init__()
        self.nodes, self.edges = nn.Linear(3, WIDTH), nn.Linear(2, HEADS)
        self.layers = nn.ModuleList([Block(causal=False) for _ in range(3)])
        self.energy = nn.Linear(WIDTH, 1)

    def forward(self, nodes, edges):
        x, bias = self.nodes(nodes), self.edges(edges).permute(0, 3, 1, 2)
        for layer in self.layers:
            x = layer(x, bias)
        return self.energy(x).sum((1, 2))


class TiedGPT(nn.Module):
    """The head is F.linear with the embedding's weight; there is no module for it."""

    def __init__(self, block=Block):
        super().__init__()
        self.wte, self.wpe = (
            nn.Embedding(VOCABULARY, WIDTH),
            nn.Parameter(0.1 * torch.randn(32, WIDTH)),
        )
        self.blocks = nn.ModuleList([block() for _ in range(3)])
        self.ln = nn.LayerNorm(WIDTH)

    def forward(self, idx):
        x = self.wte(idx) + self.wpe[: idx.shape[1]]
        for block in self.blocks:
            x = block(x)
        return F.linear(self.ln(x), self.wte.weight)


class DropPath(nn.Module):
    def __init__(self, p):
        super().__init__()
        self.p = p

    def forward(self, x):
        if not self.training:
            return x
        keep = torch.rand(len(x), 1, 1, device=x.device) >= self.p
        return x * keep / (1 - self.p)


class StochasticBlock(Block):
    """Stochastic depth, as a module around each map's output."""

    def __init__(self):
        super().__init__()
        self.drop = DropPath(0.2)

    def forward(self, x, bias=None):
        x = x + self.drop(self.mix(self.n1(x)))
        return x + self.drop(self.think(self.n2(x)))


class SkippingBlock(Block):
    """Stochastic depth by a branch of Python, in training alone."""

    def forward(self, x, bias=None):
        if self.training and float(torch.rand(())) < 0.2:
            return x
        return super().forward(x)


class DictBlock(Block):
    """Hands on a dict."""

    def forward(self, inputs):
        return {**inputs, "hidden": super().forward(inputs["hidden"])}


class DictGPT(TiedGPT):
    """Blocks hand on a dict, and so does the model."""

    def __init__(self):
        super().__init__(DictBlock)

    def forward(self, idx):
        inputs = {"hidden": self.wte(idx) + self.wpe[: idx.shape[1]], "depth": 0}
        for block in self.blocks:
            inputs = block(inputs)
        x = self.ln(inputs["hidden"])
        return {"features": x, "logits": F.linear(x, self.wte.weight)}


class BatchGPT(TiedGPT):
    """forward(batch: dict)."""

    def forward(self, batch):
        x = self.wte(batch["input_ids"]) + self.wpe[: batch["input_ids"].shape[1]]
        hidden = batch["mask"][:, None, None, :].to(x.dtype).log()
        for block in self.blocks:
            x = block(x, hidden)
        return {"logits": F.linear(self.ln(x), self.wte.weight)}


class LoRA(nn.Module):
    """W x + (alpha/r) B A x around a linear map that is frozen."""

    def __init__(self, base, rank=2, alpha=4.0):
        super().__init__()
        self.base, self.scale = base, alpha / rank
        self.a = nn.Parameter(0.3 * torch.randn(rank, base.in_features))
        self.b = nn.Parameter(0.3 * torch.randn(base.out_features, rank))

    def forward(self, x):
        return self.base(x) + self.scale * F.linear(F.linear(x, self.a), self.b)


class Int8Linear(nn.Module):
    """A weight of bytes with a scale for each row."""

    def __init__(self, base):
        super().__init__()
        scale = base.weight.detach().abs().amax(1, keepdim=True) / 127
        self.register_buffer("weight_int8", (base.weight.detach() / scale).round().to(torch.int8))
        self.register_buffer("scale", scale)
        self.bias = base.bias

    def forward(self, x):
        return F.linear(x, self.weight_int8.to(x.dtype) * self.scale.to(x.dtype), self.bias)


def wrapped(model, wrap):
    """The model with every linear map of its blocks wrapped."""
    for block in model.blocks:
        for part in [*block.modules()]:
            for name, child in [*part.named_children()]:
                if isinstance(child, nn.Linear):
                    setattr(part, name, wrap(child))
    return model

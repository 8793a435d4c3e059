"""Blocks as people have built them since 2022, for the models of `recent_models.py`."""

import math

import torch
import torch.nn.functional as F
from torch import nn

WIDTH = 32
HEADS = 4
DEPTH = 3


def rms(x):
    """A norm without a gain."""
    return F.rms_norm(x, (x.shape[-1],))


def heads_of(x):
    """(batch, tokens, width) as (batch, heads, tokens, channels)."""
    return x.unflatten(-1, (HEADS, -1)).transpose(1, 2)


def joined(y):
    return y.transpose(1, 2).flatten(2)


def rotary(x):
    """Halves of the channels, turned by the position."""
    half = x.shape[-1] // 2
    rates = 10000.0 ** -torch.linspace(0, 1, half, dtype=x.dtype)
    angles = torch.arange(x.shape[-2], dtype=x.dtype)[:, None] * rates
    a, b = x.chunk(2, -1)
    return torch.cat([a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()], -1)


class Attention(nn.Module):
    """Causal, rotary, with norms of queries and keys. `extra` is added to the values."""

    def __init__(self, kv_heads=HEADS):
        super().__init__()
        head = WIDTH // HEADS
        self.q = nn.Linear(WIDTH, WIDTH, bias=False)
        self.k = nn.Linear(WIDTH, kv_heads * head, bias=False)
        self.v = nn.Linear(WIDTH, kv_heads * head, bias=False)
        self.o = nn.Linear(WIDTH, WIDTH, bias=False)
        self.head = head

    def forward(self, x, extra=None):
        q, k, v = (
            m(x).unflatten(-1, (-1, self.head)).transpose(1, 2) for m in (self.q, self.k, self.v)
        )
        if extra is not None:
            v = v + heads_of(extra)
        y = F.scaled_dot_product_attention(
            rotary(rms(q)), rotary(rms(k)), v, is_causal=True, enable_gqa=True
        )
        return self.o(joined(y))


class SquaredReLU(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x):
        return self.down(F.relu(self.up(x)).square())


class SwiGLU(nn.Module):
    def __init__(self, inner=64):
        super().__init__()
        self.gate = nn.Linear(WIDTH, inner, bias=False)
        self.up = nn.Linear(WIDTH, inner, bias=False)
        self.down = nn.Linear(inner, WIDTH, bias=False)

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


class NanochatBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.attn = Attention(kv_heads=2)
        self.mlp = SquaredReLU()

    def forward(self, x):
        x = x + self.attn(rms(x))
        return x + self.mlp(rms(x))


class SpeedrunBlock(nn.Module):
    """As in modded-nanogpt: the state is mixed with the first one inside the block, and values with
    an embedding of their own.
    """

    def __init__(self):
        super().__init__()
        self.lambdas = nn.Parameter(torch.tensor([1.0, 0.2]))
        self.attn = Attention()
        self.mlp = SquaredReLU()

    def forward(self, x, x0, ve):
        x = self.lambdas[0] * x + self.lambdas[1] * x0
        x = x + self.attn(rms(x), ve)
        return x + self.mlp(rms(x))


class ReorderedBlock(nn.Module):
    """As in OLMo 2: the norm stands behind each map. With `inside`, one before it too."""

    def __init__(self, inside):
        super().__init__()
        self.attn = Attention()
        self.mlp = SwiGLU()
        self.attention_norm = nn.RMSNorm(WIDTH)
        self.feed_forward_norm = nn.RMSNorm(WIDTH)
        self.before_attention = nn.RMSNorm(WIDTH) if inside else nn.Identity()
        self.before_mlp = nn.RMSNorm(WIDTH) if inside else nn.Identity()

    def forward(self, x):
        x = x + self.attention_norm(self.attn(self.before_attention(x)))
        return x + self.feed_forward_norm(self.mlp(self.before_mlp(x)))


class KeelBlock(nn.Module):
    """A post-norm whose state is multiplied, with a norm before the map: N(a x + f(N x))."""

    def __init__(self, alpha=2.0 * DEPTH):
        super().__init__()
        self.alpha = alpha
        self.attn = Attention()
        self.mlp = SwiGLU()
        self.inner = nn.ModuleList([nn.RMSNorm(WIDTH) for _ in range(2)])
        self.outer = nn.ModuleList([nn.RMSNorm(WIDTH) for _ in range(2)])

    def forward(self, x):
        x = self.outer[0](self.alpha * x + self.attn(self.inner[0](x)))
        return self.outer[1](self.alpha * x + self.mlp(self.inner[1](x)))


class DeepNormBlock(nn.Module):
    """N(a x + f(x)), as in DeepNet."""

    def __init__(self):
        super().__init__()
        self.alpha = (2 * DEPTH) ** 0.25
        self.attn = Attention()
        self.ffn = nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, WIDTH))
        self.norm1 = nn.LayerNorm(WIDTH)
        self.norm2 = nn.LayerNorm(WIDTH)

    def forward(self, x):
        x = self.norm1(x * self.alpha + self.attn(x))
        return self.norm2(x * self.alpha + self.ffn(x))


class NormalisedBlock(nn.Module):
    """As in nGPT: the state stays on the sphere and moves a share of the way to the output."""

    def __init__(self):
        super().__init__()
        self.attn = Attention()
        self.mlp = SwiGLU()
        self.attn_rate = nn.Parameter(torch.full((WIDTH,), 0.2))
        self.mlp_rate = nn.Parameter(torch.full((WIDTH,), 0.2))

    def forward(self, x):
        x = F.normalize(x + self.attn_rate * (F.normalize(self.attn(x), dim=-1) - x), dim=-1)
        return F.normalize(x + self.mlp_rate * (F.normalize(self.mlp(x), dim=-1) - x), dim=-1)


class ParallelBlock(nn.Module):
    """As in PaLM: attention and FFN read one norm, and are added at once."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH, bias=False)
        self.attn = Attention(kv_heads=1)
        self.mlp = SwiGLU()

    def forward(self, x):
        z = self.norm(x)
        return x + self.attn(z) + self.mlp(z)


class DifferentialAttention(nn.Module):
    """The difference of two softmaxes, the second one weighted."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.weight = nn.Parameter(torch.tensor(0.3))
        self.norm = nn.RMSNorm(WIDTH // HEADS)

    def forward(self, x):
        q, k, v = map(heads_of, self.qkv(x).chunk(3, -1))
        later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        rows = []
        for a, b in zip(q.chunk(2, -1), k.chunk(2, -1), strict=True):
            scores = a @ b.mT / math.sqrt(a.shape[-1])
            rows.append(scores.masked_fill(later, -torch.inf).softmax(-1))
        return self.out(joined(self.norm((rows[0] - self.weight * rows[1]) @ v)))


class DifferentialBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1 = nn.RMSNorm(WIDTH)
        self.norm2 = nn.RMSNorm(WIDTH)
        self.attn = DifferentialAttention()
        self.mlp = SwiGLU()

    def forward(self, x):
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class GatedLinearAttention(nn.Module):
    """A state of keys and values that decays by a gate of the token: no softmax."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.decay = nn.Linear(WIDTH, HEADS)
        self.gate = nn.Linear(WIDTH, WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x):
        q, k, v = map(heads_of, self.qkv(x).chunk(3, -1))
        keep = torch.sigmoid(self.decay(x)).mT[..., None, None]
        memory = torch.zeros_like(q[:, :, 0, :, None] * v[:, :, 0, None])
        out = []
        for t in range(x.shape[1]):
            memory = keep[:, :, t] * memory + k[:, :, t, :, None] * v[:, :, t, None]
            out.append((q[:, :, t, None] @ memory)[:, :, 0])
        return self.out(joined(torch.stack(out, 2)) * torch.sigmoid(self.gate(x)))


class LinearBlock(DifferentialBlock):
    def __init__(self):
        super().__init__()
        self.attn = GatedLinearAttention()


class LatentAttention(nn.Module):
    """As in DeepSeek: keys and values come from a few shared channels."""

    def __init__(self, latent=8):
        super().__init__()
        self.q = nn.Linear(WIDTH, WIDTH, bias=False)
        self.down = nn.Linear(WIDTH, latent, bias=False)
        self.norm = nn.RMSNorm(latent)
        self.up = nn.Linear(latent, 2 * WIDTH, bias=False)
        self.o = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x):
        k, v = self.up(self.norm(self.down(x))).chunk(2, -1)
        q, k, v = map(heads_of, (self.q(x), k, v))
        y = F.scaled_dot_product_attention(rotary(q), rotary(k), v, is_causal=True)
        return self.o(joined(y))


class SharedExperts(nn.Module):
    """Two of six experts for each token, and one for all."""

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(WIDTH, 6, bias=False)
        self.experts = nn.ModuleList([SwiGLU(16) for _ in range(6)])
        self.shared = SwiGLU(32)

    def forward(self, x):
        weights, chosen = torch.sigmoid(self.router(x)).topk(2, -1)
        weights = weights / weights.sum(-1, keepdim=True)
        y = self.shared(x)
        for number, expert in enumerate(self.experts):
            share = (weights * (chosen == number)).sum(-1, keepdim=True)
            y = y + share * expert(x)
        return y


class ExpertBlock(DifferentialBlock):
    def __init__(self):
        super().__init__()
        self.attn = LatentAttention()
        self.mlp = SharedExperts()


class SinkAttention(nn.Module):
    """As in gpt-oss: a window of tokens, and a learned logit of each head that gets weight and has
    no value.
    """

    def __init__(self, window=4):
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.sinks = nn.Parameter(torch.zeros(HEADS))
        self.window = window

    def forward(self, x):
        q, k, v = map(heads_of, self.qkv(x).chunk(3, -1))
        scores = rotary(q) @ rotary(k).mT / math.sqrt(q.shape[-1])
        behind = torch.arange(x.shape[1])[:, None] - torch.arange(x.shape[1])
        is_seen = (behind >= 0) & (behind < self.window)
        scores = scores.masked_fill(~is_seen, -torch.inf)
        sinks = self.sinks[None, :, None, None].expand(*scores.shape[:-1], 1)
        weights = torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]
        return self.out(joined(weights @ v))


class SinkBlock(DifferentialBlock):
    def __init__(self):
        super().__init__()
        self.attn = SinkAttention()


class MemoryBlock(nn.Module):
    """As in LIMe: keys and values read a learned mix of all earlier states."""

    def __init__(self, number):
        super().__init__()
        self.mix = nn.Parameter(torch.full((number + 1,), 1 / (number + 1)))
        self.norm = nn.RMSNorm(WIDTH)
        self.q = nn.Linear(WIDTH, WIDTH, bias=False)
        self.kv = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.o = nn.Linear(WIDTH, WIDTH, bias=False)
        self.norm2 = nn.RMSNorm(WIDTH)
        self.mlp = SwiGLU()

    def forward(self, states):
        x = states[-1]
        memory = sum(w * s for w, s in zip(self.mix, states, strict=True))
        k, v = self.kv(self.norm(memory)).chunk(2, -1)
        q, k, v = map(heads_of, (self.q(self.norm(x)), k, v))
        x = x + self.o(joined(F.scaled_dot_product_attention(q, k, v, is_causal=True)))
        return x + self.mlp(self.norm2(x))


class ScaledBlock(nn.Module):
    """As in DINOv2: each sublayer is scaled by a vector of small numbers."""

    def __init__(self):
        super().__init__()
        self.norm1 = nn.LayerNorm(WIDTH)
        self.attn = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
        self.ls1 = nn.Parameter(torch.full((WIDTH,), 0.1))
        self.norm2 = nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, WIDTH))
        self.ls2 = nn.Parameter(torch.full((WIDTH,), 0.1))

    def forward(self, x):
        z = self.norm1(x)
        x = x + self.ls1 * self.attn(z, z, z, need_weights=False)[0]
        return x + self.ls2 * self.mlp(self.norm2(x))


class BiasedAttention(nn.Module):
    """As in T5: no scale, a learned bias by distance, and a context to read if one is given."""

    def __init__(self, has_bias):
        super().__init__()
        self.q = nn.Linear(WIDTH, WIDTH, bias=False)
        self.kv = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.o = nn.Linear(WIDTH, WIDTH, bias=False)
        self.bias = nn.Embedding(32, HEADS) if has_bias else None

    def forward(self, x, context=None, *, causal=False):
        source = x if context is None else context
        k, v = self.kv(source).chunk(2, -1)
        q, k, v = map(heads_of, (self.q(x), k, v))
        scores = q @ k.mT
        if self.bias is not None:
            distance = torch.arange(x.shape[1]) - torch.arange(x.shape[1])[:, None]
            scores = scores + self.bias(distance.clamp(-16, 15) + 16).permute(2, 0, 1)
        if causal:
            later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
            scores = scores.masked_fill(later, -torch.inf)
        return self.o(joined(scores.softmax(-1) @ v))


class T5Block(nn.Module):
    def __init__(self, is_decoder):
        super().__init__()
        self.own = BiasedAttention(has_bias=True)
        self.cross = BiasedAttention(has_bias=False) if is_decoder else None
        self.ff = SwiGLU()
        self.norms = nn.ModuleList([nn.RMSNorm(WIDTH) for _ in range(3)])

    def forward(self, x, context=None):
        x = x + self.own(self.norms[0](x), causal=self.cross is not None)
        if self.cross is not None:
            x = x + self.cross(self.norms[1](x), context)
        return x + self.ff(self.norms[2](x))

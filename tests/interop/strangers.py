"""More models as strangers write them; see `examples/unlike_models.py`."""

import math

import torch
import torch.nn.functional as F
from torch import nn

from examples.unlike_models import MHA, D, H, PreBlock, V, mlp


class DecBlock(nn.Module):
    """Attention, cross-attention, FFN."""

    def __init__(self):
        super().__init__()
        self.l1, self.l2, self.l3 = (nn.LayerNorm(D) for _ in range(3))
        self.sa, self.ca, self.ff = MHA(causal=True), MHA(), mlp()

    def forward(self, x, mem):
        x = x + self.sa(self.l1(x))
        x = x + self.ca(self.l2(x), mem)
        return x + self.ff(self.l3(x))


class MiniWhisper(nn.Module):
    """Sound to tokens."""

    def __init__(self):
        super().__init__()
        self.c1, self.c2 = nn.Conv1d(8, D, 3, padding=1), nn.Conv1d(D, D, 3, 2, 1)
        self.enc = nn.ModuleList(PreBlock(causal=False) for _ in range(2))
        self.ln = nn.LayerNorm(D)
        self.te = nn.Embedding(V, D)
        self.dec = nn.ModuleList(DecBlock() for _ in range(2))
        self.lo = nn.LayerNorm(D)

    def forward(self, mel, tokens):
        x = F.gelu(self.c2(F.gelu(self.c1(mel)))).mT
        for b in self.enc:
            x = b(x)
        x = self.ln(x)
        y = self.te(tokens)
        for b in self.dec:
            y = b(y, x)
        return self.lo(y) @ self.te.weight.T


class SwinBlock(nn.Module):
    """Attention in windows, which may be shifted."""

    def __init__(self, shift):
        super().__init__()
        self.shift, self.n1, self.n2, self.att, self.ff = (
            shift,
            nn.LayerNorm(D),
            nn.LayerNorm(D),
            MHA(),
            mlp(),
        )

    def forward(self, x):
        B, Hh, W, C = x.shape
        y = self.n1(x)
        if self.shift:
            y = torch.roll(y, (-1, -1), (1, 2))
        y = y.view(B, Hh // 2, 2, W // 2, 2, C).transpose(2, 3).reshape(-1, 4, C)
        y = self.att(y).view(B, Hh // 2, W // 2, 2, 2, C).transpose(2, 3).reshape(B, Hh, W, C)
        if self.shift:
            y = torch.roll(y, (1, 1), (1, 2))
        x = x + y
        return x + self.ff(self.n2(x))


class Swin(nn.Module):
    """States are (batch, height, width, channels)."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, D, 4, 4)
        self.stages = nn.ModuleList([nn.Sequential(SwinBlock(0), SwinBlock(1))])
        self.fc = nn.Linear(D, 5)

    def forward(self, x):
        x = self.stem(x).permute(0, 2, 3, 1)
        for st in self.stages:
            x = st(x)
        return self.fc(x.mean((1, 2)))


class TimeMix(nn.Module):
    """RWKV's mixing along time."""

    def __init__(self):
        super().__init__()
        self.r, self.k, self.v, self.o = (nn.Linear(D, D, bias=False) for _ in range(4))
        self.w = nn.Parameter(torch.rand(D))
        self.mu = nn.Parameter(torch.rand(D))

    def forward(self, x, state=None):
        xx = F.pad(x, (0, 0, 1, -1))
        xm = x * self.mu + xx * (1 - self.mu)
        k, v, r = self.k(xm), self.v(xm), self.r(xm).sigmoid()
        num = den = torch.zeros_like(k[:, 0])
        out = []
        for i in range(k.shape[1]):
            e = k[:, i].clamp(max=20).exp()
            num = num * torch.exp(-self.w) + e * v[:, i]
            den = den * torch.exp(-self.w) + e
            out.append(num / den)
        return self.o(r * torch.stack(out, 1)), (num, den)


class ChanMix(nn.Module):
    """RWKV's FFN, which reads the token before."""

    def __init__(self):
        super().__init__()
        self.k, self.v, self.r = (
            nn.Linear(D, 2 * D, bias=False),
            nn.Linear(2 * D, D, bias=False),
            nn.Linear(D, D, bias=False),
        )
        self.mu = nn.Parameter(torch.rand(D))

    def forward(self, x):
        xm = x * self.mu + F.pad(x, (0, 0, 1, -1)) * (1 - self.mu)
        return self.r(xm).sigmoid() * self.v(F.relu(self.k(xm)) ** 2)


class RWKVBlock(nn.Module):
    """It returns the state of its recurrence, too."""

    def __init__(self):
        super().__init__()
        self.l1, self.l2, self.tm, self.cm = nn.LayerNorm(D), nn.LayerNorm(D), TimeMix(), ChanMix()

    def forward(self, x, state=None):
        y, st = self.tm(self.l1(x), state)
        x = x + y
        return x + self.cm(self.l2(x)), st


class RWKV(nn.Module):
    """A recurrent language model."""

    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(V, D)
        self.ln0 = nn.LayerNorm(D)
        self.blocks = nn.ModuleList(RWKVBlock() for _ in range(3))
        self.head = nn.Linear(D, V, bias=False)

    def forward(self, idx):
        x = self.ln0(self.emb(idx))
        sts = []
        for b in self.blocks:
            x, st = b(x)
            sts.append(st)
        return self.head(x), sts


class MoE(nn.Module):
    """Two of four experts for each token."""

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(D, 4)
        self.experts = nn.ModuleList(mlp() for _ in range(4))

    def forward(self, x):
        p, i = self.router(x).softmax(-1).topk(2)
        out = 0
        for e, f in enumerate(self.experts):
            out = out + f(x) * (p * (i == e)).sum(-1, keepdim=True)
        return out, p.var()


class MoEBlock(nn.Module):
    """It returns the loss of its router, too."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.att, self.moe = nn.RMSNorm(D), nn.RMSNorm(D), MHA(causal=True), MoE()

    def forward(self, x):
        x = x + self.att(self.a(x))
        y, aux = self.moe(self.b(x))
        return x + y, aux


class MoELM(nn.Module):
    """It reads a dict and returns a dict."""

    def __init__(self):
        super().__init__()
        self.e = nn.Embedding(V, D)
        self.h = nn.ModuleList(MoEBlock() for _ in range(3))
        self.o = nn.Linear(D, V)

    def forward(self, batch):
        x, aux = self.e(batch["input_ids"]), 0.0
        for b in self.h:
            x, a = b(x)
            aux = aux + a
        return {"logits": self.o(x), "aux": aux}


class InlineBlock(nn.Module):
    """Attention in the block's own forward."""

    def __init__(self):
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(D), nn.LayerNorm(D)
        self.qkv, self.o, self.f1, self.f2 = (
            nn.Linear(D, 3 * D),
            nn.Linear(D, D),
            nn.Linear(D, 48),
            nn.Linear(48, D),
        )

    def forward(self, x):
        B, T, C = x.shape
        q, k, v = self.qkv(self.n1(x)).view(B, T, 3, H, -1).permute(2, 0, 3, 1, 4)
        w = (
            (q @ k.mT / math.sqrt(C // H))
            .masked_fill(torch.ones(T, T, device=q.device).triu(1).bool(), -torch.inf)
            .softmax(-1)
        )
        x = x + self.o((w @ v).transpose(1, 2).reshape(B, T, C))
        return x + self.f2(F.gelu(self.f1(self.n2(x))))


class AttrGPT(nn.Module):
    """Blocks are attributes."""

    def __init__(self):
        super().__init__()
        self.e = nn.Embedding(V, D)
        self.block1, self.block2, self.block3 = InlineBlock(), InlineBlock(), InlineBlock()
        self.o = nn.Linear(D, V)

    def forward(self, x):
        return self.o(self.block3(self.block2(self.block1(self.e(x)))))


class PreNormAttn(nn.Module):
    """The norm is inside of the map."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(D)
        self.to_qkv = nn.Linear(D, 3 * D, bias=False)
        self.to_out = nn.Linear(D, D)

    def forward(self, x):
        q, k, v = self.to_qkv(self.norm(x)).unflatten(-1, (3, H, -1)).permute(2, 0, 3, 1, 4)
        return self.to_out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Lucid(nn.Module):
    """Lists of lists: x = f(x) + x in the model."""

    def __init__(self):
        super().__init__()
        self.to_patch = nn.Linear(48, D)
        self.layers = nn.ModuleList(
            [
                nn.ModuleList(
                    [
                        PreNormAttn(),
                        nn.Sequential(
                            nn.LayerNorm(D), nn.Linear(D, 48), nn.GELU(), nn.Linear(48, D)
                        ),
                    ]
                )
                for _ in range(3)
            ]
        )
        self.norm = nn.LayerNorm(D)
        self.head = nn.Linear(D, 7)

    def forward(self, img):
        x = F.unfold(img, 4, stride=4).mT
        x = self.to_patch(x)
        for attn, ff in self.layers:
            x = attn(x) + x
            x = ff(x) + x
        return self.head(self.norm(x).mean(1))


class FTT(nn.Module):
    """Numbers and categories as tokens, in a dict."""

    def __init__(self):
        super().__init__()
        self.w, self.b = nn.Parameter(torch.randn(4, D)), nn.Parameter(torch.zeros(4, D))
        self.cat = nn.ModuleList(nn.Embedding(5, D) for _ in range(2))
        self.cls = nn.Parameter(torch.randn(1, 1, D))
        self.layers = nn.ModuleList(PreBlock(causal=False) for _ in range(2))
        self.o = nn.Linear(D, 1)

    def forward(self, batch):
        x = torch.cat(
            [self.cls.expand(len(batch["num"]), -1, -1), batch["num"][..., None] * self.w + self.b]
            + [e(batch["cat"][:, i])[:, None] for i, e in enumerate(self.cat)],
            1,
        )
        for layer in self.layers:
            x = layer(x)
        return self.o(x[:, 0])


class TwoStreamBlock(nn.Module):
    """States of tokens and of pairs."""

    def __init__(self):
        super().__init__()
        self.a, self.ff, self.n1, self.n2, self.np, self.bias, self.pp = (
            MHA(),
            mlp(),
            nn.LayerNorm(D),
            nn.LayerNorm(D),
            nn.LayerNorm(8),
            nn.Linear(8, H),
            nn.Linear(8, 8),
        )

    def forward(self, x, pair):
        x = x + self.a(self.n1(x))
        x = x + self.ff(self.n2(x)) + self.bias(self.np(pair)).mean((2, 3))[..., None]
        return x, pair + self.pp(self.np(pair))


class TwoStream(nn.Module):
    """Two streams."""

    def __init__(self):
        super().__init__()
        self.e = nn.Linear(4, D)
        self.p = nn.Linear(1, 8)
        self.blocks = nn.ModuleList(TwoStreamBlock() for _ in range(3))
        self.o = nn.Linear(D, 3)

    def forward(self, x):
        pair = self.p((x[:, :, None] - x[:, None]).norm(dim=-1, keepdim=True))
        h = self.e(x)
        for b in self.blocks:
            h, pair = b(h, pair)
        return self.o(h)


class ConvModule(nn.Module):
    """A convolution with gates."""

    def __init__(self):
        super().__init__()
        self.n, self.p1, self.dw, self.bn, self.p2 = (
            nn.LayerNorm(D),
            nn.Conv1d(D, 2 * D, 1),
            nn.Conv1d(D, D, 3, padding=1, groups=D),
            nn.BatchNorm1d(D),
            nn.Conv1d(D, D, 1),
        )

    def forward(self, x):
        return self.p2(F.silu(self.bn(self.dw(F.glu(self.p1(self.n(x).mT), 1))))).mT


class ConformerBlock(nn.Module):
    """Half an FFN, attention, a convolution, half an FFN, a norm."""

    def __init__(self):
        super().__init__()
        self.f1, self.f2 = (
            nn.Sequential(nn.LayerNorm(D), nn.Linear(D, 48), nn.SiLU(), nn.Linear(48, D))
            for _ in range(2)
        )
        self.na, self.att, self.conv, self.n = (
            nn.LayerNorm(D),
            nn.MultiheadAttention(D, H, batch_first=True),
            ConvModule(),
            nn.LayerNorm(D),
        )

    def forward(self, x, mask=None):
        x = x + 0.5 * self.f1(x)
        y = self.na(x)
        x = x + self.att(y, y, y, key_padding_mask=mask, need_weights=False)[0]
        x = x + self.conv(x)
        return self.n(x + 0.5 * self.f2(x))


class Conformer(nn.Module):
    """Frames of sound with lengths, which make a padding mask."""

    def __init__(self):
        super().__init__()
        self.i = nn.Linear(8, D)
        self.layers = nn.ModuleList(ConformerBlock() for _ in range(3))
        self.o = nn.Linear(D, V)

    def forward(self, feats, lengths):
        mask = torch.arange(feats.shape[1], device=feats.device)[None] >= lengths[:, None]
        x = self.i(feats)
        for layer in self.layers:
            x = layer(x, mask)
        return self.o(x).log_softmax(-1)

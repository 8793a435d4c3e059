"""Blocks of unusual form, for the models of `unlike_models.py`."""

import torch
import torch.nn.functional as F
from torch import nn

V, D, H = 53, 24, 4
"""Sizes of the vocabulary, the states and the heads' number."""


class MHA(nn.Module):
    """Attention, or cross-attention to a context."""

    def __init__(self, d=D, h=H, *, causal=False):
        super().__init__()
        self.h, self.causal = h, causal
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(d, d) for _ in range(4))

    def forward(self, x, ctx=None):
        ctx = x if ctx is None else ctx
        q, k, v = (
            f(z).unflatten(-1, (self.h, -1)).transpose(1, 2)
            for f, z in ((self.wq, x), (self.wk, ctx), (self.wv, ctx))
        )
        return self.wo(
            F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
            .transpose(1, 2)
            .flatten(2)
        )


def mlp(d=D, m=2):
    return nn.Sequential(nn.Linear(d, m * d), nn.GELU(), nn.Linear(m * d, d))


class PreBlock(nn.Module):
    """X + f(N X)."""

    def __init__(self, *, causal=True):
        super().__init__()
        self.ln1, self.att, self.ln2, self.ff = (
            nn.LayerNorm(D),
            MHA(causal=causal),
            nn.LayerNorm(D),
            mlp(),
        )

    def forward(self, x):
        x = x + self.att(self.ln1(x))
        return x + self.ff(self.ln2(x))


class DiTBlock(nn.Module):
    """adaLN: gains, offsets and scales depend on the context c."""

    def __init__(self):
        super().__init__()
        self.n1 = nn.LayerNorm(D, elementwise_affine=False, eps=1e-6)
        self.n2 = nn.LayerNorm(D, elementwise_affine=False, eps=1e-6)
        self.attn, self.mlp, self.ada = MHA(), mlp(), nn.Sequential(nn.SiLU(), nn.Linear(D, 6 * D))

    def forward(self, x, c):
        a, b, e, f, gg, h = self.ada(c).chunk(6, -1)
        x = x + e[:, None] * self.attn(self.n1(x) * (1 + b[:, None]) + a[:, None])
        return x + h[:, None] * self.mlp(self.n2(x) * (1 + gg[:, None]) + f[:, None])


class GatedConv(nn.Module):
    """A convolution and a linear recurrence with a gate, no attention."""

    def __init__(self):
        super().__init__()
        self.norm = nn.RMSNorm(D)
        self.inp = nn.Linear(D, 4 * D)
        self.conv = nn.Conv1d(2 * D, 2 * D, 3, padding=2, groups=2 * D)
        self.out = nn.Linear(2 * D, D)
        self.a = nn.Parameter(torch.rand(2 * D))

    def forward(self, x):
        u, z = self.inp(self.norm(x)).chunk(2, -1)
        u = F.silu(self.conv(u.mT)[..., : x.shape[1]]).mT
        hs, h = [], torch.zeros_like(u[:, 0])
        for i in range(u.shape[1]):
            h = self.a.sigmoid() * h + u[:, i]
            hs.append(h)
        return x + self.out(torch.stack(hs, 1) * F.silu(z))


class CNBlock(nn.Module):
    """A residual convolution."""

    def __init__(self, c=D):
        super().__init__()
        self.dw = nn.Conv2d(c, c, 5, padding=2, groups=c)
        self.n = nn.LayerNorm(c)
        self.p1, self.p2 = nn.Linear(c, 4 * c), nn.Linear(4 * c, c)
        self.gamma = nn.Parameter(0.5 * torch.ones(c))

    def forward(self, x):
        y = self.dw(x).permute(0, 2, 3, 1)
        y = self.gamma * self.p2(F.gelu(self.p1(self.n(y))))
        return x + y.permute(0, 3, 1, 2)


class MixBlock(nn.Module):
    """MLPs along tokens and along channels."""

    def __init__(self, n=16):
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(D), nn.LayerNorm(D)
        self.tok, self.ch = mlp(n), mlp()

    def forward(self, x):
        x = x + self.tok(self.n1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.ch(self.n2(x))


class PerceiverBlock(nn.Module):
    """Cross-attention to the input, attention, FFN."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c, self.ca, self.sa, self.ff = (
            nn.LayerNorm(D),
            nn.LayerNorm(D),
            nn.LayerNorm(D),
            MHA(),
            MHA(),
            mlp(),
        )

    def forward(self, z, inp):
        z = z + self.ca(self.a(z), inp)
        z = z + self.sa(self.b(z))
        return z + self.ff(self.c(z))


class GAU(nn.Module):
    """A gated attention unit: one map, its rows not a softmax."""

    def __init__(self):
        super().__init__()
        self.n, self.uv, self.z, self.o = (
            nn.LayerNorm(D),
            nn.Linear(D, 4 * D),
            nn.Linear(D, 8),
            nn.Linear(2 * D, D),
        )
        self.gam, self.bet = nn.Parameter(torch.randn(2, 8)), nn.Parameter(torch.zeros(2, 8))

    def forward(self, x):
        y = self.n(x)
        u, v = F.silu(self.uv(y)).chunk(2, -1)
        z = F.silu(self.z(y))
        q, k = (z[..., None, :] * self.gam + self.bet).unbind(-2)
        a = F.relu(q @ k.mT / x.shape[1]) ** 2
        return x + self.o(u * (a.tril() @ v))

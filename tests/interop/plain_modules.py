"""Modules as people write them who have not heard of ctrans: no config, no common base, names and
habits of their own.
"""

import torch
import torch.nn.functional as F
from torch import nn

from tests.helpers import learned

VOCABULARY, WIDTH, HEADS = 31, 32, 4


class FusedAttention(nn.Module):
    """One linear map for queries, keys and values, and torch's fused kernel."""

    def __init__(self, causal):
        super().__init__()
        self.causal = causal
        self.qkv, self.proj, self.drop = (
            nn.Linear(WIDTH, 3 * WIDTH),
            nn.Linear(WIDTH, WIDTH),
            nn.Dropout(0.1),
        )

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.drop(self.proj(y.transpose(1, 2).flatten(-2)))


class SoftmaxAttention(nn.Module):
    """Three linear maps, scores and softmax by hand, and a mask that is an argument."""

    def __init__(self):
        super().__init__()
        self.to_q, self.to_k, self.to_v, self.o = (
            nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4)
        )

    def forward(self, h, mask):
        q, k, v = (
            f(h).view(*h.shape[:2], HEADS, -1).transpose(1, 2)
            for f in (self.to_q, self.to_k, self.to_v)
        )
        rows = (q @ k.transpose(-1, -2) / (WIDTH / HEADS) ** 0.5 + mask).softmax(-1)
        return self.o((rows @ v).transpose(1, 2).flatten(-2))


class PreBlock(nn.Module):
    """X + s f(N X), the FFN's two maps in the block itself with GELU as a function between them."""

    def __init__(self, scale):
        super().__init__()
        self.ln_a, self.mix, self.ln_b = (
            nn.LayerNorm(WIDTH),
            FusedAttention(True),
            nn.LayerNorm(WIDTH),
        )
        self.grow, self.shrink, self.scale = nn.Linear(WIDTH, 48), nn.Linear(48, WIDTH), scale

    def forward(self, x):
        x = x + self.scale * self.mix(self.ln_a(x))
        return x + self.scale * self.shrink(F.gelu(self.grow(self.ln_b(x))))


class LanguageModel(nn.Module):
    """A GPT of one's own, whose blocks stand in `stack`; `scales` by layer."""

    def __init__(self, scales=(1.0, 1.0, 1.0)):
        super().__init__()
        self.tok, self.pos = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(16, WIDTH)
        self.stack = nn.ModuleList([PreBlock(scale) for scale in scales])
        self.ln, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, idx):
        x = self.tok(idx) + self.pos(torch.arange(idx.shape[1]))
        for block in self.stack:
            x = block(x)
        return self.out(self.ln(x))


class PostBlock(nn.Module):
    """N(X + f(X)) around torch's own attention; returns the state and something else."""

    def __init__(self):
        super().__init__()
        self.a = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
        self.n1, self.n2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.ff = nn.Sequential(nn.Linear(WIDTH, 64), nn.ReLU(), nn.Linear(64, WIDTH))

    def forward(self, x):
        y, rows = self.a(x, x, x)
        x = self.n1(x + y)
        return self.n2(x + self.ff(x)), rows


class AudioClassifier(nn.Module):
    """Frames of features, by keyword only; a mean over frames; a dict."""

    def __init__(self):
        super().__init__()
        self.frontend = nn.Linear(5, WIDTH)
        self.layers = nn.ModuleList([PostBlock(), PostBlock()])
        self.cls = nn.Linear(WIDTH, 3)

    def forward(self, *, frames, gain=1.0):
        x = self.frontend(gain * frames)
        for layer in self.layers:
            x, _ = layer(x)
        return {"scores": self.cls(x.mean(1)), "logits": self.cls(x.mean(1))}


class RootMeanSquare(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(WIDTH)), 1e-6

    def forward(self, x):
        return self.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)


class LayerScale(nn.Module):
    def __init__(self):
        super().__init__()
        self.gamma = nn.Parameter(torch.linspace(0.1, 0.3, WIDTH))

    def forward(self, x):
        return x * self.gamma


class GatedBlock(nn.Module):
    """RMSNorm, a gated FFN whose three maps stand in the block, and LayerScale as a module and as a
    bare parameter.
    """

    def __init__(self, scaled):
        super().__init__()
        self.norm1, self.attn, self.norm2 = (
            RootMeanSquare(),
            FusedAttention(False),
            RootMeanSquare(),
        )
        self.w1, self.w3, self.w2 = (
            nn.Linear(*shape, bias=False) for shape in ((WIDTH, 40), (WIDTH, 40), (40, WIDTH))
        )
        self.ls1 = LayerScale() if scaled else nn.Identity()
        self.ls2 = nn.Parameter(torch.linspace(0.3, 0.1, WIDTH)) if scaled else 1.0

    def forward(self, x):
        x = x + self.ls1(self.attn(self.norm1(x)))
        u = self.norm2(x)
        return x + self.ls2 * self.w2(F.silu(self.w1(u)) * self.w3(u))


class ImageClassifier(nn.Module):
    """Patches by a convolution, a class token, blocks in an nn.Sequential, a head on the class
    token.
    """

    def __init__(self, scaled=False):
        super().__init__()
        self.patches = nn.Conv2d(3, WIDTH, 4, 4)
        self.token, self.places = (
            nn.Parameter(torch.zeros(1, 1, WIDTH)),
            nn.Parameter(torch.zeros(1, 5, WIDTH)),
        )
        self.blocks = nn.Sequential(*(GatedBlock(scaled) for _ in range(2)))
        self.norm, self.head = RootMeanSquare(), nn.Linear(WIDTH, 4)

    def forward(self, images):
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], dim=1) + self.places
        return self.head(self.norm(self.blocks(x))[:, 0])


class MaskedBlock(nn.Module):
    """A mask handed down from the model, and an output norm."""

    def __init__(self):
        super().__init__()
        self.att, self.after = SoftmaxAttention(), nn.LayerNorm(WIDTH)
        self.mlp, self.after_mlp = (
            nn.Sequential(nn.Linear(WIDTH, 48), nn.SiLU(), nn.Linear(48, WIDTH)),
            nn.LayerNorm(WIDTH),
        )

    def forward(self, mask, hidden):
        hidden = hidden + self.after(self.att(hidden, mask))
        return hidden + self.after_mlp(self.mlp(hidden))


class Regression(nn.Module):
    """Real numbers in and out, blocks that get their state second, under a wrapper, with a causal
    mask.
    """

    def __init__(self):
        super().__init__()
        self.net = nn.ModuleDict(
            {"inp": nn.Linear(3, WIDTH), "trunk": nn.ModuleList([MaskedBlock(), MaskedBlock()])}
        )
        self.out = nn.Linear(WIDTH, 1)

    def forward(self, series):
        mask = torch.full((series.shape[1],) * 2, -torch.inf, dtype=series.dtype).triu(1)
        x = self.net["inp"](series)
        for block in self.net["trunk"]:
            x = block(mask, x)
        return self.out(x).squeeze(-1)


class Encoder(nn.Module):
    """torch's own Transformer layers, in either order of axes."""

    def __init__(self, norm_first, batch_first, causal=False):
        super().__init__()
        layer = nn.TransformerEncoderLayer(
            WIDTH, HEADS, 64, norm_first=norm_first, batch_first=batch_first
        )
        self.table, self.out = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.causal, self.batch_first = causal, batch_first

    def forward(self, src):
        length = src.shape[1 if self.batch_first else 0]
        mask = nn.Transformer.generate_square_subsequent_mask(length) if self.causal else None
        return self.out(self.encoder(self.table(src), mask=mask))


def ids(batch=2, tokens=7, seed=0):
    return torch.randint(VOCABULARY, (batch, tokens), generator=torch.Generator().manual_seed(seed))


def numbers(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


PLAIN = {
    "language": (LanguageModel, lambda seed: ids(seed=seed), "pre"),
    "audio": (AudioClassifier, lambda seed: {"frames": numbers(2, 6, 5, seed=seed)}, "post"),
    "images": (ImageClassifier, lambda seed: numbers(2, 3, 8, 8, seed=seed), "pre"),
    "images, by channel": (
        lambda: ImageClassifier(True),
        lambda seed: numbers(2, 3, 8, 8, seed=seed),
        "pre",
    ),
    "regression": (Regression, lambda seed: numbers(2, 6, 3, seed=seed), "output"),
    "torch, pre": (lambda: Encoder(True, True), lambda seed: ids(seed=seed), "pre"),
    "torch, post, causal": (
        lambda: Encoder(False, True, True),
        lambda seed: ids(seed=seed),
        "post",
    ),
    "torch, tokens first": (
        lambda: Encoder(True, False, True),
        lambda seed: ids(seed=seed).T.contiguous(),
        "pre",
    ),
    "torch, post, tokens first": (
        lambda: Encoder(False, False),
        lambda seed: ids(seed=seed).T.contiguous(),
        "post",
    ),
}
"""Modules, an input by seed, and their placement. An entry is enrolled in every test of plain
modules.
"""


def plain(name):
    """That module in eval mode, every parameter moved off its initial value."""
    torch.manual_seed(0)
    return learned(PLAIN[name][0]().eval(), 0.05)


class MadeNorm(nn.Module):
    """A norm as people write it by hand; `kind` is how."""

    def __init__(self, width, kind):
        super().__init__()
        self.kind, self.eps = kind, 1e-6
        for name, value in MADE_NORMS[kind].items():
            setattr(self, name, nn.Parameter(torch.full((width,), value)))

    def forward(self, x):
        root = torch.rsqrt(
            x.square().mean(-1, keepdim=True) + (1e-6 if "inline" in self.kind else self.eps)
        )
        if self.kind == "functional, unit length":
            return F.normalize(x, dim=-1) * x.shape[-1] ** 0.5 * self.g
        if self.kind == "annotated":
            return (
                self.a_2 * (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + self.eps)
                + self.b_2
            )
        if self.kind == "one added":
            return x * root * (1 + self.w)
        if self.kind == "layer norm, inline":
            centred = x - x.mean(-1, keepdim=True)
            return (
                centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + 1e-6) * self.scale
                + self.shift
            )
        return x * root if self.kind == "no gain" else x * root * next(iter(self.parameters()))


MADE_NORMS = {
    "g, inline": {"g": 1.0},
    "gain": {"gain": 1.0},
    "functional, unit length": {"g": 1.0},
    "annotated": {"a_2": 1.0, "b_2": 0.0},
    "one added": {"w": 0.0},
    "layer norm, inline": {"scale": 1.0, "shift": 0.0},
    "no gain": {},
}


def with_norms(kind):
    """The language model with norms of that kind in its blocks and before its head, trained a
    little.
    """
    torch.manual_seed(0)
    model = LanguageModel()
    for block in model.stack:
        block.ln_a, block.ln_b = MadeNorm(WIDTH, kind), MadeNorm(WIDTH, kind)
    model.ln = MadeNorm(WIDTH, kind)
    return learned(model.eval(), 0.05)

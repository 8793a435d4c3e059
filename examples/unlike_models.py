"""Fifteen models of unusual form, for `any_model.py`."""

import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

sys.path.append(
    str(Path(__file__).parent)
)  # of the file with the blocks, wherever this one is run from

from unlike_blocks import (
    GAU,
    MHA,
    CNBlock,
    D,
    DiTBlock,
    GatedConv,
    H,
    MixBlock,
    PerceiverBlock,
    PreBlock,
    V,
    mlp,
)


def seeded(number):
    return torch.Generator().manual_seed(number)


def numbers(*shape):
    return torch.randn(*shape, generator=seeded(3))


def ids(*shape):
    return torch.randint(1, V, shape, generator=seeded(4))


class DictOfBlocks(nn.Module):
    """A language model whose blocks are in an nn.ModuleDict."""

    def __init__(self):
        super().__init__()
        self.e = nn.Embedding(V, D)
        self.layers = nn.ModuleDict({f"l{i}": PreBlock() for i in range(3)})
        self.h = nn.Linear(D, V)

    def forward(self, x):
        x = self.e(x)
        for layer in self.layers.values():
            x = layer(x)
        return self.h(x)


class PatchTST(nn.Module):
    """A forecast of several channels, each a sequence of its own: the batch axis counts channels
    too.
    """

    def __init__(self, c=3, L=32, p=8, out=4):
        super().__init__()
        self.p = p
        self.proj = nn.Linear(p, D)
        self.pos = nn.Parameter(torch.randn(L // p, D) * 0.02)
        self.enc = nn.TransformerEncoder(nn.TransformerEncoderLayer(D, H, 48, batch_first=True), 2)
        self.head = nn.Linear(L // p * D, out)

    def forward(self, x):  # (B, L, C)
        B, L, C = x.shape
        z = x.transpose(1, 2).reshape(B * C, L // self.p, self.p)
        z = self.enc(self.proj(z) + self.pos)
        return self.head(z.flatten(1)).view(B, C, -1).transpose(1, 2)


class Translator(nn.Module):
    """torch's encoder and decoder."""

    def __init__(self):
        super().__init__()
        self.se, self.te = nn.Embedding(V, D), nn.Embedding(V, D)
        self.t = nn.Transformer(D, H, 2, 2, 48, batch_first=True)
        self.out = nn.Linear(D, V)

    def forward(self, src, tgt):
        m = nn.Transformer.generate_square_subsequent_mask(tgt.shape[1])
        return self.out(self.t(self.se(src), self.te(tgt), tgt_mask=m))


class DiT(nn.Module):
    """A diffusion transformer with time and class."""

    def __init__(self):
        super().__init__()
        self.patch = nn.Conv2d(3, D, 4, 4)
        self.y = nn.Embedding(10, D)
        self.t = nn.Linear(1, D)
        self.blocks = nn.ModuleList(DiTBlock() for _ in range(3))
        self.n = nn.LayerNorm(D)
        self.o = nn.Linear(D, 48)

    def forward(self, x, t, y):
        c = self.t(t[:, None]) + self.y(y)
        x = self.patch(x).flatten(2).mT
        for b in self.blocks:
            x = b(x, c)
        return self.o(self.n(x))


class HybridLM(nn.Module):
    """Recurrences and attention in turn."""

    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(V, D)
        self.layers = nn.ModuleList([GatedConv(), PreBlock(), GatedConv(), PreBlock()])
        self.nf = nn.RMSNorm(D)

    def forward(self, input_ids):
        x = self.emb(input_ids)
        for layer in self.layers:
            x = layer(x)
        return self.nf(x) @ self.emb.weight.T


class ConvNet(nn.Module):
    """A ConvNeXt: states are (batch, channels, height, width)."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, D, 4, 4)
        self.body = nn.Sequential(*[CNBlock() for _ in range(3)])
        self.fc = nn.Linear(D, 5)

    def forward(self, x):
        return self.fc(self.body(self.stem(x)).mean((2, 3)))


class Mixer(nn.Module):
    """An MLP-Mixer."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, D, 4, 4)
        self.mix = nn.Sequential(*[MixBlock() for _ in range(3)])
        self.fc = nn.Linear(D, 5)

    def forward(self, x):
        return self.fc(self.mix(self.stem(x).flatten(2).mT).mean(1))


class Shared(nn.Module):
    """One block in a loop, as in ALBERT."""

    def __init__(self):
        super().__init__()
        self.e = nn.Embedding(V, D)
        self.layer = PreBlock(causal=False)
        self.n = 4
        self.o = nn.Linear(D, V)

    def forward(self, x):
        x = self.e(x)
        for _ in range(self.n):
            x = self.layer(x)
        return self.o(x)


class CLIP(nn.Module):
    """Two towers and a contrastive output."""

    def __init__(self):
        super().__init__()
        self.vp = nn.Conv2d(3, D, 4, 4)
        self.visual = nn.ModuleList(PreBlock(causal=False) for _ in range(2))
        self.te = nn.Embedding(V, D)
        self.text = nn.ModuleList(PreBlock(causal=True) for _ in range(3))
        self.sc = nn.Parameter(torch.tensor(2.0))

    def forward(self, image, text):
        x = self.vp(image).flatten(2).mT
        for b in self.visual:
            x = b(x)
        y = self.te(text)
        for b in self.text:
            y = b(y)
        return self.sc.exp() * F.normalize(x.mean(1), dim=-1) @ F.normalize(y[:, -1], dim=-1).T


class Perceiver(nn.Module):
    """Latents read the input in each block."""

    def __init__(self):
        super().__init__()
        self.lat = nn.Parameter(torch.randn(5, D))
        self.inp = nn.Linear(3, D)
        self.blk = nn.ModuleList(PerceiverBlock() for _ in range(3))
        self.o = nn.Linear(D, 2)

    def forward(self, pts):
        k = self.inp(pts)
        z = self.lat.expand(len(pts), -1, -1)
        for b in self.blk:
            z = b(z, k)
        return self.o(z.mean(1))


class FLASH(nn.Module):
    """A language model of gated attention units."""

    def __init__(self):
        super().__init__()
        self.e = nn.Embedding(V, D)
        self.body = nn.Sequential(*[GAU() for _ in range(4)])
        self.o = nn.Linear(D, V)

    def forward(self, x):
        return self.o(self.body(self.e(x)))


class FlatLists(nn.Module):
    """Norms, attentions and FFNs in lists of their own, with no blocks."""

    def __init__(self):
        super().__init__()
        self.e = nn.Embedding(V, D)
        self.norms = nn.ModuleList(nn.LayerNorm(D) for _ in range(6))
        self.attns = nn.ModuleList(MHA(causal=True) for _ in range(3))
        self.ffs = nn.ModuleList(mlp() for _ in range(3))
        self.o = nn.Linear(D, V)

    def forward(self, x):
        x = self.e(x)
        for i, (a, f) in enumerate(zip(self.attns, self.ffs, strict=True)):
            x = x + a(self.norms[2 * i](x))
            x = x + f(self.norms[2 * i + 1](x))
        return self.o(x)


class ResMLP(nn.Module):
    """A regression on tables: states are (batch, width)."""

    def __init__(self):
        super().__init__()
        self.i = nn.Linear(6, D)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(D), nn.Linear(D, 48), nn.SiLU(), nn.Linear(48, D))
            for _ in range(4)
        )
        self.o = nn.Linear(D, 1)

    def forward(self, x):
        h = self.i(x)
        for b in self.blocks:
            h = h + b(h)
        return self.o(h).squeeze(-1)


class Classifier(nn.Module):
    """Tokens first, and a padding mask made of the ids."""

    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(V, D, padding_idx=0)
        self.enc = nn.TransformerEncoder(nn.TransformerEncoderLayer(D, H, 48), 3)
        self.cls = nn.Linear(D, 3)

    def forward(self, ids):
        pad = ids.eq(0)
        x = self.enc(self.emb(ids).transpose(0, 1), src_key_padding_mask=pad)
        return self.cls(x[0])


class UViT(nn.Module):
    """A long skip from each block to a later one."""

    def __init__(self):
        super().__init__()
        self.e = nn.Linear(4, D)
        self.down = nn.ModuleList(PreBlock(causal=False) for _ in range(2))
        self.up = nn.ModuleList(PreBlock(causal=False) for _ in range(2))
        self.skip = nn.ModuleList(nn.Linear(2 * D, D) for _ in range(2))
        self.o = nn.Linear(D, 4)

    def forward(self, x):
        x = self.e(x)
        st = []
        for b in self.down:
            x = b(x)
            st.append(x)
        for b, k in zip(self.up, self.skip, strict=True):
            x = b(k(torch.cat([x, st.pop()], -1)))
        return self.o(x)


# what each reads, with targets: functions for --example


def tokens():
    return ids(3, 9), ids(3, 9)


def labels():
    """Targets of -100 do not count."""
    read = ids(3, 9)
    return read, torch.where(torch.arange(9) < 4, -100, read)


def series():
    return numbers(3, 32, 3), numbers(3, 4, 3)


def sentences():
    """The decoder's input is first, so its states are read. The encoder's is a context."""
    return {"tgt": ids(3, 5), "src": ids(3, 7)}, ids(3, 5)


def noised():
    return {"x": numbers(3, 3, 16, 16), "t": numbers(3), "y": torch.tensor([1, 2, 3])}, numbers(
        3, 16, 48
    )


def pictures():
    return numbers(3, 3, 16, 16), torch.tensor([1, 2, 3])


def pairs():
    return {"image": numbers(3, 3, 16, 16), "text": ids(3, 9)}, torch.arange(3)


def points():
    return numbers(3, 20, 3), numbers(3, 2)


def padded():
    return torch.where(torch.arange(9) < torch.tensor([[9], [6], [4]]), ids(3, 9), 0), torch.tensor(
        [0, 1, 2]
    )


def tables():
    return numbers(8, 6), numbers(8)


def paths():
    return numbers(3, 6, 4), numbers(3, 6, 4)


# losses: functions for --loss


def classified(output, classes):
    return F.cross_entropy(output, classes)


def translated(output, words):
    return F.cross_entropy(output.flatten(0, 1), words.flatten())


def squared(output, targets):
    return F.mse_loss(output, targets)


UNLIKE = {
    "blocks in an nn.ModuleDict": (DictOfBlocks, tokens, None),
    "PatchTST": (PatchTST, series, squared),
    "the decoder of nn.Transformer": (Translator, sentences, translated),
    "DiT": (DiT, noised, squared),
    "recurrence and attention": (HybridLM, labels, None),
    "ConvNeXt": (ConvNet, pictures, classified),
    "MLP-Mixer": (Mixer, pictures, classified),
    "one block in a loop": (Shared, tokens, None),
    "CLIP": (CLIP, pairs, classified),
    "Perceiver": (Perceiver, points, squared),
    "gated attention units": (FLASH, tokens, None),
    "lists without blocks": (FlatLists, tokens, None),
    "a padding mask, tokens first": (Classifier, padded, classified),
    "a residual MLP on tables": (ResMLP, tables, squared),
    "U-ViT": (UViT, paths, squared),
}
"""Each as it is made, its example with targets, and its loss if it is not the usual one."""

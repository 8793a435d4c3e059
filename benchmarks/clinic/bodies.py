"""The architectures of the clinic: each module with its parts, so that a fault or a cure can find
them.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ctrans import GPT, GPTConfig
from ctrans.training.tasks import TASKS

WIDTH, HEADS, BLOCKS, INNER, CONTEXT = 32, 4, 3, 96, 32
MASK_ID, BYTES = 256, 257
"""The id of a hidden token, and the size of the vocabulary of text."""
SIZES = {"text": (BYTES, CONTEXT)} | {
    name: (task.architecture["vocab_size"], task.architecture["context"])
    for name, task in TASKS.items()
}
"""Vocabulary and context of each task."""


@dataclasses.dataclass
class Parts:
    """A block. The entries of `q`, `k` and `v` are a weight and its bias, or views into a joined
    one.
    """

    attention: nn.Module
    ffn: nn.Module
    norms: Sequence[nn.Module]
    q: Sequence[Tensor]
    k: Sequence[Tensor]
    v: Sequence[Tensor]
    out: nn.Linear
    up: nn.Linear
    down: nn.Linear
    router: Any = None
    whole: Any = None
    """The module of the block, where it is one."""
    gate: Any = None
    """The two maps whose outputs an FFN multiplies."""
    groups: int = 0
    """Heads of keys, where they are fewer than those of queries."""


@dataclasses.dataclass
class Body:
    """A module and how to find its parts. The parts are found anew at each call, so that a copy has
    its own.
    """

    model: nn.Module
    find: Callable[[nn.Module], dict[str, Any]]
    causal: bool
    example: Tensor | None = None
    loss: Callable[..., Tensor] | None = None

    @property
    def found(self) -> dict[str, Any]:
        return self.find(self.model)

    @property
    def blocks(self) -> list[Parts]:
        return list(self.found["blocks"])

    def part(self, name: str) -> Any:
        """`embedding`, `positions`, `head` (tensors), `final_norm` (a module), `tied`, or None."""
        return self.found.get(name)

    def logits(self, x: Tensor) -> Tensor:
        output = self.model(x)
        output = output[0] if isinstance(output, tuple) else output
        return getattr(output, "logits", output)

    def set_causal(self, causal: bool) -> None:  # noqa: FBT001  # a setter
        for module in self.found.get("masked", ()):
            for name in ("causal", "is_causal"):
                if hasattr(module, name):
                    setattr(module, name, causal)
            if causal and hasattr(module, "ahead"):
                module.ahead = 0

    def masking(self) -> list[tuple[Any, str, Any]]:
        """What decides which tokens are hidden, as arguments of `setattr`."""
        return [
            (module, name, getattr(module, name))
            for module in self.found.get("masked", ())
            for name in ("causal", "is_causal", "ahead")
            if hasattr(module, name)
        ]


def joined(linear: Any) -> list[list[Tensor]]:
    """Queries, keys and values of one matrix, as views."""
    weights = linear.weight.detach().chunk(3)
    biases = [None] * 3 if linear.bias is None else linear.bias.detach().chunk(3)
    return [[w] if b is None else [w, b] for w, b in zip(weights, biases, strict=True)]


def single(linear: nn.Linear) -> list[Tensor]:
    return [each.detach() for each in (linear.weight, linear.bias) if each is not None]


def _gpt_parts(model: GPT) -> dict[str, Any]:
    blocks = []
    for first, second in zip(model.depth.sublayers[::2], model.depth.sublayers[1::2], strict=True):
        a, f = first.field, second.field
        norms = [
            n
            for each in (first, second)
            for n in (each.input_norm, each.output_norm)
            if n is not None
        ]
        blocks.append(
            Parts(a, f, norms, *joined(a.qkv), a.out, f.up, f.down, getattr(f, "router", None))
        )
    head = model.token_embedding if model.unembedding is None else model.unembedding
    return {
        "blocks": blocks,
        "embedding": model.token_embedding.weight,
        "positions": model.position_embedding.weight,
        "final_norm": model.final_norm,
        "head": head.weight,
        "tied": model.unembedding is None,
        "masked": [each.attention for each in blocks],
    }


def gpt(task: str, **options: Any) -> Body:
    vocabulary, context = SIZES[task]
    size = {
        "vocab_size": vocabulary,
        "context": context,
        "depth": BLOCKS,
        "width": WIDTH,
        "heads": HEADS,
        "embedding_std": 0.1,
    }
    return Body(
        GPT(
            GPTConfig(**{**size, "placement": "pre", **options}), seed=torch.initial_seed() % 2**31
        ),
        _gpt_parts,
        causal=True,
    )


def of_transformers(task: str, family: str, **options: Any) -> nn.Module:
    import transformers

    logging.getLogger("transformers").setLevel(logging.ERROR)
    vocabulary, context = SIZES[task]
    size = {
        "vocab_size": vocabulary,
        "hidden_size": WIDTH,
        "num_hidden_layers": BLOCKS,
        "num_attention_heads": HEADS,
    }
    config = getattr(transformers, f"{family}Config")(
        **size,
        intermediate_size=INNER,
        max_position_embeddings=context,
        pad_token_id=None,
        **options,
    )
    made: nn.Module = getattr(transformers, options.pop("model", None) or MODELS[family])(config)
    return made


MODELS = {
    "Llama": "LlamaForCausalLM",
    "Bert": "BertForMaskedLM",
    "Qwen3": "Qwen3ForCausalLM",
    "GPTNeoX": "GPTNeoXForCausalLM",
    "ModernBert": "ModernBertForMaskedLM",
}


def llama_parts(model: Any) -> dict[str, Any]:
    blocks = [
        Parts(
            each.self_attn,
            each.mlp,
            [each.input_layernorm, each.post_attention_layernorm],
            *(single(getattr(each.self_attn, f"{name}_proj")) for name in "qkv"),
            each.self_attn.o_proj,
            each.mlp.gate_proj,
            each.mlp.down_proj,
        )
        for each in model.model.layers
    ]
    inner = model.model
    return {
        "blocks": blocks,
        "embedding": inner.embed_tokens.weight,
        "final_norm": inner.norm,
        "head": model.lm_head.weight,
        "tied": False,
    }


def bert_parts(model: Any) -> dict[str, Any]:
    blocks = []
    for each in model.bert.encoder.layer:
        own = each.attention.self
        norms = [each.attention.output.LayerNorm, each.output.LayerNorm]
        maps = [single(part) for part in (own.query, own.key, own.value)]
        blocks.append(
            Parts(
                each.attention,
                each.intermediate,
                norms,
                *maps,
                each.attention.output.dense,
                each.intermediate.dense,
                each.output.dense,
            )
        )
    inner = model.bert.embeddings
    return {
        "blocks": blocks,
        "embedding": inner.word_embeddings.weight,
        "positions": inner.position_embeddings.weight,
        "final_norm": model.cls.predictions.transform.LayerNorm,
        "head": model.cls.predictions.decoder.weight,
        "tied": True,
    }


class Encoder(nn.Module):
    """torch's own encoder layers, behind a table of tokens and of places, with a mask of later
    tokens.
    """

    def __init__(self, vocabulary: int, context: int):
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, WIDTH), nn.Embedding(context, WIDTH)
        layer = nn.TransformerEncoderLayer(
            WIDTH, HEADS, INNER, dropout=0.0, batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, BLOCKS, enable_nested_tensor=False)
        self.norm, self.head, self.causal = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, vocabulary), True
        for part in (*self.layers.layers,):
            for weight in part.parameters():
                if weight.dim() > 1:
                    nn.init.xavier_uniform_(weight)

    def forward(self, tokens: Tensor) -> Tensor:
        count = tokens.shape[-1]
        x = self.tokens(tokens) + self.places(torch.arange(count, device=tokens.device))
        mask = nn.Transformer.generate_square_subsequent_mask(count) if self.causal else None
        found: Tensor = self.head(self.norm(self.layers(x, mask=mask, is_causal=self.causal)))
        return found


def encoder_parts(model: Any) -> dict[str, Any]:
    blocks = []
    for each in model.layers.layers:
        a = each.self_attn
        biases = a.in_proj_bias.detach().chunk(3)
        maps = [[w, b] for w, b in zip(a.in_proj_weight.detach().chunk(3), biases, strict=True)]
        blocks.append(
            Parts(
                a,
                each.linear1,
                [each.norm1, each.norm2],
                *maps,
                a.out_proj,
                each.linear1,
                each.linear2,
            )
        )
    return {
        "blocks": blocks,
        "embedding": model.tokens.weight,
        "positions": model.places.weight,
        "final_norm": model.norm,
        "head": model.head.weight,
        "tied": False,
        "masked": [model],
    }


class Mixer(nn.Module):
    """Attention by hand: one linear map for queries, keys and values."""

    def __init__(self, *, causal: bool):
        super().__init__()
        self.qkv, self.back = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.causal, self.heads = causal, HEADS

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        found: Tensor = self.back(mixed.transpose(1, 2).flatten(-2))
        return found


class Layer(nn.Module):
    """X + f(N X), the FFN's maps in the block itself."""

    def __init__(self, *, causal: bool):
        super().__init__()
        self.a, self.mix, self.b = nn.LayerNorm(WIDTH), Mixer(causal=causal), nn.LayerNorm(WIDTH)
        self.grow, self.shrink = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mix(self.a(x))
        return x + self.shrink(F.relu(self.grow(self.b(x))))


class Stranger(nn.Module):
    """A language model of no library."""

    def __init__(self, vocabulary: int, context: int):
        super().__init__()
        self.words = nn.Embedding(vocabulary, WIDTH)
        self.where = nn.Parameter(0.1 * torch.randn(context, WIDTH))
        self.stack = nn.ModuleList(Layer(causal=True) for _ in range(BLOCKS))
        self.last, self.read = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, vocabulary)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids) + self.where[: ids.shape[-1]]
        for layer in self.stack:
            x = layer(x)
        found: Tensor = self.read(self.last(x))
        return found


class Vision(nn.Module):
    """A vision Transformer on images of 8 x 8 pixels: patches of 2 x 2 and a class token."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.token = (
            nn.Conv2d(1, WIDTH, 2, 2),
            nn.Parameter(0.02 * torch.randn(1, 1, WIDTH)),
        )
        self.where = nn.Parameter(0.1 * torch.randn(1, 17, WIDTH))
        self.stack = nn.Sequential(*(Layer(causal=False) for _ in range(BLOCKS)))
        self.last, self.read = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.where
        found: Tensor = self.read(self.last(self.stack(x))[:, 0])
        return found


def plain_parts(model: Any) -> dict[str, Any]:
    blocks = [
        Parts(
            each.mix,
            each.grow,
            [each.a, each.b],
            *joined(each.mix.qkv),
            each.mix.back,
            each.grow,
            each.shrink,
        )
        for each in model.stack
    ]
    words = getattr(model, "words", None)
    return {
        "blocks": blocks,
        "embedding": model.patches.weight if words is None else words.weight,
        "positions": model.where,
        "final_norm": model.last,
        "head": model.read.weight,
        "tied": False,
        "masked": [] if words is None else [each.attention for each in blocks],
        "heads": [each.attention for each in blocks],
    }


def redraw(linear: Any) -> None:
    """Draws a linear map anew, at 1/sqrt(inputs)."""
    with torch.no_grad():
        linear.weight.normal_(0.0, 1 / math.sqrt(linear.weight.shape[-1]))
        if linear.bias is not None:
            linear.bias.zero_()

"""Pairs of models for `parting.py`: the changes, with the part that changed and the causes that
name it, and the harmless pairs.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.parting_models import FAMILIES

Change = Callable[[Any], object]
BLOCK = 2
"""The block that is changed, where one is."""
ATTENTION = f"block {BLOCK}, attention"
FFN = f"block {BLOCK}, ffn"
EVERY_ATTENTION = "block 0, attention"
EVERY_FFN = "block 0, ffn"
EMBEDDING = "the embedding"
HEAD = "the head"


@dataclass(frozen=True)
class Case:
    """A pair of models: a family, how the second one is made of the first, and what is true.

    - `part`: the first part that changed, "" for a harmless pair
    - `causes`: names of stages, kinds of relations and kinds of weights' relations, any of which
      names the cause
    """

    category: str
    family: str
    name: str
    change: Change
    part: str = ""
    causes: tuple[str, ...] = ()
    rebuilt: bool = False
    """Whether `change` makes the second model anew, from the weights of the first."""

    def pair(self) -> tuple[nn.Module, nn.Module]:
        first = FAMILIES[self.family]()
        if self.rebuilt:
            second = self.change(first)
            second.load_state_dict(first.state_dict(), strict=False)
            return first, second.eval()
        second = copy.deepcopy(first)
        with torch.no_grad():
            result = self.change(second)
        if isinstance(result, nn.Module):
            second = result
        return first, second


PATHS: dict[str, dict[str, str]] = {
    "gpt2": {
        "blocks": "transformer.h",
        "norm": "ln_1",
        "out": "attn.c_proj",
        "down": "mlp.c_proj",
        "up": "mlp.c_fc",
        "key": "attn.c_attn",
        "embedding": "transformer.wte",
        "head": "lm_head",
    },
    "llama": {
        "blocks": "model.layers",
        "norm": "input_layernorm",
        "out": "self_attn.o_proj",
        "down": "mlp.down_proj",
        "up": "mlp.up_proj",
        "key": "self_attn.k_proj",
        "embedding": "model.embed_tokens",
        "head": "lm_head",
    },
    "bert": {
        "blocks": "bert.encoder.layer",
        "norm": "attention.output.LayerNorm",
        "out": "attention.output.dense",
        "down": "output.dense",
        "up": "intermediate.dense",
        "key": "attention.self.key",
        "embedding": "bert.embeddings.word_embeddings",
        "head": "cls.predictions.decoder",
    },
    "vit": {
        "blocks": "vit.layers",
        "norm": "layernorm_before",
        "out": "attention.o_proj",
        "down": "mlp.fc2",
        "up": "mlp.fc1",
        "key": "attention.k_proj",
        "embedding": "",
        "head": "classifier",
    },
    "stranger": {
        "blocks": "blocks",
        "norm": "norm1",
        "out": "attention.out",
        "down": "down",
        "up": "up",
        "key": "attention.qkv",
        "embedding": "embedding",
        "head": "head",
    },
}
PATHS["gemma2"] = PATHS["llama"]
PATHS["mixtral"] = PATHS["llama"]


def part_of(model: nn.Module, family: str, name: str, block: int = BLOCK) -> Any:
    paths = PATHS[family]
    if name in ("embedding", "head"):
        return model.get_submodule(paths[name])
    return model.get_submodule(f"{paths['blocks']}.{block}.{paths[name]}")


def weight_changed(family: str, name: str, act: Callable[[Tensor], Tensor]) -> Change:
    def change(model: Any) -> None:
        weight = part_of(model, family, name).weight
        weight.copy_(act(weight.clone()))

    return change


def bias_dropped(family: str, name: str) -> Change:
    def change(model: Any) -> None:
        part_of(model, family, name).bias.zero_()

    return change


def setting(family: str, name: str, **values: Any) -> Change:
    def change(model: Any) -> None:
        part = part_of(model, family, name)
        for attribute, value in values.items():
            assert hasattr(part, attribute), attribute
            setattr(part, attribute, value)

    return change


def everywhere(kind: type[nn.Module], **values: Any) -> Change:
    def change(model: Any) -> None:
        for part in model.modules():
            if isinstance(part, kind):
                for attribute, value in values.items():
                    assert hasattr(part, attribute), attribute
                    setattr(part, attribute, value)

    return change


def rebuilt(family: str, **changes: Any) -> Change:
    return lambda first: FAMILIES[family](**changes)


def eights(weight: Tensor) -> Tensor:
    """The weight in 8 bits, with a scale for each row."""
    step = (weight.abs().amax(1, keepdim=True) / 127).clamp(min=1e-9)  # padding has a row of zeros
    return (weight / step).round() * step


def in_eights(model: Any) -> None:
    for part in model.modules():
        if isinstance(part, nn.Linear) and part.weight.shape[1] >= 32:
            part.weight.copy_(eights(part.weight))


def rounded_to(dtype: torch.dtype) -> Change:
    def change(model: Any) -> None:
        for parameter in model.parameters():
            parameter.copy_(parameter.to(dtype).to(parameter.dtype))

    return change


def stale(model: Any, family: str, names: tuple[str, ...]) -> None:
    """A shard of an earlier step: some weights of a block with a change of a twentieth."""
    generator = torch.Generator().manual_seed(5)
    for name in names:
        weight = part_of(model, family, name).weight
        weight += 0.05 * weight.std() * torch.randn(weight.shape, generator=generator)


def untied(family: str) -> Change:
    def change(model: Any) -> None:
        head = part_of(model, family, "head")
        drawn = 0.1 * torch.randn(head.weight.shape, generator=torch.Generator().manual_seed(6))
        head.weight = nn.Parameter(drawn)

    return change


def permuted_sums(model: Any) -> None:
    """The hidden units of the FFNs in another order: sums in another order, and no other change."""
    order = torch.randperm(128, generator=torch.Generator().manual_seed(7))
    for part in model.modules():
        if hasattr(part, "up_proj") and isinstance(part.up_proj, nn.Linear):
            part.up_proj.weight.copy_(part.up_proj.weight[order])
            part.gate_proj.weight.copy_(part.gate_proj.weight[order])
            part.down_proj.weight.copy_(part.down_proj.weight[:, order])


class SplitLinear(nn.Module):
    """A linear map in two parts whose outputs are added, as tensor parallelism adds them."""

    def __init__(self, linear: nn.Linear):
        super().__init__()
        half = linear.weight.shape[1] // 2
        self.first = nn.Parameter(linear.weight[:, :half].clone())
        self.second = nn.Parameter(linear.weight[:, half:].clone())
        self.bias = linear.bias

    def forward(self, x: Tensor) -> Tensor:
        half = self.first.shape[1]
        y = F.linear(x[..., :half], self.first) + F.linear(x[..., half:], self.second)
        return y if self.bias is None else y + self.bias


def split(model: Any) -> None:
    """The last map of each FFN in two parts."""
    for part in list(model.modules()):
        for name in ("down_proj", "fc2", "down"):
            linear = getattr(part, name, None)
            if isinstance(linear, nn.Linear):
                setattr(part, name, SplitLinear(linear))


def compiled(model: Any) -> Any:
    return torch.compile(model, backend="aot_eager")


def in_dtype(dtype: torch.dtype) -> Change:
    return lambda model: model.to(dtype)


def norm_without_one(model: Any) -> None:
    """A stored gain of Gemma is its offset from 1, and a port multiplies by it."""
    part_of(model, "gemma2", "norm").weight -= 1


def late_positions(family: str) -> Change:
    def change(model: Any) -> None:
        paths = {
            "gpt2": "transformer.wpe",
            "bert": "bert.embeddings.position_embeddings",
        }
        weight = model.get_submodule(paths[family]).weight
        weight.copy_(weight.roll(-1, 0))

    return change


def last_norm_scaled(path: str) -> Change:
    def change(model: Any) -> None:
        model.get_submodule(path).weight.mul_(1.02)

    return change


NORMS = ("norm before it", "norm and scale behind it", "map")
ROWS = "rows of attention"
CHANGES: list[Case] = []


def add(category: str, family: str, name: str, part: str, causes: Any, change: Change, **more: Any):
    CHANGES.append(Case(category, family, name, change, part, causes, **more))


for family in ("llama", "gemma2", "mixtral"):
    add(
        "rotary",
        family,
        "base 500,000",
        EVERY_ATTENTION,
        (ROWS,),
        rebuilt(family, rope_parameters={"rope_type": "default", "rope_theta": 5e5}),
        rebuilt=True,
    )
add(
    "rotary",
    "stranger",
    "base 500,000",
    ATTENTION,
    (ROWS,),
    lambda m: setattr(m.blocks[BLOCK].attention, "base", 5e5),
)
add(
    "rotary",
    "stranger",
    "pairs for halves",
    ATTENTION,
    (ROWS,),
    lambda m: setattr(m.blocks[BLOCK].attention, "pairs", True),
)
add(
    "rotary",
    "llama",
    "keys as pairs",
    ATTENTION,
    ("keys", "rows in another order"),
    weight_changed("llama", "key", lambda w: w.view(2, 2, 8, -1).transpose(1, 2).reshape(w.shape)),
)
for family in ("llama", "gemma2", "mixtral"):
    add(
        "KV heads' order",
        family,
        "key heads exchanged",
        ATTENTION,
        ("keys", "rows in another order"),
        weight_changed(family, "key", lambda w: w.roll(16, 0)),
    )
add(
    "mask",
    "stranger",
    "sees the next token",
    ATTENTION,
    ("mask",),
    lambda m: setattr(m.blocks[BLOCK].attention, "diagonal", 2),
)
add(
    "mask",
    "gemma2",
    "window of 7 for 8",
    EVERY_ATTENTION,
    ("mask",),
    rebuilt("gemma2", sliding_window=7),
    rebuilt=True,
)
add(
    "mask",
    "mixtral",
    "window of 9",
    EVERY_ATTENTION,
    ("mask",),
    rebuilt("mixtral", sliding_window=9),
    rebuilt=True,
)
add("eps", "gpt2", "1e-3", ATTENTION, ("norm before it",), setting("gpt2", "norm", eps=1e-3))
add(
    "eps",
    "llama",
    "1e-3",
    ATTENTION,
    ("norm before it",),
    setting("llama", "norm", variance_epsilon=1e-3),
)
add("eps", "vit", "1e-3", ATTENTION, ("norm before it",), setting("vit", "norm", eps=1e-3))
add("eps", "bert", "1e-3", ATTENTION, (*NORMS, "state norm"), setting("bert", "norm", eps=1e-3))
add(
    "gelu",
    "stranger",
    "tanh form",
    FFN,
    ("map",),
    lambda m: setattr(m.blocks[BLOCK], "approximate", "tanh"),
)
add(
    "gelu",
    "gpt2",
    "exact for the tanh form",
    EVERY_FFN,
    ("map",),
    rebuilt("gpt2", activation_function="gelu"),
    rebuilt=True,
)
add(
    "gelu",
    "bert",
    "tanh form",
    EVERY_FFN,
    ("map",),
    rebuilt("bert", hidden_act="gelu_new"),
    rebuilt=True,
)
add(
    "gelu",
    "vit",
    "tanh form",
    EVERY_FFN,
    ("map",),
    rebuilt("vit", hidden_act="gelu_new"),
    rebuilt=True,
)
add("norm without its 1", "gemma2", "gain less 1", ATTENTION, ("norm before it",), norm_without_one)
add(
    "scale twice",
    "stranger",
    "1/d for 1/sqrt(d)",
    ATTENTION,
    ("scores scaled",),
    lambda m: setattr(m.blocks[BLOCK].attention, "power", 1.0),
)
add(
    "scale twice",
    "gpt2",
    "by the block's number",
    "block 1, attention",
    ("scores scaled",),
    rebuilt("gpt2", scale_attn_by_inverse_layer_idx=True),
    rebuilt=True,
)
add(
    "scale twice",
    "gemma2",
    "scalar 64 for 256",
    EVERY_ATTENTION,
    ("scores scaled", ROWS),
    rebuilt("gemma2", query_pre_attn_scalar=64),
    rebuilt=True,
)
add(
    "softmax in bf16",
    "stranger",
    "one block",
    ATTENTION,
    (ROWS, "fewer digits"),
    lambda m: setattr(m.blocks[BLOCK].attention, "half", True),
)
for family, name in (
    ("gpt2", "out"),
    ("llama", "out"),
    ("bert", "out"),
    ("vit", "out"),
    ("stranger", "out"),
):
    add(
        "transposed matrix",
        family,
        "attention's output",
        ATTENTION,
        ("transposed",),
        weight_changed(family, name, lambda w: w.t().clone()),
    )
for family in ("gpt2", "llama", "vit"):
    add(
        "stale shard",
        family,
        "one FFN",
        FFN,
        ("slightly different", "some rows differ"),
        lambda m, family=family: stale(m, family, ("up", "down")),
    )
add(
    "bias dropped",
    "gpt2",
    "attention's output",
    ATTENTION,
    ("shifted", "scaled"),
    bias_dropped("gpt2", "out"),
)
add(
    "bias dropped", "bert", "FFN's output", FFN, ("shifted", "scaled"), bias_dropped("bert", "down")
)
add(
    "bias dropped",
    "llama",
    "keys",
    ATTENTION,
    ("scaled", "unrelated", ROWS),
    bias_dropped("llama", "key"),
)
add(
    "positions from 1",
    "gpt2",
    "learned",
    EMBEDDING,
    ("output", "rows in another order"),
    late_positions("gpt2"),
)
add(
    "positions from 1",
    "bert",
    "learned",
    EMBEDDING,
    ("output", "rows in another order"),
    late_positions("bert"),
)
for family in ("gpt2", "stranger", "bert"):
    add("untied head", family, "drawn anew", HEAD, ("unrelated", "logits"), untied(family))
add(
    "wrong head size",
    "stranger",
    "8 heads for 4",
    ATTENTION,
    (ROWS, "queries", "keys", "values"),
    lambda m: setattr(m.blocks[BLOCK].attention, "heads", 8),
)
add(
    "one quantised layer",
    "llama",
    "8 bits",
    FFN,
    ("rounded",),
    weight_changed("llama", "down", eights),
)
add(
    "one quantised layer", "vit", "8 bits", FFN, ("rounded",), weight_changed("vit", "down", eights)
)
add(
    "residual scale",
    "stranger",
    "0.9",
    ATTENTION,
    ("scaled",),
    lambda m: setattr(m.blocks[BLOCK], "scale", 0.9),
)
add(
    "residual scale",
    "llama",
    "last map times 1.01",
    FFN,
    ("scaled",),
    weight_changed("llama", "down", lambda w: 1.01 * w),
)
add(
    "gate and up",
    "stranger",
    "interleaved",
    FFN,
    ("map",),
    lambda m: setattr(m.blocks[BLOCK], "interleaved", True),
)
add(
    "gate and up",
    "stranger",
    "exchanged",
    FFN,
    ("map",),
    lambda m: setattr(m.blocks[BLOCK], "swapped", True),
)
add(
    "soft cap",
    "gemma2",
    "of scores missing",
    EVERY_ATTENTION,
    (ROWS,),
    rebuilt("gemma2", attn_logit_softcapping=None),
    rebuilt=True,
)
add(
    "soft cap",
    "gemma2",
    "of logits missing",
    HEAD,
    ("logits",),
    rebuilt("gemma2", final_logit_softcapping=None),
    rebuilt=True,
)
add("soft cap", "stranger", "of logits added", HEAD, ("logits",), lambda m: setattr(m, "cap", 30.0))
add(
    "dropout",
    "stranger",
    "left on",
    ATTENTION,
    ("not the same twice", ROWS, "map"),
    lambda m: setattr(m.blocks[BLOCK].attention, "dropout", 0.1),
)
add(
    "last norm",
    "llama",
    "gain times 1.02",
    HEAD,
    ("scaled", "logits"),
    last_norm_scaled("model.norm"),
)

HARMLESS: list[Case] = []
for family in FAMILIES:
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        if (family, dtype) == ("mixtral", torch.float64):
            continue  # torch multiplies experts in float32 at most
        short = str(dtype).removeprefix("torch.")
        HARMLESS.append(Case("dtype", family, short, in_dtype(dtype)))
    HARMLESS.append(Case("weights", family, "rounded to bfloat16", rounded_to(torch.bfloat16)))
    HARMLESS.append(Case("weights", family, "rounded to float16", rounded_to(torch.float16)))
    HARMLESS.append(Case("compiled", family, "aot_eager", compiled))
for family in ("gpt2", "llama", "bert", "vit", "mixtral"):
    HARMLESS.append(
        Case("kernel", family, "eager", rebuilt(family, attn_implementation="eager"), rebuilt=True)
    )
for family in ("llama", "vit", "bert", "gemma2", "stranger"):
    HARMLESS.append(Case("weights", family, "8 bits", in_eights))
for family in ("llama", "gemma2"):
    HARMLESS.append(Case("sums", family, "permuted units", permuted_sums))
for family in ("llama", "vit", "gemma2", "stranger"):
    HARMLESS.append(Case("sums", family, "in two parts", split))
CASES = CHANGES + HARMLESS

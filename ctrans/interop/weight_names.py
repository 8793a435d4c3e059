"""Names of weights in other libraries' checkpoints."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping

BLOCK = re.compile(r"(?:^|\.)([0-9]{1,18})(?:\.|$)")
"""The number of the block in a weight's name. Longer ones are no number of a block."""
GAIN = re.compile(r"((norm|(^|[._])ln)[^.]*\.(weight|gamma|scale|g)|norm_weight)$", re.I)
"""Names of a norm's gains."""


@dataclasses.dataclass(frozen=True)
class WeightNames:
    """The library's paths of our modules.

    - `outside`: modules around the blocks
    - `blocks`: the list of blocks
    - `sublayers`: for each of our sublayers of a block, the modules in it
    """

    outside: Mapping[str, str]
    blocks: str
    sublayers: tuple[Mapping[str, str], ...]

    def of(self, name: str) -> str:
        """The library's name of our parameter."""
        module, _, parameter = name.rpartition(".")
        if module in self.outside:
            return f"{self.outside[module]}.{parameter}"
        _, _, number, part = module.split(".", 3)  # depth.sublayers.NUMBER.PART
        block, sublayer = divmod(int(number), len(self.sublayers))
        path = self.sublayers[sublayer][part]
        return f"{self.blocks}.{block}.{path}.{parameter}"


GPT2_NAMES = WeightNames(
    outside={
        "token_embedding": "transformer.wte",
        "position_embedding": "transformer.wpe",
        "final_norm": "transformer.ln_f",
        "unembedding": "lm_head",
    },
    blocks="transformer.h",
    sublayers=(
        {"input_norm": "ln_1", "field.qkv": "attn.c_attn", "field.out": "attn.c_proj"},
        {"input_norm": "ln_2", "field.up": "mlp.c_fc", "field.down": "mlp.c_proj"},
    ),
)
"""Names of GPT-2 and nanoGPT."""
LLAMA_NAMES = WeightNames(
    outside={
        "token_embedding": "model.embed_tokens",
        "final_norm": "model.norm",
        "unembedding": "lm_head",
    },
    blocks="model.layers",
    sublayers=(
        {
            "input_norm": "input_layernorm",
            "field.qkv": "self_attn.qkv_proj",
            "field.out": "self_attn.o_proj",
        },
        {
            "input_norm": "post_attention_layernorm",
            "field.gate": "mlp.gate_proj",
            "field.up": "mlp.up_proj",
            "field.down": "mlp.down_proj",
        },
    ),
)
"""Names of Llama. It has separate queries, keys and values, each in the place of `qkv_proj`."""
GPT_NEOX_NAMES = WeightNames(
    outside={
        "token_embedding": "gpt_neox.embed_in",
        "final_norm": "gpt_neox.final_layer_norm",
        "unembedding": "lm_head",
    },
    blocks="gpt_neox.layers",
    sublayers=(
        {
            "field.attention_gains": "input_layernorm",
            "field.ffn_gains": "post_attention_layernorm",
            "field.attention.qkv": "attention.query_key_value",
            "field.attention.out": "attention.dense",
            "field.ffn.up": "mlp.dense_h_to_4h",
            "field.ffn.down": "mlp.dense_4h_to_h",
        },
    ),
)
"""Names of GPT-NeoX."""


def place_and_block(what: str, name: str) -> tuple[str, int | None]:
    """Where something of that name is: its block, if the name has a number, in words and as one."""
    number = BLOCK.search(name)
    if number is None:
        return what, None
    block = int(number[1])
    if "sublayers." in name:
        block = block // 2  # a block of ours has two
    return f"block {block}: {what}", block

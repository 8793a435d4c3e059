"""One tiny random model of each family, built from its config class alone. An entry here is
enrolled in every family test.
"""

import dataclasses
import logging
from collections.abc import Callable

import torch
import transformers

from tests.helpers import learned

logging.getLogger("transformers").setLevel(logging.ERROR)
VOCABULARY, WIDTH, WINDOW, TOKENS = 31, 32, 4, 9
SMALL = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 48,
}
TEXT = {
    **SMALL,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "max_position_embeddings": 32,
}
GEMMA = {
    **TEXT,
    "head_dim": 12,
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}


@dataclasses.dataclass(frozen=True)
class Family:
    make: Callable[[], transformers.PreTrainedModel]
    placement: str
    centred: bool
    shift: float


def gpt2():
    config = {
        "n_embd": WIDTH,
        "n_layer": 3,
        "n_head": 4,
        "n_positions": 32,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=VOCABULARY, **config))


def bert():
    return transformers.BertForMaskedLM(
        transformers.BertConfig(**SMALL, max_position_embeddings=32)
    )


def llama():
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**TEXT))


def qwen2():
    window = {"use_sliding_window": True, "max_window_layers": 1, "sliding_window": WINDOW}
    return transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**TEXT, **window))


def qwen3():
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**TEXT, head_dim=12))


def gemma2():
    config = transformers.Gemma2Config(
        **{**GEMMA, "num_hidden_layers": 4}, query_pre_attn_scalar=12
    )
    return transformers.Gemma2ForCausalLM(config)


def gemma3():
    config = transformers.Gemma3TextConfig(
        **{**GEMMA, "num_hidden_layers": 4}, query_pre_attn_scalar=12
    )
    return transformers.Gemma3ForCausalLM(config)


def olmo2():
    return transformers.Olmo2ForCausalLM(transformers.Olmo2Config(**TEXT))


def vit():
    config = {name: value for name, value in SMALL.items() if name != "vocab_size"}
    return transformers.ViTForImageClassification(
        transformers.ViTConfig(**config, image_size=8, patch_size=4, num_labels=5)
    )


FAMILIES = {
    "gpt2": Family(gpt2, "pre", True, 0.0),
    "bert": Family(bert, "post", True, 0.0),
    "llama": Family(llama, "pre", False, 0.0),
    "qwen2": Family(qwen2, "pre", False, 0.0),
    "qwen3": Family(qwen3, "pre", False, 0.0),
    "gemma2": Family(gemma2, "peri", False, 1.0),
    "gemma3": Family(gemma3, "peri", False, 1.0),
    "olmo2": Family(olmo2, "output", False, 0.0),
    "vit": Family(vit, "pre", True, 0.0),
}


def made(name, scale=0.1):
    """The family's model in eval mode, every parameter moved off its initial value."""
    torch.manual_seed(0)
    return learned(FAMILIES[name].make().eval(), scale)


def without_dropout(model):
    """The model in training mode, but deterministic."""
    for part in model.train().modules():
        if isinstance(part, torch.nn.Dropout):
            part.p = 0.0
    return model


def inputs(model, seed=0):
    """Tokens, or an image for a model that takes one."""
    generator = torch.Generator().manual_seed(seed)
    if model.main_input_name == "pixel_values":
        return torch.randn(2, 3, 8, 8, generator=generator)
    return torch.randint(1, VOCABULARY, (2, TOKENS), generator=generator)


def block_outputs(model, blocks, x):
    """What the model's own forward pass puts out after each block, and at the end."""
    seen = []
    handles = [
        block.register_forward_hook(lambda _, __, output: seen.append(output)) for block in blocks
    ]
    logits = model(x).logits
    for handle in handles:
        handle.remove()
    return seen, logits

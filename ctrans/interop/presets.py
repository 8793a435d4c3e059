"""Published architectures of other libraries, by name."""

from __future__ import annotations

from typing import Any


def _gpt2(blocks: int, width: int, heads: int) -> dict[str, Any]:
    return {"model_type": "gpt2", "n_layer": blocks, "n_embd": width, "n_head": heads}


def _gated(
    family: str,
    blocks: int,
    width: int,
    heads: int,
    groups: int,
    hidden: int,
    vocabulary: int,
    theta: float,
    context: int,
    **settings: Any,
) -> dict[str, Any]:
    return {
        "model_type": family,
        "num_hidden_layers": blocks,
        "hidden_size": width,
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "intermediate_size": hidden,
        "vocab_size": vocabulary,
        "max_position_embeddings": context,
        "rope_parameters": {"rope_type": "default", "rope_theta": theta},
        **settings,
    }


PRESETS: dict[str, dict[str, Any]] = {
    "gpt2": _gpt2(12, 768, 12),
    "gpt2-medium": _gpt2(24, 1024, 16),
    "gpt2-large": _gpt2(36, 1280, 20),
    "gpt2-xl": _gpt2(48, 1600, 25),
    "llama-7b": _gated("llama", 32, 4096, 32, 32, 11008, 32000, 1e4, 4096, rms_norm_eps=1e-5),
    "llama-13b": _gated("llama", 40, 5120, 40, 40, 13824, 32000, 1e4, 4096, rms_norm_eps=1e-5),
    "llama-70b": _gated("llama", 80, 8192, 64, 8, 28672, 32000, 1e4, 4096, rms_norm_eps=1e-5),
    "llama3-8b": _gated("llama", 32, 4096, 32, 8, 14336, 128256, 5e5, 8192, rms_norm_eps=1e-5),
    "llama3-70b": _gated("llama", 80, 8192, 64, 8, 28672, 128256, 5e5, 8192, rms_norm_eps=1e-5),
    "qwen2.5-7b": _gated("qwen2", 28, 3584, 28, 4, 18944, 152064, 1e6, 131072, rms_norm_eps=1e-6),
    "gemma2-9b": _gated(
        "gemma2", 42, 3584, 16, 8, 14336, 256000, 1e4, 8192, head_dim=256, query_pre_attn_scalar=256
    ),
    "gemma2-27b": _gated(
        "gemma2",
        46,
        4608,
        32,
        16,
        36864,
        256000,
        1e4,
        8192,
        head_dim=128,
        query_pre_attn_scalar=144,
    ),
    "olmo2-7b": _gated("olmo2", 32, 4096, 32, 32, 11008, 100352, 5e5, 4096, rms_norm_eps=1e-6),
    "olmo2-13b": _gated("olmo2", 40, 5120, 40, 40, 13824, 100352, 5e5, 4096, rms_norm_eps=1e-6),
}
"""Published models, as their config.json describes them. `transformers` has their families."""

"""Model families of `transformers` that are known to work, or known not to. Each has one entry with
a configuration so small that a test builds it quickly. All that the documentation says about a
family (docs/howto/model-families.md) is found in that model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from ctrans.dynamics.fields import ExposesHeads, ExposesWeights, HasBound, HasOutputProjection
from ctrans.interop.block_structure import UNKNOWN
from ctrans.interop.example_inputs import main_input
from ctrans.interop.imported import Imported
from ctrans.interop.transformers_library import import_transformers
from solvers import ConfigError, look_up

Settings = Mapping[str, Any]
"""Settings of a configuration, by name."""
VOCABULARY = 31
"""Tokens of the small models."""
WIDTH = 32
"""Channels of the small models."""
WINDOW = 4
"""Tokens of a sliding window of the small models."""
IMAGE = 8
"""Pixels per side of the images of the small models."""
SIZES: Settings = {
    "hidden_size": WIDTH,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 48,
}
WORDS: Settings = {**SIZES, "vocab_size": VOCABULARY}
"""Also of families with other names of these sizes: their configurations take both."""
TEXT: Settings = {**WORDS, "max_position_embeddings": 32}
CAUSAL: Settings = {
    **TEXT,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
IMAGES: Settings = {**SIZES, "image_size": IMAGE, "patch_size": 4}
ENDS: Settings = {"bos_token_id": 1, "eos_token_id": 2}
ENCODER: Settings = {
    "d_model": WIDTH,
    "encoder_layers": 3,
    "encoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_layers": 1,
    "decoder_attention_heads": 4,
    "decoder_ffn_dim": 48,
    "vocab_size": VOCABULARY,
    "pad_token_id": 0,
    "decoder_start_token_id": 1,
    **ENDS,
}
FOUR_EXPERTS: Settings = {"num_experts": 4, "num_experts_per_tok": 2}
ALTERNATING = ["sliding_attention", "full_attention"]


@dataclass(frozen=True)
class Family:
    """A family of models: the names of its class and configuration class in `transformers`, and a
    small configuration.

    `part` is the attribute of the model that is opened, if not the whole. `refused` is a part of
    the reason why sublayers of a family are not read.
    """

    model: str
    config: str
    settings: Settings
    part: str = ""
    refused: str = ""


def _family(kind: str, sizes: Settings, stem: str, refused: str = "", **more: Any) -> Family:
    return Family(f"{stem}{kind}", f"{stem}Config", {**sizes, **more}, refused=refused)


_text = partial(_family, "ForCausalLM", TEXT)
_causal = partial(_family, "ForCausalLM", CAUSAL)
_masked = partial(_family, "ForMaskedLM", TEXT)
_classifier = partial(_family, "ForImageClassification", IMAGES)


def _gemma(**more: Any) -> dict[str, Any]:
    layers = {"num_hidden_layers": 4, "layer_types": ALTERNATING * 2}
    return {
        **CAUSAL,
        "head_dim": 12,
        "sliding_window": WINDOW,
        "query_pre_attn_scalar": 12,
        **layers,
        **more,
    }


FAMILIES: dict[str, Family] = {
    "gpt2": Family("GPT2LMHeadModel", "GPT2Config", {**TEXT, **ENDS}),
    "gpt_neo": _text(
        "GPTNeo",
        num_hidden_layers=2,
        window_size=WINDOW,
        attention_types=[[["global", "local"], 1]],
        **ENDS,
    ),
    "gptj": _text("GPTJ", rotary_dim=4, **ENDS),
    "gpt_neox": _text("GPTNeoX", **ENDS),
    "gpt_oss": _causal(
        "GptOss",
        num_local_experts=4,
        num_experts_per_tok=2,
        head_dim=8,
        sliding_window=WINDOW,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        layer_types=[*ALTERNATING, ALTERNATING[0]],
    ),
    "opt": _text("OPT", ffn_dim=48, word_embed_proj_dim=WIDTH),
    "bloom": Family("BloomForCausalLM", "BloomConfig", {**WORDS, **ENDS}),
    "falcon": _text("Falcon", **ENDS),
    "mpt": Family("MptForCausalLM", "MptConfig", WORDS),
    "llama": _causal("Llama"),
    "mistral": _causal("Mistral", sliding_window=WINDOW),
    "qwen2": _causal("Qwen2", use_sliding_window=True, max_window_layers=1, sliding_window=WINDOW),
    "qwen3": _causal("Qwen3", head_dim=12),
    "smollm3": _causal("SmolLM3"),
    "gemma2": Family("Gemma2ForCausalLM", "Gemma2Config", _gemma()),
    "gemma3_text": Family("Gemma3ForCausalLM", "Gemma3TextConfig", _gemma()),
    "gemma3n_text": Family(
        "Gemma3nForCausalLM",
        "Gemma3nTextConfig",
        {
            **_gemma(head_dim=8),
            "vocab_size_per_layer_input": VOCABULARY,
            "hidden_size_per_layer_input": 8,
            "laurel_rank": 8,
            "num_kv_shared_layers": 0,
            "activation_sparsity_pattern": [0.0] * 4,
        },
        refused="returns no state of the shape",
    ),
    "llama4_text": Family(
        "Llama4ForCausalLM",
        "Llama4TextConfig",
        {
            **CAUSAL,
            "intermediate_size_mlp": 48,
            "head_dim": 8,
            "num_local_experts": 4,
            "num_experts_per_tok": 1,
            "interleave_moe_layer_step": 2,
            "attention_chunk_size": WINDOW,
        },
    ),
    "olmo": _causal("Olmo"),
    "olmo2": _causal("Olmo2"),
    "olmo3": _causal("Olmo3", sliding_window=WINDOW),
    "glm4": _causal("Glm4", head_dim=8),
    "granite": _causal("Granite", residual_multiplier=0.22),
    "nemotron": _causal("Nemotron"),
    "starcoder2": _causal("Starcoder2"),
    "phi": _causal("Phi"),
    "phi3": _causal("Phi3"),
    "stablelm": _causal("StableLm"),
    "cohere": _causal("Cohere"),
    "cohere2": _causal("Cohere2", sliding_window=WINDOW),
    "mixtral": _causal("Mixtral", num_local_experts=4),
    "granitemoe": _causal("GraniteMoe", residual_multiplier=0.22, num_local_experts=4),
    "qwen3_moe": _causal(
        "Qwen3Moe", **FOUR_EXPERTS, moe_intermediate_size=24, head_dim=8, mlp_only_layers=[1]
    ),
    "olmoe": _causal("Olmoe", **FOUR_EXPERTS),
    "deepseek_v3": _causal(
        "DeepseekV3",
        num_key_value_heads=4,
        kv_lora_rank=16,
        q_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=8,
        moe_intermediate_size=24,
        n_routed_experts=4,
        n_shared_experts=1,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
        first_k_dense_replace=1,
    ),
    "mamba": Family(
        "MambaForCausalLM",
        "MambaConfig",
        {"vocab_size": VOCABULARY, "hidden_size": WIDTH, "num_hidden_layers": 3, "state_size": 4},
    ),
    "bert": _masked("Bert"),
    "minilm": Family("BertModel", "BertConfig", {**TEXT, "hidden_act": "gelu"}),
    "roberta": _masked("Roberta"),
    "electra": _masked("Electra", embedding_size=16),
    "distilbert": _masked("DistilBert", hidden_dim=48),
    "mpnet": _masked("MPNet"),
    "deberta": _masked("Deberta", relative_attention=True, pos_att_type=["c2p", "p2c"]),
    "deberta-v2": _masked(
        "DebertaV2",
        relative_attention=True,
        position_buckets=8,
        pos_att_type=["c2p", "p2c"],
        norm_rel_ebd="layer_norm",
        share_att_key=True,
        position_biased_input=False,
    ),
    "modernbert": _masked(
        "ModernBert", pad_token_id=0, cls_token_id=1, sep_token_id=2, local_attention=WINDOW, **ENDS
    ),
    "albert": _masked("Albert", embedding_size=16),
    "t5": Family("T5EncoderModel", "T5Config", {**WORDS, "d_kv": 8, "d_ff": 48}),
    "bart": Family(
        "BartModel", "BartConfig", {**ENCODER, "max_position_embeddings": 32}, part="encoder"
    ),
    "whisper": Family(
        "WhisperModel",
        "WhisperConfig",
        {**ENCODER, "num_mel_bins": 8, "max_source_positions": 6, "max_target_positions": 8},
        part="encoder",
    ),
    "vit": _classifier("ViT", num_labels=5),
    "deit": _classifier("DeiT", num_labels=5),
    "beit": _classifier("Beit", num_labels=5),
    "dinov2": _classifier("Dinov2", num_labels=5),
    "siglip_vision_model": Family("SiglipVisionModel", "SiglipVisionConfig", IMAGES),
    "siglip_text_model": Family("SiglipTextModel", "SiglipTextConfig", TEXT),
    "clip_vision_model": Family("CLIPVisionModel", "CLIPVisionConfig", IMAGES),
    "clip_text_model": Family("CLIPTextModel", "CLIPTextConfig", {**TEXT, "eos_token_id": 2}),
}
"""Families by the name in a config's `model_type`; MiniLM is a BERT without a head."""


@dataclass(frozen=True)
class FoundFamily:
    """What was found in the small model of a family.

    - `model`, `opened`: its class, and the class of the part that was opened
    - `reads`: what it reads
    - `supported`, `refused`: whether all its parts are read; if not, why
    - `placement`, `norm`, `attention`, `ffn`, `parallel`, `lengths`: as in `Architecture`
    - `theta`: whether attention's matrices by head, its temperature and its rows are known, as
      theta and Emadi's bounds need
    - `bounds`: whether each map has a bound on its output
    - `matrices`: whether each map's matrices are known, as statements on initialisation need
    - `last`: whether each map has a known output projection, as Hamiltonians over weights need
    - `unread`: why not
    """

    family: str
    model: str
    opened: str
    reads: str
    supported: bool
    refused: str | None = None
    placement: str | None = None
    norm: str | None = None
    attention: str | None = None
    ffn: str | None = None
    parallel: bool = False
    lengths: tuple[float, ...] = ()
    theta: bool = False
    bounds: bool = False
    matrices: bool = False
    last: bool = False
    unread: tuple[str, ...] = ()


def small_model(family: str, seed: int = 0) -> nn.Module:
    """The family's small model with the library's initialisation, in eval mode. Raises ConfigError
    for an unknown family.
    """
    entry = look_up("family", family, FAMILIES)
    transformers = import_transformers()
    config = getattr(transformers, entry.config)(**entry.settings)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: Any = getattr(transformers, entry.model)(config).eval()
    if hasattr(model, "set_experts_implementation"):  # fused kernels of experts have no float64
        model.set_experts_implementation("eager")
    if entry.part:
        model = getattr(model, entry.part)
    opened: nn.Module = model
    return opened


def found_family(family: str) -> FoundFamily:
    """What is found in the family's small model. It does not depend on weights or sizes."""
    entry = FAMILIES[family]
    model = _moved(small_model(family))
    about: dict[str, Any] = {
        "family": family,
        "model": entry.model,
        "opened": type(model).__name__,
        "reads": READS.get(main_input(model), main_input(model)),
    }
    try:
        imported = Imported(model)
    except ConfigError as error:
        return FoundFamily(**about, supported=False, refused=str(error))
    config = imported.config
    if UNKNOWN in config.placement:
        return FoundFamily(**about, supported=False, refused=config.unread[-1])
    fields = [
        branch.field
        for sublayer in imported.depth.sublayers
        for branch in sublayer.branches.values()
    ]
    attentions = sum("attention" in sublayer.branches for sublayer in imported.depth.sublayers)
    with_heads = [field for field in fields if isinstance(field, ExposesHeads)]
    bilinear = not any(field.normalised_scores for field in with_heads)
    return FoundFamily(
        **about,
        supported=True,
        placement=config.placement,
        norm=config.norm,
        attention=config.attention,
        ffn=config.ffn,
        parallel=config.parallel,
        lengths=config.lengths,
        unread=config.unread,
        theta=len(with_heads) == attentions and bilinear,
        bounds=all(isinstance(field, HasBound) for field in fields),
        matrices=all(isinstance(field, ExposesWeights) for field in fields),
        last=all(_has_last(field) for field in fields),
    )


READS = {"input_ids": "tokens", "pixel_values": "images", "input_features": "audio"}
"""What a model reads, by the name of its main argument."""


def _has_last(map_: object) -> bool:
    try:
        return isinstance(map_, HasOutputProjection)
    except ConfigError:
        return False


def _moved(model: nn.Module) -> nn.Module:
    """The model with each weight moved off its initial value, because scales may start at 1 and
    offsets at 0.
    """
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.1 * torch.randn(weight.shape, generator=generator))
    return model

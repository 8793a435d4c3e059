"""Our GPT as a Hugging Face model and back: the same numbers under the library's names.

| ours                                                                      | theirs  |
| ------------------------------------------------------------------------- | ------- |
| pre, RMSNorm, rotary positions, SwiGLU, no bias, any `kv_heads`, dt = 1     | Llama   |
| the same with another dt, their `residual_multiplier`                      | Granite |
| pre, LayerNorm, learned positions, GELU, bias, dt = 1                       | GPT-2   |
| pre, LayerNorm, rotary positions on a part of a head, GELU, bias, attention |         |
| and FFN at once with a norm each (`branch_norms`), dt = 1                   | GPTNeoX |
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ctrans.fields.positions import turned_entries
from ctrans.interop.hugging_face import CONFIG, WEIGHTS, load_local
from ctrans.interop.transformers_library import import_transformers
from ctrans.model.config import GPTConfig
from ctrans.model.gpt import GPT
from ctrans.model.weights_file import safetensors_bytes, write_durably
from ctrans.weights.on_demand import check_present
from solvers import ConfigError

FREE = {
    *("vocab_size", "context", "depth", "width", "heads", "ffn_width", "eps", "rotary_base", "kv_heads", "tied", "dt"),
    *("initialisation", "embedding_std"),
}
"""Settings that the library has too, or that act only before training."""
LLAMA = GPTConfig(placement="pre", norm="rmsnorm", positions="rotary", ffn="swiglu", bias=False)
GPT2 = GPTConfig(placement="pre")
GPT_NEOX = GPTConfig(placement="pre", positions="rotary", parallel_blocks=True, branch_norms=True)


@dataclasses.dataclass(frozen=True)
class Target:
    """A family that ours can be written as: `like` has all settings that are not in `FREE`; `free` are those that are, here.

    `settings` gives its config, `weights` our weights by its names, as views (a head's rows apart where the order is another one), and
    `read` what ours is of its config, where that is known.
    """

    family: str
    like: GPTConfig
    free: frozenset[str]
    settings: Callable[[GPTConfig], dict[str, Any]]
    weights: Callable[[GPT], dict[str, Tensor]]
    read: Callable[[Any], GPTConfig] | None = None

    @property
    def model(self) -> str:
        """The name of its class."""
        return f"{self.family}{'LMHeadModel' if self.family == 'GPT2' else 'ForCausalLM'}"


def _llama_settings(c: GPTConfig) -> dict[str, Any]:
    return {
        "vocab_size": c.vocab_size,
        "max_position_embeddings": c.context,
        "num_hidden_layers": c.depth,
        "hidden_size": c.width,
        "num_attention_heads": c.heads,
        "num_key_value_heads": c.kv_heads or c.heads,
        "head_dim": c.width // c.heads,
        "intermediate_size": c.hidden_width,
        "rms_norm_eps": c.eps,
        "rope_parameters": {"rope_type": "default", "rope_theta": c.rotary_base},
        "tie_word_embeddings": c.tied,
        "attention_bias": False,
        "mlp_bias": False,
        "hidden_act": "silu",
        **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
    }


def _llama_read(c: Any) -> GPTConfig:
    return dataclasses.replace(
        LLAMA,
        vocab_size=c.vocab_size,
        context=c.max_position_embeddings,
        depth=c.num_hidden_layers,
        width=c.hidden_size,
        heads=c.num_attention_heads,
        kv_heads=None if c.num_key_value_heads == c.num_attention_heads else c.num_key_value_heads,
        ffn_width=c.intermediate_size,
        eps=c.rms_norm_eps,
        rotary_base=c.rope_parameters["rope_theta"],
        tied=c.tie_word_embeddings,
        dt=getattr(c, "residual_multiplier", 1.0),
    )


def _granite_settings(c: GPTConfig) -> dict[str, Any]:
    scores = (c.width // c.heads) ** -0.5
    return {**_llama_settings(c), "residual_multiplier": c.dt, "attention_multiplier": scores}


def _llama_weights(model: GPT) -> dict[str, Tensor]:
    c, weights = model.config, {"model.embed_tokens.weight": model.token_embedding.weight}
    shared = (c.kv_heads or c.heads) * (c.width // c.heads)
    parts = list(model.depth.sublayers)
    for i, (attention, ffn) in enumerate(zip(parts[::2], parts[1::2], strict=True)):
        query, key, value = attention.field.qkv.weight.split([c.width, shared, shared])
        own = {
            "input_layernorm": attention.input_norm.gamma,  # type: ignore[union-attr]  # as the placement says
            "self_attn.q_proj": query,
            "self_attn.k_proj": key,
            "self_attn.v_proj": value,
            "self_attn.o_proj": attention.field.out.weight,
            "post_attention_layernorm": ffn.input_norm.gamma,  # type: ignore[union-attr]  # as the placement says
            "mlp.gate_proj": ffn.field.gate.weight,
            "mlp.up_proj": ffn.field.up.weight,
            "mlp.down_proj": ffn.field.down.weight,
        }
        weights |= {f"model.layers.{i}.{name}.weight": weight for name, weight in own.items()}
    weights["model.norm.weight"] = model.final_norm.gamma  # type: ignore[assignment]  # an RMS norm has one
    if model.unembedding is not None:
        weights["lm_head.weight"] = model.unembedding.weight
    return weights


def _gpt2_settings(c: GPTConfig) -> dict[str, Any]:
    return {
        "vocab_size": c.vocab_size,
        "n_positions": c.context,
        "n_layer": c.depth,
        "n_embd": c.width,
        "n_head": c.heads,
        "n_inner": c.hidden_width,
        "layer_norm_epsilon": c.eps,
        "activation_function": "gelu",
        "tie_word_embeddings": c.tied,
        **dict.fromkeys(("embd_pdrop", "attn_pdrop", "resid_pdrop"), 0.0),
        **dict.fromkeys(("bos_token_id", "eos_token_id")),
    }


def _gpt2_weights(model: GPT) -> dict[str, Tensor]:
    assert model.position_embedding is not None, "positions are learned"
    weights = {"transformer.wte.weight": model.token_embedding.weight, "transformer.wpe.weight": model.position_embedding.weight}
    parts = list(model.depth.sublayers)
    for i, (attention, ffn) in enumerate(zip(parts[::2], parts[1::2], strict=True)):
        norms: dict[str, Any] = {"ln_1": attention.input_norm, "ln_2": ffn.input_norm}
        maps = {"attn.c_attn": attention.field.qkv, "attn.c_proj": attention.field.out}
        maps |= {"mlp.c_fc": ffn.field.up, "mlp.c_proj": ffn.field.down}
        own = {f"{name}.weight": norm.gamma for name, norm in norms.items()} | {
            f"{name}.bias": norm.beta for name, norm in norms.items()
        }
        own |= {f"{name}.weight": each.weight.T for name, each in maps.items()} | {
            f"{name}.bias": each.bias for name, each in maps.items()
        }
        weights |= {f"transformer.h.{i}.{name}": weight for name, weight in own.items()}
    last: Any = model.final_norm
    weights |= {"transformer.ln_f.weight": last.gamma, "transformer.ln_f.bias": last.beta}
    if model.unembedding is not None:
        weights["lm_head.weight"] = model.unembedding.weight
    return weights


def _neox_settings(c: GPTConfig) -> dict[str, Any]:
    head = c.width // c.heads
    turned = turned_entries(head, c.rotary_fraction)  # theirs rounds to any number of entries, and has no odd ones
    return {
        "vocab_size": c.vocab_size,
        "max_position_embeddings": c.context,
        "num_hidden_layers": c.depth,
        "hidden_size": c.width,
        "num_attention_heads": c.heads,
        "intermediate_size": c.hidden_width,
        "layer_norm_eps": c.eps,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": c.rotary_base,
            "partial_rotary_factor": c.rotary_fraction if int(head * c.rotary_fraction) == turned else turned / head,
        },
        "tie_word_embeddings": c.tied,
        "use_parallel_residual": True,
        "attention_bias": True,
        "hidden_act": "gelu",
        **dict.fromkeys(("bos_token_id", "eos_token_id")),
    }


def _neox_weights(model: GPT) -> dict[str, Tensor]:
    c, weights = model.config, {"gpt_neox.embed_in.weight": model.token_embedding.weight}
    for i, sublayer in enumerate(model.depth.sublayers):
        both = sublayer.field
        maps = {"attention.dense": both.attention.out, "mlp.dense_h_to_4h": both.ffn.up, "mlp.dense_4h_to_h": both.ffn.down}
        norms = {"input_layernorm": both.attention_gains, "post_attention_layernorm": both.ffn_gains}
        own = {f"{name}.weight": each.weight for name, each in {**maps, **norms}.items()}
        own |= {f"{name}.bias": each.bias for name, each in {**maps, **norms}.items()}
        # theirs has a head's queries, keys and values one after the other
        own["attention.query_key_value.weight"] = both.attention.qkv.weight.unflatten(0, (3, c.heads, -1)).transpose(0, 1)
        own["attention.query_key_value.bias"] = both.attention.qkv.bias.unflatten(0, (3, c.heads, -1)).transpose(0, 1)
        weights |= {f"gpt_neox.layers.{i}.{name}": weight for name, weight in own.items()}
    last: Any = model.final_norm
    weights |= {"gpt_neox.final_layer_norm.weight": last.gamma, "gpt_neox.final_layer_norm.bias": last.beta}
    if model.unembedding is not None:
        weights["lm_head.weight"] = model.unembedding.weight
    return weights


def _neox_read(c: Any) -> GPTConfig:
    return dataclasses.replace(
        GPT_NEOX,
        vocab_size=c.vocab_size,
        context=c.max_position_embeddings,
        depth=c.num_hidden_layers,
        width=c.hidden_size,
        heads=c.num_attention_heads,
        ffn_width=c.intermediate_size,
        eps=c.layer_norm_eps,
        rotary_base=c.rope_parameters["rope_theta"],
        rotary_fraction=c.rope_parameters["partial_rotary_factor"],
        tied=c.tie_word_embeddings,
    )


TARGETS: dict[str, Target] = {
    "llama": Target("Llama", LLAMA, frozenset(FREE - {"dt"}), _llama_settings, _llama_weights, _llama_read),
    "granite": Target("Granite", LLAMA, frozenset(FREE), _granite_settings, _llama_weights, _llama_read),
    "gpt_neox": Target(
        "GPTNeoX",
        GPT_NEOX,
        frozenset(FREE - {"dt", "kv_heads"} | {"rotary_fraction"}),
        _neox_settings,
        _neox_weights,
        _neox_read,
    ),
    "gpt2": Target("GPT2", GPT2, frozenset(FREE - {"dt", "rotary_base", "kv_heads"}), _gpt2_settings, _gpt2_weights),
}
"""Families that ours can be written as, by `model_type`; the first that fits is taken."""


def target_of(config: GPTConfig) -> Target:
    """The family that computes what that configuration does. Raises ConfigError that names what no family has."""
    lacks = {}
    for name, target in TARGETS.items():
        fields = [field.name for field in dataclasses.fields(GPTConfig) if field.name not in target.free]
        lacks[name] = [field for field in fields if getattr(config, field) != getattr(target.like, field)]
        if not lacks[name]:
            return target
    nearest = min(lacks, key=lambda name: len(lacks[name]))
    odd = ", ".join(
        f"{field} = {getattr(config, field)!r} ({getattr(TARGETS[nearest].like, field)!r} there)" for field in lacks[nearest]
    )
    raise ConfigError(
        f"no family of transformers that is known here computes this model; nearest is {TARGETS[nearest].family}, and what differs is {odd}"
    )


def to_transformers(model: GPT) -> Any:
    """The library's model with these weights (copies), in their dtype and in eval mode. Raises ConfigError for what has no counterpart.

    >>> to_transformers(GPT(GPTConfig(placement="pre", norm="rmsnorm", positions="rotary", ffn="swiglu", bias=False)))
    """
    check_present(model, "written as a model of transformers")
    target, transformers = target_of(model.config), import_transformers()
    config = getattr(transformers, f"{target.family}Config")(**target.settings(model.config))
    kind, dtype = getattr(transformers, target.model), model.token_embedding.weight.dtype
    with torch.random.fork_rng(devices=[]):
        made = kind._from_config(config, dtype=dtype)
    weights = {name: _as_theirs(name, weight) for name, weight in target.weights(model).items()}
    missing, unexpected = made.load_state_dict(weights, strict=False)
    missing = [name for name in missing if not (name == "lm_head.weight" and model.config.tied)]
    assert not missing + unexpected, (missing, unexpected)
    return made.eval()


def write_transformers(model: GPT, directory: str | Path) -> str:
    """Writes config.json and model.safetensors, which `AutoModelForCausalLM.from_pretrained` reads; each whole or not at all.

    Gives the family's name. Raises ConfigError for what has no counterpart, and where it cannot be written.
    """
    check_present(model, "written as a model of transformers")
    target, transformers = target_of(model.config), import_transformers()
    config = getattr(transformers, f"{target.family}Config")(
        **target.settings(model.config),
        architectures=[target.model],
        dtype=str(model.token_embedding.weight.dtype).removeprefix("torch."),
    )
    weights = {name: _as_theirs(name, weight).cpu().contiguous().clone() for name, weight in target.weights(model).items()}
    directory = Path(directory)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        write_durably(directory / WEIGHTS, safetensors_bytes(weights, {"format": "pt"}))
        write_durably(directory / CONFIG, (json.dumps(config.to_diff_dict(), indent=2, sort_keys=True) + "\n").encode())
    except OSError as error:
        raise ConfigError(f"cannot write a model to {str(directory)!r}: {error.strerror or error}") from None
    return target.family


def to_gpt(model: nn.Module | str | Path) -> GPT:
    """Our GPT with the weights (copies) of a Llama, Granite or GPT-NeoX of the library, or of one saved in a directory.

    Unlike `from_transformers`, which looks at the library's own modules, it trains, saves and generates as ours do. Raises ConfigError
    for a model that computes something else: scaled rotary positions, biases, multipliers of embeddings or logits.
    """
    own: Any = model if isinstance(model, nn.Module) else load_local(model)
    kind = getattr(getattr(own, "config", None), "model_type", type(own).__name__)
    target = TARGETS.get(kind)
    if target is None or target.read is None or type(own).__name__ != target.model:
        able = ", ".join(each.family for each in TARGETS.values() if each.read is not None)
        raise ConfigError(f"{type(own).__name__} is no {able} with a head: look at it by from_transformers")
    c = own.config
    rope, config = c.rope_parameters, target.read(c)
    wanted = target.settings(config)
    said = {name: getattr(c, name, None) for name in wanted} | {"rope_parameters": {**rope, "rope_theta": config.rotary_base}}
    said |= {name: getattr(c, name, 1.0) for name in ("embedding_multiplier", "logits_scaling")}
    wanted |= {"embedding_multiplier": 1.0, "logits_scaling": 1.0}
    tokens = ("bos_token_id", "eos_token_id", "pad_token_id")
    odd = [name for name in wanted if name not in tokens and not _alike(said[name], wanted[name])]
    if odd:
        raise ConfigError(
            f"{type(own).__name__} has {odd[0]} = {said[odd[0]]!r}, and ours computes with {wanted[odd[0]]!r}: not ours"
        )
    made = GPT(config).to(next(own.parameters()).dtype)
    theirs = own.state_dict()
    with torch.no_grad():
        for name, weight in target.weights(made).items():  # views of ours
            weight.copy_(theirs[name].view(weight.shape))
    return made


def _as_theirs(name: str, weight: Tensor) -> Tensor:
    """The weight with the rows of heads one after the other."""
    rows = weight.detach()
    if rows.dim() < 3:
        return rows
    return rows.flatten() if name.endswith("bias") else rows.flatten(0, -2)


def _alike(found: object, wanted: object) -> bool:
    if isinstance(found, Mapping) and isinstance(wanted, Mapping):
        return all(found.get(name) == value for name, value in wanted.items())
    return found == wanted

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

from ctrans.dynamics.fields.positions import turned_entries
from ctrans.dynamics.weights.on_demand import check_present
from ctrans.interop.hugging_face import load_local
from ctrans.interop.hugging_face_files import CONFIG, WEIGHTS
from ctrans.interop.transformers_library import import_transformers
from ctrans.interop.weight_names import GPT2_NAMES, GPT_NEOX_NAMES, LLAMA_NAMES, WeightNames
from ctrans.model.config import GPTConfig
from ctrans.model.gpt import GPT
from ctrans.model.weights_file import safetensors_bytes, write_durably
from solvers import ConfigError, checked

LLAMA = GPTConfig(placement="pre", norm="rmsnorm", positions="rotary", ffn="swiglu", bias=False)
GPT2 = GPTConfig(placement="pre")
GPT_NEOX = GPTConfig(placement="pre", positions="rotary", parallel_blocks=True, branch_norms=True)
BEFORE_TRAINING = {"initialisation", "embedding_std"}
"""Settings that act only before training."""
OF_ROTARY = ("rope_theta", "partial_rotary_factor")
"""Settings of the library that are in `rope_parameters`."""
SPECIAL_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")

Weights = dict[str, Tensor]


@dataclasses.dataclass(frozen=True)
class Target:
    """A family of the library as which our GPT can be written.

    - `settings`: our settings, and values derived from them, by the family's names. All other
      settings of ours are as in `like`
    - `fixed`: the family's other settings
    - `names`: the family's names of our weights
    - `layout`: from our weights under these names to views of them under the family's own names and
      in its order of axes. If a head's rows have another order, they get an axis of their own
    - `readable`: whether `to_gpt` reads the family
    """

    family: str
    like: GPTConfig
    settings: Mapping[str, str]
    fixed: Mapping[str, Any]
    names: WeightNames
    layout: Callable[[GPTConfig, Weights], Weights]
    readable: bool = True

    @property
    def model(self) -> str:
        """The name of the family's class."""
        return f"{self.family}{'LMHeadModel' if self.family == 'GPT2' else 'ForCausalLM'}"

    def config(self, c: GPTConfig) -> dict[str, Any]:
        """The family's settings for our configuration."""
        head = c.width // c.heads
        values = {
            **vars(c),
            "kv_heads": c.kv_heads or c.heads,
            "ffn_width": c.hidden_width,
            "rotary_fraction": _turned_fraction(c),
            "head_width": head,
            "score_scale": head**-0.5,
        }
        theirs = {name: values[ours] for ours, name in self.settings.items()}
        rotary = {name: theirs.pop(name) for name in OF_ROTARY if name in theirs}
        return {
            **theirs,
            **self.fixed,
            **({"rope_parameters": {"rope_type": "default", **rotary}} if rotary else {}),
        }

    def read(self, config: Any) -> GPTConfig:
        """Our configuration for a config of the family."""
        values = {
            ours: config.rope_parameters[name] if name in OF_ROTARY else getattr(config, name)
            for ours, name in self.settings.items()
            if hasattr(self.like, ours)
        }
        if values.get("kv_heads") == values["heads"]:
            values["kv_heads"] = None
        return dataclasses.replace(self.like, **values)

    def weights(self, model: GPT) -> Weights:
        """Our weights by the family's names, as views."""
        ours = model.state_dict(keep_vars=True)
        return self.layout(
            model.config, {self.names.of(name): weight for name, weight in ours.items()}
        )


def _turned_fraction(c: GPTConfig) -> float:
    """The fraction of a head's entries that rotary positions turn. The library rounds to an even
    number of entries.
    """
    head = c.width // c.heads
    turned = turned_entries(head, c.rotary_fraction)
    if int(head * c.rotary_fraction) == turned:
        return c.rotary_fraction
    return turned / head


def _queries_keys_and_values_apart(c: GPTConfig, weights: Weights) -> Weights:
    shared = (c.kv_heads or c.heads) * (c.width // c.heads)
    apart: Weights = {}
    for name, weight in weights.items():
        if "qkv_proj" in name:
            parts = weight.split([c.width, shared, shared])
            apart |= {
                name.replace("qkv_proj", f"{letter}_proj"): part
                for letter, part in zip("qkv", parts, strict=True)
            }
        else:
            apart[name] = weight
    return apart


def _matrices_transposed(c: GPTConfig, weights: Weights) -> Weights:
    return {
        name: weight.T if ".c_" in name and weight.dim() == 2 else weight
        for name, weight in weights.items()
    }


def _each_heads_queries_keys_and_values(c: GPTConfig, weights: Weights) -> Weights:
    return {
        name: (
            weight.unflatten(0, (3, c.heads, -1)).transpose(0, 1)
            if "query_key_value" in name
            else weight
        )
        for name, weight in weights.items()
    }


COMMON = {
    "vocab_size": "vocab_size",
    "context": "max_position_embeddings",
    "depth": "num_hidden_layers",
    "width": "hidden_size",
    "heads": "num_attention_heads",
    "ffn_width": "intermediate_size",
    "tied": "tie_word_embeddings",
    "rotary_base": "rope_theta",
}
OF_LLAMA = {
    **COMMON,
    "kv_heads": "num_key_value_heads",
    "eps": "rms_norm_eps",
    "head_width": "head_dim",
}
OF_GRANITE = {**OF_LLAMA, "dt": "residual_multiplier", "score_scale": "attention_multiplier"}
OF_NEOX = {**COMMON, "eps": "layer_norm_eps", "rotary_fraction": "partial_rotary_factor"}
OF_GPT2 = {
    "vocab_size": "vocab_size",
    "context": "n_positions",
    "depth": "n_layer",
    "width": "n_embd",
    "heads": "n_head",
    "ffn_width": "n_inner",
    "eps": "layer_norm_epsilon",
    "tied": "tie_word_embeddings",
}
NO_SPECIAL_TOKENS = dict.fromkeys(SPECIAL_TOKENS)
NO_ENDS = dict.fromkeys(SPECIAL_TOKENS[:2])
AS_LLAMA = {"attention_bias": False, "mlp_bias": False, "hidden_act": "silu", **NO_SPECIAL_TOKENS}
AS_NEOX = {"use_parallel_residual": True, "attention_bias": True, "hidden_act": "gelu", **NO_ENDS}
AS_GPT2 = {
    "activation_function": "gelu",
    **dict.fromkeys(("embd_pdrop", "attn_pdrop", "resid_pdrop"), 0.0),
    **NO_ENDS,
}
TARGETS: dict[str, Target] = {
    "llama": Target(
        "Llama", LLAMA, OF_LLAMA, AS_LLAMA, LLAMA_NAMES, _queries_keys_and_values_apart
    ),
    "granite": Target(
        "Granite", LLAMA, OF_GRANITE, AS_LLAMA, LLAMA_NAMES, _queries_keys_and_values_apart
    ),
    "gpt_neox": Target(
        "GPTNeoX", GPT_NEOX, OF_NEOX, AS_NEOX, GPT_NEOX_NAMES, _each_heads_queries_keys_and_values
    ),
    "gpt2": Target(
        "GPT2", GPT2, OF_GPT2, AS_GPT2, GPT2_NAMES, _matrices_transposed, readable=False
    ),
}
"""Families as which our GPT can be written, by `model_type`; the first that fits is used."""


def target_of(config: GPTConfig) -> Target:
    """The family that computes the same model. Raises ConfigError, naming the settings that no
    family has.
    """
    lacks = {}
    for name, target in TARGETS.items():
        free = {*target.settings, *BEFORE_TRAINING}
        fields = [field.name for field in dataclasses.fields(GPTConfig) if field.name not in free]
        lacks[name] = [
            field for field in fields if getattr(config, field) != getattr(target.like, field)
        ]
        if not lacks[name]:
            return target
    nearest = min(lacks, key=lambda name: len(lacks[name]))
    odd = ", ".join(
        f"{field} = {getattr(config, field)!r} ({getattr(TARGETS[nearest].like, field)!r} there)"
        for field in lacks[nearest]
    )
    raise ConfigError(
        "no known family of transformers computes this model; the nearest is"
        f" {TARGETS[nearest].family}, which differs in {odd}"
    )


@checked
def to_transformers(model: GPT) -> Any:
    """The library's model with copies of these weights, in their dtype and in eval mode. Raises
    ConfigError for a model without a counterpart.

    >>> to_transformers(GPT(GPTConfig(placement="pre", norm="rmsnorm", positions="rotary", ffn="swiglu", bias=False)))
    """
    target, config, weights = _written(model)
    kind = getattr(import_transformers(), target.model)
    dtype = model.token_embedding.weight.dtype
    with torch.random.fork_rng(devices=[]):
        made = kind._from_config(config, dtype=dtype)
    missing, unexpected = made.load_state_dict(weights, strict=False)
    missing = [name for name in missing if not (name == "lm_head.weight" and model.config.tied)]
    assert not missing + unexpected, (missing, unexpected)
    return made.eval()


@checked
def write_transformers(model: GPT, directory: str | Path) -> str:
    """Writes config.json and model.safetensors, which `AutoModelForCausalLM.from_pretrained` reads.
    Each file is written completely or not at all.

    Returns the family's name. Raises ConfigError for a model without a counterpart, and if writing
    fails.
    """
    target, config, weights = _written(model)
    weights = {name: weight.cpu().contiguous().clone() for name, weight in weights.items()}
    directory = Path(directory)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        write_durably(directory / WEIGHTS, safetensors_bytes(weights, {"format": "pt"}))
        write_durably(
            directory / CONFIG,
            (json.dumps(config.to_diff_dict(), indent=2, sort_keys=True) + "\n").encode(),
        )
    except OSError as error:
        raise ConfigError(
            f"cannot write a model to {str(directory)!r}: {error.strerror or error}"
        ) from None
    return target.family


def _written(model: GPT) -> tuple[Target, Any, Weights]:
    """The family, its config object and the weights by its names, with the rows of heads one after
    the other.
    """
    check_present(model, "written as a model of transformers")
    target = target_of(model.config)
    config = getattr(import_transformers(), f"{target.family}Config")(
        **target.config(model.config),
        architectures=[target.model],
        dtype=str(model.token_embedding.weight.dtype).removeprefix("torch."),
    )
    weights = {name: weight.detach() for name, weight in target.weights(model).items()}
    for name, weight in weights.items():
        if weight.dim() > 2:
            weights[name] = weight.flatten(0, -1 if name.endswith("bias") else -2)
    return target, config, weights


@checked
def to_gpt(model: nn.Module | str | Path) -> GPT:
    """Our GPT with copies of the weights of a Llama, Granite or GPT-NeoX model, or of one saved in
    a directory.

    Unlike a model of `from_transformers`, which uses the library's modules, it trains, saves and
    generates as our GPTs do. Raises ConfigError for a model that computes something else: scaled
    rotary positions, biases, multipliers of embeddings or logits.
    """
    own: Any = model if isinstance(model, nn.Module) else load_local(model)
    kind = getattr(getattr(own, "config", None), "model_type", type(own).__name__)
    target = TARGETS.get(kind)
    if target is None or not target.readable or type(own).__name__ != target.model:
        able = ", ".join(each.family for each in TARGETS.values() if each.readable)
        raise ConfigError(
            f"{type(own).__name__} is no {able} with a head: open it by from_transformers"
        )
    c = own.config
    rope = c.rope_parameters
    config = target.read(c)
    wanted = target.config(config)
    said = {name: getattr(c, name, None) for name in wanted} | {
        "rope_parameters": {**rope, "rope_theta": config.rotary_base}
    }
    said |= {name: getattr(c, name, 1.0) for name in ("embedding_multiplier", "logits_scaling")}
    wanted |= {"embedding_multiplier": 1.0, "logits_scaling": 1.0}
    odd = [
        name
        for name in wanted
        if name not in SPECIAL_TOKENS and not _alike(said[name], wanted[name])
    ]
    if odd:
        raise ConfigError(
            f"{type(own).__name__} has {odd[0]} = {said[odd[0]]!r}, but our GPT has"
            f" {wanted[odd[0]]!r}: open it by from_transformers"
        )
    made = GPT(config).to(next(own.parameters()).dtype)
    theirs = own.state_dict()
    with torch.no_grad():
        for name, weight in target.weights(made).items():  # views of ours
            weight.copy_(theirs[name].view(weight.shape))
    return made


def _alike(found: object, wanted: object) -> bool:
    if isinstance(found, Mapping) and isinstance(wanted, Mapping):
        return all(found.get(name) == value for name, value in wanted.items())
    return found == wanted

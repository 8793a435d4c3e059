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

import contextlib
import dataclasses
import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ctrans.base.durable_files import flush, write_durably
from ctrans.dynamics.fields.positions import turned_entries
from ctrans.dynamics.weights.on_demand import check_present
from ctrans.interop.hugging_face import load_local
from ctrans.interop.hugging_face_files import CONFIG, EARLIER_CONFIG, WEIGHTS, sharded_files
from ctrans.interop.transformers_library import import_transformers
from ctrans.interop.weight_names import GPT2_NAMES, GPT_NEOX_NAMES, LLAMA_NAMES, WeightNames
from ctrans.model.config import GPTConfig
from ctrans.model.gpt import GPT
from ctrans.model.weights_file import safetensors_bytes
from solvers import ConfigError

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
        if self.family == "GPT2":
            return "GPT2LMHeadModel"
        return f"{self.family}ForCausalLM"

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
        settings = {**theirs, **self.fixed}
        if rotary:
            settings["rope_parameters"] = {"rope_type": "default", **rotary}
        return settings

    def read(self, config: Any) -> GPTConfig:
        """Our configuration for a config of the family."""
        values = {}
        for ours, name in self.settings.items():
            if not hasattr(self.like, ours):
                continue
            if name in OF_ROTARY:
                values[ours] = config.rope_parameters[name]
            else:
                values[ours] = getattr(config, name)
        if values.get("kv_heads") == values["heads"]:
            values["kv_heads"] = None
        return dataclasses.replace(self.like, **values)

    def weights(self, model: GPT) -> Weights:
        """Our weights by the family's names, as views."""
        ours = model.state_dict(keep_vars=True)
        renamed = {self.names.of(name): weight for name, weight in ours.items()}
        return self.layout(model.config, renamed)


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
            for letter, part in zip("qkv", parts, strict=True):
                apart[name.replace("qkv_proj", f"{letter}_proj")] = part
        else:
            apart[name] = weight
    return apart


def _matrices_transposed(c: GPTConfig, weights: Weights) -> Weights:
    transposed = dict(weights)
    for name, weight in weights.items():
        if ".c_" in name and weight.dim() == 2:
            transposed[name] = weight.T
    return transposed


def _each_heads_queries_keys_and_values(c: GPTConfig, weights: Weights) -> Weights:
    by_head = dict(weights)
    for name, weight in weights.items():
        if "query_key_value" in name:
            by_head[name] = weight.unflatten(0, (3, c.heads, -1)).transpose(0, 1)
    return by_head


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
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
    "resid_pdrop": 0.0,
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
    target = TARGETS[nearest]
    differences = ", ".join(
        f"{field} = {getattr(config, field)!r} ({getattr(target.like, field)!r} there)"
        for field in lacks[nearest]
    )
    raise ConfigError(
        "no known family of transformers computes this model; the nearest is"
        f" {target.family}, which differs in {differences}"
    )


def to_transformers(model: GPT) -> Any:
    """The library's model with copies of these weights, in their dtype and in eval mode. Raises
    ConfigError for a model without a counterpart.

    >>> to_transformers(GPT(GPTConfig(placement="pre")))
    """
    target, config, weights = _written(model)
    kind = getattr(import_transformers(), target.model)
    dtype = model.token_embedding.weight.dtype
    with torch.random.fork_rng(devices=[]):
        library_model = kind._from_config(config, dtype=dtype)
    missing, unexpected = library_model.load_state_dict(weights, strict=False)
    if model.config.tied:
        missing = [name for name in missing if name != "lm_head.weight"]
    assert not missing + unexpected, (missing, unexpected)
    return library_model.eval()


def write_transformers(model: GPT, directory: str | Path) -> str:
    """Writes config.json and model.safetensors, which `AutoModelForCausalLM.from_pretrained` reads.
    Each file is written completely or not at all. If a kill comes between the two, the directory
    has no config.json, and nothing reads it as a model. Then the index and the shards of an earlier
    model in the directory are removed.

    Returns the family's name. Raises ConfigError for a model without a counterpart, and if writing
    fails.
    """
    target, config, weights = _written(model)
    weights = {name: weight.cpu().contiguous().clone() for name, weight in weights.items()}
    directory = Path(directory)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with _without_config(directory):
            write_durably(directory / WEIGHTS, safetensors_bytes(weights, {"format": "pt"}))
        settings = json.dumps(config.to_diff_dict(), indent=2, sort_keys=True) + "\n"
        write_durably(directory / CONFIG, settings.encode())
        (directory / EARLIER_CONFIG).unlink(missing_ok=True)
        for path in sharded_files(directory):
            path.unlink(missing_ok=True)
    except OSError as error:
        raise ConfigError(
            f"cannot write a model to {str(directory)!r}: {error.strerror or error}"
        ) from None
    return target.family


@contextlib.contextmanager
def _without_config(directory: Path) -> Iterator[None]:
    """Sets an earlier model's config aside, since weights with the config of others are another
    model. If the weights stay as they were, as on a full disk or after Ctrl-C, the config comes
    back.
    """
    config = directory / CONFIG
    aside = directory / EARLIER_CONFIG
    is_there = os.path.lexists(config)
    weights = _identity(directory / WEIGHTS)
    if is_there:
        os.replace(config, aside)
        flush(directory)
    try:
        yield
    except BaseException:
        if is_there and _identity(directory / WEIGHTS) == weights:
            os.replace(aside, config)
        raise


def _identity(path: Path) -> tuple[int, int] | None:
    """The device and the number of a file, which a new one in its place changes; None without a
    file.
    """
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_dev, status.st_ino


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
        if weight.dim() <= 2:
            continue
        if name.endswith("bias"):
            weights[name] = weight.flatten()
        else:
            weights[name] = weight.flatten(0, -2)
    return target, config, weights


def to_gpt(model: nn.Module | str | Path) -> GPT:
    """Our GPT with copies of the weights of a Llama, Granite or GPT-NeoX model, or of one saved in
    a directory.

    Unlike a model of `from_transformers`, which uses the library's modules, it trains, saves and
    generates as our GPTs do. Raises ConfigError for a model that computes something else: scaled
    rotary positions, biases, multipliers of embeddings or logits.
    """
    source: Any
    if isinstance(model, nn.Module):
        source = model
    else:
        source = load_local(model)
    name = type(source).__name__
    kind = getattr(getattr(source, "config", None), "model_type", name)
    target = TARGETS.get(kind)
    if target is None or not target.readable or name != target.model:
        readable = ", ".join(target.family for target in TARGETS.values() if target.readable)
        raise ConfigError(f"{name} is no {readable} with a head: open it by from_transformers")
    config = target.read(source.config)
    _check_settings(source, target, config)
    gpt = GPT(config).to(next(source.parameters()).dtype)
    theirs = source.state_dict()
    with torch.no_grad():
        for weight_name, weight in target.weights(gpt).items():  # views of ours
            weight.copy_(theirs[weight_name].view(weight.shape))
    return gpt


def _check_settings(source: Any, target: Target, config: GPTConfig) -> None:
    """Raises ConfigError if the library's model has settings with another effect than ours."""
    theirs = source.config
    expected = target.config(config)
    stated = {name: getattr(theirs, name, None) for name in expected}
    stated["rope_parameters"] = {**theirs.rope_parameters, "rope_theta": config.rotary_base}
    for name in ("embedding_multiplier", "logits_scaling"):
        expected[name] = 1.0
        stated[name] = getattr(theirs, name, 1.0)
    for name, value in expected.items():
        if name not in SPECIAL_TOKENS and not _agree(stated[name], value):
            raise ConfigError(
                f"{type(source).__name__} has {name} = {stated[name]!r}, but our GPT has"
                f" {value!r}: open it by from_transformers"
            )


def _agree(stated: object, expected: object) -> bool:
    """Whether a setting has the expected value; of several in one, those that are expected."""
    if isinstance(stated, Mapping) and isinstance(expected, Mapping):
        return all(stated.get(name) == value for name, value in expected.items())
    return stated == expected

"""Entries of a config that do not fit together are named; what the library computes is free."""

import json

import pytest
import torch
import transformers

from ctrans.interop import from_transformers, open_model
from ctrans.interop.architecture import skeleton
from ctrans.interop.config_errors import check_groups
from solvers import ConfigError
from tests.interop.models import GEMMA, SMALL, TEXT, made

LLAMA = {"model_type": "llama", **TEXT}
GEMMA_3 = {"model_type": "gemma3_text", **GEMMA, "num_hidden_layers": 4}
BERT = {"model_type": "bert", **SMALL}
FAULTS = [
    (
        {**LLAMA, "pad_token_id": 31},
        "pad_token_id = 31: it must be at least 0 and below vocab_size = 31, or null",
    ),
    ({**LLAMA, "pad_token_id": -32}, "pad_token_id = -32: it must be at least 0"),
    ({**BERT, "pad_token_id": 100}, "pad_token_id = 100: it must be at least 0"),
    ({**LLAMA, "num_attention_heads": 5}, "num_attention_heads = 5: it must divide hidden_size"),
    ({**BERT, "num_attention_heads": 5}, "num_attention_heads = 5: it must divide hidden_size"),
    (
        {"model_type": "llama", "num_attention_heads": 5},
        "num_attention_heads = 5: it must divide the width = 4096",
    ),
    (
        {"model_type": "gpt2", "n_embd": 32, "n_head": 5},
        "n_head = 5: it must divide n_embd = 32",
    ),
    (
        {**LLAMA, "num_key_value_heads": 3},
        "num_key_value_heads = 3: it must divide num_attention_heads = 4",
    ),
    ({**LLAMA, "num_key_value_heads": 8}, "num_key_value_heads = 8: it must divide"),
    (
        {**GEMMA_3, "layer_types": ["full_attention"]},
        r'layer_types = \["full_attention"\], 1 in all: .*, and num_hidden_layers = 4',
    ),
    (
        {**GEMMA_3, "layer_types": ["full_attention", "full", "x", "y"]},
        "layer_types with \"full\": did you mean 'full_attention'\\? It must be one of full_att",
    ),
    (
        {**GEMMA_3, "layer_types": ["linear_attention"] * 4},
        'layer_types with "linear_attention": this family has no such blocks',
    ),
    ({**GEMMA_3, "layer_types": "full"}, "layer_types = 'full': it must be a list of texts or nul"),
    (
        {"model_type": "gemma3", "text_config": {**GEMMA, "num_hidden_layers": 3}},
        "layer_types = .* 4 in all: .*, and num_hidden_layers = 3",
    ),
]


@pytest.mark.parametrize(("entries", "words"), FAULTS)
def test_entries_that_do_not_fit_together_are_named_in_one_line(entries, words):
    with pytest.raises(ConfigError, match=f"^architecture '\\w+' says {words}") as caught:
        skeleton(entries)
    assert "\n" not in str(caught.value)


def test_of_a_directory_the_file_is_named(tmp_path):
    made("llama").save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    for changes in ({"pad_token_id": 31}, {"num_key_value_heads": 3}):
        path.write_text(json.dumps(config | changes))
        (name,) = changes
        with pytest.raises(ConfigError, match=rf"^'{path}' says {name} = "):
            from_transformers(tmp_path)


@pytest.mark.parametrize(
    "entries",
    [
        {"model_type": "gpt2", "n_embd": 48, "n_layer": 1, "pad_token_id": 10**6},
        {**LLAMA, "pad_token_id": -1},
        {"model_type": "qwen3", **TEXT, "num_attention_heads": 6, "head_dim": 12},
        {"model_type": "gpt2", "n_embd": 48, "n_layer": 1, "num_key_value_heads": 5},
    ],
)
def test_what_the_library_computes_is_free(entries):
    assert isinstance(skeleton(entries), transformers.PreTrainedModel)


def test_heads_that_no_family_groups_are_free():
    """A config of latent keys has a number of key-value heads that nothing uses."""
    module = torch.nn.Module()
    module.num_key_value_groups = 1
    module.config = transformers.DeepseekV3Config(num_attention_heads=4, num_key_value_heads=3)
    check_groups("here", module)
    module.config = transformers.LlamaConfig(**{**TEXT, "num_key_value_heads": 3})
    with pytest.raises(ConfigError, match="num_key_value_heads = 3: it must divide"):
        check_groups("here", module)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "experts"), [("Mixtral", "num_local_experts"), ("Qwen3Moe", "num_experts")]
)
def test_more_experts_of_a_token_than_there_are_are_named(family, experts, tmp_path):
    config = getattr(transformers, f"{family}Config")(**TEXT, **{experts: 4})
    getattr(transformers, f"{family}ForCausalLM")(config).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    settings = json.loads(path.read_text()) | {"num_experts_per_tok": 99, experts: 4}
    if experts == "num_experts":  # as in the files of its authors
        settings.pop("num_local_experts", None)
    path.write_text(json.dumps(settings))
    with pytest.raises(
        ConfigError, match=f"says num_experts_per_tok = 99: it must be at most {experts} = 4"
    ):
        open_model(tmp_path)

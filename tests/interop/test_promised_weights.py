"""What the config.json of a directory promises, beside the names and shapes of its files."""

import json
import re

import pytest
import torch
from safetensors.torch import load_file, save_file

from ctrans.interop.families import FAMILIES, small_model
from ctrans.interop.promised_weights import family_directory, why_unlike_config
from solvers import ConfigError

SUPPORTED = [name for name, family in FAMILIES.items() if not family.refused]


def saved(name, directory):
    torch.manual_seed(0)
    small_model(name).save_pretrained(directory)
    return directory


def changed(directory, change):
    path = directory / "model.safetensors"
    weights = load_file(path)
    change(weights)
    save_file(weights, path, {"format": "pt"})


def reason_of(directory):
    """The reason, or "not compared" and why."""
    try:
        return why_unlike_config(directory)
    except ConfigError as error:
        return f"not compared: {error}"


@pytest.mark.cases(3)
@pytest.mark.parametrize("name", SUPPORTED)
def test_a_family_as_saved_is_what_its_config_says_and_one_that_lacks_a_weight_is_not(
    name, tmp_path
):
    directory = saved(name, tmp_path)
    assert family_directory(directory) == directory
    as_saved = reason_of(directory)
    assert not as_saved or as_saved.startswith("not compared")

    def without_a_matrix(weights):
        matrices = [key for key, weight in weights.items() if weight.dim() == 2]
        del weights[sorted(matrices)[len(matrices) // 2]]

    changed(directory, without_a_matrix)
    lacking = reason_of(directory)
    assert "lacks" in lacking or lacking.startswith("not compared")
    assert as_saved or not lacking.startswith("not compared")


def without_the_last_block(weights):
    for key in [key for key in weights if ".layers.2." in key]:
        del weights[key]


def without_the_last_norm(weights):
    del weights["model.norm.weight"]


def with_a_flat_matrix(weights):
    key = "model.layers.1.self_attn.k_proj.weight"
    weights[key] = weights[key].flatten()


def with_another_block(weights):
    for key in [key for key in weights if ".layers.2." in key]:
        weights[key.replace(".2.", ".3.")] = weights[key].clone()


def with_another_name(weights):
    key = "model.layers.1.mlp.up_proj.weight"
    weights["model.layers.1.mlp.up.weight"] = weights.pop(key)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (without_the_last_block, "all 9 weights of model.layers.2"),
        (without_the_last_norm, "lacks model.norm.weight"),
        (with_a_flat_matrix, r"k_proj.weight is \(512,\), expected \(16, 32\)"),
        (with_another_block, "says 3 blocks"),
        (with_another_name, "lacks model.layers.1.mlp.up_proj.weight"),
    ],
)
def test_a_llama_whose_file_is_another_one(change, words, tmp_path):
    directory = saved("llama", tmp_path)
    changed(directory, change)
    assert re.search(words, why_unlike_config(directory))
    assert family_directory(directory / "model.safetensors") == directory


def test_what_is_no_directory_of_a_family(tmp_path):
    assert family_directory(tmp_path) is None
    (tmp_path / "config.json").write_text('{"depth": 2}')
    assert family_directory(tmp_path) is None


@pytest.mark.parametrize("classes", [3, "GPT2Model", [None], {"a": 1}])
def test_architectures_that_are_no_list_of_names_are_refused_before_weights_are_read(
    classes, tmp_path
):
    directory = saved("gpt2", tmp_path)
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"architectures": classes}))
    with pytest.raises(ConfigError, match=r"config\.json' says architectures = .*a list of texts"):
        family_directory(directory)


def test_a_class_that_the_library_does_not_have_leaves_the_two_not_compared(tmp_path):
    directory = saved("gpt2", tmp_path)
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"architectures": ["GPT2Modl"]}))
    assert family_directory(directory) == directory
    assert "not compared" in reason_of(directory)
    assert "did you mean 'GPT2Model'?" in reason_of(directory)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["", "model.safetensors"])
def test_a_class_of_another_family_is_refused_without_a_model(name, tmp_path):
    directory = saved("llama", tmp_path)
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"model_type": "gemma"}))
    with pytest.raises(ConfigError, match="model_type = 'gemma' and architectures = "):
        family_directory(directory / name)

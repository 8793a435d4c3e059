"""What a directory or a checkpoint holds besides the model is refused or said, not passed over."""

import logging
import warnings

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file

from ctrans.interop import from_transformers
from ctrans.interop.directory_tokeniser import find_tokeniser
from ctrans.interop.distributed_checkpoint import distributed_weights
from ctrans.interop.nested_names import names_of_model
from solvers import ConfigError
from tests.interop.models import made

QUERY = "transformer.h.0.attn.c_attn"


def said(caplog):
    """The messages of ctrans alone."""
    return [record.getMessage() for record in caplog.records if record.name == "ctrans.interop"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        f"base_model.model.{QUERY}.lora_A.weight",
        f"base_model.model.{QUERY}.lora_B.default.weight",
        f"{QUERY}.lora_A.default.weight",
    ],
)
@pytest.mark.parametrize("on_demand", [False, True])
def test_weights_of_an_adapter_next_to_the_model_are_refused(name, on_demand, tmp_path):
    made("gpt2").save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    weights[name] = torch.ones(2, 2)
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ConfigError, match=r"weights of an adapter \(1\), such as .*lora_.*merge"):
        from_transformers(tmp_path, on_demand=on_demand)


@pytest.mark.slow
def test_of_a_distributed_checkpoint_the_average_next_to_the_model_is_left_out(tmp_path, caplog):
    weights = {f"layers.{k}.weight": torch.ones(2, 2) for k in range(2)}
    with warnings.catch_warnings(action="ignore"):  # that there is one process
        dcp.save({"model": weights, "ema": weights, "step": 3}, checkpoint_id=tmp_path / "both")
        dcp.save(weights, checkpoint_id=tmp_path / "alone")
    with caplog.at_level(logging.WARNING, "ctrans.interop"):
        stored = distributed_weights(tmp_path / "both")
        assert stored.keys() == {f"model.{name}" for name in weights}
        (message,) = said(caplog)
        assert message.endswith("left out is what its file holds next to the weights: 'ema'")
        assert distributed_weights(tmp_path / "alone").keys() == weights.keys()
    assert len(said(caplog)) == 1


def test_dictionaries_that_may_both_be_the_model_are_refused(tmp_path):
    keys = {"model.w": ("model", "w"), "module.w": ("module", "w"), "ema.w": ("ema", "w")}
    with pytest.raises(ConfigError, match="weights under 'model' and under 'module'"):
        names_of_model(tmp_path, keys, keys)


def test_names_of_one_flat_dictionary_are_all_of_the_model(tmp_path):
    names = {"model.layers.0.w", "lm_head.weight", "ema.w"}
    keys = {name: (name,) for name in names}
    assert names_of_model(tmp_path, names, keys) == (names, [])
    assert names_of_model(tmp_path, names, {}) == (names, [])


def make_dangling(path):
    path.symlink_to(path.with_name("absent"))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (make_dangling, "is a link to a file that does not exist"),
        (lambda path: path.mkdir(), "is a directory"),
    ],
)
def test_a_tokenizer_that_is_no_file_is_said(make, words, tmp_path, caplog):
    make(tmp_path / "tokenizer.json")
    with caplog.at_level(logging.WARNING, "ctrans.interop"):
        find_tokeniser(tmp_path, 256)
    (message,) = caplog.messages
    assert f"tokenizer.json' {words}" in message


def test_a_directory_without_a_tokenizer_is_not_said(tmp_path, caplog):
    with caplog.at_level(logging.WARNING, "ctrans.interop"):
        find_tokeniser(tmp_path, 256)
    assert not caplog.messages

"""States of an optimiser, gradients, averages and masks are no weights, in a file of any kind."""

import logging
import warnings

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

from ctrans.examine.diagnosis.weights_only import weight_diagnosis
from ctrans.interop.checkpoint_weights import read_checkpoint
from solvers import ConfigError

NAMES = ("embed.weight", "layers.0.up.weight", "layers.0.norm.weight")
LEFT_OUT = {
    "optimizer.state.{}.exp_avg": "'optimizer'",
    "optimiser.{}": "'optimiser'",
    "exp_avg.{}": "'exp_avg'",
    "exp_avg_sq.{}": "'exp_avg_sq'",
    "{}.exp_avg": "'embed.weight.exp_avg'",
    "state.{}.momentum_buffer": "'state.embed.weight.momentum_buffer'",
    "{}.grad": "'embed.weight.grad'",
    "ema.{}": "'ema'",
    "model_ema.{}": "'model_ema'",
    "master_params.{}": "'master_params'",
    "{}_mask": "'embed.weight_mask'",
    "{}_m": "'embed.weight_m'",
    "{}_momentum": "'embed.weight_momentum'",
}


def as_safetensors(tensors, directory):
    save_file(tensors, directory / "model.safetensors")
    return directory / "model.safetensors"


def as_a_pickle(tensors, directory):
    torch.save(tensors, directory / "model.bin")
    return directory / "model.bin"


def in_parts(tensors, directory):
    with warnings.catch_warnings(action="ignore"):  # that there is one process
        dcp.save(tensors, checkpoint_id=directory)
    return directory


def numbers(pattern="{}"):
    return {pattern.format(name): torch.zeros(2, 2) for name in NAMES}


CASES = [(as_safetensors, pattern) for pattern in LEFT_OUT] + [
    (as_a_pickle, "optimizer.state.{}.exp_avg"),
    (as_a_pickle, "{}.grad"),
    (in_parts, "optimizer.state.{}.exp_avg"),
    (in_parts, "ema.{}"),
]


@pytest.mark.parametrize(("save", "pattern"), CASES)
def test_what_a_training_keeps_is_left_out_and_named(save, pattern, tmp_path, caplog):
    path = save(numbers() | numbers(pattern), tmp_path)
    with caplog.at_level(logging.WARNING, "ctrans.interop"):
        found = read_checkpoint(path, allow_pickle=True)
    assert found.weights.keys() == set(NAMES)
    (message,) = [
        record.getMessage() for record in caplog.records if record.name == "ctrans.interop"
    ]
    assert LEFT_OUT[pattern] in message.partition("next to the weights: ")[2]


def test_the_result_names_what_was_left_out(tmp_path):
    found = read_checkpoint(as_safetensors(numbers() | numbers("ema.{}"), tmp_path))
    missing = weight_diagnosis(found.weights, left_out=found.left_out).missing
    assert missing["what a training keeps next to the weights"] == "1 left out, such as 'ema'"


@pytest.mark.parametrize("pattern", ["ema.{}", "model_ema.{}", "master.{}"])
def test_an_average_alone_is_the_model(pattern, tmp_path):
    weights = numbers(pattern)
    found = read_checkpoint(as_safetensors(weights, tmp_path))
    assert found.weights.keys() == weights.keys()
    assert not found.left_out


@pytest.mark.parametrize("pattern", ["optimizer.state.{}.exp_avg", "{}.grad"])
def test_a_file_of_states_alone_is_refused(pattern, tmp_path):
    with pytest.raises(ConfigError, match=r"holds only what a training keeps .*: give the file of"):
        read_checkpoint(as_safetensors(numbers(pattern), tmp_path))


@pytest.mark.parametrize(
    "name",
    [
        "mask_token",
        "layers.0.gradient.weight",
        "layers.0.ema.alpha",
        "optical.weight",
        "layers.0.conv.weight_v",
    ],
)
def test_weights_with_similar_names_are_weights(name, tmp_path):
    weights = numbers() | {name: torch.zeros(2, 2)}
    found = read_checkpoint(as_safetensors(weights, tmp_path))
    assert found.weights.keys() == weights.keys()


def test_settings_of_transformer_engine_are_left_out_without_a_word(tmp_path, caplog):
    settings = {"layers.0.up._extra_state": torch.zeros(2, 4, dtype=torch.uint8)}
    found = read_checkpoint(as_safetensors(numbers() | settings, tmp_path))
    assert found.weights.keys() == set(NAMES)
    assert not found.left_out
    assert not caplog.messages

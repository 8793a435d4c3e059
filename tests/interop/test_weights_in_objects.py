"""Weights among other objects of a file: read, refused, or named as left out; never dropped
without a word.
"""

import logging

import pytest
import torch

from ctrans.interop.checkpoint_weights import checkpoint_weights
from solvers import ConfigError

GOOD = torch.ones(2, 2)
BAD = torch.full((2, 2), torch.nan)
REFUSED = {
    "a number and a text of the same name": ({1: BAD, "1": GOOD}, "two tensors with the name '1'"),
    "a dictionary in weights": (
        {"a.weight": GOOD, "block": {"b.weight": BAD}},
        "more of them inside of 'block'",
    ),
    "a list in weights": ({"a.weight": GOOD, "blocks": [BAD]}, "more of them inside of 'blocks'"),
    "a list in weights of a trainer": (
        {"model": {"a.weight": GOOD, "blocks": [[BAD]]}},
        "more of them inside of 'blocks'",
    ),
    "a weight next to the model": (
        {"model": {"a.weight": GOOD}, "head.weight": BAD},
        "under 'model', and 'head.weight' next to it",
    ),
    "two models": (
        {"state_dict": {"a.weight": GOOD}, "model": {"a.weight": BAD}},
        "under 'state_dict' and under 'model'",
    ),
}


def read(content, directory):
    path = directory / "checkpoint.pt"
    torch.save(content, path)
    return checkpoint_weights(path, allow_pickle=True)


@pytest.mark.parametrize("kind", REFUSED)
def test_weights_that_would_be_left_out_are_refused(kind, tmp_path):
    content, words = REFUSED[kind]
    with pytest.raises(ConfigError, match=words):
        read(content, tmp_path)


def test_a_checkpoint_of_a_trainer_is_read_and_what_is_left_out_is_named(tmp_path, caplog):
    optimizer = {"state": {0: {"exp_avg": BAD}}, "param_groups": [{"lr": 0.1}]}
    content = {
        "model": {"a.weight": GOOD},
        "optimizer": optimizer,
        "model_ema": {"a.weight": BAD},
        "epoch": 3,
        "rng_state": torch.zeros(8, dtype=torch.uint8),
        "args": {"model": "small"},
    }
    with caplog.at_level(logging.WARNING, "ctrans.interop"):
        found = read(content, tmp_path)
    assert found.keys() == {"a.weight"}
    assert torch.equal(found["a.weight"](), GOOD)
    (message,) = caplog.messages
    assert message.endswith("next to the weights: 'optimizer', 'model_ema'")


def test_settings_under_the_key_of_weights_are_no_weights(tmp_path):
    assert read({"model": {"name": "small"}, "a.weight": GOOD}, tmp_path).keys() == {"a.weight"}


def test_a_dictionary_that_holds_itself_is_read_to_its_end(tmp_path):
    content = {"model": {"a.weight": GOOD}}
    content["more"] = [content["model"], content]
    assert read(content, tmp_path).keys() == {"a.weight"}

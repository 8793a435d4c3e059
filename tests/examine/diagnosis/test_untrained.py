"""Blocks whose matrices are like random ones: beside exact singular values of random matrices, of
common initial weights, and of a model that is trained here.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ctrans import GPT, GPTConfig, diagnose
from ctrans.examine.diagnosis.untrained import QUANTITY, excess_of, untrained_blocks
from ctrans.examine.diagnosis.weights_only import weight_diagnosis

CHECK = "block untrained"
INITIAL = {
    "normal": lambda w: nn.init.normal_(w, std=0.02),
    "uniform": lambda w: nn.init.kaiming_uniform_(w, a=5**0.5),
    "xavier": nn.init.xavier_uniform_,
    "truncated": lambda w: nn.init.trunc_normal_(w, std=0.02),
    "orthogonal": nn.init.orthogonal_,
    "sparse": lambda w: nn.init.sparse_(w, 0.5),
}


def excess(weight):
    values = torch.linalg.svdvals(weight.double())
    return excess_of(float(values.square().sum() / values[0] ** 2), weight.shape)


@pytest.mark.parametrize("shape", [(16, 16), (32, 96), (300, 40), (200, 200)])
@pytest.mark.parametrize("law", INITIAL)
def test_initial_weights_are_random(law, shape):
    torch.manual_seed(0)
    assert all(excess(INITIAL[law](torch.empty(shape))) < 1 for _ in range(40))


def test_a_direction_that_is_larger_exceeds_random_entries_by_as_much():
    torch.manual_seed(0)
    weight = torch.randn(200, 200)
    direction = torch.outer(torch.randn(200), torch.randn(200)) / 200
    spike = 60.0
    wanted = (spike + 200 / spike) / (2 * 200**0.5 + 4)  # of a spiked random matrix
    assert excess(weight + spike * direction) == pytest.approx(wanted, rel=0.15)


def test_blocks_are_judged_by_the_upper_median_of_the_others():
    readings = untrained_blocks(
        {"layers": {0: [0.9, 0.8], 1: [0.7, 0.9], 2: [1.4, 0.9], 3: [0.9, 1.6]}}
    )
    assert [reading.value for reading in readings] == [1.4, 1.4, 0.0, 0.0]
    assert (
        untrained_blocks({"layers": {0: [0.9, 0.8], 1: [2.0]}}) == []
    )  # one matrix tells too little
    two_stacks = {"encoder": {0: [1.9] * 2, 1: [1.8] * 2}, "decoder": {0: [0.9] * 2, 1: [1.8] * 2}}
    named = [reading.place for reading in untrained_blocks(two_stacks) if reading.value]
    assert named == ["block 0 of decoder"]


@pytest.fixture(scope="module")
def trained():
    """A GPT that has learned which token follows."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocab_size=16, context=16, depth=3, width=32, heads=2, placement="pre"))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    for _ in range(120):
        start = torch.randint(16, (16, 1))
        tokens = (start + 3 * torch.arange(17)) % 16
        F.cross_entropy(model(tokens[:, :-1])[0].flatten(0, 1), tokens[:, 1:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def with_fresh_block(model, block):
    torch.manual_seed(5)
    fresh = GPT(model.config, seed=5)
    mixed = GPT(model.config)
    weights = model.state_dict()
    for name, weight in fresh.state_dict().items():
        if f"sublayers.{2 * block}." in name or f"sublayers.{2 * block + 1}." in name:
            weights[name] = weight
    mixed.load_state_dict(weights)
    return mixed


def tokens():
    row = (3 * torch.arange(17)) % 16
    return row[None, :-1], row[None, 1:]


def named(findings):
    return {(f.check, f.place) for f in findings if f.check == CHECK}


@pytest.mark.parametrize("block", [0, 1, 2])
def test_a_block_that_was_not_loaded_is_named_with_a_text_and_without(trained, block):
    model = with_fresh_block(trained, block)
    wanted = {(CHECK, f"block {block}")}
    assert named(diagnose(model, *tokens()).findings) == wanted
    weights = {name: weight.clone for name, weight in model.state_dict().items()}
    assert named(weight_diagnosis(weights).findings) == wanted


def test_a_trained_model_and_an_untrained_one_have_no_such_block(trained):
    untrained = GPT(trained.config)
    for model in (trained, untrained):
        found = diagnose(model, *tokens())
        assert len(found.readings[QUANTITY]) == 3
        assert named(found.findings) == set()

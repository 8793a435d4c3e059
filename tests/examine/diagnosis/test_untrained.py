"""Blocks whose matrices are like random ones: beside exact singular values of random matrices, of
common initial weights, and of a model that is trained here.
"""

import copy
import math

import pytest
import scipy.stats
import torch
import torch.nn.functional as F
from torch import nn

from ctrans import GPT, GPTConfig, diagnose
from ctrans.examine.diagnosis.untrained import (
    BLOCK_QUANTITY,
    WEIGHT_QUANTITY,
    Excess,
    excess_of,
    untrained_blocks,
    untrained_weights,
)
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
    return excess_of(
        weight, float(torch.linalg.matrix_norm(weight.double(), 2)), float(weight.abs().max())
    )


@pytest.mark.parametrize("shape", [(16, 16), (32, 96), (300, 40), (200, 200)])
@pytest.mark.parametrize("law", INITIAL)
def test_initial_weights_are_random(law, shape):
    torch.manual_seed(0)
    assert all(excess(INITIAL[law](torch.empty(shape))).independent < 1 for _ in range(40))


@pytest.mark.parametrize(
    "drawn",
    [
        lambda w: nn.init.kaiming_uniform_(w, a=5**0.5),
        nn.init.xavier_uniform_,
        nn.init.kaiming_uniform_,
        lambda w: nn.init.kaiming_uniform_(w, nonlinearity="linear"),
        lambda w: nn.init.xavier_uniform_(w).bfloat16(),
    ],
)
def test_even_entries_are_known_and_a_small_training_too(drawn):
    torch.manual_seed(0)
    for shape in ((32, 64), (64, 48), (300, 400)):
        weights = [drawn(torch.empty(shape)) for _ in range(8)]
        assert max(excess(weight).even for weight in weights) < 1
        trained = weights[0] + 0.1 * weights[0].std() * torch.randn(shape)
        assert excess(trained).even > 2
        assert excess(torch.randn(shape) * weights[0].std()).even > 2


def test_the_distance_from_even_entries_is_kolmogorovs():
    weight = 0.1 * torch.randn(50, 50, generator=torch.Generator().manual_seed(0)).double()
    edge = float(weight.abs().max())
    wanted = scipy.stats.kstest(weight.flatten().numpy(), "uniform", (-edge, 2 * edge)).statistic
    reached = scipy.stats.kstwobign.isf(math.exp(-8)) / weight.numel() ** 0.5
    off_the_edge = min(abs(edge / (k / 50) ** 0.5 - 1) for k in (1, 3, 6))
    off_the_edge /= 8 / weight.numel() + 2**-8
    assert excess(weight).even == pytest.approx(max(wanted / reached, off_the_edge), rel=1e-6)


def test_a_direction_that_is_larger_exceeds_random_entries_by_as_much():
    torch.manual_seed(0)
    weight = torch.randn(200, 200)
    direction = torch.outer(torch.randn(200), torch.randn(200)) / 200
    spike = 60.0
    wanted = (spike + 200 / spike) / (2 * 200**0.5 + 4)  # of a spiked random matrix
    assert excess(weight + spike * direction).independent == pytest.approx(wanted, rel=0.15)


@pytest.mark.parametrize("axis", [0, 1])
def test_rows_of_unlike_lengths_exceed_random_entries_by_their_spread(axis):
    """Against the same variance by numpy, of rows whose lengths a training has set apart."""
    weight = torch.randn(80, 300, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    weight = weight * torch.linspace(0.5, 1.5, weight.shape[axis]).unsqueeze(1 - axis)
    squares = weight.square().numpy()
    means = squares.mean(1 - axis)
    ratio = means.var() * weight.shape[1 - axis] / squares.var()
    count = len(means)
    wanted = (ratio / (1 + 2 * (8 / count) ** 0.5 + 16 / count)) ** 0.5
    assert wanted > 1
    assert excess(weight).independent == pytest.approx(wanted, rel=1e-9)


@pytest.mark.parametrize("size", [1e-12, 1e10])
def test_the_excess_over_independent_draws_has_no_scale(size):
    weight = torch.randn(80, 300, generator=torch.Generator().manual_seed(0))
    weight = weight * torch.linspace(0.5, 1.5, 80).unsqueeze(1)
    wanted = excess(weight).independent
    assert wanted > 1
    assert excess(size * weight).independent == pytest.approx(wanted, rel=1e-4)


def like(**independent):
    return {name.replace("_", "."): Excess(value, 9.0) for name, value in independent.items()}


def test_blocks_are_judged_by_the_upper_median_of_the_others():
    figures = {0: [0.9, 0.8], 1: [0.7, 0.9], 2: [1.4, 0.9], 3: [0.9, 1.6]}
    readings = untrained_blocks(
        {f"layers.{k}.{i}": Excess(v, 9) for k, of in figures.items() for i, v in enumerate(of)}
    )
    assert [reading.value for reading in readings] == [1.4, 1.4, 0.0, 0.0]
    assert (
        untrained_blocks(like(layers_0_a=0.9, layers_0_b=0.8, layers_1_a=2.0)) == []
    )  # one matrix tells too little
    two_stacks = {"encoder": {0: 1.9, 1: 1.8}, "decoder": {0: 0.9, 1: 1.8}}
    readings = untrained_blocks(
        {
            f"{stack}.{k}.{part}": Excess(value, 9)
            for stack, of_blocks in two_stacks.items()
            for k, value in of_blocks.items()
            for part in "ab"
        }
    )
    assert [reading.place for reading in readings if reading.value] == ["block 0 of decoder"]


def test_a_weight_is_judged_beside_its_role_and_by_the_law_that_tells_more():
    weights = {f"layers.{k}.q.weight": Excess(2.0, 9.0) for k in range(4)}
    assert [reading.value for reading in untrained_weights(weights)] == [0.0] * 4
    weights["layers.1.q.weight"] = Excess(0.8, 9.0)
    assert [reading.value for reading in untrained_weights(weights)] == [0.0, 2.0, 0.0, 0.0]
    weights["layers.2.q.weight"] = Excess(1.1, 0.9)
    assert [reading.value for reading in untrained_weights(weights)] == [0.0, 2.0, 9.0, 0.0]
    two = {f"layers.{k}.q.weight": Excess(2.0 * k, 9.0) for k in range(2)}
    assert untrained_weights(two) == []  # one other tells too little


def test_a_weight_outside_of_the_blocks_counts_if_even_where_most_blocks_are_trained():
    blocks = {f"layers.{k}.q.weight": Excess(2.0, 9.0) for k in range(3)}
    head = {"head.weight": Excess(0.8, 0.9), "embedding.weight": Excess(0.8, 9.0)}
    readings = untrained_weights(blocks | head)[3:]
    assert [(reading.place, reading.value) for reading in readings] == [
        ("the weight head.weight", 2.0),
        ("the weight embedding.weight", 0.0),
    ]
    fresh = {name: Excess(0.9, 9.0) for name in blocks}
    assert all(reading.value < 1 for reading in untrained_weights(fresh | head))


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
        assert len(found.readings[BLOCK_QUANTITY]) == 3
        assert len(found.readings[WEIGHT_QUANTITY]) >= 3 * 4
        assert named(found.findings) == set()


@pytest.mark.parametrize("role", ["qkv", "up"])  # the others move little in so narrow a model
def test_a_matrix_that_was_not_loaded_is_named_with_a_text_and_without(trained, role):
    torch.manual_seed(5)
    (name,) = (
        name
        for name in trained.state_dict()
        if f"{2 + (role != 'qkv')}.field.{role}.weight" in name
    )
    model = copy.deepcopy(trained)
    with torch.no_grad():
        dict(model.named_parameters())[name].copy_(GPT(model.config, seed=5).state_dict()[name])
    weights = {name: weight.clone for name, weight in model.state_dict().items()}
    for findings in (diagnose(model, *tokens()).findings, weight_diagnosis(weights).findings):
        places = {found.place for found in findings if found.check == "weight untrained"}
        assert places == {f"block 1: the weight {name}"}

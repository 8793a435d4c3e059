"""Which weights are scaled, and by how much."""

import math

import pytest
import torch

from ctrans.examine.diagnosis.treatment import LARGER, size_of_neighbours

NAMES = [f"layers.{k}.mlp.down.weight" for k in range(3)]


def factors(sizes, names=NAMES):
    """Weights of these sizes: all entries are +-size, so that their rms is known."""
    made = {
        name: size * torch.tensor([1.0, -1.0, 1.0, -1.0])
        for name, size in zip(names, sizes, strict=True)
    }
    return size_of_neighbours({name: lambda each=each: each for name, each in made.items()})


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ([1.0, 50.0, 3.0], {NAMES[1]: 2.0 / 50.0}),
        ([50.0, 1.0, 1.0], {NAMES[0]: 1.0 / 50.0}),
        ([1.0, LARGER, 1.0], {}),
        ([1.0, 1.01 * LARGER, 1.0], {NAMES[1]: 1 / (1.01 * LARGER)}),
        ([50.0, 50.0, 1.0], {}),
        ([0.0, 50.0, 0.0], {}),
        ([1.0, math.inf, 1.0], {}),
        ([1.0, math.nan, 1.0], {}),
        ([1.0, 0.001, 1.0], {}),
    ],
    ids=[
        "median",
        "first",
        "at the limit",
        "beyond it",
        "half of the blocks",
        "others are 0",
        "inf",
        "nan",
        "small",
    ],
)
def test_a_weight_is_scaled_to_the_median_of_the_same_weight_in_the_other_blocks(sizes, expected):
    assert factors(sizes) == pytest.approx(expected)


def test_of_two_blocks_the_larger_one_is_scaled_and_one_block_has_no_others():
    assert factors([1.0, 50.0], NAMES[:2]) == pytest.approx({NAMES[1]: 1 / 50})
    assert factors([50.0], NAMES[:1]) == {}


@pytest.mark.parametrize(
    "name",
    ["layers.{}.input_layernorm.weight", "layers.{}.attn.norm_weight", "embed{}.weight", "head_{}"],
)
def test_gains_and_weights_outside_of_the_blocks_are_not(name):
    assert factors([1.0, 50.0, 1.0], [name.format(k) for k in range(3)]) == {}


def test_only_the_same_weight_is_compared():
    assert (
        factors(
            [1.0, 50.0, 1.0], ["layers.0.up.weight", "layers.1.down.weight", "layers.2.up.weight"]
        )
        == {}
    )

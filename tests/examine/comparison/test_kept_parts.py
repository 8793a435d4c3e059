"""Which parts make rounding's difference: contributions that add up, and the best parts to keep."""

import copy
import itertools

import pytest
import torch

import ctrans
from ctrans.examine.compared import answer
from ctrans.examine.comparison.compare import compare
from ctrans.examine.comparison.kept_parts import contributions_of, kept_parts, mixed
from ctrans.examine.comparison.parts import ModelParts
from tests.examine.comparison.test_compare import gpt, text


def rounded(model, dtype=torch.bfloat16):
    other = copy.deepcopy(model)
    with torch.no_grad():
        for weight in other.parameters():
            weight.copy_(weight.to(dtype).to(weight.dtype))
    return other


def sides(model, other):
    tokens, targets = text()
    a, b = ModelParts(model, targets), ModelParts(other, targets)
    with torch.no_grad():
        return a, b, tokens, list(a.states(tokens)), list(b.states(tokens))


def test_contributions_add_up_to_the_difference_of_the_last_states():
    model = gpt()
    a, _, _, own, others = sides(model, rounded(model))

    found = contributions_of(a, own[-1], others)

    assert len(found) == len(own)
    torch.testing.assert_close(sum(found), others[-1] - own[-1], atol=1e-13, rtol=0)


@torch.no_grad()
def test_the_parts_that_are_kept_are_the_best_of_all():
    """Against all sets of the same size, each run: the best single part, and at most a tenth more
    than the best pair and triple.
    """
    for seed in range(3):
        model = gpt(initialisation="xavier", embedding_std=1.0 + seed)
        a, b, tokens, own, others = sides(model, rounded(model))
        contributions = contributions_of(a, own[-1], others)

        found = list(kept_parts(a, b, tokens, contributions, own[-1], others, of_second=False))

        size = own[-1].norm()
        for kept in found[1:]:
            best = min(
                float((mixed(a, b, tokens, others, [set(parts)])[0] - own[-1]).norm() / size)
                for parts in itertools.combinations(range(len(own)), len(kept.names))
            )
            allowed = 1.1 if len(kept.names) > 1 else 1 + 1e-9
            assert best <= kept.difference * (1 + 1e-9)
            assert kept.difference <= allowed * best
        assert found[0].difference > found[1].difference > found[2].difference


@torch.no_grad()
def test_with_all_parts_kept_the_fine_model_is_left():
    model = gpt()
    a, b, tokens, own, others = sides(model, rounded(model))

    (found,) = mixed(a, b, tokens, others, [set(range(len(own)))])
    assert torch.equal(found, own[-1])


@pytest.mark.cases(1)
@pytest.mark.parametrize("coarse_first", [False, True])
def test_a_part_of_few_digits_is_the_one_to_keep(coarse_first):
    model = gpt(torch.float32)
    other = copy.deepcopy(model)
    with torch.no_grad():
        for weight in other.depth.sublayers[3].parameters():
            weight.copy_(weight.to(torch.bfloat16).to(weight.dtype))
    tokens, targets = text()
    pair = (other.double(), model) if coarse_first else (model.double(), other)

    found = compare(*pair, tokens, targets)

    assert not found.changed
    assert found.kept[1].names == ("block 1, ffn",)
    assert found.kept[1].difference < 0.1 * found.kept[0].difference
    assert max(found.sublayers, key=lambda part: part.at_end).name == "block 1, ffn"
    assert "Kept as in" in answer("a", "b", found).text


@pytest.mark.cases(1)
def test_amplification_of_sublayers_is_that_of_a_small_step():
    """x -> x + f(x) amplifies a difference d by |d + f(x + d) - f(x)|/|d|."""
    model = gpt()
    other = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        weight = other.token_embedding.weight
        weight += 1e-6 * torch.randn(weight.shape, generator=generator, dtype=weight.dtype)
    tokens, targets = text()

    found = ctrans.compare(model, other, tokens, targets)

    with torch.no_grad():
        x, y = model.embed(tokens), other.embed(tokens)
        for part, sublayer in zip(found.sublayers, model.depth.sublayers, strict=True):
            before = (y - x).norm()
            x, y = (sublayer.step(z, model.config.dt) for z in (x, y))
            assert part.amplified == pytest.approx(float((y - x).norm() / before), rel=1e-9)

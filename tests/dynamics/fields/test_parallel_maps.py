"""Attention and FFN at once: whatever is asked of one of them is what it would be alone behind its
own norm.
"""

import dataclasses
import math

import pytest
import torch
from torch import nn

from ctrans import GPT, GPTConfig
from ctrans.dynamics.fields import ExposesWeights, HasBound, TokenBound, spectral_norm
from ctrans.dynamics.fields.projected_map import scale_linear
from ctrans.interop import from_transformers, to_transformers
from ctrans.interop.families import small_model
from ctrans.measure.attention.attention_path import attention_path
from ctrans.measure.attention.bounds import step_bound
from ctrans.measure.attention.by_depth import attention_layers, block_layers
from ctrans.measure.forward.bounds import difference_bound, map_bound
from ctrans.measure.forward.spectra import Spectra
from ctrans.measure.walk import walk
from ctrans.training.attention_theta import MeanTheta, mean_theta
from ctrans.training.monitor.sites import sites_of
from solvers import ConfigError
from tests.helpers import learned, small_config, tokens

NORMS = pytest.mark.parametrize("norm", ["layernorm", "rmsnorm"])
TWO = {"heads": 4, "depth": 1, "parallel_blocks": True, "branch_norms": True}


def test_a_class_that_names_a_protocol_as_its_base_asks_for_its_own_instances():
    class Bounded(HasBound):
        def bound(self):
            return TokenBound(0.0, 0.0)

    class Like:
        def bound(self):
            return TokenBound(0.0, 0.0)

    assert isinstance(Bounded(), HasBound)
    assert isinstance(Like(), HasBound)
    assert isinstance(Bounded(), Bounded)
    assert not isinstance(Like(), Bounded)


@pytest.mark.parametrize(
    ("protocol", "member"), [(HasBound, "bound"), (ExposesWeights, "matrices")]
)
def test_a_sum_has_a_member_only_if_both_maps_have_it(protocol, member):
    with_both, attention, ffn = (
        GPT(small_config("pre", **TWO)).depth.sublayers[0].field for _ in range(3)
    )
    attention.attention = nn.Linear(8, 8)
    ffn.ffn = nn.Linear(8, 8)
    for made, has in ((with_both, True), (attention, False), (ffn, False)):
        assert (isinstance(made, protocol), hasattr(made, member)) == (has, has)


def test_a_sum_without_a_bound_says_so():
    model = GPT(small_config("pre", **TWO))
    model.depth.sublayers[0].field.ffn = nn.Linear(8, 8)
    with pytest.raises(ConfigError, match=r"no bound is known: ParallelMaps"):
        map_bound(model.depth.sublayers[0])


def two_norms(norm="layernorm", **changes):
    return learned(
        GPT(small_config("pre", norm=norm, **{**TWO, **changes})).double(), 0.3
    ).requires_grad_(False)


def apart(made):
    """The same attention and FFN as two sublayers of a sequential model, each behind an ordinary
    norm with its gains.
    """
    config = dataclasses.replace(made.config, parallel_blocks=False, branch_norms=False)
    other = GPT(config).double().requires_grad_(False)
    for sublayer, branch in zip(
        other.depth.sublayers, made.depth.sublayers[0].branches.values(), strict=True
    ):
        sublayer.field.load_state_dict(branch.field.state_dict())
        for name, value in branch.gains.named_parameters():
            sublayer.input_norm.get_parameter(name).copy_(value)
    other.token_embedding.load_state_dict(made.token_embedding.state_dict())
    other.position_embedding.load_state_dict(made.position_embedding.state_dict())
    return other


def states(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@NORMS
def test_two_norms_are_two_ordinary_norms(norm):
    made, x = two_norms(norm), states(2, 5, 16)
    attention, ffn = apart(made).depth.sublayers
    expected = x + 0.1 * (attention(x) + ffn(x))
    assert torch.allclose(made.depth.sublayers[0].step(x, 0.1), expected, atol=1e-13)


@pytest.mark.cases(1)
@NORMS
def test_attention_in_a_sum_has_the_figures_that_it_has_alone(norm):
    made = two_norms(norm)
    alone, x = apart(made), states(1, 5, 16)
    (mine,), (its,) = (
        attention_layers(each.depth, [x] * (1 + len(each.depth.sublayers)))
        for each in (made, alone)
    )
    for name in ("theta_mean", "theta_max", "bound", "printed", "measured", "G", "B"):
        assert getattr(mine, name) == pytest.approx(getattr(its, name), rel=1e-9), name
    ids = tokens(2, 6)
    assert mean_theta(made, ids) == pytest.approx(mean_theta(alone, ids), rel=1e-12)
    entering, first = made.depth.sublayers[0], alone.depth.sublayers[0]
    v = states(1, 5, 16, seed=3)
    assert torch.allclose(
        attention_path(entering, 0.1, x).push(v), attention_path(first, 0.1, x).push(v), atol=1e-12
    )


@pytest.mark.cases(1)
@NORMS
def test_no_step_and_no_output_exceeds_what_the_sum_says_of_itself(norm):
    made, x = two_norms(norm), states(1, 4, 16)
    sublayer = made.depth.sublayers[0]
    jacobian = torch.func.jacrev(lambda y: sublayer.step(y, 0.1))(x).reshape(4, 16, 4, 16)
    rows = jacobian.permute(0, 2, 1, 3)
    # |J| in the block norm is at most the largest sum over j of |J_ij|, and at least the largest
    # |J_ij|
    assert float(torch.linalg.matrix_norm(rows, 2).amax()) <= step_bound(sublayer, 0.1, x).corrected
    (layer,) = block_layers(made.depth, [x, x])
    assert layer.measured <= layer.bound
    bound, apart_at_most = map_bound(sublayer), difference_bound(sublayer)
    for seed in range(20):
        u, v = (sublayer.given(states(1, 4, 16, seed=seed + k)) for k in (0, 100))
        assert float(sublayer.field(u).norm(dim=-1).max()) <= bound.at(4.0)
        moved = torch.cdist(sublayer.field(u), sublayer.field(v)).max()
        assert float(moved) <= apart_at_most * float(torch.cdist(u, v).max())


def test_a_bound_behind_gains_is_the_polynomial_at_the_longest_input():
    own = TokenBound(2.0, 0.5, 3.0)
    for gain, offset, radius in ((1.5, 0.2, 0.7), (0.0, 1.0, 2.0), (2.0, 0.0, 1.0)):
        assert own.behind(gain, offset).at(radius) == pytest.approx(
            own.at(gain * radius + offset), rel=1e-14
        )
    assert TokenBound(math.inf, 1.0).behind(1.0, 0.0).offset == 1.0


def test_spectra_are_those_of_both_maps():
    made = two_norms()
    found = walk(made, tokens(1, 5), None, [Spectra()])[0]
    assert [each.kind for each in found] == ["attention"] * 8 + ["ffn"]
    ffn = made.depth.sublayers[0].field.ffn
    assert float(found[-1].singular[0]) == pytest.approx(
        spectral_norm(ffn.down.weight @ ffn.up.weight), rel=1e-6
    )


def test_experts_in_a_sum_are_asked_at_their_own_input():
    made = two_norms(ffn="moe", experts=4)
    alone, x = apart(made), states(2, 5, 16)
    branch = made.depth.sublayers[0].branches["ffn"]
    expected = alone.depth.sublayers[1].field.auxiliary(alone.depth.sublayers[1].given(x))
    found = branch.field.auxiliary(branch.given(made.depth.sublayers[0].given(x)))
    assert {name: float(value) for name, value in found.items()} == pytest.approx(
        {k: float(v) for k, v in expected.items()}
    )


def test_the_last_map_of_a_sum_is_scaled_in_place():
    made, x = two_norms(), states(1, 4, 16)
    field = made.depth.sublayers[0].field
    before = field(x)
    scale_linear(field.output_projection, 3.0)
    assert torch.allclose(field(x), 3 * before, atol=1e-12)


def test_a_foreign_sum_is_our_own_class_with_its_heads():
    sizes = {
        "vocab_size": 31,
        "context": 24,
        "width": 32,
        "depth": 2,
        "placement": "pre",
        "positions": "rotary",
    }
    made = learned(GPT(GPTConfig(**sizes, parallel_blocks=True, branch_norms=True)), 0.1)
    imported = from_transformers(to_transformers(made))
    ids = tokens(2, 6)
    for ours, theirs in zip(made.depth.sublayers, imported.depth.sublayers, strict=True):
        assert type(ours.field) is type(theirs.field)
        assert ours.kind == theirs.kind == "parallel"
        for own, its in zip(ours.branches.values(), theirs.branches.values(), strict=True):
            assert torch.equal(own.gains.gamma, its.gains.gamma)
            assert torch.equal(own.gains.beta, its.gains.beta)
    assert torch.allclose(imported(ids)[0], made(ids)[0], atol=1e-5)


def test_theta_of_a_foreign_sum_is_that_of_its_attention():
    model = small_model("gptj")
    imported, ids = from_transformers(model), tokens(2, 6)
    sublayer, x = imported.depth.sublayers[0], imported.embed(ids)
    model.config._attn_implementation = "eager"
    rows = model(ids, output_attentions=True).attentions[0]
    found = sublayer.attention.field.probabilities(sublayer.attention.given(sublayer.given(x)))
    assert torch.allclose(found, rows, atol=1e-6)
    assert 0 < walk(imported, ids, instruments=[MeanTheta()])[0] <= 1


@pytest.mark.slow
def test_a_foreign_sum_leaves_by_two_exits_and_ours_by_one():
    assert len(sites_of(small_model("gptj")).by_depth[0].exits) == 2
    site = sites_of(two_norms()).by_depth[0]
    assert type(site.attention).__name__ == "Attention"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"parallel_blocks": False},
            "branch_norms = True has no meaning for blocks of two sublayers",
        ),
        (
            {"norm": "dyt"},
            "branch_norms = True needs a norm with a gain for each channel, and 'dyt' has none",
        ),
        (
            {"placement": "post"},
            "branch_norms = True with placement 'post', which has no input norm",
        ),
    ],
)
def test_two_norms_that_make_no_sense_are_refused_in_one_line(changes, words):
    with pytest.raises(ConfigError, match=words) as refused:
        GPTConfig(**{"width": 16, "placement": "pre", **TWO, **changes})
    assert "\n" not in str(refused.value)

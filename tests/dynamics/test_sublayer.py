import copy
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ctrans.dynamics.fields import (
    ACTIVATIONS,
    Attention,
    FeedForward,
    reference_kernels,
    spectral_norm,
)
from ctrans.dynamics.norm import RMSNorm
from ctrans.dynamics.placement import PLACEMENTS, get_placement
from ctrans.dynamics.sublayer import Sublayer
from solvers import ConfigError
from tests.helpers import NAMES, learned, small_model


def states(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))


def attention_by_hand(attention, x):
    """Token by token, head by head, with loops: what the definition says."""
    tokens, width = x.shape
    size = width // attention.heads
    q, k, v = attention.qkv(x).split(width, dim=-1)
    mixed = torch.zeros_like(x)
    for h in range(attention.heads):
        part = slice(h * size, (h + 1) * size)
        for i in range(tokens):
            seen = range(i + 1) if attention.causal else range(tokens)
            qi = attention.query_norm(q[i, part])
            scores = torch.stack([qi @ attention.key_norm(k[j, part]) for j in seen]) / (
                attention.temperature * math.sqrt(size)
            )
            weights = scores.exp() / scores.exp().sum()
            mixed[i, part] = sum(w * v[j, part] for w, j in zip(weights, seen, strict=True))
    return mixed @ attention.out.weight.T + attention.out.bias


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("qk_norm", [True, False])
@pytest.mark.parametrize("temperature", [1.0, 3.0])
def test_attention_is_its_definition_on_both_paths(causal, qk_norm, temperature):
    attention = learned(
        Attention(12, 3, causal=causal, qk_norm=qk_norm, temperature=temperature).double()
    )
    x = states(5, 12)
    expected = attention_by_hand(attention, x)
    assert torch.allclose(attention(x), expected, atol=1e-13)
    with reference_kernels(attention):
        assert attention.use_reference_kernel
        assert torch.allclose(attention(x), expected, atol=1e-13)
    assert not attention.use_reference_kernel


def test_attention_works_with_any_number_of_batch_axes():
    attention = Attention(8, 2).double()
    x = states(3, 2, 5, 8)
    assert torch.allclose(attention(x)[1, 1], attention(x[1, 1]), atol=1e-14)


def test_attention_rows_are_convex_weights_of_earlier_tokens():
    rows = Attention(8, 2).double().probabilities(states(2, 5, 8))
    assert rows.shape == (2, 2, 5, 5)
    assert torch.allclose(rows.sum(-1), torch.ones(2, 2, 5, dtype=torch.float64))
    assert bool((rows.triu(1) == 0).all())


def test_the_plain_path_has_forward_mode_and_second_derivatives():
    attention = Attention(4, 2).double()
    x = states(3, 4).requires_grad_()
    with reference_kernels(attention):
        assert torch.autograd.gradcheck(attention, x, check_forward_ad=True)
        assert torch.autograd.gradgradcheck(attention, x)


@pytest.mark.parametrize("field", [Attention(8, 2), FeedForward(8, 12)], ids=["attention", "ffn"])
def test_a_map_is_its_last_matrix_times_its_features(field):
    x = states(2, 5, 8, dtype=torch.float32)
    assert torch.equal(field(x), field.output_projection(field.pre_projection(x)))
    assert [matrix.last for matrix in field.matrices()].count(True) == 1


@given(
    activation=st.sampled_from(sorted(ACTIVATIONS)),
    kind=st.sampled_from(["attention", "ffn"]),
    size=st.floats(1e-3, 1e3),
    seed=st.integers(0, 999),
)
@settings(max_examples=150)
def test_no_output_token_is_longer_than_the_bound(activation, kind, size, seed):
    field = Attention(8, 2) if kind == "attention" else FeedForward(8, 12, activation=activation)
    field = learned(field.double(), 0.5, seed)
    x = size * states(2, 5, 8, seed=seed)
    assert float(field(x).norm(dim=-1).max()) <= field.bound().at(float(x.norm(dim=-1).max())) * (
        1 + 1e-12
    )


def test_attentions_bound_is_attained_by_equal_tokens_along_the_top_direction():
    attention = Attention(8, 1, bias=False).double()
    product = attention.out.weight @ attention.qkv.weight.chunk(3)[2]
    _, s, vh = torch.linalg.svd(product)
    assert float(attention(vh[0].repeat(4, 1)).norm(dim=-1).max()) == pytest.approx(
        attention.bound().gain, rel=1e-10
    )
    assert attention.bound().gain == pytest.approx(float(s[0]), rel=1e-10)


@pytest.mark.parametrize("shape", [(7, 3), (3, 7), (5, 5), (1, 4)])
def test_spectral_norm_equals_the_largest_singular_value(shape):
    m = states(*shape)
    assert spectral_norm(m) == pytest.approx(float(torch.linalg.svdvals(m)[0]), rel=1e-10)


@pytest.mark.parametrize("name", NAMES)
def test_raw_velocity_and_step_are_what_the_placement_table_says(name):
    model, placement = small_model(name), get_placement(name)
    x, dt = states(2, 5, 16), 0.3
    for sublayer in model.depth.sublayers:
        assert (sublayer.input_norm is not None) == placement.input_norm
        assert (sublayer.output_norm is not None) == placement.output_norm
        assert (sublayer.state_norm is not None) == placement.state_norm
        v = sublayer.field(sublayer.input_norm(x) if placement.input_norm else x)
        v = sublayer.output_norm(v) if placement.output_norm else v
        v = v / (2 * model.config.depth) ** 0.25 if name == "deepnorm" else v
        assert torch.allclose(sublayer(x), v, atol=1e-14)
        y = x + dt * v
        assert torch.allclose(
            sublayer.step(x, dt), sublayer.state_norm(y) if placement.state_norm else y, atol=1e-14
        )
        velocity = sublayer.state_norm.tangent(x, v) if placement.state_norm else v
        assert torch.allclose(sublayer.velocity(x), velocity, atol=1e-14)


def test_a_sublayer_keeps_its_placement_where_its_parts_are_those_of_another():
    """DeepNorm with alpha = 1 has the parts of `post`, and is still DeepNorm: in a model, its
    copies and around other maps.
    """
    model = small_model("deepnorm", alpha=1.0)
    depths = [model.depth, model.depth.refine(2), copy.deepcopy(model.depth)]
    for part in [part for depth in depths for part in depth.sublayers]:
        assert (part.placement.name, part.gain) == ("deepnorm", 1.0)
        assert part.with_field(FeedForward(16, 16)).placement is part.placement
    found = Sublayer(FeedForward(4, 4), "ffn", state_norm=RMSNorm(4))
    assert found.placement.name == "post"
    with pytest.raises(ConfigError, match="'pre' has other norms"):
        Sublayer(FeedForward(4, 4), "ffn", state_norm=RMSNorm(4), placement=PLACEMENTS["pre"])


def test_the_table_of_placements_is_complete_and_says_where_a_final_norm_stands():
    page = (Path(__file__).parents[2] / "docs/commands/architecture.md").read_text()
    rows = [f"| `{p.name}` | {p.velocity} | {p.step} | {p.seen_in} |" for p in PLACEMENTS.values()]
    assert (
        "| placement | velocity | discrete step | seen in |\n| --- | --- | --- | --- |\n"
        + "\n".join(rows)
        + "\n\n"
        in page
    )
    assert all(name == placement.name for name, placement in PLACEMENTS.items())
    assert {p.name for p in PLACEMENTS.values() if p.final_norm} >= {
        "none",
        "pre",
        "peri",
        "output",
    }
    assert not any(PLACEMENTS[name].final_norm for name in ("post", "pre_post", "deepnorm"))


def test_unknown_names_are_answered_with_the_nearest():
    with pytest.raises(ConfigError, match="did you mean 'peri'"):
        get_placement("perri")
    with pytest.raises(ConfigError, match="did you mean 'gelu'"):
        FeedForward(4, 4, activation="gellu")
    with pytest.raises(ConfigError, match="not divisible by heads"):
        Attention(10, 3)

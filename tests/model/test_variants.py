"""Every option of our attentions and FFNs, enrolled by its row in `VARIANTS`: what holds for every
map holds for each.
"""

import dataclasses
import json
import math
import subprocess
import sys

import pytest
import torch

from ctrans import GPT, GPTConfig
from ctrans.dynamics.fields import (
    AttentionOptions,
    ExposesHeads,
    HasDiscontinuities,
    check_map,
    reference_kernels,
)
from ctrans.measure.attention.block_norm import block_gain
from ctrans.measure.attention.bounds import local_attention_bound
from ctrans.measure.backward.sensitivity import sublayer_sensitivity
from ctrans.model.checkpoint import load, save
from solvers import GRADIENTS, ConfigError, solve
from tests.cases import VARIANTS
from tests.helpers import learned, small_config, tokens

each = pytest.mark.parametrize("name", VARIANTS)


def config(name, **changes):
    return small_config("pre", **{"heads": 4, "depth": 1, **VARIANTS[name], **changes})


def model(name, dtype=torch.float64, **changes):
    return learned(GPT(config(name, **changes)).to(dtype), 0.3).requires_grad_(False)


def changed(name, made):
    """The map that the variant is about."""
    return made.depth.sublayers[-1 if VARIANTS[name].keys() & {"ffn", "activation"} else 0].field


def without_a_switch(made):
    """Tokens whose states stay away from switches, if the map has any, so that what they pass is
    smooth: the first of those drawn.
    """
    mixing = made.depth.sublayers[-1]
    if not isinstance(mixing.field, HasDiscontinuities):
        return tokens(1, 5)
    assert len(made.depth.sublayers) == 2, "the second one is looked at"
    for seed in range(100):
        ids = tokens(1, 2, seed=seed)
        passed = made.trajectory(ids, method="rk4", steps=1)
        segment = made.depth.segments(continuous=True)[1]
        passed = torch.stack(
            solve([segment], passed.states[1], method="rk4", steps=16, save="steps").states
        )
        inside = mixing.input_norm(passed)
        if (
            mixing.field.distance_to_switch(inside).min() > 0.02
            and len(mixing.field.route(inside).chosen.unique(dim=0)) == 1
        ):
            return ids
    raise AssertionError("every text comes near a switch")


def states(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@each
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_an_euler_step_is_the_discrete_model(name, dtype):
    made, ids = model(name, dtype), tokens(2, 6)
    assert torch.equal(made.trajectory(ids).x1, made.depth(made.embed(ids)))
    assert torch.isfinite(made(ids)[0]).all()


@each
def test_no_token_sees_a_later_one(name):
    made, ids = model(name), tokens(1, 8)
    if isinstance(changed(name, made), HasDiscontinuities):
        changed(
            name, made
        ).use_reference_kernel = (
            True  # sorted by expert, how many go with a token decides on its rounding
        )
    other = ids.clone()
    other[0, 5] = (other[0, 5] + 1) % 11
    assert torch.equal(made(ids)[0][:, :5], made(other)[0][:, :5])
    assert not torch.equal(made(ids)[0][:, 5:], made(other)[0][:, 5:])


@each
@pytest.mark.parametrize("causal", [True, False])
def test_both_paths_agree_and_the_map_is_what_it_says(name, causal):
    if VARIANTS[name].get("attention") == "gated_linear" and not causal:
        with pytest.raises(
            ConfigError, match="causal = False has no meaning for attention 'gated_linear'"
        ):
            config(name, causal=False)
        return
    field = changed(name, model(name, causal=causal))
    x = states(2, 6, 16)
    with reference_kernels(field):
        plain = field(x)
    assert torch.allclose(field(x), plain, atol=1e-12)
    assert torch.allclose(field(x[0]), plain[0], atol=1e-12)
    check_map(field, "attention" if hasattr(field, "heads") else "ffn", 16)


@pytest.mark.cases(1)
@each
@pytest.mark.parametrize(("method", "order", "sizes"), [("euler", 1, (32, 64)), ("rk4", 4, (4, 8))])
def test_methods_have_their_orders(name, method, order, sizes):
    made = model(name)
    segments, x0 = made.depth.segments(continuous=True), made.embed(without_a_switch(made))
    exact = solve(segments, x0, method="rk4", steps=64).x1
    coarse, fine = (
        float((solve(segments, x0, method=method, steps=n).x1 - exact).norm()) for n in sizes
    )
    if name in ("reglu", "squared relu", "linear", "gated linear") and order > 1:
        assert (
            fine < coarse / 2
        )  # phi has a kink, or a jump in its second derivative: the order holds where none is crossed
    else:
        assert math.log2(coarse / fine) == pytest.approx(order, abs=0.15)


@pytest.mark.cases(2)
@each
@pytest.mark.parametrize("gradient", sorted(set(GRADIENTS) - {"backprop"}))
def test_every_kind_of_gradient_is_that_of_backprop(name, gradient):
    made = model(name)
    ids, found = without_a_switch(made), []
    made.requires_grad_(True)
    for kind in ("backprop", gradient):
        end = made.trajectory(ids, method="rk4", steps=6, gradient=kind).x1
        parts = torch.autograd.grad(
            end.square().sum(), list(made.depth.parameters()), allow_unused=True
        )
        found.append(torch.cat([part.flatten() for part in parts if part is not None]))
    assert float((found[1] - found[0]).norm()) <= 1e-4 * float(found[0].norm())


@each
def test_every_parameter_is_trained(name):
    made = GPT(config(name))
    made(tokens(), tokens(seed=1))[1].backward()
    for key, parameter in made.named_parameters():
        assert parameter.grad is not None, key
        assert torch.isfinite(parameter.grad).all(), key


@each
def test_it_is_saved_and_drawn_on_demand_bit_for_bit(name, tmp_path):
    made, ids = GPT(config(name)), tokens()
    save(made, tmp_path)
    assert torch.equal(load(tmp_path)(ids)[0], made(ids)[0])
    assert load(tmp_path).config == made.config
    drawn = GPT(config(name), on_demand=True)
    assert torch.equal(drawn(ids)[0], made(ids)[0])


@each
@pytest.mark.parametrize("radius", [0.1, 3.0, 300.0])
def test_no_adversary_exceeds_the_bound(name, radius):
    """Ascent on the longest output token over inputs no longer than the radius."""
    field = changed(name, model(name)).requires_grad_(False)
    bound = field.bound().at(radius)
    x = states(8, 4, 16, seed=1)
    best = 0.0
    for _ in range(25):
        x = (radius * x / x.norm(dim=-1, keepdim=True)).requires_grad_()
        lengths = field(x).norm(dim=-1)
        best = max(best, float(lengths.detach().max()))
        (ascent,) = torch.autograd.grad(lengths.sum(), x)
        x = (x + radius * ascent / ascent.norm(dim=-1, keepdim=True).clamp_min(1e-30) / 2).detach()
    assert best <= bound * (1 + 1e-12)
    assert best >= bound / 30  # it says something: the adversary comes within a small factor of it


@pytest.mark.cases(26)
@each
def test_its_sensitivity_is_the_norm_of_the_dense_jacobian(name):
    made = model(name)
    sublayer, x = (
        made.depth.sublayers[0 if hasattr(changed(name, made), "heads") else -1],
        states(1, 4, 16),
    )
    with reference_kernels(sublayer):
        dense = torch.autograd.functional.jacobian(sublayer.velocity, x).reshape(
            x.numel(), x.numel()
        )
    assert sublayer_sensitivity(sublayer, x).value == pytest.approx(
        float(torch.linalg.matrix_norm(dense, 2)), rel=2e-3
    )


@each
def test_local_values_are_below_the_bounds_of_theorem_5_1_and_of_lipschitz(name):
    field, x = changed(name, model(name)), states(5, 16)
    with reference_kernels(field):
        measured = block_gain(field, x)
    if hasattr(field, "lipschitz"):
        radius = float(x.norm(dim=-1).max())
        assert measured <= field.lipschitz(radius) * (1 + 1e-9)
        if isinstance(field, HasDiscontinuities):
            assert measured <= field.lipschitz_between_switches(radius) * (1 + 1e-9)
    if isinstance(field, ExposesHeads):
        if field.normalised_scores:
            with pytest.raises(ConfigError, match="qk_norm"):
                local_attention_bound(field, x)
        else:
            assert measured <= local_attention_bound(field, x) * (1 + 1e-9)


COMPILES = """
import torch
from tests.model.test_variants import VARIANTS, model
from tests.helpers import tokens

for name in VARIANTS:
    torch._dynamo.reset()
    made, ids = model(name, torch.float32), tokens()
    x = made.embed(ids)
    compiled = torch.compile(made.depth, backend="eager", fullgraph=True)
    assert torch.allclose(compiled(x), made.depth(x), atol=1e-5), name
"""


@pytest.mark.slow
def test_each_is_one_graph_to_a_compiler():
    # in a process of its own, since the run-time check of annotations is what a compiler cannot
    # trace
    subprocess.run([sys.executable, "-c", COMPILES], check=True)


def test_a_parallel_block_is_one_segment_whose_field_is_the_sum_of_both_maps():
    made = model("parallel", depth=3)
    assert (made.depth.blocks, len(made.depth.sublayers), made.depth.times[-1]) == (
        3,
        3,
        pytest.approx(0.3),
    )
    sublayer, x = made.depth.sublayers[0], states(2, 5, 16)
    u = sublayer.input_norm(x)
    assert torch.equal(
        sublayer.step(x, 0.1), x + 0.1 * (sublayer.field.attention(u) + sublayer.field.ffn(u))
    )
    assert sublayer.attention == (sublayer.field.attention, None)
    last = sublayer.field.output_projection
    assert torch.allclose(
        sublayer.field.pre_projection(u) @ last.weight.T + last.bias, sublayer.field(u), atol=1e-13
    )
    assert made.at_depth(6).depth.times[-1] == pytest.approx(0.3)
    with pytest.raises(ConfigError, match="placement post/pre needs two sublayers"):
        small_config("post/pre", parallel_blocks=True)


def test_a_sink_and_a_gate_say_why_they_show_no_heads():
    for name, words in (("sinks", "does not sum to 1"), ("gated output", "a gate")):
        field = changed(name, model(name))
        assert not isinstance(field, ExposesHeads)
        assert words in field.why_not
    assert isinstance(changed("rotary", model("rotary")), ExposesHeads)


def test_a_configuration_without_options_is_saved_as_it_always_was(tmp_path):
    save(GPT(small_config("peri")), tmp_path)
    assert not {field.name for field in dataclasses.fields(AttentionOptions)} & set(
        load_json(tmp_path)
    )
    save(GPT(small_config("peri", window=3)), tmp_path)
    assert load_json(tmp_path)["window"] == 3


def load_json(directory):
    return json.loads((directory / "config.json").read_text())


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"positions": "rotory"}, "unknown positions 'rotory': did you mean 'rotary'"),
        ({"kv_heads": 3}, "kv_heads = 3 does not divide the 4 heads"),
        ({"kv_heads": 0}, "kv_heads = 0: give a whole number"),
        ({"window": 0}, "window = 0: give a whole number"),
        ({"softcap": 0.0}, "softcap = 0.0: give a number from 1e-12 to 1e"),
        ({"softcap": math.inf}, "softcap = inf"),
        ({"rotary_base": 100.0}, "rotary_base = 100.0 has no meaning for positions 'learned'"),
        (
            {"rotary_base": 0.5, "positions": "rotary"},
            "rotary_base = 0.5: give a finite number of at least 1",
        ),
        ({"rotary_fraction": 1.5, "positions": "rotary"}, "rotary_fraction = 1.5"),
        ({"rotary_fraction": 0.1, "positions": "rotary"}, "is none: choose wider heads"),
        ({"qk_norm": "l3"}, "unknown qk_norm 'l3'"),
        (
            {"window": 4, "attention": "linear"},
            "window = 4 has no meaning for attention 'linear': leave it out, or choose attention",
        ),
        (
            {"positions": "rotary", "attention": "linear"},
            "positions = 'rotary' has no meaning for attention 'linear'",
        ),
        ({"temperature": 2.0, "attention": "gated_linear"}, "temperature = 2.0 has no meaning"),
        (
            {"activation": "relu", "ffn": "swiglu"},
            "activation = 'relu' has no meaning for ffn 'swiglu': leave it out, or choose ffn mlp",
        ),
    ],
)
def test_options_that_make_no_sense_are_refused_in_one_line(changes, words):
    with pytest.raises(ConfigError, match=words) as refused:
        GPTConfig(**{"width": 16, "heads": 4, **changes})
    assert "\n" not in str(refused.value)

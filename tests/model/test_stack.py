"""A stack of blocks as one velocity: what is native is the OT-Transformer's, to the last bit, and
its ODE in any number of steps.
"""

import dataclasses
import json
import math

import pytest
import torch
from torch import nn

from ctrans.control.model_check import check_model
from ctrans.interop import from_nanogpt
from ctrans.model.checkpoint import load, save
from ctrans.model.config import GPTConfig
from ctrans.model.gpt import GPT
from ctrans.model.size import number_of_weights
from ctrans.training.objective import Objective
from ctrans.training.settings import TrainConfig
from solvers import ConfigError, Segment, solve
from tests.cli.test_commands import run
from tests.helpers import FREE, small_config, small_model, tokens
from tests.interop.test_ot_transformer import NORMS, checkpoint, plain

every = pytest.mark.parametrize("placement", FREE)


def plain_stack(model, x):
    """N_f(blocks(x)) by the parts."""
    velocity = model.depth.sublayers[0]
    for sublayer in velocity.field.blocks.sublayers:
        x = x + sublayer(x)
    return x if velocity.output_norm is None else velocity.output_norm(x)


@every
@pytest.mark.parametrize("steps", [1, 3])
def test_the_logits_are_those_of_euler_steps_by_hand_bit_for_bit(placement, steps):
    model = small_model(placement, depth=2, stack_steps=steps, dt=0.3)
    x = model.embed(tokens())
    for _ in range(steps):
        x = x + 0.3 * plain_stack(model, x)
    assert torch.equal(model(tokens())[0], x @ model.token_embedding.weight.T)
    assert isinstance(model.final_norm, nn.Identity)
    assert len(model.depth.sublayers) == model.config.segments == steps


@pytest.mark.cases(2)
@pytest.mark.parametrize("norms", [n for n in NORMS if n["lnf_on"]], ids=str)
def test_an_imported_ot_transformer_is_the_native_model_bit_for_bit(norms, tmp_path):
    loaded = from_nanogpt(checkpoint(steps=3, **norms)[1])
    native = loaded.native()
    assert native.config.stack_steps == 3
    assert torch.equal(native(tokens())[0], loaded(tokens())[0])
    save(native, tmp_path / "model")
    again = load(tmp_path / "model")
    assert torch.equal(again(tokens())[0], loaded(tokens())[0])
    assert len(list(again.parameters())) == len(list(loaded.parameters()))


def test_a_velocity_without_its_norm_is_no_gpt():
    with pytest.raises(ConfigError, match="lnf_on = False"):
        from_nanogpt(checkpoint(lnf_on=False)[1]).native()


def test_the_transport_cost_is_the_imported_models():
    """lam/2 int |v|^2 with lam = 2 lmbda/d is lmbda sum_k dt mean(v^2)."""
    model, saved = checkpoint(steps=4)
    native = from_nanogpt(saved).native().double()
    _, cost = plain(model.double(), tokens(), 4)
    price = 0.7
    config = TrainConfig(kinetic=2 * price / native.config.width, dtype="float64")
    losses = Objective(native, config)(tokens(), tokens(seed=1))
    assert float((losses.total - losses.cross_entropy).detach()) == pytest.approx(
        price * float(cost.detach()), rel=1e-9
    )


@pytest.mark.cases(1)
@every
def test_more_steps_share_the_weights_and_converge_at_order_one_to_the_ode(placement):
    model = small_model(placement, depth=1, scale=0.05, stack_steps=4, dt=0.05)
    x = model.embed(tokens())
    exact = solve(
        [Segment(0.0, 0.2, lambda t, x: plain_stack(model, x))], x, method="rk4", steps=200
    ).x1
    errors = []
    for steps in (16, 32, 64):
        other = model.at_depth(steps)
        assert other.config.stack_steps == steps
        assert len(list(other.parameters())) == len(list(model.parameters()))
        assert other.depth.times[-1] == pytest.approx(0.2)
        errors.append(float((other.depth(x) - exact).norm()))
    assert errors[0] / errors[1] == pytest.approx(2, rel=0.1)
    assert errors[1] / errors[2] == pytest.approx(2, rel=0.1)
    fourth = [
        float((model.trajectory(tokens(), method="rk4", steps=steps).x1 - exact).norm())
        for steps in (4, 8)
    ]
    assert math.log2(fourth[0] / fourth[1]) == pytest.approx(4, abs=0.25)


def test_a_stack_has_as_many_weights_as_its_blocks():
    config = small_config("pre", depth=2, stack_steps=7)
    model = GPT(config)
    assert sum(p.numel() for p in model.parameters() if p.dim() == 2) == number_of_weights(config)
    free = GPT(dataclasses.replace(config, stack_steps=None))
    assert sum(p.numel() for p in model.parameters()) == sum(p.numel() for p in free.parameters())


@every
def test_its_velocity_ends_in_the_linear_map_that_it_names(placement):
    field = small_model(placement, depth=2, stack_steps=2).depth.sublayers[0].field
    x = torch.randn(2, 5, 16, dtype=torch.float64)
    if placement in ("peri", "output"):
        assert not hasattr(field, "last")
        return
    torch.testing.assert_close(
        field.output_projection(field.pre_projection(x)), field(x), rtol=0, atol=1e-12
    )
    h = field.pre_projection(x)
    torch.testing.assert_close(
        h @ field.output_projection.weight.T + field.output_projection.bias,
        field(x),
        rtol=0,
        atol=1e-12,
    )


@pytest.mark.slow
@pytest.mark.parametrize("norm", ["layernorm", "rmsnorm"])
def test_a_norm_at_the_end_of_the_velocity_makes_h_finite(norm):
    check = check_model(
        small_model("pre", depth=1, stack_steps=2, norm=norm),
        tokens(),
        tokens(seed=1),
        thorough=True,
    )
    assert check.placement == "output"
    assert check.finite
    assert check.agrees, check.failures


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"stack_steps": 0}, "stack_steps = 0"),
        ({"stack_steps": 2, "placement": "post"}, "no state of its own"),
        ({"stack_steps": 2, "placement": "deepnorm"}, "no state of its own"),
        ({"stack_steps": 2, "ffn": "moe"}, "balances its experts"),
        ({"stack_steps": 2, "residual": "mhc"}, "one stream"),
    ],
)
def test_stacks_that_make_no_velocity_are_refused(changes, words):
    with pytest.raises(ConfigError, match=words):
        GPTConfig(**{"placement": "pre", **changes})
    if changes == {"stack_steps": 0}:
        with pytest.raises(ConfigError, match="needs all its weights at once"):
            GPT(small_config("pre", stack_steps=2), on_demand=True)


SMALL = ["--depth", "1", "--width", "16", "--heads", "2", "--context", "8"]


@pytest.mark.slow
def test_it_is_trained_and_looked_at_from_the_command_line(tmp_path):
    out = tmp_path / "run"
    trained = run(
        *(
            "train",
            *SMALL,
            "--placement",
            "pre",
            "--stack-steps",
            "3",
            "--dt",
            "0.3",
            "--kinetic",
            "0.01",
            "--iterations",
            "3",
        ),
        *(
            "--eval-windows",
            "2",
            "--batch",
            "2",
            "--eval-depth",
            "6",
            "--out",
            out,
            "--monitor",
            "--every",
            "1",
        ),
    )
    assert trained.exit_code == 0, trained.output
    assert load(out).config.stack_steps == 3
    for command in (
        ["simulate", "--no-reference"],
        ["screen", "--quick"],
        ["hjb-check"],
        ["diagnose"],
    ):
        result = run(*command, "--checkpoint", out, "--context", 6, "--batch", 1, "--json", "-")
        assert result.exit_code == 0, (command, result.stderr)
        assert json.loads(result.stdout)["command"] == command[0]

"""Auxiliary terms of maps in the objective, and the biases that balance experts, through `ctrans
train`'s own loop.
"""

import json

import pytest
import torch

from ctrans import GPTConfig, train
from ctrans.model.gpt import GPT
from ctrans.training.loop import carry_out
from ctrans.training.objective import Objective
from ctrans.training.settings import TrainConfig
from solvers import GRADIENTS, ConfigError
from tests.helpers import learned, small_config, tokens
from tests.training.helpers import TEXT, resume, same, start, weights

MOE = {"ffn": "moe", "experts": 4}


def case(placement="pre", **settings):
    model = learned(GPT(small_config(placement, depth=2, dt=0.02, **MOE)).double())
    ids = tokens(batch=2, length=7)
    return model, Objective(model, TrainConfig(**settings)), ids[:, :-1], ids[:, 1:]


@pytest.mark.parametrize("placement", ["pre", "peri", "post"])
def test_the_objective_is_the_loss_and_the_weighted_terms_of_each_map_at_what_it_is_given(
    placement,
):
    model, objective, ids, targets = case(placement, balance=0.3, router_z=0.2)
    x, terms = model.embed(ids), []
    for sublayer in model.depth.sublayers:
        if sublayer.kind == "ffn":
            terms.append(
                sublayer.field.auxiliary(
                    x if sublayer.input_norm is None else sublayer.input_norm(x)
                )
            )
        x = sublayer.step(x, model.depth.dt)
    expected = model(ids, targets)[1] + sum(
        0.3 * term["balance"] + 0.2 * term["router_z"] for term in terms
    )
    losses = objective(ids, targets)
    torch.testing.assert_close(losses.total, expected)
    for name, value in losses.auxiliary:
        torch.testing.assert_close(value, torch.stack([term[name] for term in terms]).mean())
    wanted = torch.autograd.grad(expected, list(model.parameters()))
    for have, want in zip(
        torch.autograd.grad(losses.total, list(model.parameters())), wanted, strict=True
    ):
        torch.testing.assert_close(have, want)


@pytest.mark.cases(2)
@pytest.mark.parametrize("gradient", GRADIENTS)
def test_terms_have_their_gradient_with_every_kind(gradient):
    found = []
    for kind in ("backprop", gradient):
        model, objective, ids, targets = case(
            balance=3.0, router_z=2.0, method="rk4", steps=2, gradient=kind
        )
        found.append(
            torch.autograd.grad(
                objective(ids, targets).total, list(model.parameters()), allow_unused=True
            )
        )
    for have, want in zip(found[1], found[0], strict=True):
        if want is not None:
            torch.testing.assert_close(have, want, rtol=1e-4, atol=1e-6)


def test_in_evaluation_nothing_is_added():
    model, objective, ids, targets = case()
    torch.testing.assert_close(objective.eval()(ids, targets).total, model(ids, targets)[1])


@pytest.mark.slow
def test_terms_are_logged_and_biases_follow_the_load(tmp_path):
    run, progress = start(tmp_path, model=MOE, bias_rate=0.01, accumulate=2)
    carry_out(run, progress)
    rows = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert all(row["balance"] >= 0.9 and row["router_z"] > 0 for row in rows if "loss" in row)
    biases = run.model.depth.sublayers[1].field.choice_bias
    assert float(biases.abs().max()) > 0.005
    assert torch.allclose(biases / 0.01, (biases / 0.01).round(), atol=1e-4)


def test_without_a_rate_biases_stay(tmp_path):
    run, progress = start(tmp_path, model=MOE)
    carry_out(run, progress)
    assert not run.model.depth.sublayers[1].field.choice_bias.any()


@pytest.mark.slow
def test_a_run_with_experts_is_resumed_to_the_bit(tmp_path):
    run, progress = start(tmp_path / "whole", model=MOE, bias_rate=0.01)
    carry_out(run, progress)
    expected = weights(run)
    run, progress = start(tmp_path / "parts", model=MOE, bias_rate=0.01, iterations=6)
    carry_out(run, progress)
    # the schedule ends elsewhere, so that only what is restored is compared
    halfway = weights(run)
    run, _ = resume(tmp_path / "parts")
    assert same(weights(run), halfway)
    assert any(key.endswith("choice_bias") for key in expected)


@pytest.mark.slow
def test_more_pressure_evens_the_load(tmp_path):
    found = []
    for balance in (0.0, 1.0):
        run, progress = start(tmp_path / str(balance), model=MOE, balance=balance, iterations=40)
        carry_out(run, progress)
        last = json.loads((tmp_path / str(balance) / "log.jsonl").read_text().splitlines()[-1])
        found.append(last["balance"])
    assert found[1] < found[0]


def test_settings_of_experts_are_refused_without_any(tmp_path):
    with pytest.raises(
        ConfigError,
        match=r"balance = 0\.5 has no meaning for ffn 'mlp': leave it out, or choose ffn moe",
    ):
        train(GPTConfig(width=16, heads=2, context=8), TrainConfig(balance=0.5), TEXT, out=tmp_path)
    with pytest.raises(ConfigError, match="bias_rate = -1"):
        TrainConfig(bias_rate=-1)


def test_loads_of_a_model_without_experts_are_none():
    model = GPT(GPTConfig(width=8, heads=2, depth=2, context=4, vocab_size=10), seed=0)
    tokens = torch.arange(4).reshape(1, 4)
    losses = Objective(model, TrainConfig(bias_rate=0.01))(tokens, tokens)
    assert losses.loads == ()

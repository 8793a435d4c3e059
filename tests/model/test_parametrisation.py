"""Parametrisations against the papers' tables, and what they leave alone."""

import dataclasses
import math

import pytest
import torch

from ctrans import GPT, GPTConfig
from ctrans.model.parametrisation import PARAMETRISATIONS, STANDARD
from ctrans.training.settings import TrainConfig
from solvers import ConfigError

BASE = GPTConfig(vocab_size=16, context=8, depth=2, width=32, heads=2, placement="pre", tied=False)
SCALED = sorted(PARAMETRISATIONS.keys() - {STANDARD})


def scaled(name, width=128, depth=8, **fields):
    sizes = {
        "width": width,
        "heads": width // 16,
        "depth": depth,
        "base_width": 32,
        "base_depth": 2,
    }
    return dataclasses.replace(BASE, parametrisation=name, **sizes, **fields)


def groups(config, optimiser, **settings):
    """The parameter groups, found by a weight that is in each."""
    model = GPT(config)
    made = TrainConfig(optimiser=optimiser, learning_rate=0.1, **settings).make_optimiser(
        model.parameters(), model=model
    )
    of = {id(p): group for group in made.param_groups for p in group["params"]}
    block = model.depth.sublayers[1]
    weights = {
        "embedding": model.token_embedding.weight,
        "head": model.unembedding.weight,
        "final norm": model.final_norm.weight,
        "matrix": block.field.up.weight,
        "bias": block.field.up.bias,
        "norm": block.input_norm.weight,
    }
    return {name: of[id(weight)] for name, weight in weights.items()}


@pytest.mark.parametrize("name", SCALED)
@pytest.mark.parametrize("optimiser", ["adamw", "sgd"])
def test_a_parametrisation_changes_nothing_at_its_base(name, optimiser):
    tokens = torch.arange(16).view(2, 8)
    ends = []
    for config in (BASE, scaled(name, width=32, depth=2)):
        model = GPT(config)
        made = TrainConfig(optimiser=optimiser, learning_rate=0.1).make_optimiser(
            model.parameters(), model=model
        )
        for _ in range(3):
            made.zero_grad()
            model(tokens, tokens)[1].backward()
            made.step()
        ends.append([weight.detach().clone() for weight in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))


@pytest.mark.parametrize(
    ("name", "alpha", "rate_in_depth"),
    [("mup", 0, 0), ("depth_mup", 0.5, -0.5), ("completep", 1, 0)],
)
def test_adams_rules_are_those_of_the_papers_table(name, alpha, rate_in_depth):
    """Dey et al. 2025, table 1, with alpha = 0.5 and 1; n = l = 4. At alpha = 0 it is mup alone."""
    n, deeper = 4.0, 4.0
    found = groups(scaled(name), "adamw", weight_decay=0.1)
    rates = {part: group["lr"] / 0.1 for part, group in found.items()}
    deep = deeper**rate_in_depth
    assert rates == pytest.approx(
        {"embedding": 1, "head": 1, "final norm": 1, "matrix": deep / n, "bias": deep, "norm": deep}
    )
    assert found["matrix"]["weight_decay"] * found["matrix"]["lr"] == pytest.approx(0.1 * 0.1)
    assert found["matrix"]["eps"] == pytest.approx(1e-8 / (n * deeper**alpha))
    assert found["embedding"]["eps"] == pytest.approx(1e-8 / n)
    assert scaled(name).step_length == pytest.approx(deeper**-alpha)


@pytest.mark.parametrize("initialisation", ["gpt2", "lecun", "xavier"])
def test_matrices_are_drawn_with_the_bases_deviation_over_the_root_of_the_width(initialisation):
    stds = {
        config.width: [
            float(weight.detach().std())
            for part in GPT(config).depth.sublayers[:2]
            for weight, _, _ in part.field.matrices()
        ]
        for config in (
            dataclasses.replace(BASE, initialisation=initialisation),
            scaled("completep", initialisation=initialisation),
        )
    }
    for base, wide in zip(stds[32], stds[128], strict=True):
        assert wide / base == pytest.approx(1 / 2, rel=0.1)


def test_logits_are_divided_by_the_width():
    config = scaled("mup")
    model = GPT(config)
    x = torch.randn(3, 128)
    assert torch.allclose(model.head(x), model.final_norm(x) @ model.unembedding.weight.mT / 4)


@pytest.mark.parametrize("name", SCALED)
def test_another_depth_of_a_model_has_the_same_depth_time(name):
    config = scaled(name)
    model = GPT(config)
    deeper = model.at_depth(16)
    assert deeper.depth.times[-1] == pytest.approx(model.depth.times[-1])
    assert GPT(deeper.config).depth.dt == pytest.approx(deeper.depth.dt)


def test_completep_keeps_the_depth_time_and_the_others_do_not():
    times = {
        name: [GPT(scaled(name, 32, depth)).depth.times[-1] for depth in (2, 8)] for name in SCALED
    }
    assert times["completep"] == pytest.approx([4, 4])
    assert times["depth_mup"] == pytest.approx([4, 8])
    assert times["mup"] == pytest.approx([4, 16])


@pytest.mark.parametrize("optimiser", ["adamw", "sgd", "muon"])
@pytest.mark.parametrize(("width", "depth"), [(128, 2), (32, 8)])
def test_rates_cancel_the_growth_of_an_optimisers_step(optimiser, width, depth):
    """The spectral norm of the last hidden matrix's first step is the same at every size under
    CompleteP.
    """

    def norm(width, depth, seed):
        model = GPT(
            scaled("completep", width, depth, initialisation="lecun", embedding_std=1.0, dt=0.1),
            seed=seed,
        )
        settings = TrainConfig(optimiser=optimiser, learning_rate=1e-3, weight_decay=0.0)
        made = settings.make_optimiser(model.parameters(), model=model)
        weight, tokens = model.depth.sublayers[-1].field.down.weight, torch.tensor([[3, 5]])
        before = weight.detach().clone()
        model(tokens, tokens)[1].backward()
        made.step()
        return math.log(float(torch.linalg.matrix_norm(weight.detach() - before, 2)), 4)

    grown = [norm(width, depth, seed) - norm(32, 2, seed) for seed in range(6)]
    assert sum(grown) / len(grown) == pytest.approx(0, abs=0.2)


def test_choices_without_a_rule_are_refused():
    with pytest.raises(
        ConfigError, match="base_width = 32 has no meaning for parametrisation standard"
    ):
        dataclasses.replace(BASE, base_width=32)
    with pytest.raises(
        ConfigError, match="'completep' has no rules for stack_steps: choose standard"
    ):
        dataclasses.replace(BASE, parametrisation="completep", stack_steps=2)
    with pytest.raises(ConfigError, match="'mup' has no rules for residual 'ngpt'"):
        GPTConfig(parametrisation="mup", residual="ngpt", placement="post", norm="l2norm")

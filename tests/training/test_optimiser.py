"""Muon against a singular value decomposition and torch's own."""

import dataclasses

import pytest
import torch

from ctrans import GPT, GPTConfig
from ctrans.study.description import PlannedRun
from ctrans.study.population import batches
from ctrans.training.optimiser import Muon, orthogonalised
from ctrans.training.settings import TrainConfig
from solvers import ConfigError

CONFIG = GPTConfig(vocab_size=16, context=8, depth=1, width=16, heads=2, placement="pre")


@pytest.mark.parametrize("shape", [(6, 6), (4, 9), (9, 4), (2, 5, 3)])
def test_orthogonalised_keeps_singular_vectors_and_makes_the_values_alike(shape):
    matrix = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    u, _, v = torch.linalg.svd(matrix, full_matrices=False)
    inner = u.mT @ orthogonalised(matrix) @ v.mT  # diagonal if the vectors are kept
    values = inner.diagonal(dim1=-2, dim2=-1)
    assert torch.allclose(inner, torch.diag_embed(values), atol=1e-9)
    assert values.min() > 0.6
    assert values.max() < 1.3
    assert torch.equal(orthogonalised(torch.zeros(3, 4)), torch.zeros(3, 4))


@pytest.mark.parametrize("shape", [(8, 16), (16, 8)])
def test_a_matrix_takes_torchs_steps_of_muon(shape):
    draws = torch.Generator().manual_seed(1)
    ours, theirs = (torch.nn.Parameter(torch.zeros(shape)) for _ in range(2))
    mine = Muon([{"params": [ours], "orthogonal": True, "weight_decay": 0.1}], 0.1, (0.9, 0.99))
    other = torch.optim.Muon([theirs], lr=0.1, weight_decay=0.1, momentum=0.9, nesterov=True)
    for _ in range(3):
        gradient = torch.randn(shape, generator=draws)
        ours.grad, theirs.grad = gradient.clone(), gradient.clone()
        mine.step()
        other.step()
    # torch computes in bfloat16, and averages the momentum where we add, which changes no direction
    assert float((ours - theirs).detach().norm() / theirs.detach().norm()) < 0.1


def test_other_weights_take_torchs_steps_of_adamw():
    draws = torch.Generator().manual_seed(2)
    ours, theirs = (torch.nn.Parameter(torch.ones(5, dtype=torch.float64)) for _ in range(2))
    mine = Muon([{"params": [ours], "weight_decay": 0.1}], 0.1, (0.9, 0.95))
    other = torch.optim.AdamW([theirs], lr=0.1, weight_decay=0.1, betas=(0.9, 0.95))
    for _ in range(4):
        gradient = torch.randn(5, dtype=torch.float64, generator=draws)
        ours.grad, theirs.grad = gradient.clone(), gradient.clone()
        mine.step()
        other.step()
    torch.testing.assert_close(ours.detach(), theirs.detach())


def test_a_state_that_is_saved_and_read_continues_with_the_same_bits():
    tokens = torch.arange(8).view(1, 8)

    def steps(model, optimiser, count):
        for _ in range(count):
            optimiser.zero_grad()
            model(tokens, tokens)[1].backward()
            optimiser.step()
        return [weight.detach().clone() for weight in model.parameters()]

    def made():
        model = GPT(CONFIG)
        return model, TrainConfig(optimiser="muon").make_optimiser(model.parameters(), model=model)

    through = steps(*made(), 4)
    first, optimiser = made()
    steps(first, optimiser, 2)
    second, other = made()
    second.load_state_dict(first.state_dict())
    other.load_state_dict(optimiser.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(through, steps(second, other, 2), strict=True))


def test_muon_without_the_model_is_refused():
    with pytest.raises(
        ConfigError, match="'muon' treats the matrices of a GPT's depth apart: give the model"
    ):
        TrainConfig(optimiser="muon").make_optimiser(GPT(CONFIG).parameters())


def test_runs_with_rates_by_group_are_no_members_of_a_population():
    def run(model=CONFIG, **training):
        return PlannedRun(model, TrainConfig(**training), {})

    assert batches(run())
    assert not batches(run(optimiser="muon"))
    assert not batches(run(dataclasses.replace(CONFIG, parametrisation="mup", base_width=8)))

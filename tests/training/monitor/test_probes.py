"""Probes: sharpness against a dense Hessian, the others against the instruments they are made of; a
training is left as it was.
"""

import math

import pytest
import torch
from torch.func import functional_call, hessian

from ctrans import GPT, GPTConfig
from ctrans.dynamics.fields import reference_kernels
from ctrans.training.monitor import Monitor, read_log
from ctrans.training.monitor.edge_of_stability import adam_scales, over_edge
from ctrans.training.monitor.probes import PROBES, Held, probe
from ctrans.training.monitor.sharpness import sharpness
from ctrans.training.monitor.sites import sites_of
from tests.training.monitor.test_bits import hugging_face


def small(**options):
    made = GPTConfig(
        vocab_size=7,
        context=4,
        depth=1,
        width=4,
        heads=2,
        embedding_std=0.5,
        initialisation="xavier",
        **options,
    )
    return GPT(made, seed=3).double()


def batch(vocabulary=7, length=4):
    rows = torch.randint(vocabulary, (2, length + 1), generator=torch.Generator().manual_seed(0))
    return rows[:, :-1], rows[:, 1:]


def dense(model, tokens, targets):
    """The Hessian by all weights, in the order of `parameters()`."""
    names = dict(model.named_parameters())
    sizes = [p.numel() for p in names.values()]

    def loss(flat):
        parts = {
            n: part.view_as(p)
            for (n, p), part in zip(names.items(), flat.split(sizes), strict=True)
        }
        return functional_call(model, parts, (tokens, targets))[1]

    with reference_kernels(model):
        return hessian(loss)(torch.cat([p.detach().flatten() for p in names.values()]))


@pytest.mark.cases(1)
@pytest.mark.parametrize("placement", ["peri", "pre", "post"])
def test_sharpness_is_the_largest_eigenvalue_of_the_dense_hessian(placement):
    model, (tokens, targets) = small(placement=placement), batch()
    matrix = dense(model, tokens, targets)
    weights = list(model.parameters())
    largest = float(torch.linalg.eigvalsh(matrix)[-1])
    assert sharpness(model, weights, tokens, targets) == pytest.approx(largest, rel=0.03)
    optimiser = torch.optim.AdamW(weights, lr=1e-2, betas=(0.9, 0.99))
    for _ in range(3):
        optimiser.zero_grad()
        model(tokens, targets)[1].backward()
        optimiser.step()
    scales = torch.cat([scale.flatten() for scale in adam_scales(weights, optimiser).values()])
    matrix = scales[:, None] * dense(model, tokens, targets) * scales
    found = over_edge(model, weights, tokens, targets, optimiser)
    expected = float(torch.linalg.eigvalsh(matrix)[-1])
    assert found["preconditioned"] == pytest.approx(expected, rel=0.03)
    assert found["edge"] == pytest.approx(38 / 1e-2)
    assert found["preconditioned_over_edge"] == pytest.approx(expected / 3800, rel=0.03)


def test_adams_scales_are_those_of_its_own_step():
    """Adam's step is lr m_hat/(sqrt(nu_hat) + eps), m_hat = m/(1 - b^t): P^-1 times lr m."""
    weight = torch.nn.Parameter(torch.randn(5, dtype=torch.float64))
    optimiser = torch.optim.Adam([weight], lr=0.1)
    for _ in range(4):
        before = weight.detach().clone()
        weight.grad = torch.randn(5, dtype=torch.float64)
        optimiser.step()
    (scale,) = adam_scales([weight], optimiser).values()
    assert torch.allclose(
        weight.detach() - before, -0.1 * scale.square() * optimiser.state[weight]["exp_avg"]
    )


def test_gradient_descents_edge_has_its_momentum():
    model, (tokens, targets) = small(), batch()
    weights = list(model.parameters())
    found = over_edge(
        model, weights, tokens, targets, torch.optim.SGD(weights, lr=0.5, momentum=0.9)
    )
    assert found["edge"] == pytest.approx(2 * 1.9 / 0.5)
    assert "sharpness" in over_edge(model, weights, tokens, targets, None)


@pytest.mark.cases(1)
@pytest.mark.parametrize("placement", ["peri", "pre"])
def test_every_probe_speaks_of_our_models(placement):
    model = GPT(
        GPTConfig(vocab_size=32, context=8, depth=2, width=16, heads=2, placement=placement)
    )
    tokens, targets = batch(32, 8)
    found = probe(
        sites_of(model), Held(tokens, targets), torch.optim.SGD(model.parameters(), lr=0.1)
    )
    assert "missing" not in found
    assert 0 <= found["theta"] <= 1
    assert len(found["sensitivity"]) == len(found["gap"]) == 4
    assert all(gap >= 0 for gap in found["gap"])
    assert all(math.isinf(h) == (placement == "pre") for h in found["hamiltonian"])
    assert all((bound is not None) == (placement == "pre") for bound in found["map_bounds"])
    assert found["sharpness"] > 0
    with torch.no_grad():
        assert found["held_loss"] == pytest.approx(float(model.eval()(tokens, targets)[1]))
    assert len(found["lyapunov"]) == 2
    for word in (
        "first",
        "last",
    ):  # the value of H's supremum over |W| <= R grows like R where H is infinite, and not at all elsewhere
        assert found[f"hamiltonian_exponent_{word}"] == pytest.approx(
            1.0 if placement == "pre" else 0.0, abs=0.05
        )


@pytest.mark.slow
def test_probes_speak_of_a_model_of_transformers_and_leave_it_as_it_was():
    model = hugging_face()
    tokens, targets = batch(32, 8)
    monitor = Monitor(model, every=2, probe_every=2, held=(tokens, targets))
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    state = torch.get_rng_state()
    monitor.step(loss, torch.optim.SGD(model.parameters(), lr=0.1))
    assert torch.equal(state, torch.get_rng_state())
    assert model.training
    assert all(p.requires_grad and p.grad is not None for p in model.parameters())
    found = monitor.past.probes[-1][1]
    assert {"theta", "sharpness", "preconditioned_over_edge"} <= found.keys()
    assert len(monitor.gauges.map_bounds) == 4
    monitor.close()


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    "options",
    [{"parallel_blocks": True}, {"attention": "linear"}, {"ffn": "moe", "parallel_blocks": True}],
)
def test_probes_speak_of_blocks_that_act_at_once(options):
    model = GPT(GPTConfig(vocab_size=32, context=8, depth=2, width=16, heads=2, **options))
    found = probe(sites_of(model), Held(*batch(32, 8)), torch.optim.SGD(model.parameters(), lr=0.1))
    assert "missing" not in found
    assert {
        "theta",
        "log_sensitivity_first",
        "log_sensitivity_last",
        "sharpness",
        "sensitivity",
        "gap",
    } <= found.keys()


@pytest.mark.slow
def test_a_model_without_attention_says_so():
    pytest.importorskip("transformers")
    from ctrans.interop.families import small_model

    model = small_model("mamba")
    found = probe(sites_of(model), Held(*batch(31, 8)), None)
    assert "attention" in found["missing"]["attention"]
    assert "sharpness" in found


def test_a_probe_that_fails_is_a_row_that_says_why_and_the_training_goes_on(monkeypatch, tmp_path):
    def broken(at):
        raise IndexError("list index out of range")

    def out_of_memory(at):
        raise torch.OutOfMemoryError("no more")

    monkeypatch.setitem(PROBES, "attention", broken)
    monkeypatch.setitem(PROBES, "curvature", out_of_memory)
    model = GPT(GPTConfig(vocab_size=32, context=8, depth=1, width=16, heads=2))
    monitor = Monitor(model, every=1, probe_every=1, held=batch(32, 8), out=tmp_path)
    loss = model(*batch(32, 8))[1]
    loss.backward()
    monitor.step(loss)
    monitor.close()
    (row,) = read_log(tmp_path).probes
    assert row["missing"] == {
        "attention": "IndexError: list index out of range",
        "curvature": "OutOfMemoryError: no more",
    }
    assert "sensitivity" in row
    assert model.training


@pytest.mark.slow
def test_probes_are_as_rare_as_asked_for():
    model = GPT(GPTConfig(vocab_size=32, context=8, depth=1, width=16, heads=2))
    monitor = Monitor(model, every=2, probe_every=6, held=batch(32, 8))
    for _ in range(13):
        loss = model(*batch(32, 8))[1]
        loss.backward()
        monitor.step(loss)
    assert [step for step, _ in monitor.past.probes] == [1, 6, 12]
    assert PROBES

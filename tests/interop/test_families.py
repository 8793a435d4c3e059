"""Hugging Face models as a Depth: the same hidden states, logits and gradients as the model's own,
for every family.
"""

import copy

import pytest
import torch

from ctrans.control import costate
from ctrans.interop import from_transformers
from ctrans.interop.anatomy import Anatomy
from ctrans.interop.find_blocks import find_blocks
from solvers import ConfigError, Segment, solve
from tests.interop.models import FAMILIES, VOCABULARY, block_outputs, inputs, made

TOLERANCE = 1e-5
each_family = pytest.mark.parametrize("name", FAMILIES)


@pytest.mark.cases(1)
@each_family
def test_hidden_states_after_each_block_and_logits_are_the_models_own(name):
    model = made(name)
    x, imported = inputs(model), from_transformers(model)
    expected, logits = block_outputs(model, find_blocks(model, Anatomy()), x)
    states = imported.trajectory(x).states
    for own, state in zip(expected, states[2::2], strict=True):
        assert torch.allclose(state, own, rtol=TOLERANCE, atol=TOLERANCE)
    assert torch.allclose(imported.head(states[-1]), logits, rtol=TOLERANCE, atol=TOLERANCE)
    assert torch.allclose(imported(x)[0], logits, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.cases(1)
@each_family
def test_gradients_of_all_parameters_are_the_models_own(name):
    model = made(name)
    x, imported = inputs(model), from_transformers(model)
    found = []
    for output in (lambda: model(x).logits, lambda: imported(x)[0]):
        model.zero_grad()
        output().square().mean().backward()
        found.append(
            {key: p.grad.clone() for key, p in model.named_parameters() if p.grad is not None}
        )
    expected, got = found
    assert expected.keys() == got.keys()
    largest = max(float(gradient.abs().max()) for gradient in expected.values())
    for key, gradient in expected.items():
        assert torch.allclose(got[key], gradient, rtol=TOLERANCE, atol=TOLERANCE * largest), key


@pytest.mark.cases(1)
@each_family
def test_no_weight_is_copied(name):
    model = made(name)
    imported = from_transformers(model)
    assert {id(p) for p in imported.parameters()} == {id(p) for p in model.parameters()}


@pytest.mark.cases(1)
@each_family
def test_structure_is_read_and_said(name):
    family, imported = FAMILIES[name], from_transformers(made(name))
    assert imported.config.placement == family.placement
    norms = [part for part in imported.depth.modules() if hasattr(part, "gamma")]
    assert {(norm.centred, norm.shift) for norm in norms} == {(family.centred, family.shift)}
    assert f"placement {family.placement}" in str(imported.config)
    assert type(norms[0].module).__name__ in str(imported.config)


@pytest.mark.cases(1)
@each_family
def test_norm_adapters_compute_what_their_modules_do_and_know_its_geometry(name):
    imported = from_transformers(made(name))
    norm = next(part for part in imported.depth.modules() if hasattr(part, "gamma"))
    x = torch.randn(3, norm.width)
    assert torch.equal(norm(x), norm.module(x))
    precise, y = copy.deepcopy(norm).double(), x.double()
    assert torch.allclose(precise(y), norm(x).double(), atol=1e-5)
    dense = torch.stack([torch.autograd.functional.jacobian(precise, row) for row in y])
    assert torch.allclose(dense, precise.jacobian(y), atol=1e-10)


@pytest.mark.cases(1)
@each_family
def test_leading_dimensions_are_batches(name):
    model = made(name)
    imported = from_transformers(model)
    x = imported.embed(inputs(model)).detach()
    for part in imported.depth.sublayers[:2]:
        assert torch.allclose(part(x.unsqueeze(0)), part(x).unsqueeze(0), atol=1e-6)
        assert torch.allclose(part(x[0]), part(x)[0], atol=1e-5)


@pytest.mark.slow
def test_sliding_windows_differ_between_blocks():
    for name in ("qwen2", "gemma2", "gemma3"):
        model = made(name)
        imported = from_transformers(model)
        x = imported.embed(inputs(model)).detach()
        moved = x.clone()
        moved[:, 0] += 1
        reached = {
            bool((part(moved) - part(x))[:, -1].abs().max() > 0)
            for part in imported.depth.sublayers[::2]
        }
        assert reached == {True, False}, name


@pytest.mark.cases(1)
@pytest.mark.parametrize("name", ["gpt2", "gemma2"])
def test_substeps_converge_at_order_one_to_the_switched_ode(name):
    model = made(name)
    x, imported = inputs(model), copy.deepcopy(from_transformers(model, dt=0.1)).double()
    with torch.no_grad():
        exact = imported.trajectory(x, method="rk4", steps=4).x1
        errors = [
            float((imported.trajectory(x, steps=k, continuous=True).x1 - exact).norm())
            for k in (8, 16)
        ]
    assert abs(torch.tensor(errors[0] / errors[1]).log2() - 1) < 0.15


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "gemma2"])
def test_refined_depth_converges_at_order_one_to_the_averaged_ode(name):
    model = made(name)
    x, imported = inputs(model), copy.deepcopy(from_transformers(model, dt=0.1)).double()
    parts, span = list(imported.depth.sublayers), 2 * imported.depth.dt

    def averaged(attention, ffn):
        return lambda t, x: (attention(x) + ffn(x)) / 2

    pairs = zip(parts[::2], parts[1::2], strict=True)
    segments = [Segment(i * span, (i + 1) * span, averaged(*pair)) for i, pair in enumerate(pairs)]
    with torch.no_grad():
        x0 = imported.embed(x)
        exact = solve(segments, x0, method="rk4", steps=4).x1
        errors = [float((imported.depth.refine(k)(x0) - exact).norm()) for k in (8, 16)]
    assert abs(torch.tensor(errors[0] / errors[1]).log2() - 1) < 0.15


def test_refining_copies_blocks_and_not_the_model():
    model = made("gemma2")
    refined = from_transformers(model).depth.refine(2)
    own = sum(p.numel() for block in find_blocks(model, Anatomy()) for p in block.parameters())
    assert sum(p.numel() for p in refined.parameters()) == 2 * own
    assert not {id(p) for p in refined.parameters()} & {id(p) for p in model.parameters()}
    assert refined.sublayers[0].field.adapter.model is model


def test_contexts_follow_the_models_kernel():
    model = made("gpt2")
    x, imported = inputs(model), from_transformers(model)
    expected = imported(x)[0]
    model.set_attn_implementation("eager")
    assert torch.allclose(imported(x)[0], expected, atol=1e-5)
    assert torch.allclose(model(x).logits, expected, atol=1e-5)


def test_a_copy_asks_its_own_model_for_contexts():
    imported = copy.deepcopy(from_transformers(made("llama")))
    assert imported.depth.sublayers[0].field.adapter.model is imported.model


@pytest.mark.cases(1)
@pytest.mark.parametrize("gradient", ["checkpoint", "adjoint"])
def test_kinds_of_gradient_agree_on_an_imported_model(gradient):
    model = made("gemma2")
    x, imported = inputs(model), from_transformers(model, dt=0.05)
    found = []
    for kind in ("backprop", gradient):
        model.zero_grad()
        imported.trajectory(x, method="rk4", gradient=kind).x1.square().mean().backward()
        found.append(
            torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
        )
    assert float((found[1] - found[0]).norm()) < 1e-3 * float(found[0].norm())


@pytest.mark.cases(1)
@pytest.mark.parametrize("name", ["gpt2", "bert", "gemma3"])
def test_costate_of_an_imported_model_is_autograds_gradient(name):
    model = made(name)
    imported, x = from_transformers(model), inputs(model)
    found = costate(imported, x, x)
    x0 = imported.embed(x).detach().requires_grad_()
    loss = torch.nn.functional.cross_entropy(
        imported.head(imported.depth(x0)).flatten(0, 1), x.flatten()
    )
    assert torch.allclose(found.costates[0], torch.autograd.grad(loss, x0)[0], rtol=1e-4, atol=1e-6)


@pytest.mark.cases(1)
@each_family
def test_plain_attention_has_second_derivatives_and_the_same_values(name):
    model = made(name)
    imported = from_transformers(model)
    part, x = imported.depth.sublayers[0], imported.embed(inputs(model)).detach().requires_grad_()
    fused = part(x)
    part.field.use_reference_kernel = True
    assert torch.allclose(part(x), fused, atol=1e-5)
    (gradient,) = torch.autograd.grad(part(x).square().sum(), x, create_graph=True)
    assert torch.autograd.grad(gradient.square().sum(), x)[0].isfinite().all()


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("tokens", "words"),
    [
        (torch.tensor([[0, VOCABULARY]]), f"the vocabulary from 0 to {VOCABULARY - 1}"),
        (torch.tensor([[-1, 0]]), "tokens run from -1"),
        (torch.tensor([[0.5]]), "give int64 or int32"),
        (torch.ones(1, 33, dtype=torch.int64), "33 tokens exceed the model's context of 32"),
    ],
)
def test_tokens_that_the_model_does_not_have_are_refused(tokens, words):
    with pytest.raises(ConfigError, match=words):
        from_transformers(made("gpt2")).embed(tokens)

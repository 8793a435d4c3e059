"""What gradient descent finds: the radial identity, alignment zero, and the principle for shared
weights.
"""

import json
import math

import pytest
import torch
import torch.nn.functional as F

import ctrans
from ctrans.control.attained import attained
from ctrans.control.costate import costate
from ctrans.control.maximum_principle import maximum_principle
from ctrans.dynamics.placement import PLACEMENTS
from ctrans.interop import from_transformers
from ctrans.report.files import to_json
from tests.cases import PAPERS
from tests.helpers import FREE, learned, small_model, tokens
from tests.interop.models import gpt2

every = pytest.mark.parametrize("placement", PLACEMENTS)
TEXT = tokens(2, 9)


def last_factor(sublayer):
    owner = (
        sublayer.field.output_projection if sublayer.output_norm is None else sublayer.output_norm
    )
    return list(owner.parameters())


@pytest.mark.slow
@every
@pytest.mark.parametrize("norm", PAPERS)
def test_the_work_of_a_step_is_the_radial_derivative_of_its_last_factor(placement, norm):
    """h <P, r> against <theta, dL/dtheta> by one backward pass through the whole model."""
    model = small_model(placement, depth=2, norm=norm).requires_grad_(True)
    loss = F.cross_entropy(
        model.head(model.depth(model.embed(TEXT[:, :-1]))).flatten(0, -2), TEXT[:, 1:].flatten()
    )
    parts = [last_factor(sublayer) for sublayer in model.depth.sublayers]
    radial = []
    for part in parts:
        gradients = torch.autograd.grad(loss, part, retain_graph=True)
        radial.append(
            sum(
                float((value * gradient).sum())
                for value, gradient in zip(part, gradients, strict=True)
            )
        )
    found = attained(model, TEXT[:, :-1], TEXT[:, 1:])
    assert found.work == pytest.approx(radial, rel=1e-9, abs=1e-14)
    assert max(found.identity) < 1e-13
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.cases(1)
@pytest.mark.parametrize("placement", FREE)
def test_the_identity_holds_along_the_ode(placement):
    """dt <P, v> of a segment, constant on it, against <theta, dL/dtheta> through a fine solution of
    the ODE.
    """
    model = small_model(placement, depth=1, eps=1e-2).requires_grad_(True)
    end = model.trajectory(TEXT[:, :-1], method="dopri5", rtol=1e-10, atol=1e-12).x1
    loss = F.cross_entropy(model.head(end).flatten(0, -2), TEXT[:, 1:].flatten())
    parts = [last_factor(sublayer) for sublayer in model.depth.sublayers]
    radial = [
        sum(
            float((a * b).sum())
            for a, b in zip(part, torch.autograd.grad(loss, part, retain_graph=True), strict=True)
        )
        for part in parts
    ]
    model.requires_grad_(False)
    found = costate(model, TEXT[:, :-1], TEXT[:, 1:], form="continuous", rtol=1e-10, atol=1e-12)
    products = maximum_principle(model.depth, found).product
    assert [0.1 * product for product in products] == pytest.approx(radial, rel=1e-6, abs=1e-9)


@pytest.mark.cases(1)
@every
def test_no_parameters_of_the_same_norm_gain_faster_than_first_order(placement):
    """d/ds of h <P, r> towards 20 random parameters of the present norm, and towards the steepest
    ones, which attain it.
    """
    model = small_model(placement, depth=1)
    found, fixed = (
        attained(model, TEXT[:, :-1], TEXT[:, 1:]),
        costate(model, TEXT[:, :-1], TEXT[:, 1:]),
    )
    sublayer, x, p = model.depth.sublayers[1], fixed.states[1], fixed.costates[2]
    if sublayer.state_norm is not None:
        p = torch.autograd.functional.vjp(sublayer.state_norm, x + 0.1 * sublayer(x), p)[1]
    names = [name for name, _ in sublayer.named_parameters() if not name.startswith("state_norm")]
    theta = [sublayer.get_parameter(name).detach() for name in names]
    size = torch.cat([part.flatten() for part in theta]).norm()

    def work(*parts):
        return (
            0.1
            * (
                p * torch.func.functional_call(sublayer, dict(zip(names, parts, strict=True)), (x,))
            ).sum()
        )

    def towards(target):
        scale = size / torch.cat([part.flatten() for part in target]).norm()
        change = tuple(scale * end - part for end, part in zip(target, theta, strict=True))
        return -float(torch.func.jvp(work, tuple(theta), change)[1])

    generator = torch.Generator().manual_seed(0)
    gains = [
        towards([torch.randn(part.shape, generator=generator, dtype=part.dtype) for part in theta])
        for _ in range(20)
    ]
    assert max(gains) <= found.first_order[1]
    steepest = torch.func.grad(work, argnums=tuple(range(len(theta))))(*theta)
    assert towards([-part for part in steepest]) == pytest.approx(found.first_order[1], rel=1e-10)
    assert (
        found.shared_gap[1] >= found.last_gap[1] * (1 - 1e-9) or PLACEMENTS[placement].output_norm
    )
    behind = PLACEMENTS[placement].output_norm
    assert math.isinf(found.pointwise_gap[1]) != behind


@pytest.mark.cases(1)
@pytest.mark.parametrize("placement", ["pre", "peri"])
def test_the_last_factors_gap_is_what_the_best_of_its_norm_gains(placement):
    """theta* = -|theta| g/|g|, g the gradient: put into the model, the step's work falls by the
    gap.
    """
    model = small_model(placement, depth=1)
    before = attained(model, TEXT[:, :-1], TEXT[:, 1:])
    fixed = costate(model, TEXT[:, :-1], TEXT[:, 1:])
    k, x, p = 1, fixed.states[1], fixed.costates[2]
    theta = last_factor(model.depth.sublayers[k])
    for part in theta:
        part.requires_grad_(True)
    g = torch.autograd.grad(0.1 * (p * model.depth.sublayers[k](x)).sum(), theta)
    size, slope = (
        torch.cat([part.detach().flatten() for part in parts]).norm() for parts in (theta, g)
    )
    with torch.no_grad():
        for part, gradient in zip(theta, g, strict=True):
            part.copy_(-size / slope * gradient)
        work = 0.1 * float((p * model.depth.sublayers[k](x)).sum())
    assert before.work[k] - work == pytest.approx(before.last_gap[k], rel=1e-10)


@pytest.mark.slow
@pytest.mark.parametrize("placement", ["pre", "peri"])
def test_training_takes_the_alignment_to_zero_and_not_to_one(placement):
    """Gradient descent on the last factors alone, to a critical point: <P, v> = 0, the pointwise
    gap is all of H, the last gap 0.
    """
    torch.manual_seed(0)
    model = learned(small_model(placement, depth=1, dt=1.0), 0.1)
    theta = [part for sublayer in model.depth.sublayers for part in last_factor(sublayer)]
    for part in theta:
        part.requires_grad_(True)
    optimiser = torch.optim.LBFGS(
        theta, max_iter=400, tolerance_grad=1e-9, tolerance_change=0, line_search_fn="strong_wolfe"
    )
    few, targets = (
        TEXT[:, :-1],
        torch.stack([TEXT[0, 1:], TEXT[0, 1:].flip(0)]),
    )  # equal tokens, unequal targets: no loss of zero
    few = few[:1].expand(2, -1)

    def closure():
        optimiser.zero_grad()
        decay = 0.05 / 2 * sum(part.square().sum() for part in theta)
        value = (
            F.cross_entropy(
                model.head(model.depth(model.embed(few))).flatten(0, -2), targets.flatten()
            )
            + decay
        )
        value.backward()
        return value

    start = attained(model, few, targets, weight_decay=0.05, decay_gains=True)
    optimiser.step(closure)
    end = attained(model, few, targets, weight_decay=0.05, decay_gains=True)
    assert max(map(abs, end.stationarity)) < 1e-5 < max(map(abs, start.stationarity))
    for k, sublayer in enumerate(model.depth.sublayers):
        decayed = 0.05 * sum(float(part.detach().square().sum()) for part in last_factor(sublayer))
        assert end.work[k] == pytest.approx(-decayed, rel=5e-3)
        assert (
            abs(end.last_gap[k]) < 5e-3 * decayed
        )  # the mean-field principle holds for what was trained
        if placement == "peri":
            assert end.pointwise_gap[k] > end.last_gap[k]  # and the pointwise one does not


@pytest.mark.slow
def test_a_critical_point_without_decay_has_no_work_and_no_alignment():
    model = small_model("peri", depth=1, dt=1.0)
    norm = model.depth.sublayers[-1].output_norm
    for part in norm.parameters():
        part.requires_grad_(True)
    few, targets = TEXT[:1, :-1].expand(2, -1), torch.stack([TEXT[0, 1:], TEXT[0, 1:].flip(0)])
    optimiser = torch.optim.LBFGS(
        norm.parameters(),
        max_iter=2000,
        tolerance_grad=1e-11,
        tolerance_change=0,
        line_search_fn="strong_wolfe",
    )

    def closure():
        optimiser.zero_grad()
        value = F.cross_entropy(
            model.head(model.depth(model.embed(few))).flatten(0, -2), targets.flatten()
        )
        value.backward()
        return value

    before = attained(model, few, targets)
    optimiser.step(closure)
    found = attained(model, few, targets)
    assert abs(found.stationarity[-1]) < 1e-4 < abs(before.stationarity[-1])
    assert found.work[-1] / found.pointwise_gap[-1] == pytest.approx(0, abs=1e-3)


def test_every_field_is_plain_json():
    found = attained(small_model("post", depth=1), TEXT[:, :-1], TEXT[:, 1:])
    assert json.loads(to_json(found))["pointwise_gap"] == ["inf", "inf"]


def test_a_saddle_has_a_gap_though_its_first_order_condition_holds():
    """V = W_O = 0: no gradient, but Q = K = 0 and values and outputs of rank one, as long, gain
    |theta|^2/2 |(A X)'P|_2.
    """
    model = small_model("pre", depth=1, width=8, bias=False, dt=1.0)
    attention, sublayer = model.depth.sublayers[0].field, model.depth.sublayers[0]
    attention.qkv.weight[16:].zero_()
    attention.out.weight.zero_()
    found, fixed = (
        attained(model, TEXT[:, :-1], TEXT[:, 1:]),
        costate(model, TEXT[:, :-1], TEXT[:, 1:]),
    )
    assert found.first_order[0] == pytest.approx(0, abs=1e-9)
    x, p, spent = fixed.states[0], fixed.costates[1], float(attention.qkv.weight.square().sum())
    rows = torch.ones(8, 8, dtype=torch.float64).tril()
    u, s, vt = torch.linalg.svd(
        torch.einsum("ij,bjd,bie->de", rows / rows.sum(-1, keepdim=True), sublayer.input_norm(x), p)
    )
    before, r = (
        sum(float(part.square().sum()) for part in sublayer.parameters()),
        (spent / 2) ** 0.5,
    )
    attention.qkv.weight.zero_()
    attention.qkv.weight[16], attention.out.weight[:, 0] = r * u[:, 0], -r * vt[0]
    gain = -float((p * sublayer(x)).sum())
    assert sum(float(part.square().sum()) for part in sublayer.parameters()) == pytest.approx(
        before, rel=1e-12
    )
    assert gain == pytest.approx(spent / 2 * float(s[0]), rel=1e-12)
    assert 0 < gain <= found.shared_gap[0]


@pytest.mark.slow
def test_last_maps_that_a_library_keeps_transposed_are_read_where_they_are_trained():
    """<P, r> of GPT-2's sublayers against <theta, dL/dtheta> by the library's own backward pass."""
    library = gpt2().double().eval().requires_grad_(True)
    text = tokens(2, 9) % library.config.vocab_size
    logits = library(text[:, :-1]).logits
    F.cross_entropy(logits.flatten(0, -2), text[:, 1:].flatten()).backward()
    parts = [part.c_proj for block in library.transformer.h for part in (block.attn, block.mlp)]
    radial = [sum(float((each * each.grad).sum()) for each in part.parameters()) for part in parts]
    found = attained(from_transformers(library), text[:, :-1], text[:, 1:])
    assert found.work == pytest.approx(radial, rel=1e-9, abs=1e-14)
    assert max(found.identity) < 1e-13


def test_an_opened_model_without_gradients_is_measured_too():
    """Its weights need no gradients. The parts were once put back to that state while they
    computed, and every figure by weights was 0.
    """
    library = gpt2().double().eval()
    text = tokens(2, 9) % library.config.vocab_size
    found = attained(ctrans.open_model(library), text[:, :-1], text[:, 1:])
    assert max(found.identity) < 1e-12
    assert min(found.first_order) > 0

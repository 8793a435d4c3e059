"""Oracle: the dense Jacobian of the logits by all weights of a tiny model, and its Gauss-Newton
matrices.
"""

import math

import pytest
import torch
from torch.func import functional_call

from ctrans.measure.backward.curvature import ADAM_EPS, GaussNewton, curvature, edge, effective_rank
from ctrans.measure.walk import walk
from solvers import ConfigError
from tests.helpers import small_model, tokens

TINY = {"depth": 1, "width": 4, "heads": 1, "vocab_size": 5, "ffn_width": 4}


def setting(name, masked=False):
    model = small_model(name, **TINY)
    text, targets = tokens(2, 6, vocabulary=5), tokens(2, 6, vocabulary=5, seed=1)
    if masked:
        targets[:, ::2] = -1
    return model, text, targets


def dense(model, text, targets):
    """J (N, V, weights), p and the targets, of the tokens that have one."""
    weights = dict(model.named_parameters())
    for sublayer in model.depth.sublayers[:1]:
        sublayer.field.use_reference_kernel = True
    kept = targets.flatten() != -1

    def logits(given):
        return functional_call(model, given, (text,))[0].flatten(0, 1)[kept]

    jacobian = torch.autograd.functional.jacobian(
        lambda *values: logits(dict(zip(weights, values, strict=True))), tuple(weights.values())
    )
    model.depth.sublayers[0].field.use_reference_kernel = False
    J = torch.cat([part.flatten(2) for part in jacobian], -1)
    return J, logits(weights).softmax(-1), targets.flatten()[kept]


def gauss_newton(J, p):
    H = torch.diag_embed(p) - p.unsqueeze(-1) * p.unsqueeze(-2)
    return torch.einsum("nva,nvw,nwb->ab", J, H, J) / len(p)


@pytest.mark.cases(1)
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("name", ["pre", "peri", "post"])
def test_largest_eigenvalues_are_the_dense_matrix(name, masked):
    model, text, targets = setting(name, masked)
    found = curvature(model, text, targets, tolerance=1e-6)
    J, p, wanted = dense(model, text, targets)
    G = gauss_newton(J, p)
    parts = [torch.arange(len(p)) % 8 == i for i in range(min(8, len(p)))]
    onehot = torch.nn.functional.one_hot(wanted, p.shape[-1])
    squares = [
        torch.einsum("nv,nva->a", (p - onehot)[part], J[part]).div(part.sum()).square()
        for part in parts
    ]
    scale = (torch.stack(squares).mean(0).sqrt() + ADAM_EPS).rsqrt()
    for matrix, seen, allowed in (
        (G, found.plain, 2),
        (scale.unsqueeze(-1) * G * scale, found.adam, 38),
    ):
        exact = torch.linalg.eigvalsh(matrix)
        assert seen.largest == pytest.approx(float(exact[-1]), rel=1e-5)
        assert seen.learning_rate == pytest.approx(allowed / float(exact[-1]), rel=1e-5)


@pytest.mark.cases(1)
@pytest.mark.parametrize("name", ["pre", "peri"])
def test_the_tangent_kernel_is_that_of_centred_target_logits(name):
    model, text, targets = setting(name)
    J, p, wanted = dense(model, text, targets)
    rows = J[torch.arange(len(p)), wanted] - J.mean(1)
    kernel = rows @ rows.mT
    found = curvature(model, text, targets)
    shares = torch.linalg.eigvalsh(kernel).clamp(min=0)
    shares = shares / shares.sum()
    assert found.outputs == len(p)
    assert found.kernel_rank == pytest.approx(
        math.exp(float(torch.special.entr(shares).sum())), rel=1e-6
    )


def test_effective_rank_counts_equal_eigenvalues():
    assert effective_rank(torch.diag(torch.tensor([3.0, 3.0, 3.0, 0.0]))) == pytest.approx(3)
    assert effective_rank(torch.ones(5, 5)) == pytest.approx(1)


@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9])
def test_the_edge_is_where_averaged_momentum_on_a_parabola_stops_converging(momentum):
    rate = 0.3

    def end(curvature):
        w, m = 1.0, 0.0
        for _ in range(4000):
            m = momentum * m + (1 - momentum) * curvature * w
            w -= rate * m
        return abs(w)

    assert end(0.99 * edge(rate, momentum)) < 1e-3
    assert end(1.01 * edge(rate, momentum)) > 1e3
    assert edge(momentum=0.9) == pytest.approx(38)
    assert edge() == 2


def test_it_is_an_instrument_that_works_at_the_turn_and_refuses_weights_on_demand():
    model, text, targets = setting("pre")
    assert walk(model, text, targets, [GaussNewton()])[0].plain.largest > 0
    assert not any(parameter.requires_grad for parameter in model.parameters())
    from ctrans.model.gpt import GPT
    from tests.helpers import small_config

    drawn = GPT(small_config("pre"), on_demand=True).double().requires_grad_(False)
    with pytest.raises(ConfigError, match="needs all weights at once"):
        walk(drawn, tokens(), tokens(seed=1), [GaussNewton()])

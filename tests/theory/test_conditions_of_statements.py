"""Counterexamples beyond the conditions of statements, which their words must name."""

import math

import pytest
import torch
from torch.autograd.functional import jacobian

from ctrans.base.draw import Draw
from ctrans.measure.initialisation.over_seeds import Setting
from ctrans.theory.all_statements import all_statements
from ctrans.theory.random_models import random_model
from ctrans.theory.section_11_reach import adam_factor


def normed(x, centred=False, eps=0.0):
    x = x - x.mean(-1, keepdim=True) if centred else x
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt()


def norm_of_jacobian(function, x):
    return float(
        torch.linalg.matrix_norm(
            jacobian(lambda flat: function(flat.reshape(x.shape)).flatten(), x.flatten()), 2
        )
    )


def a_large_decay():
    weight = torch.ones(1, dtype=torch.float64, requires_grad=True)
    adam = torch.optim.AdamW([weight], lr=1.0, weight_decay=2.5, betas=(0.9, 0.99), eps=0.0)
    for step in range(12):
        weight.grad = torch.full_like(weight, 1e-9 if step else 1.0)
        adam.step()
    return float(weight.detach().abs()), 1 + sum(
        adam_factor(0.9, 0.99, step) for step in range(1, 13)
    )


def a_quadratic_loss():
    offset = torch.zeros(4, dtype=torch.float64, requires_grad=True)
    adam = torch.optim.Adam([offset], lr=1.0, eps=0.0)
    for _ in range(4):
        adam.zero_grad()
        (0.3 + offset).square().sum().backward()
        adam.step()
    return 4.0, 2 * float(offset.detach().square().mean().sqrt())


def a_turn_of_the_state():
    c, quarter = 0.7, torch.tensor([[0.0, -1.0], [1.0, 0.0]], dtype=torch.float64)

    def depth(x):
        for _ in range(20):
            x = normed(x + c * x @ quarter.T)
        return x

    return norm_of_jacobian(depth, normed(Draw(0).normal(1, 2))), (1 + c * c) ** -10


def tokens_that_attend_to_one():
    x = torch.tensor([[-1.0, 0.0]] + 9 * [[1.0, 0.0]], dtype=torch.float64)

    def depth(x):
        for _ in range(100):
            u = normed(x)
            rows = (-900 * u[:, :1] @ u[:, :1].T).softmax(-1)
            x = x + rows @ (u * torch.tensor([0.0, 0.01], dtype=x.dtype))
        return x

    return norm_of_jacobian(depth, x), math.exp(math.sqrt(2))


def a_norm_around_the_state():
    x, dt = 1e-4 * Draw(0).normal(1, 4), 1e-3

    def depth(x):
        for _ in range(2):
            x = normed(x + dt * x.tanh())
        return x

    return float((depth(x) - depth(-x)).abs().sum()), float(2 * x.abs().sum()) + 2 * dt * 4 * 2


def a_target_between_two():
    rows = torch.tensor([0.0, 1.0, -1.0], dtype=torch.float64)
    losses = [float((rows * x).logsumexp(0)) for x in (0.0, 100.0, -100.0)]
    return min(losses[1:]), losses[0]


def small_weights_and_eps():
    draw, found = Draw(0), 0.0
    for _ in range(20):
        x = draw.normal(8, 32)
        value, out = 1e-3 * draw.normal(2, 32, 32)
        found += (
            float(
                (x + normed((normed(x, True) @ value.T @ out.T).mean(0), True, 1e-5))
                .square()
                .mean()
            )
            / 20
        )
    return 2.0, 1.5 * found


def width_two():
    made = random_model(Draw(0), "post", depth=1, width=2, norm="layernorm", spread=0, eps=0.0)
    x = Draw(1).normal(1, 3, 2)
    return 1.0, 1e9 * norm_of_jacobian(made.depth, x)


def twice_the_step():
    made = random_model(Draw(0), "pre", depth=1, spread=0, dt=1.5)
    sublayer, x, pull = made.depth.sublayers[-1], Draw(1).normal(1, 1, 8), Draw(2).normal(1, 1, 8)
    sublayer.field.output_projection.requires_grad_(True)
    with torch.enable_grad():
        weight = sublayer.field.output_projection.weight
        (gradient,) = torch.autograd.grad((sublayer.step(x, made.depth.dt) * pull).sum(), weight)
    features = sublayer.field.pre_projection(sublayer.given(x)).detach()
    return float(gradient.norm()), 1.4 * float(features.norm() * pull.norm())


BEYOND = [
    ("reach-of-training", "for eta_t times the weight decay up to 2", a_large_decay),
    ("common-step", "the loss is linear in X_D", a_quadratic_loss),
    ("theorem-5.5", "constant vectors", a_turn_of_the_state),
    ("theorem-6.1", "for one token", tokens_that_attend_to_one),
    ("theorem-6", "behind output norms", a_norm_around_the_state),
    ("eq-127", "behind output norms", a_norm_around_the_state),
    ("theorem-2-optimum", "where w_y is no weighted mean of the other rows", a_target_between_two),
    ("kim-variance", "eps = 0", small_weights_and_eps),
    ("kim-3.1-massive", "0 under LayerNorm of width 2", width_two),
    ("kim-3.1", "dt = 1", twice_the_step),
]


@pytest.mark.parametrize(("name", "condition", "beyond"), BEYOND, ids=[name for name, *_ in BEYOND])
def test_a_statement_names_the_condition_beyond_which_it_fails(name, condition, beyond):
    found, bound = beyond()
    assert found > bound
    assert condition in all_statements()[name].says


def test_the_mean_gradient_over_inputs_grows_with_the_layer_under_post():
    """What Xiong's figure 3 (a, b) measures, which is not the mean square of
    `xiong-gradients-by-layer`.
    """
    setting, ratios = Setting(width=32, tokens=1), []
    for seed in range(8):
        model, draw = setting.model("post", 6, seed), Draw(seed)
        x, head = draw.normal(256, 1, 32), draw.normal(64, 32) / math.sqrt(32)
        targets = (64 * draw.unit(256) ** 4).long()
        loss = torch.nn.functional.cross_entropy(model.depth(x)[:, 0] @ head.T, targets)
        weights = [
            part.field.output_projection.weight for part in list(model.depth.sublayers)[1::2]
        ]
        first, *_, last = (float(each.norm()) for each in torch.autograd.grad(loss, weights))
        ratios.append(first / last)
    assert max(ratios) < 1
    assert "figure 3" not in all_statements()["xiong-gradients-by-layer"].source

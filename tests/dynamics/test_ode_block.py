"""ODEBlock: the discrete block at one Euler step, the ODE beyond it, differentiable by every kind
of gradient, in any model.
"""

import copy

import pytest
import torch
from torch import nn

from ctrans.dynamics.fields import Attention, FeedForward, mixes_tokens
from ctrans.dynamics.ode_block import ODEBlock, in_context
from solvers import GRADIENTS, ConfigError
from tests.helpers import NAMES, learned

WIDTH = 8


class Masked(nn.Module):
    """Attention by hand, told by keyword which tokens may be read, counting its evaluations."""

    def __init__(self):
        super().__init__()
        self.value = nn.Linear(WIDTH, WIDTH)
        self.evaluations = 0

    def forward(self, x, *, mask):
        self.evaluations += 1
        scores = (x @ x.transpose(-1, -2)).masked_fill(~mask.unsqueeze(-2), -torch.inf)
        return scores.softmax(-1) @ self.value(x)


def block(placement="pre", attention=None, dtype=torch.float64, **options):
    torch.manual_seed(0)
    attention = attention() if attention else Attention(WIDTH, 2)
    return learned(
        ODEBlock(attention, FeedForward(WIDTH, 16), placement, width=WIDTH, **options)
    ).to(dtype)


def state(dtype=torch.float64):
    return torch.randn(
        2, 5, WIDTH, generator=torch.Generator().manual_seed(3), dtype=torch.float64
    ).to(dtype)


def plain_step(placement, part, x, dt):
    """The placement's equation, written out for each name."""
    f, n = part.field, part
    return {
        "none": lambda: x + dt * f(x),
        "pre": lambda: x + dt * f(n.input_norm(x)),
        "peri": lambda: x + dt * n.output_norm(f(n.input_norm(x))),
        "output": lambda: x + dt * n.output_norm(f(x)),
        "post": lambda: n.state_norm(x + dt * f(x)),
        "pre_post": lambda: n.state_norm(x + dt * f(n.input_norm(x))),
        "deepnorm": lambda: n.state_norm(x + dt * f(x)),
    }[placement]()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("placement", NAMES)
def test_one_euler_step_has_the_bits_of_the_discrete_block(placement, dtype):
    made, x = block(placement, dt=0.3, dtype=dtype), state(dtype)
    expected = x
    for part in made.depth.sublayers:
        expected = plain_step(placement, part, expected, 0.3)
    assert torch.equal(made(x), expected)


@pytest.mark.cases(1)
@pytest.mark.parametrize("placement", NAMES)
def test_many_steps_approach_what_an_adaptive_method_finds(placement):
    x = state()
    exact = block(placement, dt=0.5, method="tsit5", rtol=1e-10, atol=1e-10)(x)
    errors = [
        float((block(placement, dt=0.5, method="rk4", steps=steps)(x) - exact).detach().norm())
        for steps in (4, 8)
    ]
    assert errors[1] < 1e-4 * float(exact.detach().norm())
    assert errors[0] / errors[1] > 2**3


@pytest.mark.cases(1)
@pytest.mark.parametrize("gradient", sorted(GRADIENTS))
def test_kinds_of_gradient_agree(gradient):
    found = []
    for kind in ("backprop", gradient):
        made, x = (
            block("peri", method="rk4", steps=8, dt=0.1, gradient=kind),
            state().requires_grad_(),
        )
        made(x).square().sum().backward()
        found.append([x.grad, *(p.grad for p in made.parameters())])
    for expected, got in zip(*found, strict=True):
        assert torch.allclose(got, expected, rtol=1e-5, atol=1e-6)


def test_context_reaches_every_evaluation_of_attention_and_hides_what_it_masks():
    made, x = block(attention=Masked, method="rk4", steps=2), state()
    mask = torch.ones(2, 5, dtype=torch.bool)
    mask[:, 3:] = False
    y = made(x, mask=mask)
    assert made.depth.sublayers[0].field.evaluations == 8
    changed = x.clone()
    changed[:, 3:] += 1
    assert torch.equal(made(changed, mask=mask)[:, :3], y[:, :3])
    assert not torch.allclose(made(changed, mask=~mask)[:, :3], y[:, :3])


@pytest.mark.cases(3)
@pytest.mark.parametrize("gradient", sorted(GRADIENTS))
def test_gradient_uses_the_context_of_its_own_forward_pass(gradient):
    masks = torch.tensor([[[True] * 5] * 2, [[True, True, False, False, False]] * 2])
    together, apart = (
        block(attention=Masked, gradient=gradient),
        block(attention=Masked, gradient=gradient),
    )
    sum(together(state(), mask=mask).square().sum() for mask in masks).backward()
    for mask in masks:
        apart(state(), mask=mask).square().sum().backward()
    for p, q in zip(together.parameters(), apart.parameters(), strict=True):
        assert torch.allclose(p.grad, q.grad, rtol=1e-9, atol=1e-12)


def test_trains_inside_another_model_and_comes_back_from_its_state_dict():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Embedding(7, WIDTH),
        block("peri", method="midpoint", dtype=torch.float32),
        nn.Linear(WIDTH, 7),
    )
    tokens = torch.randint(0, 7, (4, 6))
    optimiser = torch.optim.Adam(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(30):
        loss = nn.functional.cross_entropy(
            model(tokens)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()
        )
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.5 * losses[0]
    other = copy.deepcopy(model)
    learned(other, seed=5)
    other.load_state_dict(model.state_dict())
    assert torch.equal(other(tokens), model(tokens))


def test_names_in_the_state_dict_are_as_documented():
    names = {name.rsplit(".", 1)[0] for name in block("peri").state_dict()}
    first, second = "depth.sublayers.0", "depth.sublayers.1"
    norms = {f"{part}.{norm}" for part in (first, second) for norm in ("input_norm", "output_norm")}
    assert names == {
        *norms,
        f"{first}.field.qkv",
        f"{first}.field.out",
        f"{second}.field.up",
        f"{second}.field.down",
    }


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"placement": "sandwich"}, "placement 'sandwich'"),
        ({"norm": "batchnorm"}, "norm 'batchnorm'"),
        ({"method": "rk5"}, "rk5"),
        ({"gradient": "magic"}, "gradient 'magic'"),
        ({"steps": 0}, "steps = 0"),
        ({"dt": -1.0}, "dt = -1.0"),
        ({"method": "rk4", "rtol": 1e-3}, "takes no rtol"),
        ({"placement": "post", "gradient": "adjoint"}, "use gradient='checkpoint'"),
    ],
)
def test_requests_without_sense_are_refused_when_the_block_is_made(options, words):
    with pytest.raises(ConfigError, match=words):
        ODEBlock(Attention(WIDTH, 2), FeedForward(WIDTH, 16), **options)


def test_width_must_be_known_where_there_are_norms():
    with pytest.raises(ConfigError, match="give width"):
        ODEBlock(Masked(), FeedForward(WIDTH, 16))
    assert len(list(ODEBlock(Masked(), FeedForward(WIDTH, 16), "none").parameters())) == 6


class PerToken(nn.Module):
    """An attention that looks at no other token, and says so."""

    mixes_tokens = False

    def forward(self, x, mask=None):
        return x.tanh()


def test_a_context_around_a_map_hides_nothing_of_what_the_map_says_of_its_tokens():
    for attention, mixes in ((PerToken(), False), (Attention(8, 2), True)):
        block = ODEBlock(attention, FeedForward(8, 8), width=8)
        around = in_context(block.depth, {"mask": None}).sublayers[0]
        assert mixes_tokens(around.field, around.kind) is mixes
        assert around.placement is block.depth.sublayers[0].placement


def test_a_state_of_another_width_is_refused_with_the_width_that_is_wanted():
    block = ODEBlock(Attention(16, 2), FeedForward(16, 32))
    with pytest.raises(
        ConfigError,
        match=(
            r"the state is \(2, 5, 8\), but the block's width is 16: give \(\*batch, tokens, 16\)"
        ),
    ):
        block(torch.zeros(2, 5, 8))

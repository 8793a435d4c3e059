"""The walk and its instruments, by what breaks them."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ctrans.control.costate import DiscreteCostate
from ctrans.dynamics.fields import ATTENTIONS, FFNS, Matrix
from ctrans.dynamics.scheme import trajectory
from ctrans.examine.screening.screen import screen
from ctrans.measure.attention.by_depth import AttentionByDepth
from ctrans.measure.backward.lyapunov import LyapunovExponents
from ctrans.measure.backward.parameter_gradients import ParameterGradients
from ctrans.measure.forward.carried import CarriedStates
from ctrans.measure.walk import cross_entropy, observe, states_of, walk, walk_depth
from ctrans.model.config import GPTConfig
from ctrans.model.gpt import GPT
from solvers import METHODS, ConfigError
from tests.helpers import small_model, tokens


def test_costates_of_the_walk_are_autograds_gradients():
    model = small_model("post")
    x0 = model.embed(tokens()).requires_grad_()
    states = [x0]
    for sublayer in model.depth.sublayers:
        states.append(sublayer.step(states[-1], model.config.dt))
    logits = model.head(states[-1])
    loss = F.cross_entropy(logits.flatten(0, -2), tokens(seed=1).flatten())
    expected = torch.autograd.grad(loss, states)
    (found,) = walk(model, tokens(), tokens(seed=1), [DiscreteCostate()])
    assert found.loss == pytest.approx(float(loss.detach()), rel=1e-14)
    for p, q in zip(found.costates, expected, strict=True):
        assert torch.allclose(p, q, rtol=1e-12, atol=1e-15)


def test_states_of_a_depth_are_its_steps_and_hold_no_graph():
    model = small_model("peri").requires_grad_(True)
    x0 = model.embed(tokens())
    found = states_of(model.depth, x0)
    assert torch.equal(found[-1], model.depth(x0))
    for x, y, sublayer in zip(found, found[1:], model.depth.sublayers, strict=False):
        assert torch.equal(y, sublayer.step(x, model.config.dt))
    assert len(found) == len(model.depth.sublayers) + 1
    assert not any(x.requires_grad for x in found)


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    "make", [AttentionByDepth, lambda: LyapunovExponents(count=2)], ids=["attention", "lyapunov"]
)
def test_an_instrument_that_walks_again_finds_the_same(make):
    model, instrument = small_model("peri"), make()
    first, second = (walk(model, tokens(), instruments=[instrument])[0] for _ in range(2))
    assert first == second


def test_carried_states_begin_anew():
    model = small_model("pre")
    x = model.embed(tokens())
    carried = CarriedStates([(1.0, x), (3.0, x)])
    first, second = (walk_depth(model.depth, x, [carried])[0] for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert torch.allclose(first[0], model.depth(x))


def test_what_looks_back_asks_for_targets():
    with pytest.raises(ConfigError, match="ParameterGradients ask for the way back"):
        walk(small_model("pre"), tokens(), instruments=[ParameterGradients()])


def test_euler_as_an_object_is_the_discrete_model_too():
    model = small_model("post")
    x = model.embed(tokens())
    assert torch.equal(trajectory(model.depth, x, method=METHODS["euler"]).x1, model.depth(x))


class Twice(nn.Module):
    """W_2 (a x + b x): two matrices of one role."""

    def __init__(self, settings):
        super().__init__()
        self.a, self.b, self.down = (
            nn.Linear(settings.width, settings.width, bias=False) for _ in range(3)
        )

    def forward(self, x):
        return self.down(self.a(x) + self.b(x))

    def matrices(self):
        yield Matrix(self.a.weight, "up")
        yield Matrix(self.b.weight, "up")
        yield Matrix(self.down.weight, "down")


class Fused(nn.Module):
    """An attention that only has a fused kernel."""

    def __init__(self, settings):
        super().__init__()
        self.out = nn.Linear(settings.width, settings.width, bias=False)

    def forward(self, x):
        heads = x.unflatten(-1, (2, -1)).transpose(-3, -2)
        mixed = F.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
        return self.out(mixed.transpose(-3, -2).flatten(-2))

    def matrices(self):
        yield Matrix(self.out.weight, "out")


def own(**changes):
    settings = {
        "vocab_size": 11,
        "context": 16,
        "depth": 2,
        "width": 16,
        "heads": 2,
        "placement": "pre",
        "initialisation": "xavier",
    }
    return GPT(GPTConfig(**settings, embedding_std=1.0, **changes)).double().requires_grad_(False)


def test_matrices_of_one_role_count_together(monkeypatch):
    monkeypatch.setitem(FFNS, "twice", Twice)
    model = own(ffn="twice")
    (found,) = walk(model, tokens(), tokens(seed=1), [ParameterGradients()])
    model.requires_grad_()
    model(tokens(), tokens(seed=1))[1].backward()
    field = model.depth.sublayers[1].field
    expected = float(
        (field.a.weight.grad.square().sum() + field.b.weight.grad.square().sum()).sqrt()
    )
    assert found.sublayers[1].matrices["W_1"] == pytest.approx(expected, rel=1e-10)


@pytest.mark.slow
def test_an_attention_without_a_plain_path_stops_only_what_differentiates_it_twice(monkeypatch):
    monkeypatch.setitem(ATTENTIONS, "fused", Fused)
    screening = screen(own(attention="fused").float(), tokens(), tokens(seed=1), "quick")
    assert screening.steps["forward"].quantities["added by depth"] > 0
    for step in ("backward", "updates"):
        assert "HasReferenceKernel" in screening.missing[step]


def test_an_input_that_is_not_finite_is_a_finding():
    model = small_model("pre")
    model.token_embedding.weight[3] = float("nan")
    assert screen(model, tokens(), tokens(seed=1), "quick").steps["forward"].verdict == "non-finite"


def test_half_precision_is_refused_by_name():
    with pytest.raises(ConfigError, match="'bfloat16' is too coarse"):
        screen(small_model("pre", dtype=torch.bfloat16), tokens(), tokens(seed=1), "quick")


@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("weights", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_a_state_of_another_precision_than_the_weights_is_named(kind, weights):
    model, x = (
        GPT(GPTConfig(vocab_size=11, context=8, depth=1, width=8, heads=2)).to(weights),
        torch.ones(2, 3, 8, dtype=kind),
    )
    for call in (
        lambda: model.head(x),
        lambda: states_of(model.depth, x),
        lambda: cross_entropy(model, x, tokens()[:2, :3]),
    ):
        if kind is weights:
            call()
        else:
            with pytest.raises(
                ConfigError, match=rf"{kind} on cpu and the weights are {weights} on cpu"
            ):
                call()


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float32])
def test_autocast_takes_states_of_either_precision(kind):
    model, x = (
        GPT(GPTConfig(vocab_size=11, context=8, depth=1, width=8, heads=2)),
        torch.ones(2, 3, 8, dtype=kind),
    )
    with torch.autocast("cpu", torch.bfloat16):
        assert states_of(model.depth, x)[-1].isfinite().all()
        assert model.head(x).isfinite().all()


def test_a_state_of_the_precision_of_some_weights_is_taken():
    model = GPT(GPTConfig(vocab_size=11, context=8, depth=1, width=8, heads=2)).bfloat16()
    model.depth.sublayers[0].input_norm.float()
    assert states_of(model.depth, torch.ones(2, 3, 8, dtype=torch.bfloat16))[-1].isfinite().all()


def test_no_states_are_named():
    with pytest.raises(ConfigError, match=r"states = .*give"):
        observe(small_model("pre").depth, [], [])


@pytest.mark.parametrize("shape", [(2, 3), (2, 16)])
def test_states_of_another_width_are_refused_in_our_words(shape):
    depth = small_model("pre", width=8).depth
    with pytest.raises(ConfigError, match=f"x0 has the width {shape[-1]}, and the norms have 8"):
        states_of(depth, torch.ones(shape, dtype=torch.float64))

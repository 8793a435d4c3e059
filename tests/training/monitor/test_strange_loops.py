"""Loops that differ from the usual one: a monitor measures what is there, and no figure stands for
another.
"""

import math

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, vmap

from ctrans.training.monitor import Monitor
from ctrans.training.monitor.scores import largest_score, scores_seen, weight_ahead
from tests import typecheck
from tests.training.monitor.test_bits import Plain
from tests.training.monitor.test_degrades import said, small

__all__ = ["said"]


def tokens(seed=0, rows=2):
    return torch.randint(32, (rows, 9), generator=torch.Generator().manual_seed(seed))


def passed(model, seed=0):
    model(tokens(seed)[:, :-1], tokens(seed)[:, 1:])[1].backward()


def report(model, passes, **step):
    """The figures of one report, after some passes."""
    monitor = Monitor(model, every=1)
    for each in passes:
        each()
    monitor.step(1.0, **step)
    monitor.close()
    return monitor.past.reports[-1][1]


class StopError(Exception):
    pass


def broken_pass(model):
    def stop(*_):
        raise StopError

    handle = model.depth.sublayers[1].register_forward_pre_hook(stop)
    with pytest.raises(StopError):
        passed(model, seed=1)
    handle.remove()


OTHERS = {
    "a pass that an error ended": broken_pass,
    "a pass whose loss had no backward": lambda model: model(tokens(1)[:, :-1], tokens(1)[:, 1:]),
}


@pytest.mark.parametrize("other", OTHERS.values(), ids=OTHERS)
def test_a_pass_without_a_backward_gives_no_figure(other):
    model, _ = small()
    alone = report(model, [lambda: passed(model)])
    model.zero_grad()
    both = report(model, [lambda: other(model), lambda: passed(model)])
    for name in ("rms", "velocity", "logit", "costate"):
        assert both[name] == pytest.approx(alone[name], nan_ok=True)
    assert not math.isnan(alone["costate"][0])


def test_gradients_that_an_optimiser_took_in_the_backward_are_unknown_and_not_zero():
    model, _ = small()
    monitor = Monitor(model, every=1)
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    passed(model)
    monitor.step(1.0)
    figures = monitor.past.reports[-1][1]
    assert not {"gradient", "gradient_outside", "gradient_norm"} & set(figures)
    assert not math.isnan(figures["costate"][0])


def test_weights_that_the_model_has_no_more_have_no_gradient_and_are_no_dead_layer():
    torch.manual_seed(0)
    model = Plain()
    monitor = Monitor(model, every=1, example=torch.zeros(1, 4, dtype=torch.int64))
    model.body.layers = nn.ModuleList([nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)])
    for _ in range(3):
        passed(model)
        monitor.step(1.0)
    assert "gradient" not in monitor.past.reports[-1][1]
    assert monitor.alarms == []


def test_sparse_gradients_have_the_norm_of_dense_ones():
    def norm(sparse):
        torch.manual_seed(0)
        model = Plain()
        model.embedding.sparse = sparse
        monitor = Monitor(
            model, every=1, react=["skip"], example=torch.zeros(1, 4, dtype=torch.int64)
        )
        passed(model.eval())
        monitor.step(1.0, torch.optim.SparseAdam(model.embedding.parameters()))
        return monitor.past.reports[-1][1]["gradient_norm"]

    assert norm(True) == pytest.approx(norm(False))


def test_several_optimisers_cost_their_figures_and_no_report(said):
    typecheck.allow(False)
    model, optimiser = small()
    figures = report(model, [lambda: passed(model)], optimizer=[optimiser, optimiser])
    assert "rms" in figures
    assert "gradient" in figures
    assert len(said) == 1
    assert "a list has no param_groups" in said[0]


def test_a_pass_inside_vmap_costs_its_figures_and_no_report():
    model = Plain().train()
    monitor = Monitor(model, every=1, example=torch.zeros(1, 4, dtype=torch.int64))

    def loss(weights, row):
        return functional_call(model, weights, (row[None, :-1], row[None, 1:]))[1]

    vmap(grad(loss), in_dims=(None, 0), randomness="same")(
        {name: p.detach() for name, p in model.named_parameters()}, tokens()
    )
    model.head.bias.grad = torch.ones(32)
    monitor.step(1.0)
    assert monitor.past.reports[-1][1]["gradient_outside"] == pytest.approx(math.sqrt(32))


@pytest.mark.filterwarnings("ignore")  # torch warns of TorchScript
def test_a_model_can_be_traced_on_a_step_that_reports():
    model, _ = small()
    monitor = Monitor(model, every=1)
    # no check of names: the tests' type checker, where it is on, gives tensors other ones
    traced = torch.jit.trace(model, (tokens()[:, :-1], tokens()[:, 1:]), check_trace=False)
    monitor.close()
    assert torch.equal(
        traced(tokens(1)[:, :-1], tokens(1)[:, 1:])[1],
        model(tokens(1)[:, :-1], tokens(1)[:, 1:])[1],
    )


@pytest.mark.parametrize("kind", ["bool", "float"])
def test_scores_of_padding_are_none_of_torchs_own_attention(kind):
    torch.manual_seed(0)
    attention = nn.MultiheadAttention(16, 2, batch_first=True)
    model = Plain()
    model.body.layers[0].self_attn = attention.train()
    x, padded = torch.randn(1, 6, 16), torch.tensor([[False] * 4 + [True] * 2])
    given = padded if kind == "bool" else torch.zeros(1, 6).masked_fill(padded, -math.inf)
    layer = model.train().body.layers[0]
    seen = []
    with scores_seen(seen.append, seen.append):
        layer(x, src_key_padding_mask=given)
    found, x = largest_score(seen[0].entries), layer.norm1(x)
    weight, bias = attention.in_proj_weight, attention.in_proj_bias
    q, k, _ = (
        part.unflatten(-1, (2, 8)).transpose(1, 2)[0] for part in (x @ weight.T + bias).chunk(3, -1)
    )
    scores = (q @ k.mT / math.sqrt(8))[..., :4]
    assert torch.allclose(found, scores.abs().amax((-2, -1)))


def test_attention_to_another_sequence_reads_no_later_token():
    torch.manual_seed(0)
    attention = nn.MultiheadAttention(16, 2, batch_first=True)
    x, memory = torch.randn(1, 6, 16), torch.randn(1, 6, 16)
    seen = []
    with scores_seen(seen.append, pytest.fail):
        attention(x, x, x)
        attention(x, memory, memory)
    own, other = (weight_ahead(*scores) for scores in seen)
    assert (own > 0.1).all()
    assert other.isnan().all()


def test_an_error_without_a_text_ends_no_pass():
    class MuteError(Exception):
        def __str__(self):
            raise RuntimeError

    def fails(*_):
        raise MuteError

    model, _ = small()
    monitor = Monitor(model, every=5)
    monitor.gauges.passes._entered = fails
    monitor.gauges.arm()
    passed(model)
    monitor.step(1.0)
    assert any("its text cannot be made" in words for words in monitor.gauges.missing.values())

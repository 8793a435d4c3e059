"""Weights on demand: the same numbers as weights that stay, one piece at a time."""

import copy
import gc
import weakref

import pytest
import torch
from torch import nn

from ctrans.control.costate import costate
from ctrans.dynamics.placement import PLACEMENTS
from ctrans.dynamics.weights.on_demand import Piece, Shelf, put_on_demand, skeletons, weights_of
from ctrans.interop import to_nanogpt
from ctrans.model.checkpoint import save
from ctrans.model.config import GPTConfig
from ctrans.model.gpt import GPT
from ctrans.model.initialisation import initialise
from solvers import ConfigError, SolveError

SMALL = {"vocab_size": 11, "context": 8, "depth": 3, "width": 16, "heads": 2}
each_placement = pytest.mark.parametrize("placement", PLACEMENTS)


def pair(placement="peri", seed=0, **settings):
    config = GPTConfig(**SMALL, placement=placement, **settings)
    return GPT(config, seed=seed), GPT(config, seed=seed, on_demand=True)


def tokens(seed=0, shape=(2, 8)):
    return torch.randint(0, 11, shape, generator=torch.Generator().manual_seed(seed))


@each_placement
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_logits_are_those_of_weights_that_stay_bit_for_bit(placement, dtype):
    whole, drawn = (
        model.to(dtype) for model in pair(placement, qk_norm=True, initialisation="xavier")
    )
    assert drawn.depth.streamed
    assert not whole.depth.streamed
    assert torch.equal(drawn(tokens())[0], whole(tokens())[0])


@pytest.mark.cases(1)
@each_placement
def test_costates_and_continuous_trajectories_are_those_of_weights_that_stay_bit_for_bit(placement):
    whole, drawn = (model.double() for model in pair(placement, dt=0.1, embedding_std=1.0))
    x, y = tokens(), tokens(1)
    expected, found = costate(whole, x, y), costate(drawn, x, y)
    assert all(map(torch.equal, found.costates, expected.costates))
    expected, found = (
        whole.trajectory(x, method="rk4", steps=2),
        drawn.trajectory(x, method="rk4", steps=2),
    )
    assert all(map(torch.equal, found.states, expected.states))


@pytest.mark.parametrize("order", [[5, 0, 3], [0, 1, 2, 3, 4, 5], [2, 2, 1]])
def test_weights_do_not_depend_on_the_order_in_which_they_are_used(order):
    whole, drawn = pair(seed=3)
    for k in order:
        for name, weight in weights_of(drawn.depth.sublayers[k]).items():
            assert torch.equal(weight, weights_of(whole.depth.sublayers[k])[name]), (k, name)


def counted(live):
    """A skeleton of three linear maps, each a piece, whose weights are counted while they live."""

    def make(k):
        weight = torch.full((4, 4), float(k))
        live.add(weight)
        return {"weight": weight}

    with skeletons():
        maps = nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range(3))
    shelf = Shelf()
    for k, part in enumerate(maps):
        put_on_demand(part, Piece(str(k), lambda k=k: make(k)), shelf)
    return maps


def test_one_piece_is_there_at_a_time_and_stays_while_it_is_used():
    live = weakref.WeakSet()
    maps, x = counted(live), torch.ones(1, 4)
    for k in (0, 1, 1, 2, 0):
        assert torch.equal(maps[k](x), torch.full((1, 4), 4.0 * k))
        assert len(live) == 1
        assert maps[k].weight is maps[k].weight


@pytest.mark.slow
def test_a_graph_keeps_its_own_weights_and_no_others():
    live = weakref.WeakSet()
    maps, x = counted(live), torch.ones(1, 4, requires_grad=True)
    y = maps[1](x).sum()
    maps[2](torch.ones(1, 4))
    maps[0](torch.ones(1, 4))
    assert len(live) == 2
    y.backward()
    assert torch.equal(x.grad, torch.full((1, 4), 4.0))
    del y
    gc.collect()
    assert len(live) == 1


def test_modules_keep_their_class_and_skeletons_hold_no_matrix():
    _, drawn = pair()
    assert isinstance(drawn.depth.sublayers[1].field.up, nn.Linear)
    assert all(parameter.dim() < 2 for parameter in drawn.depth.parameters())
    assert all("norm" in name for name, _ in drawn.depth.named_parameters())


def test_a_copy_in_another_precision_leaves_the_original_as_it_is():
    _, drawn = pair()
    twin = copy.deepcopy(drawn).double()
    assert twin.depth.sublayers[0].field.qkv.weight.dtype == torch.float64
    assert drawn.depth.sublayers[0].field.qkv.weight.dtype == torch.float32
    assert torch.equal(
        twin.depth.sublayers[0].field.qkv.weight, drawn.depth.sublayers[0].field.qkv.weight.double()
    )


@pytest.mark.parametrize(
    ("use", "word"),
    [
        (lambda model, path: save(model, path), "saved"),
        (lambda model, path: to_nanogpt(model), "exported"),
        (
            lambda model, path: initialise(
                model.depth.sublayers, "xavier", torch.Generator(), blocks=2
            ),
            "initialised",
        ),
    ],
)
def test_what_would_lose_weights_on_demand_is_refused(use, word, tmp_path):
    _, drawn = pair("pre")
    with pytest.raises(ConfigError, match=f"{word}.*without on_demand"):
        use(drawn, tmp_path)


def test_weights_that_are_functions_of_depth_are_not_drawn_on_demand():
    with pytest.raises(ConfigError, match=r"linear.*only free weights"):
        pair(depth_weights="linear")


def test_a_model_larger_than_memory_is_refused_unless_its_weights_come_on_demand():
    config = GPTConfig(depth=10**4, width=2**14, heads=32)
    with pytest.raises(ConfigError, match="on_demand=True"):
        GPT(config)
    with pytest.raises(ConfigError, match="the weights need"):
        GPT(GPTConfig(depth=1, width=2**20), on_demand=True)


def test_a_state_that_overflows_is_an_error_as_with_weights_that_stay():
    for model in pair("none", embedding_std=1e30):
        with pytest.raises(SolveError):
            costate(model, tokens(), tokens(1))

"""Compiled objectives against the same ones without a compiler."""

import dataclasses

import pytest
import torch

from ctrans import GPT, GPTConfig
from ctrans.training.compiled import compile_objective
from ctrans.training.objective import Objective
from ctrans.training.settings import TrainConfig
from tests import typecheck
from tests.helpers import tokens


@pytest.fixture
def traced(monkeypatch):
    """Parts are traced, and then run as they are: what a compiler sees, without its minutes. Its
    value counts the graphs.
    """
    typecheck.allow(False)  # jaxtyping's checks cannot be compiled
    torch._dynamo.reset()
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph

    plain = torch.nn.Module.compile
    monkeypatch.setattr(torch.nn.Module, "compile", lambda part: plain(part, backend=backend))
    yield graphs
    torch._dynamo.reset()


def step(config, architecture, *, compiled):
    """The loss, and its gradient by parameter."""
    model = GPT(architecture, seed=0)
    objective = Objective(model, config)
    if compiled:
        compile_objective(objective)
    text = tokens(2, 9) % architecture.vocab_size
    loss = objective(text[:, :-1], text[:, 1:]).total
    loss.backward()
    return loss.detach(), [p.grad for p in model.parameters() if p.grad is not None]


BLOCKS = GPTConfig(vocab_size=32, context=8, depth=3, width=8, heads=2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "graphs"),
    [
        ({}, 1),
        ({"gradient": "checkpoint"}, 2),
        ({"method": "rk4", "steps": 2}, 2),
        ({"method": "rk4", "steps": 2, "gradient": "checkpoint"}, 2),
        ({"method": "tsit5"}, 3),  # the first one also without a graph, for the first step size
    ],
)
def test_blocks_share_the_graphs_of_their_sublayers(traced, settings, graphs):
    config = TrainConfig(**settings)
    plain = step(config, BLOCKS, compiled=False)
    compiled = step(config, BLOCKS, compiled=True)
    torch.testing.assert_close(plain, compiled)
    assert len(traced) == graphs


@pytest.mark.slow
def test_more_unlike_sublayers_than_torchs_limit_are_all_compiled(traced):
    architecture = dataclasses.replace(BLOCKS, depth=6, depth_weights="chebyshev", knots=3)
    config = TrainConfig(method="heun")
    plain = step(config, architecture, compiled=False)
    torch.testing.assert_close(plain, step(config, architecture, compiled=True))
    assert len(traced) == 12


@pytest.mark.slow
@pytest.mark.parametrize("blocks", [1, 2, 3])
def test_compiled_checkpoint_has_the_gradients_of_backprop(blocks):
    typecheck.allow(False)
    torch._dynamo.reset()
    architecture = dataclasses.replace(BLOCKS, depth=blocks)
    expected = step(TrainConfig(), architecture, compiled=False)
    found = step(TrainConfig(gradient="checkpoint"), architecture, compiled=True)
    torch.testing.assert_close(expected, found)


@pytest.mark.slow
@pytest.mark.parametrize("blocks", [1, 2, 3])
def test_a_compiler_leaves_the_recomputation_of_checkpoint_as_it_is(blocks):
    """Guards on its bookkeeping fail in the frame that they are made in, from two blocks on."""
    typecheck.allow(False)
    torch._dynamo.reset()
    architecture = dataclasses.replace(BLOCKS, depth=blocks)
    objective = Objective(GPT(architecture, seed=0), TrainConfig(gradient="checkpoint"))
    text = tokens(2, 9) % architecture.vocab_size
    loss = torch.compile(objective, backend="eager")(text[:, :-1], text[:, 1:]).total
    loss.backward()
    found = [p.grad for p in objective.parameters() if p.grad is not None]
    expected = step(TrainConfig(), architecture, compiled=False)
    torch.testing.assert_close(expected, (loss.detach(), found))


@pytest.mark.slow
def test_an_evaluation_is_one_graph_and_gives_the_same(traced):
    """Checks within it would end the graph at each of many sublayers."""
    text = tokens(2, 9) % BLOCKS.vocab_size
    results = []
    for compiled in (False, True):
        objective = Objective(GPT(BLOCKS, seed=0), TrainConfig()).eval()
        if compiled:
            compile_objective(objective)
        results.append(objective(text[:, :-1], text[:, 1:]))
    assert len(traced) == 1
    plain, of_graph = results
    for name in ("total", "first_square", "last_square", "largest", "accuracy"):
        torch.testing.assert_close(getattr(of_graph, name), getattr(plain, name))

"""Every instrument on weights that are made on demand: at most one block's are there at a time, and
the figures are the same.
"""

import copy
import dataclasses
from functools import partial

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from ctrans.control.costate import costate
from ctrans.dynamics.weights.on_demand import KnownPieces, Piece, Shelf, put_on_demand
from ctrans.measure.backward.lyapunov import lyapunov
from ctrans.measure.backward.sensitivity import StepGraphs, backward_sensitivity
from ctrans.measure.backward.weight_slope import sensitivity_slope
from ctrans.measure.forward.carried import GrowthWithWeights
from ctrans.measure.transport.perturbations import adversarial_direction
from ctrans.measure.walk import states_of, walk, walk_depth
from solvers import ConfigError
from tests.helpers import NAMES, gradient_norms, small_model, tokens, transport

DEPTH = 2


class Makers:
    """Makes segments' weights, and notes which are alive, in whatever holds them, whenever some are
    made.
    """

    def __init__(self):
        self.made, self.most, self._alive = [], 0, []

    def make(self, segment, weights):
        copies = {name: weight.clone() for name, weight in weights.items()}
        self._alive = [(k, ref) for k, ref in self._alive if not ref.expired()]
        self._alive += [
            (segment, StorageWeakRef(weight.untyped_storage())) for weight in copies.values()
        ]
        self.made.append(segment)
        self.most = max(self.most, len({k for k, _ in self._alive}))
        return copies


def on_demand(model):
    """A copy of the model whose sublayers' weights are made on demand, and who makes them."""
    twin, makers, shelf = copy.deepcopy(model), Makers(), Shelf(torch.float64)
    for k, sublayer in enumerate(twin.depth.sublayers):
        weights = {
            name: weight.detach().clone() for name, weight in sublayer.field.named_parameters()
        }
        sublayer.field.to("meta")
        put_on_demand(
            sublayer.field, Piece(f"segment {k}", partial(makers.make, k, weights)), shelf
        )
    return twin, makers


@dataclasses.dataclass(frozen=True)
class Measured:
    """What is computed, how many sublayers' weights it may hold, and how often it goes through the
    depth.
    """

    run: object
    held: int
    passes: int


def _embedded(function):
    return lambda model: function(model.depth, model.embed(tokens()))


INSTRUMENTS = {
    "trajectory": Measured(_embedded(lambda depth, x0: states_of(depth, x0)), 1, 1),
    "costate": Measured(lambda model: vars(costate(model, tokens(), tokens(seed=1))), 1, 2),
    "gradients": Measured(lambda model: gradient_norms(model, tokens(), tokens(seed=1)), 1, 2),
    "sensitivities": Measured(_embedded(partial(backward_sensitivity, starts=0)), 2, 1),
    "lyapunov": Measured(_embedded(partial(lyapunov, count=2)), 1, 1),
    "weight scaling": Measured(
        lambda model: walk(model, tokens(), instruments=[GrowthWithWeights()]), 1, 1
    ),
    "transport": Measured(lambda model: transport(model, tokens(), "noise"), 1, 1),
}


def figures(result):
    """All numbers in what an instrument gives, in order."""
    if dataclasses.is_dataclass(result):
        return figures(vars(result))
    if isinstance(result, dict):
        return [each for value in result.values() for each in figures(value)]
    if isinstance(result, (list, tuple)):
        return [each for value in result for each in figures(value)]
    if isinstance(result, torch.Tensor):
        return result.flatten().tolist()
    return [] if result is None or isinstance(result, str) else [result]


@pytest.mark.cases(6)
@pytest.mark.parametrize("name", INSTRUMENTS)
@pytest.mark.parametrize("placement", NAMES)
def test_one_sublayer_at_a_time(placement, name):
    instrument, model = INSTRUMENTS[name], small_model(placement, depth=DEPTH)
    twin, makers = on_demand(model)
    found = instrument.run(twin)
    assert makers.most <= instrument.held
    # bounds of maps behind no norm need the weights once more
    passes = instrument.passes + ((placement, name) == ("pre", "transport"))
    # a sublayer on which a pass turns round is there already
    assert DEPTH * 2 * passes - len(makers.made) in range(passes)
    assert figures(found) == pytest.approx(figures(instrument.run(model)), rel=1e-14, abs=0)


def test_a_graph_of_the_whole_depth_would_be_seen():
    twin, makers = on_demand(small_model("pre", depth=DEPTH))
    steps = walk_depth(twin.depth, twin.embed(tokens()), [StepGraphs()])[0]
    assert makers.most == len(steps) == DEPTH * 2


def test_a_slope_needs_a_sublayers_weights_once():
    twin, makers = on_demand(small_model("pre", depth=DEPTH))
    x = twin.embed(tokens())
    sensitivity_slope(twin.depth.sublayers[1], x, "W2")
    assert makers.made == [1]


def test_what_needs_all_weights_at_once_is_left_out_and_says_why():
    twin, makers = on_demand(small_model("peri", depth=DEPTH))
    x = twin.embed(tokens())
    found, some = (backward_sensitivity(twin.depth, x, starts=starts) for starts in (None, 2))
    assert {product.note for product in (*found.products, *some.products)} == {
        "left out: it needs all weights at once, and these are made on demand"
    }
    assert found.condition == some.condition == [None] * DEPTH
    assert [i for i, block in enumerate(some.blocks) if block.value is not None] == [0, DEPTH - 1]
    assert [some.blocks[i] for i in (0, DEPTH - 1)] == [found.blocks[i] for i in (0, DEPTH - 1)]
    assert makers.most == 2
    with pytest.raises(ConfigError, match="choose noise"):
        adversarial_direction(twin.depth, x)
    with pytest.raises(ConfigError, match="choose noise"):
        transport(twin, tokens(), "adversarial")


class WithHead(torch.nn.Module):
    """An embedding module, a depth, and a head module, which may share the embedding's weights."""

    def __init__(self, depth, tied):
        super().__init__()
        self.embedding = torch.nn.Embedding(11, 16, dtype=torch.float64)
        self.depth = depth
        self.readout = torch.nn.Linear(16, 11, bias=not tied, dtype=torch.float64)
        if tied:
            self.readout.weight = self.embedding.weight

    def embed(self, tokens):
        return self.embedding(tokens)

    def head(self, x):
        return self.readout(x)


@pytest.mark.cases(1)
@pytest.mark.parametrize("tied", [False, True])
def test_embedding_and_head_on_demand_have_the_gradients_that_they_have_in_memory(tied):
    model = WithHead(small_model("peri").depth, tied).requires_grad_(False)
    twin, makers = on_demand(model)
    shelf, known = Shelf(torch.float64), KnownPieces()
    twin.embedding.to("meta"), twin.readout.to("meta")
    if tied:
        twin.readout.weight = twin.embedding.weight
    for k, name in enumerate(("embedding", "readout")):
        weights = {
            key: weight.detach().clone() for key, weight in getattr(model, name).named_parameters()
        }
        put_on_demand(
            getattr(twin, name),
            Piece(name, partial(makers.make, 100 + k, weights)),
            shelf,
            known_pieces=known,
        )
    found = gradient_norms(twin, tokens(), tokens(seed=1))
    assert figures(found) == pytest.approx(
        figures(gradient_norms(model, tokens(), tokens(seed=1))), rel=1e-14
    )
    assert set(makers.made) == {*range(6), 100, *([] if tied else [101])}

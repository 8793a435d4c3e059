"""Models, token ids and losses that cannot be used: one plain sentence before any work."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import ctrans
from ctrans import ConfigError, Monitor
from ctrans.interop import continuize, from_transformers
from ctrans.interop.open_model import FRAMES, open_model

VOCABULARY = 11
WIDTH = 8


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.ffn = nn.Sequential(nn.Linear(WIDTH, 16), nn.GELU(), nn.Linear(16, WIDTH))

    def forward(self, x):
        z = self.norm(x)
        x = x + self.attention(z, z, z, need_weights=False)[0]
        return x + self.ffn(x)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids):
        x = self.table(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def batch():
    ids = torch.arange(10).reshape(2, 5)
    return ids, ids + 1


ANALYSES = {
    "diagnose": ctrans.diagnose,
    "screen": lambda model, x, y, **named: ctrans.screen(model, x, y, "quick", **named),
    "costate": ctrans.costate,
}
EVERYTHING = {**ANALYSES, "simulate": lambda model, x, y: ctrans.simulate(model, x)}
every_analysis = pytest.mark.parametrize("analysis", ANALYSES)
everything = pytest.mark.parametrize("analysis", EVERYTHING)


@everything
def test_a_class_in_place_of_a_model_is_said(analysis):
    with pytest.raises(ConfigError, match=r"^model is the class Model: give an instance"):
        EVERYTHING[analysis](Model, *batch())


@pytest.mark.parametrize("kind", [nn.Linear, Model])
def test_a_class_is_not_opened(kind):
    words = f"model is the class {kind.__name__}: give an instance"
    for opens in (open_model, Monitor, continuize, from_transformers):
        with pytest.raises(ConfigError, match=words):
            opens(kind)


def test_a_function_is_called_first():
    with pytest.raises(ConfigError, match="model = a function: call it"):
        open_model(lambda: Model())


def with_its_parent():
    model = Model()
    model.blocks[0].parent = model
    return model


def nested(levels):
    module = nn.Linear(WIDTH, WIDTH)
    for _ in range(levels):
        module = nn.Sequential(module)
    return module


def with_a_nested_part():
    model = Model()
    model.part = nested(3000)
    return model


UNUSABLE = {
    "holds itself: blocks.0.parent": with_its_parent,
    "nested more than [0-9]+ deep": with_a_nested_part,
    r"call super\(\).__init__\(\) first": lambda: nn.Linear.__new__(nn.Linear),
}


@pytest.mark.parametrize("words", UNUSABLE)
@everything
def test_a_module_that_torch_cannot_walk_is_said(analysis, words):
    with pytest.raises(ConfigError, match=words):
        EVERYTHING[analysis](UNUSABLE[words](), *batch())


@pytest.mark.parametrize("words", UNUSABLE)
def test_such_a_module_is_neither_opened_nor_watched(words):
    module = UNUSABLE[words]()
    with pytest.raises(ConfigError, match=words):
        open_model(module, torch.float64, example=batch()[0])
    with pytest.raises(ConfigError, match=words):
        Monitor(module)
    with pytest.raises(ConfigError, match=words):
        continuize(module)


def test_nesting_below_the_limit_is_opened(monkeypatch):
    module = Model()
    module.part = nested(3)
    deepest = 5  # the model, its part, two Sequentials and a Linear
    monkeypatch.setattr("sys.getrecursionlimit", lambda: FRAMES * deepest)
    assert open_model(module, example=batch()[0]).depth.blocks == 2
    module.part = nested(4)
    with pytest.raises(ConfigError, match="nested more than 5 deep"):
        open_model(module, example=batch()[0])


def test_a_module_that_is_shared_is_no_cycle():
    module = Model()
    module.same = module.blocks
    assert open_model(module, example=batch()[0]).depth.blocks == 2


@pytest.mark.parametrize("shape", [(0, 5), (2, 0), (0,)])
def test_an_empty_batch_is_said(shape):
    empty = torch.zeros(shape, dtype=torch.int64)
    with pytest.raises(ConfigError, match="at least one entry"):
        ctrans.screen(Model(), empty, empty)
    with pytest.raises(ConfigError, match="is no batch of inputs"):
        open_model(Model(), example=empty)
    with pytest.raises(ConfigError, match="at least one entry"):
        Monitor(Model(), held=(empty, empty), probe_every=10)


class MeanRow(nn.LayerNorm):
    """Returns one vector for all tokens."""

    def forward(self, x):
        return super().forward(x).mean(-2, keepdim=True)


def test_a_norm_that_returns_one_vector_is_read_with_a_row_for_each_token():
    module = Model()
    for block in module.blocks:
        block.norm = MeanRow(WIDTH)
    ids, targets = batch()
    opened = open_model(module, example=ids)
    x = opened.embed(ids)
    for sublayer, length in zip(opened.depth.sublayers, opened.depth.lengths, strict=True):
        assert sublayer.velocity(x).shape == x.shape
        x = sublayer.step(x, length)
    assert torch.allclose(opened.head(x), module(ids), atol=1e-6)
    assert ctrans.screen(module, ids, targets, "quick").steps


@everything
@pytest.mark.parametrize("wrong", [VOCABULARY, 99, -3])
def test_ids_beyond_the_vocabulary_are_said_with_both(analysis, wrong):
    ids, targets = batch()
    ids[1, 3] = wrong
    with pytest.raises(ConfigError, match=rf"ids run from .*{wrong}.*vocabulary of Model is 0 to"):
        EVERYTHING[analysis](Model(), ids, targets)
    opened = open_model(Model(), example=batch()[0], loss="next")
    with pytest.raises(ConfigError, match=rf"tokens run from .*{wrong}.*from 0 to 10"):
        EVERYTHING[analysis](opened, ids, targets)


@every_analysis
def test_targets_beyond_the_vocabulary_are_said(analysis):
    ids, targets = batch()
    targets[1, 3] = 99
    with pytest.raises(ConfigError, match="targets run from 1 to 99, the vocabulary from 0 to 10"):
        ANALYSES[analysis](Model(), ids, targets)
    targets[1, 3] = -100
    assert ANALYSES[analysis](Model(), ids, targets) is not None


def test_another_text_beyond_the_vocabulary_is_said():
    ids, targets = batch()
    with pytest.raises(ConfigError, match="other text run from 90 to 99"):
        ctrans.screen(Model(), ids, targets, other=ids + 90)


def test_a_sequence_longer_than_the_table_of_positions_is_said():
    class WithPositions(Model):
        def __init__(self):
            super().__init__()
            self.positions = nn.Embedding(4, WIDTH)

        def forward(self, ids):
            x = self.table(ids) + self.positions(torch.arange(ids.shape[1]))
            for block in self.blocks:
                x = block(x)
            return self.head(x)

    with pytest.raises(ConfigError, match=r"positions of .* has 4 rows .* from 0 to 4 .*shorter"):
        ctrans.diagnose(WithPositions(), *batch())


def mean_loss(output, targets):
    return F.cross_entropy(output.flatten(0, 1), targets.flatten())


def rows_loss(output, targets):
    return F.cross_entropy(output.flatten(0, 1), targets.flatten(), reduction="none")


def pair_loss(output, targets):
    return mean_loss(output, targets), output


def float_loss(output, targets):
    return mean_loss(output, targets).item()


def none_loss(output, targets):
    return None


def count_loss(output, targets):
    return (output.argmax(-1) == targets).sum()


def detached_loss(output, targets):
    return mean_loss(output, targets).detach()


WRONG_LOSSES = {
    rows_loss: r"rows_loss returned a tensor \(10,\)",
    pair_loss: "pair_loss returned a tuple",
    float_loss: "float_loss returned a float",
    none_loss: "none_loss returned None",
    count_loss: r"count_loss returned a tensor \(\) of int64",
    detached_loss: "detached_loss returned a number without derivatives",
}


@every_analysis
@pytest.mark.parametrize("loss", WRONG_LOSSES)
def test_a_loss_that_is_no_number_is_refused_before_other_work(analysis, loss, monkeypatch):
    def walked(*args, **kwargs):
        raise AssertionError("the loss is checked first")

    for work in ("diagnosis.diagnose", "screening.screen", "costate_of"):
        monkeypatch.setattr(f"ctrans.examine.analysis.{work}", walked)
    with pytest.raises(ConfigError, match=f"^loss=: {WRONG_LOSSES[loss]}"):
        ANALYSES[analysis](Model(), *batch(), loss=loss)


def test_a_loss_of_one_entry_is_a_number():
    def one_entry(output, targets):
        return mean_loss(output, targets).reshape(1, 1)

    found = ctrans.costate(Model(), *batch(), loss=one_entry)
    assert found.loss == ctrans.costate(Model(), *batch(), loss=mean_loss).loss


def test_a_class_of_losses_is_said():
    with pytest.raises(ConfigError, match="loss is the class CrossEntropyLoss: give an instance"):
        open_model(Model(), example=batch()[0], loss=nn.CrossEntropyLoss)


class SkipsItsBlocks(Model):
    def forward(self, ids):
        x = self.table(ids)
        if ids.any():
            for block in self.blocks:
                x = block(x)
        return self.head(x)


def test_inputs_for_which_no_block_runs_have_no_states():
    ids, targets = batch()
    opened = open_model(SkipsItsBlocks(), example=ids)
    with pytest.raises(ConfigError, match="does not see these inputs through the states"):
        opened.embed(torch.zeros_like(ids))
    with pytest.raises(ConfigError, match=r"the targets are of torch\.float32: give a tensor of"):
        opened(ids, targets.float())

"""What a part keeps for code behind it is found, also where it changes nothing to first order."""

import pytest
import torch
from torch import nn

from ctrans.control.model_check import check_model
from ctrans.interop import from_transformers, open_model
from ctrans.interop.past_the_states import WAY, past_the_states
from solvers import ConfigError
from tests.interop.models import FAMILIES, made
from tests.interop.test_factors import TOKENS, VOCABULARY, WIDTH, Block, Model


class Keeping(Block):
    """A block under peri that keeps what its FFN computed."""

    def __init__(self):
        super().__init__()
        self.n3 = nn.LayerNorm(WIDTH)
        self.n4 = nn.LayerNorm(WIDTH)

    def forward(self, x):
        x = x + self.n3(self.attention(self.n1(x)))
        made_by_ffn = self.ffn(self.n2(x))
        self.kept = made_by_ffn.detach()
        self.kept_unseen = torch.func.vmap(torch.clone)(self.kept)  # torch's functions do not show
        return x + self.n4(made_by_ffn)


class Reading(Model):
    """Its head gets `added` to the last state, of what the first block keeps, and of the text."""

    def __init__(self, added):
        super().__init__(Keeping())
        self.added = added
        self.first_kept = None

    def forward(self, ids):
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        if self.first_kept is None:
            self.first_kept = self.blocks[0].kept
        return self.head(self.norm(x + self.added(self, x)))


def text():
    ids = torch.randint(0, VOCABULARY, (1, TOKENS + 1), generator=torch.Generator().manual_seed(0))
    return ids[:, :-1], ids[:, 1:]


def opened(added):
    torch.manual_seed(0)
    module = Reading(added).double().eval()
    tokens, _ = text()
    module(tokens)
    return open_model(module, example=tokens).model


def first_matrix(model, x):
    """The block's own matrix used once more, so that its output vanishes at none of its inputs."""
    return (x @ model.blocks[0].ffn.up.weight.mT).relu().sum(-1, keepdim=True)


def first_matrix_unseen(model, x):
    return torch.func.vmap(lambda row: first_matrix(model, row))(x)


SEEN = {
    "in proportion": lambda model, x: model.blocks[0].kept,
    "squared change": lambda model, x: (model.blocks[0].kept - model.first_kept) ** 2,
    "only if large": lambda model, x: (model.blocks[0].kept.abs() - 5).relu(),
}
WAYS = {
    "only if large": lambda model, x: (model.blocks[0].kept_unseen.abs() - 5).relu(),
    "its matrix": first_matrix_unseen,
}
NO_WAYS = {
    "nothing": lambda model, x: 0.0,
    "times 0": lambda model, x: 0.0 * model.blocks[0].kept_unseen.tanh(),
}


@pytest.mark.parametrize("name", SEEN)
def test_a_way_that_torchs_functions_show_is_inside_of_the_last_part(name):
    model = opened(SEEN[name])
    assert [sublayer.kind for sublayer in model.depth.sublayers] == ["attention", "part"]
    assert past_the_states(model.adapter) == {}


def test_a_matrix_that_is_used_once_more_is_in_a_part_that_is_not_read():
    model = opened(first_matrix)
    assert [sublayer.kind for sublayer in model.depth.sublayers] == ["attention", "ffn", "part"]


def test_a_way_that_is_open_at_once_is_refused():
    with pytest.raises(ConfigError, match="again behind the last state of its residual"):
        opened(lambda model, x: model.blocks[0].kept_unseen)


@pytest.mark.parametrize("name", [*WAYS, *NO_WAYS])
def test_a_way_past_the_states_is_found(name):
    model = opened((WAYS | NO_WAYS)[name])
    before = {name: weight.clone() for name, weight in model.adapter.model.state_dict().items()}

    assert past_the_states(model.adapter).keys() == ({WAY} if name in WAYS else set())
    for name, weight in model.adapter.model.state_dict().items():
        assert torch.equal(weight, before[name]), name


@pytest.mark.cases(1)
def test_a_verdict_is_open_and_no_penalty_is_proven_with_a_way_past_the_states():
    tokens, targets = text()
    whole = check_model(opened(NO_WAYS["nothing"]), tokens, targets)
    part = check_model(opened(WAYS["only if large"]), tokens, targets)

    assert whole.step_verdict.startswith("well-posed")
    assert part.step_verdict == "open"
    assert WAY in part.missing


@pytest.mark.cases(1)
@pytest.mark.parametrize("name", FAMILIES)
def test_families_have_none(name):
    assert past_the_states(from_transformers(made(name)).adapter) == {}

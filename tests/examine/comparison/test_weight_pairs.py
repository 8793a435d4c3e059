"""Which weights of two models belong together, where their names differ."""

import pytest
import torch
import transformers
from torch import nn

import ctrans
from ctrans.examine.compared import answer
from ctrans.examine.comparison.compare import compare
from ctrans.examine.comparison.weight_pairs import pairs_of
from ctrans.examine.comparison.weight_relations import relation_of
from ctrans.interop.transformers_export import to_transformers
from ctrans.model.config import GPTConfig
from ctrans.model.gpt import GPT


def module(**weights):
    made = nn.Module()
    for name, weight in weights.items():
        setattr(made, name, nn.Parameter(weight))
    return made


def drawn(*shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_weights_of_other_names_belong_together_by_what_they_are():
    query, key, value, out, gain = (
        drawn(8, 8, seed=0),
        drawn(8, 8, seed=1),
        drawn(8, 8, seed=2),
        drawn(8, 8, seed=3),
        torch.ones(8),
    )
    first = module(query=query, key=key, value=value, out=out, gain=gain)
    second = module(
        a=out.clone(),
        b=key.t().contiguous(),
        c=2 * value,
        d=query[torch.arange(7, -1, -1)],
        e=gain + 0.1 * drawn(8, seed=4),
    )
    pairs, unmatched = pairs_of(first, second)
    assert not unmatched
    found = {
        (pair.first_name, pair.second_name): relation_of(pair.first, pair.second).kind
        for pair in pairs
    }
    assert found == {
        ("query", "d"): "rows in another order",
        ("key", "b"): "transposed",
        ("value", "c"): "scaled",
        ("out", "a"): "equal",
        ("gain", "e"): "slightly different",
    }


def test_what_may_belong_to_several_has_no_partner_and_the_last_one_has():
    first = module(a=drawn(8, 8, seed=0), b=drawn(8, 8, seed=1), gain=drawn(4, seed=2))
    second = module(c=drawn(8, 8, seed=3), d=drawn(8, 8, seed=4), scale=drawn(4, seed=5))
    pairs, unmatched = pairs_of(first, second)
    assert [(pair.first_name, pair.second_name) for pair in pairs] == [("gain", "scale")]
    assert sorted(unmatched) == ["a", "b", "c", "d"]


def test_weights_of_other_parts_do_not_belong_together():
    same = drawn(8, 8, seed=0)
    first = module(a=same, b=drawn(8, 8, seed=1))
    second = module(c=drawn(8, 8, seed=2), d=same.clone())
    places = [
        {id(weight): part for part, weight in enumerate(each.parameters())}
        for each in (first, second)
    ]
    keys = {pair.first_name: pair.of_first.key for pair in pairs_of(first, second)[0]}
    assert keys == {"a": id(first.a), "b": id(first.b)}
    pairs, _ = pairs_of(first, second, *places)
    assert [(pair.first_name, pair.second_name) for pair in pairs] == [("a", "c"), ("b", "d")]


@pytest.mark.parametrize(
    "options",
    [
        {"norm": "layernorm"},
        {"norm": "rmsnorm", "ffn": "swiglu", "positions": "rotary", "bias": False},
    ],
    ids=["GPT-2", "Llama"],
)
def test_a_model_and_its_export_have_no_weight_that_differs(options):
    config = GPTConfig(
        vocab_size=31, context=8, depth=2, width=16, heads=2, placement="pre", **options
    )
    model = GPT(config, seed=0)
    exported = to_transformers(model)
    tokens = torch.randint(0, 31, (2, 8), generator=torch.Generator().manual_seed(0))
    found = compare(model, ctrans.open_model(exported), tokens, tokens.roll(-1, 1))
    assert not found.changed
    assert not {weight.kind for weight in found.weights} - {"transposed"}
    said = answer("run", "export", found)
    assert said.mark == "good", said.text
    assert isinstance(exported, transformers.PreTrainedModel)

"""Models with weights that show nothing, zeros or nan, are opened all the same: their own weights
stay as they are, bit for bit.
"""

import math

import pytest
import torch
from torch import nn

import ctrans
from tests.interop.plain_modules import VOCABULARY, WIDTH, LanguageModel, ids


def faulty(name):
    torch.manual_seed(0)
    model = LanguageModel().eval()
    block = model.stack[1]
    if name in ("attention", "block", "all"):
        nn.init.zeros_(block.mix.proj.weight), nn.init.zeros_(block.mix.proj.bias)
    if name in ("ffn", "block", "all"):
        nn.init.zeros_(block.shrink.weight), nn.init.zeros_(block.shrink.bias)
    if name == "all":  # as mu-parametrisations begin
        for each in model.stack:
            for map_ in (each.mix.proj, each.shrink):
                nn.init.zeros_(map_.weight), nn.init.zeros_(map_.bias)
    if name == "embedding":
        nn.init.zeros_(model.tok.weight)
    if name == "nan":
        block.grow.weight.data[3, 3] = math.nan
    return model


@pytest.mark.cases(1)
@pytest.mark.parametrize("name", ["attention", "ffn", "block", "all", "embedding", "nan"])
def test_structure_is_seen_and_weights_and_states_are_the_modules_own(name):
    model = faulty(name)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    opened = ctrans.open_model(model, example=ids())
    assert opened.config.placement == "pre"
    assert opened.causal
    assert ("not finite: the weight stack.1.grow.weight" in opened.described) == (name == "nan")
    for key, value in model.state_dict().items():
        assert torch.equal(value.nan_to_num(7.0), before[key].nan_to_num(7.0))
    with torch.no_grad():
        output = opened.head(opened.depth(opened.embed(ids(seed=3))))
        assert torch.equal(output.nan_to_num(7.0), model(ids(seed=3)).nan_to_num(7.0))


@pytest.mark.cases(1)
@pytest.mark.parametrize("places", [16, 64])
@pytest.mark.parametrize("example", [True, False])
def test_the_vocabulary_is_the_table_that_is_read_at_the_tokens(places, example):
    model = LanguageModel().eval()
    model.pos = nn.Embedding(places, WIDTH)
    opened = ctrans.open_model(model, example=ids()) if example else ctrans.open_model(model)
    assert opened.vocabulary == VOCABULARY
    assert opened.predicts


def test_gpt2_shows_the_rows_of_its_heads_with_the_kernel_that_it_has():
    transformers = pytest.importorskip("transformers")
    shape = {
        "n_layer": 1,
        "n_embd": 32,
        "n_head": 2,
        "n_positions": 16,
        "bos_token_id": 0,
        "eos_token_id": 0,
    }
    config = transformers.GPT2Config(vocab_size=VOCABULARY, attn_implementation="sdpa", **shape)
    opened = ctrans.open_model(transformers.GPT2LMHeadModel(config), example=ids())
    assert "heads" not in ctrans.diagnose(opened, ids(seed=2), ids(seed=3)).missing

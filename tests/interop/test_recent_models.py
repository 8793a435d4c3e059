"""Fifteen models as people have built them since 2022: their states are those that hooks by hand
see, and what is not read of them is said.
"""

import re

import pytest
import torch

import ctrans
from examples import any_model
from examples.recent_models import RECENT

PLACEMENTS = {
    "nanochat": "pre, mix",
    "modded-nanogpt": "pre, unknown",
    "norms behind each map, as in OLMo 2": "output",
    "Peri-LN with norms of queries and keys": "peri",
    "Keel": "pre_post",
    "DeepNorm": "deepnorm",
    "nGPT": "unknown",
    "parallel sublayers, as in PaLM": "pre",
    "differential attention": "pre",
    "gated linear attention": "pre",
    "latent attention and shared experts": "pre",
    "sinks and windows, as in gpt-oss": "pre",
    "keys and values of all layers": "unknown, pre",
    "a ViT with registers": "pre",
    "T5": "pre",
}
MERGED = {
    "modded-nanogpt": "part: it is no single sum x + f(x): it mixes states, or later parts read its",
    "keys and values of all layers": "part: it is no single sum x + f(x): it mixes states, or later",
}
"""Blocks that read states of earlier blocks are one part with them, and why."""
BLOCKS = re.compile(r"(layers|blocks|h|decoder)\.\d+")


def opened_of(name):
    torch.manual_seed(0)
    make, example, loss = RECENT[name]
    module = make().eval()
    inputs, targets = example()
    opened = ctrans.open_model(module, example=inputs, loss=loss)
    first = next(iter(inputs.values())) if isinstance(inputs, dict) else inputs
    return module, opened, inputs, first, targets


def run(module, inputs):
    return module(**inputs) if isinstance(inputs, dict) else module(inputs)


def own_states(module, inputs):
    """What each block returns, and what the model returns."""
    seen = []
    for name, part in module.named_modules():
        if BLOCKS.fullmatch(name):
            part.register_forward_hook(lambda _, __, x: seen.append(x))
    with torch.no_grad():
        output = run(module, inputs)
    return list(seen), output


@pytest.mark.cases(4)
@pytest.mark.parametrize("name", RECENT)
def test_its_states_are_those_of_its_blocks(name):
    module, opened, inputs, first, _ = opened_of(name)
    assert opened.config.placement == PLACEMENTS[name]
    assert max(any_model.errors(opened, inputs)) < 1e-5
    states = opened.trajectory(first).states
    wanted, output = own_states(module, inputs)
    assert len(wanted) >= 3
    assert torch.allclose(opened.head(states[-1]).to(output), output, atol=1e-5)
    if name in MERGED:
        assert MERGED[name] in opened.described
        wanted = wanted[-1:]
    places = []
    for x in wanted:
        distances = [float((x - y).norm() / x.norm()) for y in states]
        places.append(min(range(len(states)), key=distances.__getitem__))
        assert distances[places[-1]] < 1e-6
    assert places == sorted(set(places))


@pytest.mark.slow
@pytest.mark.parametrize("name", RECENT)
def test_nothing_is_wrong_with_it(name):
    _, opened, _, first, targets = opened_of(name)
    found = ctrans.diagnose(opened, first, targets)
    assert {finding.check for finding in found.findings if finding.severity != "note"} == set()
    assert {"costates", "sensitivities"}.isdisjoint(found.missing)

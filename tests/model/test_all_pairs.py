"""Every pair of options makes a model or is refused in one line: nothing in between, and nothing in
silence.
"""

import itertools
import math
import os
import tempfile
import zlib
from pathlib import Path

import pytest
import torch

from ctrans import GPT, GPTConfig
from ctrans.dynamics.fields import ATTENTIONS, EXPERTS, FFNS, POSITIONS, QK_NORMS, ROUTERS
from ctrans.dynamics.norm import NORMS
from ctrans.dynamics.placement import PLACEMENTS
from ctrans.dynamics.residual import RESIDUALS
from ctrans.dynamics.weights.functions_of_depth import BASES
from ctrans.model.checkpoint import load, save
from solvers import ConfigError
from tests.helpers import tokens

SIZES = {
    "vocab_size": 11,
    "context": 8,
    "depth": 2,
    "width": 8,
    "heads": 2,
    "placement": "pre",
    "dt": 0.5,
    "embedding_std": 1.0,
}
OPTIONS = {
    "placement": [{"placement": name} for name in (*PLACEMENTS, "post/pre", "post*1+pre*1")],
    "norm": [
        *({"norm": name} for name in NORMS),
        {"norm": "group_rmsnorm", "norm_groups": 4},
        {"norm_alpha": 1.0},
        {"norm_radius": 2.0},
    ],
    "residual": [
        *({"residual": name} for name in RESIDUALS),
        {"residual_init": 0.3},
        {"streams": 3},
    ],
    "attention": [{"attention": name} for name in ATTENTIONS],
    "ffn": [
        *({"ffn": name} for name in FFNS),
        {"ffn": "moe", "experts": 3, "top_k": 1, "shared_experts": 1},
        {"experts": 3},
    ],
    "positions": [
        *({"positions": name} for name in POSITIONS),
        {"positions": "rotary", "rotary_fraction": 0.5},
        {"rotary_base": 10.0},
    ],
    "blocks": [
        {"parallel_blocks": True},
        {"parallel_blocks": True, "branch_norms": True},
        {"branch_norms": True},
    ],
    "heads": [
        {"kv_heads": 1},
        {"window": 2},
        {"softcap": 2.0},
        {"sinks": True},
        {"gated_output": True},
        {"causal": False},
    ],
    "scores": [*({"qk_norm": name} for name in QK_NORMS), {"temperature": 2.0}],
    "experts": [
        *({"ffn": "moe", "router": name} for name in ROUTERS),
        *({"ffn": "moe", "expert": name} for name in EXPERTS),
    ],
    "weights": [
        *({"depth_weights": name} for name in BASES),
        {"tied": False},
        {"bias": False},
        {"activation": "relu2"},
        {"alpha": 2.0},
    ],
}
"""Values of every group of options, as changes of a small configuration."""
PARTS = 12
"""In so many tests all pairs are tried, so that processes share them and one that fails names a
twelfth.
"""


def pairs():
    for (_, first), (_, second) in itertools.combinations(OPTIONS.items(), 2):
        for a, b in itertools.product(first, second):
            if all(a[name] == b[name] for name in a.keys() & b.keys()):
                yield {**a, **b}


def made_or_refused(changes):
    try:
        return GPT(GPTConfig(**{**SIZES, **changes})).double()
    except ConfigError as error:
        return str(error)


def holds(changes):
    """Builds it and tries what every model does; True where it is made, False where it is refused
    in one line.
    """
    made = made_or_refused(changes)
    if isinstance(made, str):
        assert "\n" not in made, made
        assert len(made) > 20, made
        return False
    model, ids = made, tokens(2, 6)
    logits, loss = model(ids, ids.roll(-1, 1))
    loss.backward()
    assert math.isfinite(loss.item())
    assert all(
        bool(each.grad.isfinite().all()) for each in model.parameters() if each.grad is not None
    )
    with torch.no_grad(), pytest.MonkeyPatch.context() as patch:
        assert torch.equal(model.trajectory(ids).x1, model.depth(model.embed(ids)))
        patch.setattr(
            os, "fsync", lambda handle: None
        )  # what thousands of small files would wait for
        with tempfile.TemporaryDirectory() as directory:
            save(model, Path(directory))
            again = load(Path(directory))
        assert again.config == model.config
        assert torch.equal(again.double()(ids)[0], logits)
    return True


def drawn(share):
    """So many of all pairs, the same in every run."""
    return [each for each in pairs() if zlib.crc32(repr(each).encode()) % share == 0]


@pytest.mark.slow
def test_a_draw_of_pairs_of_options_is_made_whole_or_refused():
    made = [holds(changes) for changes in drawn(60)]
    assert 0 < sum(made) < len(made)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_every_pair_of_options_is_made_whole_or_refused(part):
    made = [holds(changes) for changes in itertools.islice(pairs(), part, None, PARTS)]
    assert len(made) / 6 < sum(made) < len(made)

"""Checkpoints of nanoGPT's fork for the OT-Transformer: the same model to the last bit, or a
refusal; never another model.
"""

import json

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ctrans.interop import OTTransformer, from_nanogpt
from ctrans.interop.open_model import open_model
from ctrans.model.gpt import GPT
from solvers import ConfigError
from tests.cli.test_commands import run
from tests.helpers import learned, tokens
from tests.interop.plain_nanogpt import NanoGPT

SIZES = {"n_layer": 2, "n_head": 2, "n_embd": 16, "block_size": 12, "vocab_size": 11, "bias": True}
FLAGS = {"ln1_on": True, "ln2_on": True, "lnf_on": True}
NORMS = [FLAGS, *({**FLAGS, name: False} for name in FLAGS), dict.fromkeys(FLAGS, False)]


def checkpoint(vocabulary=11, **arguments):
    """Its modules and its checkpoint."""
    given = {
        **SIZES,
        "vocab_size": vocabulary,
        "dropout": 0.0,
        "cts": True,
        "steps": 10,
        "lmbda": 0.1,
        "random_seed": 1,
        **arguments,
    }
    model = learned(NanoGPT(vocabulary=vocabulary), 0.3)
    for part, names in [(model.transformer["h"], ("ln1_on", "ln2_on"))]:
        for block in part:
            for name, path in zip(names, ("ln_1", "ln_2"), strict=True):
                if not given.get(name, True):
                    setattr(block, path, nn.Identity())
    if not given.get("lnf_on", True):
        model.transformer["ln_f"] = nn.Identity()
    return model.eval(), {"model": model.state_dict(), "model_args": given}


def plain(model, idx, steps):
    """X <- X + (1/steps) ln_f(stack(X)) and logits without a norm, with sum (1/steps) mean(v^2): as
    the paper has it.
    """
    parts, cost = model.transformer, 0.0
    x = parts["wte"](idx) + parts["wpe"](torch.arange(idx.shape[1]))
    for _ in range(steps):
        v = x
        for block in parts["h"]:
            v = block(v)
        v = parts["ln_f"](v)
        cost = cost + (1 / steps) * v.square().mean()
        x = x + (1 / steps) * v
    return model.lm_head(x), cost


@pytest.mark.parametrize(
    "norms", NORMS, ids=lambda norms: "".join("01"[on] for on in norms.values())
)
@pytest.mark.parametrize("steps", [1, 3, 10])
def test_it_is_that_model_to_the_last_bit(steps, norms):
    model, saved = checkpoint(steps=steps, **norms)
    loaded, idx = from_nanogpt(saved).eval(), tokens(length=9)
    assert isinstance(loaded, OTTransformer)
    logits, _ = plain(model, idx, steps)
    found, loss = loaded(idx, idx)
    assert torch.equal(found, logits)
    assert torch.equal(loss, F.cross_entropy(logits.flatten(0, 1), idx.flatten()))
    assert torch.equal(loaded.head(loaded.trajectory(idx).x1), logits)
    assert loaded.config.kinetic == 0.1


@pytest.mark.parametrize("norms", [FLAGS, {**FLAGS, "ln1_on": False}, {**FLAGS, "ln2_on": False}])
def test_without_cts_it_is_the_discrete_model(norms):
    model, saved = checkpoint(cts=False, **norms)
    loaded = from_nanogpt(saved)
    assert isinstance(loaded, GPT)
    assert torch.equal(loaded(tokens())[0], model(tokens())[0])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"cts": False, "lnf_on": False}, "no norm before its head"),
        (
            {"stepz": 10},
            "unknown setting in the model_args of 'the state dict' 'stepz': did you mean 'steps'",
        ),
        ({"window": 4}, "unknown setting in the model_args"),
        ({"steps": 0}, "steps = 0"),
        ({"steps": 10**40}, "give at most 10,000"),
        ({"steps": 2.5}, "steps = 2.5: it must be of type int"),
        ({"cts": "yes"}, "cts = 'yes'"),
        ({"lmbda": float("nan")}, "lmbda = nan"),
        ({"dropout": 2.0}, "dropout = 2.0: it must be between 0 and 1"),
        ({"n_layer": 3}, "has n_layer = 3, but its weights give 2"),
        ({"block_size": 8}, "has block_size = 8, but its weights give 12"),
        ({"bias": False}, "has bias = False, but its weights give True"),
        ({"lnf_on": False}, "expected absent"),
    ],
)
def test_settings_that_are_unknown_or_contradict_are_refused(changes, words):
    saved = checkpoint()[1]
    with pytest.raises(ConfigError, match=words):
        from_nanogpt({**saved, "model_args": saved["model_args"] | changes})


def test_dropout_that_it_was_trained_with_is_said(tmp_path):
    saved = checkpoint(dropout=0.1)[1]
    with pytest.warns(UserWarning, match=r"trained with dropout 0\.1, which is off here"):
        from_nanogpt(saved)
    torch.save(saved, tmp_path / "ckpt.pt")
    assert open_model(tmp_path).described.endswith("; trained with dropout 0.1, which is off here")


def test_dt_is_in_units_of_its_own_steps():
    opened = from_nanogpt(checkpoint(steps=4)[1])
    assert opened.depth.times == (0.0, 0.25, 0.5, 0.75, 1.0)
    assert opened.with_scale(0.5).depth.lengths == (0.125,) * 4 == (opened.config.dt,) * 4


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    "command", [["simulate"], ["screen", "--quick"], ["hjb-check"], ["control"]]
)
def test_commands_look_at_it(command, tmp_path):
    torch.save(checkpoint(vocabulary=256, steps=2)[1], tmp_path / "ckpt.pt")
    result = run(*command, "--model", tmp_path, "--context", 5, "--batch", 1, "--json", "-")
    assert result.exit_code == 0, result.stderr
    assert "OT-Transformer (nanoGPT): 2 steps" in json.loads(result.stdout)["model"]["described"]


@pytest.mark.slow
def test_a_norm_at_the_end_of_its_velocity_makes_h_finite_and_none_does_not(tmp_path):
    for norms, verdict in ((FLAGS, True), ({**FLAGS, "lnf_on": False}, False)):
        torch.save(checkpoint(vocabulary=256, steps=2, **norms)[1], tmp_path / "ckpt.pt")
        result = run("hjb-check", "--model", tmp_path, "--context", 5, "--batch", 1, "--json", "-")
        (row,) = json.loads(result.stdout)["checks"].values()
        (check,) = row.values()
        assert (check["verdict"] not in ("open", "degenerate")) == verdict
        assert check["agrees"]

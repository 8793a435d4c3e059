"""What is remarked of an architecture is so of its models, and of no others."""

import pytest
import torch

from ctrans import GPT, GPTConfig
from ctrans.dynamics.norm import NORMS
from ctrans.model.remarks import remarks_on
from tests.cli.test_commands import run
from tests.helpers import tokens

NARROW = {"vocab_size": 32, "context": 6, "depth": 1, "width": 1, "heads": 1}


def learned(config):
    """A model with gains and offsets that are not those of the start."""
    model = GPT(config, seed=0).double()
    draw = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for weight in model.parameters():
            weight += torch.randn(weight.shape, generator=draw, dtype=torch.float64)
    return model


def depends_on_the_text(config):
    text = tokens(4, 6) % 32
    logits = learned(config)(text)[0]
    return bool((logits - logits[:1, :1]).abs().max() > 1e-9)


@pytest.mark.parametrize("placement", ["pre", "peri", "post"])
@pytest.mark.parametrize("norm", NORMS)
def test_a_norm_is_called_constant_where_the_models_output_is(norm, placement):
    config = GPTConfig(norm=norm, placement=placement, **NARROW)
    assert bool(remarks_on(config)) is not depends_on_the_text(config)


@pytest.mark.parametrize(
    ("qk_norm", "heads", "is_constant"),
    [("layer", 4, True), ("layer", 2, False), ("rms", 4, False), ("l2", 4, False)],
)
def test_norms_of_queries_are_called_constant_where_rows_of_attention_are_uniform(
    qk_norm, heads, is_constant
):
    config = GPTConfig(qk_norm=qk_norm, **{**NARROW, "width": 4, "heads": heads})
    attention = learned(config).depth.sublayers[0].field
    with torch.no_grad():
        x = torch.randn(1, 6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        rows = attention.probabilities(x)
    uniform = torch.ones(6, 6, dtype=torch.float64).tril()
    uniform /= uniform.sum(-1, keepdim=True)
    spread = float((rows - uniform).abs().max())
    assert (spread < 1e-12) is is_constant
    assert bool(remarks_on(config)) is is_constant


def test_usual_models_are_not_remarked():
    for norm in NORMS:
        assert remarks_on(GPTConfig(norm=norm, width=8, heads=2)) == []


def test_commands_show_the_remark_in_one_line(tmp_path):
    small = ["--width", "1", "--heads", "1", "--depth", "1", "--context", "8"]
    diagnosed = run("diagnose", *small, "--placement", "pre", "--json", "-")
    assert "width 1 is the constant beta" in diagnosed.stdout
    trained = run("train", *small, "--iterations", "1", "--out", tmp_path / "run")
    remarks = [line for line in trained.stdout.splitlines() if line.startswith("Note: ")]
    assert len(remarks) == 1
    assert "width 1 is the constant beta" in remarks[0]

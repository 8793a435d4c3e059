"""Every family as somebody's checkpoint on the command line: looked at, or refused in one line;
never a traceback.
"""

import numpy as np
import pytest
import transformers

from ctrans.interop.example_inputs import EXAMPLES, main_input
from ctrans.interop.families import FAMILIES, VOCABULARY, small_model
from ctrans.interop.hugging_face import one_stack
from tests.cli.test_commands import run, strict
from tests.helpers import learned

COMMANDS = {"simulate": ["--no-reference"], "diagnose": [], "screen": ["--quick"], "hjb-check": []}
FIRST = ("gpt_neox", "bloom", "deepseek_v3", "mamba", "dinov2", "albert")
"""Families met in `make test`: parallel, residuals inside, latent attention and experts, one map a
block, images, refused.
"""
SLOW = {("hjb-check", "gpt_oss"), ("hjb-check", "t5")}
"""Minutes of adaptive steps: where experts are chosen anew the field jumps."""


def whole(name):
    """The model that a checkpoint of the family holds."""
    family = FAMILIES[name]
    if not family.part:
        return small_model(name)
    return getattr(transformers, family.model)(
        getattr(transformers, family.config)(**family.settings)
    ).eval()


@pytest.mark.cases(1)
@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in FIRST else pytest.mark.slow) for n in FAMILIES]
)
def test_a_checkpoint_of_the_family_is_looked_at(name, command, tmp_path):
    model, draw = learned(whole(name), 0.1), np.random.default_rng(0)
    model.save_pretrained(tmp_path / "model")
    part = one_stack(model)
    if main_input(part) == "input_ids":
        np.save(tmp_path / "it.npy", draw.integers(3, VOCABULARY, 300))
        given = ["--ids", tmp_path / "it.npy", "--context", "6"]
    else:
        np.save(
            tmp_path / "it.npy",
            draw.standard_normal((2, *EXAMPLES[main_input(part)](part).shape[1:])),
        )
        given = ["--images", tmp_path / "it.npy"]
    if (command, name) in SLOW:
        pytest.skip("minutes: see SLOW")
    result = run(
        command,
        "--model",
        tmp_path / "model",
        *given,
        "--batch",
        "1",
        *COMMANDS[command],
        "--json",
        "-",
    )
    assert "Traceback" not in result.output
    assert result.exception is None or isinstance(result.exception, SystemExit), repr(
        result.exception
    )
    refused = FAMILIES[name].refused
    if refused:
        assert result.exit_code == 2
        assert refused in " ".join(result.stderr.split())
    else:
        assert result.exit_code == 0, result.stderr
        assert strict(result.stdout)["model"]["architecture"]["blocks"] in (2, 3, 4)

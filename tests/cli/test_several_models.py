"""Several models named at once: compared on the same tokens, called by what tells their paths
apart, refused where that cannot be.
"""

import json

import numpy as np
import pytest
import torch
import transformers
from click.testing import CliRunner

from ctrans.cli import main
from ctrans.cli.model_sources import labels
from ctrans.model.checkpoint import save
from ctrans.model.config import GPTConfig
from ctrans.model.gpt import GPT
from tests.interop.models import TEXT, VOCABULARY, made

FEW = ["--context", "6", "--batch", "1", "--json", "-"]


def run(*args):
    return CliRunner().invoke(main, [str(arg) for arg in args], prog_name="ctrans")


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A training's checkpoints, of ours and of somebody else's, whose weights differ."""
    root = tmp_path_factory.mktemp("several")
    config = GPTConfig(
        vocab_size=VOCABULARY, placement="pre", width=16, depth=2, heads=2, context=16
    )
    for step in (1, 2):
        model = GPT(config, seed=step)
        save(model, root / "ours" / f"step-{step}" / "best")
        gpt2 = made("gpt2")
        with torch.no_grad():
            for p in gpt2.parameters():
                p.mul_(step)
        gpt2.save_pretrained(root / "theirs" / f"step-{step}")
    made("bert").save_pretrained(root / "bert")
    transformers.GPT2LMHeadModel(
        transformers.GPT2Config(**TEXT | {"vocab_size": 99})
    ).save_pretrained(root / "larger")
    rng = np.random.default_rng(0)
    np.save(root / "ids.npy", rng.integers(0, VOCABULARY, 500))
    return root


@pytest.mark.parametrize(
    ("paths", "expected"),
    [
        (["run/step-1", "run/step-20"], ["step-1", "step-20"]),
        (["/a/run/1/best", "/a/run/2/best"], ["1", "2"]),
        (["a/model", "b/other"], ["a/model", "b/other"]),
        (["llama-7b", "llama-13b"], ["llama-7b", "llama-13b"]),
        (["a", "a/b"], ["a", "a/b"]),
        (["run", "run/best"], ["run", "run/best"]),
    ],
)
def test_labels_leave_out_what_all_paths_share(paths, expected):
    assert labels(paths) == expected


@pytest.mark.slow
@pytest.mark.parametrize("whose", ["checkpoint", "model"])
def test_a_screening_of_checkpoints_is_each_ones_own(whose, models):
    place = models / ("ours" if whose == "checkpoint" else "theirs")
    paths = [place / f"step-{step}" / ("best" if whose == "checkpoint" else "") for step in (1, 2)]
    ids = ["--ids", models / "ids.npy", "--quick", *FEW]
    both = run("screen", f"--{whose}", paths[0], f"--{whose}", paths[1], *ids)
    assert (both.exit_code, both.stderr) == (0, "")
    found = json.loads(both.stdout)
    assert list(found["models"]) == ["step-1", "step-2"]
    assert found["options"][whose] == [str(path) for path in paths]
    for name, path in zip(found["models"], paths, strict=True):
        ((_, alone),) = json.loads(run("screen", f"--{whose}", path, *ids).stdout)["models"].items()
        assert found["models"][name] == alone


@pytest.mark.slow
def test_a_diagnosis_takes_several_as_arguments(models):
    result = run(
        "diagnose",
        models / "theirs" / "step-1",
        models / "theirs" / "step-2",
        "--ids",
        models / "ids.npy",
        *FEW,
    )
    assert (result.exit_code, result.stderr) == (0, "")
    found = json.loads(result.stdout)
    assert list(found["placements"]) == list(found["model"]["several"]) == ["step-1", "step-2"]


@pytest.mark.cases(4)
@pytest.mark.parametrize(
    ("args", "words"),
    [
        (
            ["simulate", "--model", "{}/theirs/step-1", "--model", "{}/theirs/step-2"],
            "2 models are given",
        ),
        (
            ["hjb-check", "--model", "{}/theirs/step-1", "--architecture", "llama-7b"],
            "2 models are given",
        ),
        (["screen", "--model", "{}/bert", "--model", "{}/bert", "--quick"], "named twice"),
        (
            ["screen", "--model", "{}/theirs/step-1", "--model", "{}/larger", "--quick"],
            "one vocabulary",
        ),
        (["diagnose", "{}/theirs/step-1", "{}/bert"], "trained alike"),
        (
            ["screen", "--model", "{}/bert", "--model", "{}/larger", "--compare", "dt=1"],
            "brings its own architecture",
        ),
    ],
)
def test_what_cannot_be_compared_is_refused_in_a_line(args, words, models):
    result = run(*(arg.format(models) for arg in args), *FEW)
    assert result.exit_code == 2
    assert words in result.stderr
    assert result.stderr.count("\n") == 1

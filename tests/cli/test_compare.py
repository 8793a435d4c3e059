"""`ctrans compare`: two saved models, what it refuses, and the gate."""

import copy

import pytest
import torch

from ctrans.model.checkpoint import load, save
from ctrans.model.config import GPTConfig
from ctrans.model.gpt import GPT
from tests.cli.test_commands import run, strict
from tests.examine.comparison.test_recording import recorded

QUICK = ["--batch", 1, "--context", 8]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    place = tmp_path_factory.mktemp("compared")
    size = {"width": 16, "heads": 2, "context": 8, "placement": "pre"}
    first = GPT(GPTConfig(depth=2, **size), seed=0)
    other = copy.deepcopy(first)
    with torch.no_grad():
        weight = other.depth.sublayers[2].field.output_projection.weight
        weight.copy_(weight.t().clone())
    save(first, place / "a")
    save(first, place / "same")
    save(other, place / "b")
    save(GPT(GPTConfig(depth=1, **size), seed=0), place / "short")
    return place


@pytest.mark.cases(1)
def test_the_part_that_changed_is_named_and_the_gate_stops(models, tmp_path):
    result = run("compare", models / "a", models / "b", *QUICK, "--out", tmp_path)
    words = " ".join(result.stdout.split())

    assert result.exit_code == 0, result.output
    assert "a and b part at block 1, attention, in its output map" in words
    assert "transposed" in words
    found = strict((tmp_path / "compare.json").read_text())
    assert found["changed"] == ["block 1, attention"]
    assert (tmp_path / "compare.png").exists()

    stopped = run(
        "compare", models / "a", models / "b", *QUICK, "--fail-on", "change", "--json", "-"
    )
    assert stopped.exit_code == 3
    assert "1 part changed" in stopped.stderr


@pytest.mark.cases(1)
def test_equal_models_pass_the_gate(models):
    result = run(
        "compare", models / "a", models / "same", *QUICK, "--fail-on", "change", "--json", "-"
    )

    assert result.exit_code == 0, result.output
    assert strict(result.stdout)["difference"] == 0


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("names", "words"),
    [
        ([], "takes two models, and 0 are given"),
        (["a"], "takes two models, and 1 are given"),
        (["a", "b", "same"], "takes two models, and 3 are given"),
        (["a", "a"], "is named twice"),
        (["a", "short"], "4 and 2 sublayers"),
        (["a", "nothing"], "nothing"),
    ],
)
def test_what_cannot_be_compared_is_refused_in_a_line(models, names, words):
    result = run("compare", *(models / name for name in names), *QUICK, "--json", "-")

    assert result.exit_code == 2
    assert words in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.cases(1)
def test_a_recording_is_the_first_of_the_two(models, tmp_path):
    model = load(models / "b")
    tokens = torch.arange(16).reshape(2, 8)
    path = recorded(model, tokens, tmp_path / "port.safetensors")

    result = run("compare", models / "a", path, "--out", tmp_path, "--fail-on", "change")
    words = " ".join(result.stdout.split())

    assert result.exit_code == 3, result.output
    assert "part at block 1, attention. With" in words
    assert "transposed" in words
    found = strict((tmp_path / "compare.json").read_text())
    total = sum(part["share"] for part in found["parts"])
    assert total == pytest.approx(found["difference"], abs=1e-9)

    for option in ("--text", "abc"), ("--context", "4"), ("--batch", "1"):
        refused = run("compare", models / "a", path, *option, "--json", "-")
        assert refused.exit_code == 2
        assert f"leave {option[0]} out" in refused.stderr

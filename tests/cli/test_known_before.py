"""What is known to be wrong before anything is done is an error before anything is done: typos
before a model is built, and sizes before memory is taken.
"""

import json

import numpy as np
import pytest
import torch

from ctrans.cli.size_checks import (
    MOST_SCORES,
    UNUSED,
    check_attention_ends,
    check_positions_used,
)
from ctrans.cli.watch import MOST_PLACES
from ctrans.interop.hugging_face_files import LARGEST_INDEX, MOST_SHARDS
from ctrans.model.config import GPTConfig
from solvers import ConfigError
from tests.cli.test_commands import run

BUILDER = """
import torch
from torch import nn
def model():
    raise RuntimeError("the model is built")
def short_targets():
    return torch.zeros(4, 3), torch.zeros(3)
def large_ids():
    return torch.tensor([[1, 2, 70]])
class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(50, 4)
    def forward(self, tokens):
        return self.embedding(tokens)
"""


@pytest.mark.parametrize(
    ("command", "options", "message"),
    [
        ("diagnose", ["--loss", "nxt"], "loss 'nxt' is not known: choose one of next, mlm"),
        ("diagnose", ["--loss", "HERE:lost"], "has no function 'lost'"),
        ("diagnose", ["--loss", "nowhere:f"], "there is no module 'nowhere'"),
        ("diagnose", ["--example", "HERE:lost"], "has no function 'lost'"),
        ("diagnose", ["--example", "HERE:short_targets"], "4 rows and targets (3,)"),
        ("diagnose", ["--anatomy", "nowhere.toml"], "cannot read 'nowhere.toml'"),
        ("diagnose", ["--ids", "nowhere.npy"], "cannot read 'nowhere.npy'"),
        ("diagnose", ["--ids", "nowhere.npy", "--text", "a"], "choose one"),
        ("diagnose", ["--file", "nowhere.txt"], "cannot read 'nowhere.txt'"),
        ("diagnose", ["--file", "nowhere.txt", "--text", "a"], "choose one"),
        ("diagnose", ["--images", "nowhere.npy"], "cannot read 'nowhere.npy'"),
        ("diagnose", ["--dt", "-1"], "dt = -1.0"),
        ("simulate", ["--orders", "xyz"], "unknown order 'xyz'"),
        ("hjb-check", ["--loss", "none"], "--loss none leaves hjb-check without a result"),
        ("hjb-check", ["--placement", "prr"], "--python brings its own placements"),
    ],
)
def test_a_typo_is_found_before_the_model_is_built(command, options, message, tmp_path):
    builder = tmp_path / "builder.py"
    builder.write_text(BUILDER)
    options = [option.replace("HERE", str(builder)) for option in options]
    result = run(command, "--python", f"{builder}:model", *options, "--json", "-")
    assert result.exit_code == 2
    assert message in result.stderr
    assert "the model is built" not in result.stderr


def test_a_token_of_an_example_beyond_the_vocabulary_is_named_with_it(tmp_path):
    builder = tmp_path / "builder.py"
    builder.write_text(BUILDER)
    example = f"{builder}:large_ids"
    result = run("diagnose", "--python", f"{builder}:Small", "--example", example, "--json", "-")
    assert result.exit_code == 2
    assert "the token id 70, and the model's vocabulary runs from 0 to 49" in result.stderr


def test_the_largest_token_of_64_bits_is_named_as_it_is(tmp_path):
    np.save(tmp_path / "ids.npy", np.array([1, 2, 2**64 - 1], dtype=np.uint64))
    result = run("simulate", "--ids", tmp_path / "ids.npy", "--json", "-")
    assert result.exit_code == 2
    assert "from 1 to 18446744073709551615, and the model's vocabulary from 0 to 255" in (
        result.stderr
    )


def test_a_context_far_beyond_the_text_is_refused_before_the_model_is_drawn():
    options = ["--context", 100_000_000, "--width", 8, "--text", "a short text", "--json", "-"]
    result = run("simulate", *options)
    assert result.exit_code == 2
    assert "take 9.6 GB, since the text has 12 tokens: lower --context to 12" in result.stderr


@pytest.mark.parametrize("more", [0, 1])
def test_embeddings_of_places_without_text_have_a_limit(more):
    places = UNUSED // (8 * (4 + 8)) + more
    config = GPTConfig(width=8, heads=1, context=100 + places)
    if more:
        with pytest.raises(ConfigError, match="lower --context to 100"):
            check_positions_used(config, 100, torch.float64)
    else:
        check_positions_used(config, 100, torch.float64)


@pytest.mark.parametrize("more", [0, 1])
def test_the_scores_of_a_pass_have_a_limit(more):
    config = GPTConfig(width=8, heads=2, depth=5)
    sequences = MOST_SCORES // 10
    if more:
        with pytest.raises(ConfigError, match=r"has 1e\+13 scores in a pass"):
            check_attention_ends(config, sequences + 1, 1)
    else:
        check_attention_ends(config, sequences, 1)


def index_of(directory, files):
    """A Hugging Face directory with this index alone."""
    (directory / "config.json").write_text(json.dumps({"model_type": "llama"}))
    index = {"metadata": {}, "weight_map": files}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


def test_an_index_of_many_files_is_refused(tmp_path):
    index_of(tmp_path, {f"w{i}": f"{i}.safetensors" for i in range(MOST_SHARDS + 1)})
    result = run("diagnose", tmp_path, "--weights-only", "--json", "-")
    assert result.exit_code == 2
    assert "names 10,001 files, and ctrans reads at most 10,000" in result.stderr


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_a_large_index_is_refused_before_it_is_parsed(name, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    with (tmp_path / f"{name}.index.json").open("wb") as file:
        file.truncate(LARGEST_INDEX + 1)
    result = run("diagnose", tmp_path, "--weights-only", "--allow-pickle", "--json", "-")
    assert result.exit_code == 2
    assert "has 33,554,433 bytes, and ctrans reads at most 33,554,432" in result.stderr


HEADER = {"model": "m", "places": ["a"], "kinds": ["ffn"], "heads": [1], "every": 1, "total": 10}


@pytest.mark.parametrize("name", ["places", "kinds", "heads"])
def test_a_log_of_too_many_sublayers_is_refused(name, tmp_path):
    header = {**HEADER, name: HEADER[name] * (MOST_PLACES + 1)}
    (tmp_path / "monitor.jsonl").write_text(json.dumps({"header": header}) + "\n")
    result = run("watch", tmp_path, "--json", "-")
    assert result.exit_code == 2
    assert f"a header with 50,001 {name}, and ctrans shows at most 50,000" in result.stderr


ODD = [None, "", "x", [], {}, True, -1, 1.5, 10**400, 2**53, float("nan")]


@pytest.mark.parametrize("step", ODD)
def test_why_of_a_log_without_a_whole_report_says_that_there_is_none(step, tmp_path):
    lines = [{"header": HEADER}, {"step": step, "run": {"loss": 1.0}, "by": {}}]
    (tmp_path / "monitor.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    result = run("watch", tmp_path, "--once", "--why")
    assert result.exit_code == 0, result.stderr
    assert "0 reports cannot say what moved first" in result.stdout

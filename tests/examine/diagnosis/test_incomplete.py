"""Checkpoints of which a block lacks weights, beside ones whose blocks differ on purpose."""

import json

import pytest
import torch
from safetensors.torch import save_file

from ctrans import GPT, GPTConfig
from ctrans.examine.diagnosis.incomplete import blocks_after_the_last, incomplete_blocks
from ctrans.examine.diagnosis.weights_only import weight_diagnosis
from ctrans.interop.checkpoint_weights import checkpoint_weights, read_checkpoint
from ctrans.interop.families import small_model

ROLES = ("norm1.weight", "attn.qkv.weight", "attn.proj.weight", "norm2.weight", "mlp.up.weight")


def names(blocks=4, prefix="model.layers."):
    return [f"{prefix}{k}.{role}" for k in range(blocks) for role in ROLES] + ["head.weight"]


def lacking(these):
    return {reading.place: reading.value for reading in incomplete_blocks(these) if reading.value}


def test_a_whole_checkpoint_lacks_nothing():
    assert lacking(names()) == {}
    assert len(incomplete_blocks(names())) == 4


@pytest.mark.parametrize("prefix", ["model.layers.", "transformer.h.", ""])
def test_a_block_that_lacks_weights_is_named_with_them(prefix):
    these = [name for name in names(prefix=prefix) if not name.startswith(f"{prefix}2.attn")]
    (reading,) = [each for each in incomplete_blocks(these) if each.value]
    assert (reading.value, reading.segment) == (2.0, 2)
    assert "attn.proj.weight, attn.qkv.weight" in reading.figure


def test_a_number_that_is_left_out_is_a_block_without_weights():
    these = [name for name in names() if ".1." not in name]
    (reading,) = [each for each in incomplete_blocks(these) if each.value]
    assert reading.figure == "no weights at all, and a later block has some"


def test_a_stage_of_a_pipeline_begins_where_it_begins():
    stage = [name for name in names(8)[:-1] if int(name.split(".")[2]) >= 4]
    assert lacking(stage) == {}


def hybrid():
    """Attention in every fourth block, a state space in the others."""
    these = []
    for k in range(8):
        part = "attn" if k % 4 == 3 else "ssm"
        these += [f"layers.{k}.{part}.{w}.weight" for w in ("in", "out", "norm")]
        these += [f"layers.{k}.mlp.{w}.weight" for w in ("up", "down", "norm")]
    return these


@pytest.mark.parametrize(
    "these",
    [
        hybrid(),
        [*names(), "model.layers.0.attn.relative_bias.weight"],  # as T5
        [f"features.{2 * k}.{w}" for k in range(5) for w in ("weight", "bias")],  # a Sequential
        [
            f"{side}.layers.{k}.{role}"
            for side in ("enc", "dec")
            for k in range(4)
            for role in ROLES
        ],
        names(2),
    ],
    ids=["hybrid", "first block has more", "sequential", "two stacks", "two blocks"],
)
def test_blocks_that_differ_on_purpose_lack_nothing(these):
    assert lacking(these) == {}


@pytest.mark.parametrize("lost", ["depth.sublayers.5.", "depth.sublayers.4.field"])
def test_a_block_of_ours_has_two_sublayers(lost):
    these = list(GPT(GPTConfig(depth=4, width=16, heads=2, context=8)).state_dict())
    assert lacking(these) == {}
    assert lacking([name for name in these if not name.startswith(lost)]).keys() == {"block 2"}


def test_the_gate_finds_it():
    torch.manual_seed(0)
    weights = {name: torch.randn(24, 24).clone for name in names() if "3.mlp" not in name}
    checks = {finding.check: finding.place for finding in weight_diagnosis(weights).findings}
    assert checks["block lacks weights"].startswith("block 3")


def test_a_number_far_beyond_the_others_is_one_gap():
    these = [*names(), *(f"model.layers.99999999999.{role}" for role in ROLES)]
    assert list(lacking(these)) == ["block 4 to block 99999999998"]


def test_the_gate_compares_a_directory_with_its_config(tmp_path):
    torch.manual_seed(0)
    small_model("llama").save_pretrained(tmp_path)
    whole = weight_diagnosis(checkpoint_weights(tmp_path), directory=tmp_path)
    assert "block lacks weights" not in {finding.check for finding in whole.findings}

    settings = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(settings | {"num_hidden_layers": 4}))
    found = weight_diagnosis(checkpoint_weights(tmp_path), directory=tmp_path)
    (finding,) = [each for each in found.findings if each.check == "block lacks weights"]
    assert finding.place == "the file"
    assert "model.layers.3" in finding.figure

    (tmp_path / "config.json").write_text(json.dumps(settings | {"model_type": "unheard"}))
    unknown = weight_diagnosis(checkpoint_weights(tmp_path), directory=tmp_path)
    assert "not compared" in unknown.missing["the weights beside config.json"]


@pytest.mark.parametrize("key", ["num_hidden_layers", "n_layer"])
@pytest.mark.parametrize("part", [None, "text_config"])
def test_blocks_that_the_config_of_an_unknown_family_has_after_the_last_are_lacking(part, key):
    config = {key: 6}
    if part:
        config = {part: config}
    (reading,) = blocks_after_the_last(names(4), config)
    assert (reading.value, reading.place) == (2.0, "the file")
    assert (
        reading.figure == f"config.json says {key} = 6, and the last block with weights is block 3"
    )


@pytest.mark.parametrize(
    ("these", "config"),
    [
        (names(4), {"num_hidden_layers": 4}),
        (names(5), {"num_hidden_layers": 4}),  # one more to predict further tokens
        (names(4), {}),
        (names(4), {"num_hidden_layers": None}),
        (names(1), {"num_hidden_layers": 12}),  # one block for all, as ALBERT
        (["embed.weight", "blocks.up.weight"], {"num_hidden_layers": 4}),  # a stack of all blocks
        (
            [f"stages.{i}.layers.{k}.{role}" for i in range(2) for k in range(3) for role in ROLES],
            {"num_hidden_layers": 6},
        ),
    ],
)
def test_a_file_with_the_blocks_of_its_config_lacks_none(these, config):
    assert blocks_after_the_last(these, config) == []


def test_experts_are_no_blocks():
    these = [f"layers.{k}.experts.{e}.up.weight" for k in range(4) for e in range(8)]
    (reading,) = blocks_after_the_last(these, {"num_hidden_layers": 6})
    assert reading.value == 2.0


def test_the_gate_finds_blocks_that_an_unknown_family_lacks(tmp_path):
    weights = {name: torch.randn(4, 4).clone for name in names(4)}
    config = {"model_type": "unheard", "num_hidden_layers": 6}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (finding,) = [
        finding
        for finding in weight_diagnosis(weights, directory=tmp_path).findings
        if finding.check == "block lacks weights"
    ]
    assert "num_hidden_layers = 6" in finding.figure


@pytest.mark.parametrize("name", ["model-00001-of-00007", "pytorch_model-00002-of-00007"])
def test_a_shard_alone_lacks_the_others(name, tmp_path):
    path = tmp_path / f"{name}.safetensors"
    save_file({"a.weight": torch.ones(2, 2)}, path)
    checkpoint = read_checkpoint(path)
    assert checkpoint.files == 7
    (finding,) = weight_diagnosis(checkpoint.weights, files=checkpoint.files).findings
    assert (finding.check, finding.value) == ("block lacks weights", 6.0)
    assert finding.figure == "it is 1 of 7 files of the model: give the directory that has them all"


@pytest.mark.parametrize("name", ["model", "model-00001-of-00001", "step-1-of-3"])
def test_a_file_that_is_no_shard_lacks_none(name, tmp_path):
    path = tmp_path / f"{name}.safetensors"
    save_file({"a.weight": torch.ones(2, 2)}, path)
    assert read_checkpoint(path).files == 1

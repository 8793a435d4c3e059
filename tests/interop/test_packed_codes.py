"""Weights in codes of any quantisation are refused by what they are, and tables of whole numbers in
plain models are left out.
"""

import json

import pytest
import torch
from safetensors.torch import save_file

from ctrans.interop.checkpoint_weights import read_checkpoint
from solvers import ConfigError

LAYER = "model.layers.0.self_attn.q_proj."
PLAIN = {"model.norm.weight": torch.ones(16), "model.layers.0.norm.weight": torch.ones(16)}


def ones(kind, *shape):
    return torch.ones(shape).to(kind)


FORMATS = {
    "HQQ": {"W_q": ones(torch.uint8, 8, 16), "scale": torch.ones(1, 16)},
    "quanto": {"weight._data._data": ones(torch.uint8, 8, 16), "weight._scale": torch.ones(16, 1)},
    "AQLM": {"codes": ones(torch.int16, 16, 2, 1), "codebooks": torch.ones(1, 256, 1, 8)},
    "VPTQ": {"indices": ones(torch.int32, 1, 16, 2), "centroids.weight": torch.ones(1, 64)},
    "SpQR": {"dense_weights": ones(torch.int64, 16), "row_offsets": ones(torch.int32, 17)},
    "Marlin": {"B": ones(torch.int32, 2, 32), "s": torch.ones(1, 16)},
    "QuIP#": {"Qidxs": ones(torch.int64, 16, 4), "SU": torch.ones(16), "SV": torch.ones(16)},
    "EXL3": {"trellis": ones(torch.int16, 1, 1, 64), "suh": torch.ones(16)},
    "unheard": {"x": ones(torch.int32, 4, 4), "y": torch.ones(4)},
    "unheard, as vectors": {"x": ones(torch.int32, 4), "z": ones(torch.uint8, 9)},
}


def read(directory, weights, **config):
    save_file(weights, directory / "model.safetensors")
    if config:
        (directory / "config.json").write_text(json.dumps(config))
    return read_checkpoint(directory)


@pytest.mark.parametrize("name", FORMATS)
def test_codes_of_any_quantisation_are_refused_by_name(name, tmp_path):
    weights = {LAYER + part: numbers for part, numbers in FORMATS[name].items()}
    with pytest.raises(ConfigError, match=r"holds model\.layers\.0\.self_attn\.q_proj\.\S+, codes"):
        read(tmp_path, PLAIN | weights)


def test_a_vector_of_codes_is_as_large_as_a_matrix(tmp_path, monkeypatch):
    monkeypatch.setattr("ctrans.interop.packed_codes.LONGEST_VECTOR", 100)
    weights = {LAYER + "scales": torch.ones(4), LAYER + "x": ones(torch.int32, 100)}
    assert read(tmp_path, PLAIN | weights).unread.keys() == {LAYER + "x"}
    with pytest.raises(ConfigError, match=r"q_proj\.x, codes of a quantisation"):
        read(tmp_path, PLAIN | weights | {LAYER + "x": ones(torch.int32, 101)})


@pytest.mark.parametrize("key", ["quantization_config", "compression_config"])
@pytest.mark.parametrize("part", [None, "text_config"])
def test_a_method_that_is_not_read_is_refused_by_name(part, key, tmp_path):
    settings = {key: {"quant_method": "hqq"}}
    if part:
        settings = {part: settings}
    with pytest.raises(ConfigError, match=f"says quant_method = 'hqq' in its {key}, and ctrans"):
        read(tmp_path, PLAIN, **settings)


def test_methods_with_scales_that_are_known_are_read(tmp_path):
    for method in ("fp8", "compressed-tensors", "bitsandbytes", None):
        found = read(tmp_path, PLAIN, quantization_config={"quant_method": method})
        assert found.weights.keys() == PLAIN.keys()


@pytest.mark.parametrize(
    ("name", "numbers"),
    [
        ("embeddings.position_ids", torch.arange(4)[None]),
        ("embeddings.token_type_ids", torch.zeros(1, 4, dtype=torch.int64)),
        ("layers.0.attn.relative_position_index", torch.ones(9, 9, dtype=torch.int64)),
        ("layers.0.attention_bias_idxs", torch.ones(9, 9, dtype=torch.int64)),
        ("layers.0.attn.rel_pos_index", torch.ones(9, 9, dtype=torch.int64)),
        ("layers.0.attn_mask", torch.ones(3, 4, 4, dtype=torch.int8)),
        ("layers.0.attn.bias", torch.ones(1, 1, 4, 4, dtype=torch.uint8)),
        ("layers.0.mlp.gate.tid2eid", torch.ones(9, 2, dtype=torch.int64)),
        ("visual_bbox", torch.ones(9, 4, dtype=torch.int64)),
        ("layers.0.q_proj.indices", torch.arange(4)),
    ],
)
def test_tables_of_plain_models_are_left_out_without_a_word(name, numbers, tmp_path):
    found = read(tmp_path, PLAIN | {name: numbers})
    assert found.weights.keys() == PLAIN.keys()
    assert not found.unread


@pytest.mark.parametrize(
    ("name", "numbers"),
    [
        ("d2t", torch.ones(200, dtype=torch.int64)),
        ("tokenizer.table", torch.ones(200, dtype=torch.int64)),
        ("model.layers.0.tokens_seen", torch.ones(8, dtype=torch.int64)),
        ("model.layers.0.causal", torch.ones(8, 8, dtype=torch.bool)),
    ],
)
def test_other_whole_numbers_of_plain_models_are_named_and_not_refused(name, numbers, tmp_path):
    found = read(tmp_path, PLAIN | {name: numbers})
    assert found.weights.keys() == PLAIN.keys()
    assert found.unread.keys() == {name}

"""Codes of fp8 whose scales are missing are refused wherever codes have scales."""

import json

import pytest
import torch
from safetensors.torch import save_file

from ctrans.interop.checkpoint_weights import checkpoint_weights
from solvers import ConfigError

CODES = torch.full((4, 4), 2.0).to(torch.float8_e4m3fn)
SCALE = torch.tensor(0.5)


def saved(tmp_path, weights, config=None):
    save_file(weights, tmp_path / "model.safetensors")
    if config is not None:
        (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path / "model.safetensors"


@pytest.mark.parametrize("scale", ["weight_scale", "weight_scale_inv"])
def test_the_first_codes_without_scales_beside_codes_with_scales_are_named(scale, tmp_path):
    names = ["layers.0.up.weight", "layers.1.down.weight", "layers.1.up.weight"]
    weights = {name: CODES.clone() for name in names}
    path = saved(tmp_path, {**weights, f"layers.0.up.{scale}": SCALE})
    words = "layers.1.down.weight as F8_E4M3 without scales, and layers.0.up.weight has some"
    with pytest.raises(ConfigError, match=words):
        checkpoint_weights(path)


@pytest.mark.parametrize("key", ["quantization_config", "compression_config"])
def test_codes_without_scales_are_refused_in_a_model_that_says_it_is_quantised(key, tmp_path):
    path = saved(tmp_path, {"up.weight": CODES}, {key: {"quant_method": "fp8"}})
    with pytest.raises(
        ConfigError, match=f"up.weight as F8_E4M3 without scales, and .*has a {key}"
    ):
        checkpoint_weights(path)


def test_codes_of_another_dtype_than_those_with_scales_are_numbers(tmp_path):
    others = torch.full((4, 4), 3.0).to(torch.float8_e5m2)
    weights = {"up.weight": CODES, "up.weight_scale": SCALE, "gain.weight": others}
    read = checkpoint_weights(saved(tmp_path, weights))
    assert torch.equal(read["gain.weight"]().float(), others.float())
    assert torch.equal(read["up.weight"](), CODES.float() / 2)


def test_scales_that_are_codes_need_no_scales(tmp_path):
    scales = torch.full((4, 1), 0.5).to(torch.float8_e4m3fn)
    path = saved(tmp_path, {"up.weight": CODES, "up.weight_scale": scales})
    assert torch.equal(checkpoint_weights(path)["up.weight"](), CODES.float() / 2)

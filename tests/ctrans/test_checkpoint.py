import json

import pytest
import torch

from ctrans.checkpoint import CONFIG, WEIGHTS, load, load_config, save
from solvers import ConfigError
from tests.helpers import NAMES, small_model, tokens


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_model_comes_back_bit_for_bit(name, dtype, tmp_path):
    model = small_model(name, dtype, dt=1 / 3)
    save(model, tmp_path)
    again = load(tmp_path)
    assert again.config == model.config == load_config(tmp_path)
    assert torch.equal(again(tokens())[0], model(tokens())[0])
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([CONFIG, WEIGHTS])


def test_damage_is_named_and_an_earlier_checkpoint_stays(tmp_path):
    save(small_model("peri"), tmp_path)
    good = (tmp_path / WEIGHTS).read_bytes()
    for data in (good[:-1], good[:100], b"", b"\x80\x04pickle"):
        (tmp_path / WEIGHTS).write_bytes(data)
        with pytest.raises(ConfigError, match="no whole safetensors file"):
            load(tmp_path)
    (tmp_path / WEIGHTS).unlink()
    with pytest.raises(ConfigError, match="cannot read"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"widht": 3}, "did you mean 'width'"),
        ({"width": 32}, "does not fit"),
        ({"placement": "pre"}, "does not fit"),
        ({"dt": -1}, "dt = -1"),
    ],
)
def test_a_configuration_that_does_not_fit_is_named(changes, words, tmp_path):
    save(small_model("peri"), tmp_path)
    settings = json.loads((tmp_path / CONFIG).read_text())
    (tmp_path / CONFIG).write_text(json.dumps({**settings, **changes}))
    with pytest.raises(ConfigError, match=words):
        load(tmp_path)
    (tmp_path / CONFIG).write_text("{")
    with pytest.raises(ConfigError, match="no JSON"):
        load(tmp_path)
    (tmp_path / CONFIG).write_text("[]")
    with pytest.raises(ConfigError, match="holds no object"):
        load(tmp_path)


def test_a_place_that_cannot_be_written_is_named():
    with pytest.raises(ConfigError, match="cannot write a checkpoint"):
        save(small_model("peri"), "/proc/nothing")

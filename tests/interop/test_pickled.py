"""Pickles of weights: refused without a word of the user, read by torch's restricted unpickler with
it, and never run.

Two tests read checkpoints that packages ship: pip install --no-deps antiberty==0.1.3
rxnmapper==0.4.3
"""

import collections
import importlib.util
import json
import os
import random
import zipfile
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from ctrans.cli import main
from ctrans.interop.checkpoint_weights import checkpoint_weights
from ctrans.interop.hugging_face import from_transformers, load_local
from ctrans.interop.open_model import open_model
from ctrans.interop.pickled import load_pickled, pickled_weights
from solvers import ConfigError
from tests.interop.models import inputs, made

NUMBERS = random.Random(0).randbytes(1024)
"""Bytes that no compression makes fewer."""


class Runs:
    """Makes a file if a pickle is run."""

    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return os.mkdir, (str(self.mark),)


@pytest.fixture
def pickled(tmp_path):
    model = made("gpt2").eval()
    model.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    return model, tmp_path


@pytest.mark.slow
def test_a_pickle_is_refused_unless_it_is_allowed_and_then_gives_the_same_model(pickled):
    model, directory = pickled
    with pytest.raises(ConfigError, match=r"is a pickle and is not read: .*--allow-pickle"):
        from_transformers(directory)
    x = inputs(model)
    for on_demand in (False, True):
        read = from_transformers(directory, allow_pickle=True, on_demand=on_demand)
        assert torch.equal(read(x)[0], from_transformers(model)(x)[0])
    assert open_model(directory, torch.float32, allow_pickle=True).depth.blocks == 3


def test_shards_of_a_pickle_are_read_by_their_index(pickled):
    model, directory = pickled
    weights = model.state_dict()
    (directory / "pytorch_model.bin").unlink()
    index = {}
    for i, name in enumerate(weights):
        index[name] = f"pytorch_model-{i % 2}.bin"
    for shard in set(index.values()):
        torch.save(
            {name: value for name, value in weights.items() if index[name] == shard},
            directory / shard,
        )
    (directory / "pytorch_model.bin.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": index})
    )
    loaded = load_local(directory, allow_pickle=True).state_dict()
    assert all(torch.equal(loaded[name], value) for name, value in weights.items())


@pytest.mark.parametrize("fault", ["elsewhere", "nowhere", "unnamed"])
def test_shards_of_pickles_are_held_to_their_index(fault, tmp_path):
    first = {"a.weight": torch.ones(2), "b.weight": torch.ones(2)}
    second = {"c.weight": torch.ones(2)}
    index = dict.fromkeys(first, "one.bin") | dict.fromkeys(second, "two.bin")
    if fault == "elsewhere":
        index["b.weight"] = "two.bin"
    elif fault == "nowhere":
        index["d.weight"] = "two.bin"
    else:
        del index["b.weight"]
    torch.save(first, tmp_path / "one.bin")
    torch.save(second, tmp_path / "two.bin")
    (tmp_path / "pytorch_model.bin.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": index})
    )
    with pytest.raises(ConfigError, match="the index of shards"):
        checkpoint_weights(tmp_path, allow_pickle=True)


def test_a_pickle_is_opened_once_for_all_of_its_weights(tmp_path, monkeypatch):
    path = tmp_path / "pytorch_model.bin"
    torch.save({f"{i}.weight": torch.full((2,), float(i)) for i in range(50)}, path)
    found = checkpoint_weights(path, allow_pickle=True)
    opened = []
    load = torch.load
    monkeypatch.setattr(
        torch, "load", lambda *args, **named: opened.append(1) or load(*args, **named)
    )
    assert all(float(found[f"{i}.weight"]()[0]) == i for i in range(50))
    assert len(opened) <= 1


@pytest.mark.parametrize("modern", [True, False])
def test_tensors_of_new_and_old_files_are_read_by_name(modern, tmp_path):
    weights = {"a.weight": torch.randn(3, 4), "b": torch.arange(5).bfloat16()}
    path = tmp_path / "pytorch_model.bin"
    torch.save({"epoch": 3, "state_dict": weights}, path, _use_new_zipfile_serialization=modern)
    found = pickled_weights(path)
    assert {name: (each.dtype, each.shape) for name, each in found.items()} == {
        "a.weight": ("F32", (3, 4)),
        "b": ("BF16", (5,)),
    }
    assert all(torch.equal(found[name].make(), value) for name, value in weights.items())


@pytest.mark.parametrize("modern", [True, False])
def test_code_in_an_allowed_pickle_is_not_run(modern, tmp_path):
    mark, path = tmp_path / "ran", tmp_path / "pytorch_model.bin"
    torch.save({"a": torch.ones(2), "b": Runs(mark)}, path, _use_new_zipfile_serialization=modern)
    with pytest.raises(ConfigError, match="holds more than weights and is not read"):
        checkpoint_weights(path, allow_pickle=True)
    assert not mark.exists()
    torch.load(path, weights_only=False)  # the file does run code where it is trusted
    assert mark.exists()


def test_what_unpacks_to_more_than_its_size_or_repeats_a_number_is_refused(tmp_path):
    path, small = tmp_path / "pytorch_model.bin", tmp_path / "small.bin"
    torch.save({"a": torch.zeros(1 << 20)}, path)
    with zipfile.ZipFile(path) as held, zipfile.ZipFile(small, "w", zipfile.ZIP_DEFLATED) as packed:
        for part in held.infolist():
            packed.writestr(part.filename, held.read(part))
    with pytest.raises(ConfigError, match="would unpack to"):
        pickled_weights(small)
    torch.save({"a": torch.zeros(1).expand(1 << 40)}, path)
    with pytest.raises(ConfigError, match="no dense tensor"):
        pickled_weights(path)
    torch.save([1, 2], path)
    with pytest.raises(ConfigError, match="holds no tensors by name"):
        pickled_weights(path)


def rewritten(path, change, compression=zipfile.ZIP_STORED):
    """The file with its parts changed by a function of their name and bytes."""
    with zipfile.ZipFile(path) as held:
        parts = {name: held.read(name) for name in held.namelist()}
    with zipfile.ZipFile(path, "w", compression) as new:
        for name, content in parts.items():
            new.writestr(name, change(name, content))


def flipped(path):
    """A bit of the file's numbers is another."""
    content = bytearray(path.read_bytes())
    content[content.index(NUMBERS)] ^= 64
    path.write_bytes(content)


ARCHIVES = {
    "a part that is too short": (
        lambda path: rewritten(path, lambda name, it: it[:512] if "/data/" in name else it),
        "has 512 bytes, and its tensors need 1,024",
    ),
    "a compressed part": (
        lambda path: rewritten(path, lambda name, it: it, zipfile.ZIP_DEFLATED),
        "is compressed, which torch.save never does",
    ),
    "a flipped bit": (flipped, "Bad CRC-32"),
}


@pytest.mark.parametrize("kind", ARCHIVES)
def test_an_archive_whose_parts_are_not_as_torch_saved_them_is_refused(kind, tmp_path):
    path = tmp_path / "pytorch_model.bin"
    torch.save({"a": torch.frombuffer(bytearray(NUMBERS), dtype=torch.float32)}, path)
    damage, words = ARCHIVES[kind]
    damage(path)
    with pytest.raises(ConfigError, match=words):
        pickled_weights(path)
    with pytest.raises(ConfigError, match="is no whole file"):
        load_pickled(path)


def test_an_archive_without_sums_and_one_of_tensors_that_share_numbers_are_read(tmp_path):
    path = tmp_path / "pytorch_model.bin"
    weights = torch.randn(4, 4)
    tensors = {"a": weights, "b": weights.t(), "c": weights[1:], "d": weights.half()}
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(collections.OrderedDict(tensors), path)
    finally:
        torch.serialization.set_crc32_options(True)
    found = pickled_weights(path)
    assert all(torch.equal(found[name].make(), value) for name, value in tensors.items())


def of_package(name, pattern):
    """The directory of a checkpoint that an installed package ships."""
    found = importlib.util.find_spec(name)
    if found is None:
        pytest.skip(f"pip install --no-deps {name}")
    (config,) = Path(found.submodule_search_locations[0]).glob(pattern)
    return config.parent


@pytest.mark.slow
def test_the_bert_of_antiberty_is_read_and_diagnosed(tmp_path):
    directory = of_package("antiberty", "trained_models/*/config.json")
    with pytest.raises(ConfigError, match="--allow-pickle"):
        checkpoint_weights(directory)
    whole = torch.load(directory / "pytorch_model.bin", map_location="cpu", weights_only=True)
    found = checkpoint_weights(directory, allow_pickle=True)
    assert found.keys() == {name for name, value in whole.items() if value.is_floating_point()}
    assert all(torch.equal(read(), whole[name]) for name, read in found.items())
    opened = open_model(directory, torch.float32, allow_pickle=True)
    assert (opened.depth.blocks, opened.config.width) == (8, 512)
    arguments = [
        "diagnose",
        directory,
        "--allow-pickle",
        "--weights-only",
        "--fail-on",
        "serious",
        "--out",
        tmp_path,
    ]
    assert CliRunner().invoke(main, [str(each) for each in arguments]).exit_code == 0


@pytest.mark.slow
def test_the_albert_of_rxnmapper_is_read_from_an_old_file(tmp_path):
    directory = of_package("rxnmapper", "models/transformers/*/config.json")
    whole = torch.load(directory / "pytorch_model.bin", map_location="cpu", weights_only=True)
    found = checkpoint_weights(directory, allow_pickle=True)
    assert len(found) == 32
    assert all(torch.equal(read(), whole[name]) for name, read in found.items())
    arguments = [
        "diagnose",
        directory,
        "--allow-pickle",
        "--weights-only",
        "--fail-on",
        "serious",
        "--out",
        tmp_path,
    ]
    assert CliRunner().invoke(main, [str(each) for each in arguments]).exit_code == 0

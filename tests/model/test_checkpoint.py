import errno
import json
import os
import pickle
import resource
import tempfile
from pathlib import Path

import hypothesis.strategies as st
import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from torch import nn

from ctrans.dynamics.norm import NORMS
from ctrans.dynamics.weights.functions_of_depth import BASES
from ctrans.dynamics.weights.low_rank import adapt, factors
from ctrans.model.checkpoint import (
    ADAPTER,
    CONFIG,
    WEIGHTS,
    find_model,
    load,
    load_config,
    remove_base,
    save,
)
from ctrans.model.config import GPTConfig
from ctrans.model.gpt import GPT
from ctrans.model.sums import SUMS, listed_files, sums
from solvers import ConfigError
from tests.campaigns.disk import BrokenDisk
from tests.cases import RESIDUAL_CASES, VARIANTS
from tests.helpers import NAMES, learned, small_config, small_model, tokens


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_model_comes_back_bit_for_bit(name, dtype, tmp_path):
    model = small_model(name, dtype, dt=1 / 3)
    save(model, tmp_path)
    again = load(tmp_path)
    assert again.config == model.config == load_config(tmp_path)
    assert torch.equal(again(tokens())[0], model(tokens())[0])
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([CONFIG, WEIGHTS])


def parts_of(model):
    """What each tensor of the model is: whether it is trained, or that it is a buffer."""
    trained = {name: weight.requires_grad for name, weight in model.named_parameters()}
    return trained | {name: "buffer" for name, _ in model.named_buffers()}


TENSORS = {
    **{name: {"placement": "pre", "heads": 4, **changes} for name, changes in VARIANTS.items()},
    **{name: {"placement": place, **more} for name, (place, more) in RESIDUAL_CASES.items()},
    **{f"norm {name}": {"placement": "pre", "norm": name} for name in NORMS},
    **{f"{name} weights": {"placement": "pre", "depth_weights": name} for name in BASES},
}
"""Options of a model that decide which parameters and buffers it has."""


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(options, id=name, marks=[pytest.mark.slow] * ("depth_weights" in options))
        for name, options in TENSORS.items()
    ],
)
def test_each_tensor_is_after_loading_what_it_was(options, tmp_path):
    model = GPT(small_config(**options))
    save(model, tmp_path)
    assert parts_of(load(tmp_path)) == parts_of(model)


@pytest.mark.slow
def test_each_tensor_under_low_rank_updates_is_after_loading_what_it_was(tmp_path):
    model = GPT(small_config("pre", ffn="moe"))
    plain_parts = parts_of(model)
    adapt(model, [sublayer.field for sublayer in model.depth.sublayers], 2)
    save(model, tmp_path / "model")
    assert parts_of(load(tmp_path / "model", merge=False)) == parts_of(model)
    assert parts_of(load(tmp_path / "model")) == plain_parts


@pytest.mark.slow
@pytest.mark.parametrize("basis", sorted(BASES))
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_functions_of_depth_come_back_shared_and_are_stored_once(basis, dtype, tmp_path):
    model = small_model("peri", dtype, depth=6, depth_weights=basis, knots=3)
    save(model, tmp_path)
    again = load(tmp_path)
    assert torch.equal(again(tokens())[0], model(tokens())[0])
    stored = safetensors.torch.load_file(tmp_path / WEIGHTS)
    names = [name for name, _ in model.named_parameters()]
    assert sorted(stored) == sorted(names) == sorted(name for name, _ in again.named_parameters())
    assert torch.equal(load(tmp_path).at_depth(9)(tokens())[0], model.at_depth(9)(tokens())[0])


def test_a_configuration_from_before_there_were_functions_of_depth_still_loads(tmp_path):
    model = small_model("peri")
    save(model, tmp_path)
    saved = json.loads((tmp_path / CONFIG).read_text())
    (tmp_path / CONFIG).write_text(
        json.dumps({k: v for k, v in saved.items() if k not in ("depth_weights", "knots")})
    )
    forget_metadata(tmp_path)
    assert torch.equal(load(tmp_path)(tokens())[0], model(tokens())[0])


def forget_metadata(directory):
    """Makes the checkpoint one from before there were a checksum and a digest."""
    safetensors.torch.save_file(
        safetensors.torch.load_file(directory / WEIGHTS), directory / WEIGHTS
    )


CHANGED = {
    "dt": 0.9,
    "placement": "output",
    "eps": 0.1,
    "causal": False,
    "activation": "relu",
    "temperature": 2.0,
    "heads": 4,
}
"""Settings that the shapes of a Peri-LN model's weights do not depend on, or not alone."""


@pytest.mark.parametrize("name", sorted(CHANGED))
def test_weights_are_not_read_into_another_architecture_than_they_were_saved_with(name, tmp_path):
    model = small_model("peri")
    save(model, tmp_path)
    good = (tmp_path / CONFIG).read_text()
    changed = json.dumps({**json.loads(good), name: CHANGED[name]})
    (tmp_path / CONFIG).write_text(changed)
    with pytest.raises(ConfigError, match=r"config\.json' was changed after"):
        load(tmp_path)
    (tmp_path / CONFIG).write_text(good)
    assert load(tmp_path).config == model.config


def test_a_configuration_that_says_the_same_in_another_layout_is_the_same(tmp_path):
    model = small_model("peri")
    save(model, tmp_path)
    settings = json.loads((tmp_path / CONFIG).read_text())
    (tmp_path / CONFIG).write_text(json.dumps(dict(reversed(settings.items()))) + "\r\n")
    assert torch.equal(load(tmp_path)(tokens())[0], model(tokens())[0])


def test_damage_is_named(tmp_path):
    save(small_model("peri"), tmp_path)
    good = (tmp_path / WEIGHTS).read_bytes()
    for data in (good[:-1], good[:100], good[:7], b"", good + b"0", b"\xff" * 8 + good[8:]):
        (tmp_path / WEIGHTS).write_bytes(data)
        with pytest.raises(ConfigError, match="no complete safetensors file"):
            load(tmp_path)
    (tmp_path / WEIGHTS).unlink()
    with pytest.raises(ConfigError, match="cannot read"):
        load(tmp_path)
    (tmp_path / CONFIG).unlink()
    with pytest.raises(ConfigError, match=r"holds no model of ctrans: give one"):
        load(tmp_path)


@pytest.mark.slow
@settings(max_examples=40)
@given(st.data())
def test_no_flipped_bit_goes_unseen(data):
    with tempfile.TemporaryDirectory() as place:
        model = small_model("peri", depth=1, width=4, context=2)
        save(model, place)
        path = Path(place) / WEIGHTS
        good = bytearray(path.read_bytes())
        header = 8 + int.from_bytes(good[:8], "little")
        part = data.draw(st.sampled_from([(0, 8), (8, header), (header, len(good))]))
        good[data.draw(st.integers(part[0], part[1] - 1))] ^= 1 << data.draw(st.integers(0, 7))
        path.write_bytes(good)
        again, message = outcome(place)
        if again is None:
            assert str(path) in message
            assert "\n" not in message
        else:  # a space, or a name in the metadata, on which no weight depends
            assert all(
                torch.equal(a, b)
                for a, b in zip(model.parameters(), again.parameters(), strict=True)
            )


def outcome(directory):
    try:
        return load(directory), None
    except ConfigError as error:
        return None, str(error)


@pytest.mark.parametrize(
    "write", [torch.save, lambda value, path: path.write_bytes(pickle.dumps(value))]
)
def test_a_pickle_is_refused_and_not_run(write, tmp_path):
    save(small_model("peri"), tmp_path)
    write({"a": Trap(tmp_path / "ran")}, tmp_path / WEIGHTS)
    with pytest.raises(ConfigError, match="may run code"):
        load(tmp_path)
    assert not (tmp_path / "ran").exists()


class Trap:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


@pytest.mark.cases(2)
@pytest.mark.parametrize("fails", ["write", "fsync", "replace"])
def test_a_failed_save_leaves_the_earlier_model_and_nothing_else(fails, tmp_path, monkeypatch):
    before, after = small_model("peri"), learned(small_model("peri"), seed=7)
    save(before, tmp_path)

    def full(*args):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    if fails == "write":
        monkeypatch.setattr(Path, "open", full)
    else:
        monkeypatch.setattr(os, fails, full)
    with pytest.raises(
        ConfigError, match=r"cannot write a checkpoint to .*: No space left on device"
    ):
        save(after, tmp_path)
    monkeypatch.undo()
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([CONFIG, WEIGHTS])
    assert torch.equal(load(tmp_path)(tokens())[0], before(tokens())[0])


def test_a_save_over_another_model_that_is_killed_leaves_one_of_the_two_or_is_refused(tmp_path):
    """Each of the two files is whole, but a kill between them leaves files of different models:
    they are never read as one.
    """
    before, after = small_model("peri"), learned(small_model("post"), seed=7)
    expected = {"before": before(tokens())[0], "after": after(tokens())[0]}

    class Killed(BaseException):
        pass

    def dying(path):
        raise Killed

    with BrokenDisk(tmp_path) as disk:
        save(after, tmp_path / "count")
    seen = []
    for number in range(1, disk.count + 1):
        save(before, tmp_path / str(number))
        with pytest.raises(Killed), BrokenDisk(tmp_path, number, dying, lasting=True):
            save(after, tmp_path / str(number))
        try:
            found = load(tmp_path / str(number))(tokens())[0]
        except ConfigError as error:
            seen.append("refused" if "was changed after" in str(error) else str(error))
        else:
            seen.append(*[name for name, logits in expected.items() if torch.equal(logits, found)])
    assert list(dict.fromkeys(seen)) == ["before", "refused", "after"]


def test_a_run_gives_its_best_model_and_never_another_in_its_place(tmp_path):
    first, second = small_model("peri"), small_model("pre")
    save(first, tmp_path / "checkpoints" / "1")
    (tmp_path / "last").symlink_to("checkpoints/1")
    with pytest.raises(
        ConfigError, match="best', the best model of the run, is missing: give another checkpoint"
    ):
        load(tmp_path)
    (tmp_path / "best").symlink_to("checkpoints/2")
    with pytest.raises(ConfigError, match="best', the best model of the run, leads nowhere"):
        load_config(tmp_path)
    save(second, tmp_path / "checkpoints" / "2")
    assert load_config(tmp_path) == second.config
    assert torch.equal(load(tmp_path)(tokens())[0], second(tokens())[0])
    assert find_model(tmp_path / "last") == (tmp_path / "checkpoints" / "1").resolve()
    save(first, tmp_path)
    assert load_config(tmp_path) == first.config


def test_the_best_of_a_run_that_was_overwritten_is_refused(tmp_path):
    for name, place in (("best", "checkpoints/1"), ("last", "checkpoints-2/1")):
        save(small_model("peri"), tmp_path / place)
        (tmp_path / name).symlink_to(place)
    with pytest.raises(ConfigError, match="best' is of a run that was overwritten"):
        load(tmp_path)


@pytest.mark.parametrize("name", ["train.json", "config.json", "model.safetensors", "SHA256SUMS"])
def test_files_of_a_run_are_bound_to_each_other(name, tmp_path):
    for seed in (1, 2):
        place = tmp_path / str(seed)
        save(learned(GPT(small_config("peri", temperature=float(seed))), seed=seed), place)
        (place / "train.json").write_text(json.dumps({"seed": seed}))
        (place / SUMS).write_bytes(sums(place))
    load(tmp_path / "1")
    (tmp_path / "1" / name).write_bytes((tmp_path / "2" / name).read_bytes())
    with pytest.raises(ConfigError, match="SHA"):
        load(tmp_path / "1")
    (tmp_path / "1" / name).unlink()
    with pytest.raises(ConfigError, match=name):
        load(tmp_path / "1")


@pytest.mark.parametrize("kind", ["a pipe", "of zeros without end", "too large", "one long name"])
def test_sums_that_are_no_small_file_are_one_line_for_little_memory(kind, tmp_path):
    save(small_model("peri"), tmp_path)
    (tmp_path / "train.json").write_text("{}")
    path = tmp_path / SUMS
    if kind == "a pipe":
        os.mkfifo(path)
    elif kind == "of zeros without end":
        path.symlink_to("/dev/zero")
    elif kind == "too large":
        path.touch()
        os.truncate(path, 1 << 35)
    else:
        path.write_bytes(sums(tmp_path) + 10**5 * b"x" + b"\n")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(
        ConfigError, match=SUMS if kind != "one long name" else "is missing"
    ) as said:
        load(tmp_path)
    assert len(str(said.value)) < 500
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 << 10
    names = listed_files(tmp_path)
    assert (names is not None) == (kind == "one long name")


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
    saved = json.loads((tmp_path / CONFIG).read_text())
    (tmp_path / CONFIG).write_text(json.dumps({**saved, **changes}))
    forget_metadata(tmp_path)
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


def test_equal_models_are_equal_bytes(tmp_path):
    files = []
    for i in range(8):  # the library's order of metadata is drawn anew each time
        save(GPT(GPTConfig(depth=1, width=16, heads=2)), tmp_path / str(i))
        files.append((tmp_path / str(i) / "model.safetensors").read_bytes())
    assert len(set(files)) == 1
    assert (int.from_bytes(files[0][:8], "little")) % 8 == 0
    assert safetensors.torch.load(files[0])["token_embedding.weight"].shape == (256, 16)


def stored_as(directory, dtypes):
    """A model's file with weights of these dtypes in turn, and without sums."""
    save(small_model("peri", torch.float32), directory)
    forget_metadata(directory)
    weights = safetensors.torch.load_file(directory / WEIGHTS)
    changed = {
        name: value.to(dtypes[i % len(dtypes)]) for i, (name, value) in enumerate(weights.items())
    }
    safetensors.torch.save_file(changed, directory / WEIGHTS)
    return changed


def test_weights_of_several_dtypes_are_read_in_one_that_holds_them_all(tmp_path):
    stored = stored_as(tmp_path, [torch.float16, torch.bfloat16])
    model = load(tmp_path)
    assert all(
        torch.equal(model.state_dict()[name], value.float()) for name, value in stored.items()
    )
    assert model(tokens())[0].dtype is torch.float32


def test_weights_of_one_byte_are_refused(tmp_path):
    stored_as(tmp_path, [torch.float32, torch.float8_e4m3fn])
    with pytest.raises(ConfigError, match=r"holds torch.float8_e4m3fn"):
        load(tmp_path)


def low_rank(seed):
    """A model with updates that are not 0."""
    model = learned(small_model("pre"), seed=seed)
    maps = [part for part in model.depth.modules() if isinstance(part, nn.Linear)]
    adapt(model, maps, 2)
    with torch.no_grad():
        for update in factors(model).values():
            update.copy_(torch.randn(update.shape))
    return model


def test_a_model_over_one_with_updates_and_the_reverse_is_the_one_that_is_loaded(tmp_path):
    updated = low_rank(0)
    whole = learned(small_model("pre"), seed=7)
    for last in (updated, whole, updated):
        save(last, tmp_path / "model")
        assert torch.equal(load(tmp_path / "model", merge=False)(tokens())[0], last(tokens())[0])
        weights = {path.name for path in (tmp_path / "model").glob("*.safetensors")}
        assert len(weights) == 1, "the earlier model is gone"


def test_updates_of_others_stay_and_a_model_is_not_saved_beside_them(tmp_path):
    safetensors.torch.save_file({"a": torch.ones(1)}, tmp_path / ADAPTER)
    before = (tmp_path / ADAPTER).read_bytes()
    with pytest.raises(ConfigError, match="was not saved by ctrans"):
        save(small_model("pre"), tmp_path)
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [before]


def test_weights_of_users_in_the_place_of_a_base_stay(tmp_path):
    save(small_model("peri"), tmp_path / "base")
    (tmp_path / "base" / CONFIG).unlink()
    before = (tmp_path / "base" / WEIGHTS).read_bytes()
    with pytest.raises(ConfigError, match="has other weights than those"):
        save(low_rank(0), tmp_path / "model")
    assert (tmp_path / "base" / WEIGHTS).read_bytes() == before


def test_an_unfinished_base_goes_and_a_users_copy_of_its_file_stays(tmp_path):
    for name in (".config.json.12", ".model.safetensors.345", ".config.json.1.bak"):
        (tmp_path / name).write_text("")
    remove_base(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [".config.json.1.bak"]

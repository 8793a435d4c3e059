"""nanoGPT checkpoints: the same logits, the same bits, and nothing executed."""

import collections
import dataclasses
import io
import pickle
import time
import zipfile

import numpy as np
import pytest
import torch

from ctrans.interop import from_nanogpt, to_nanogpt
from ctrans.model.gpt import GPT
from solvers import ConfigError
from tests.helpers import NAMES, learned, small_config, tokens
from tests.interop import plain_nanogpt

HEADS = 2
NANO = {"placement": "pre", "dt": 1.0}


def equal(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("bias", [True, False])
def test_logits_are_those_of_nanogpt(bias):
    w = plain_nanogpt.weights(bias=bias)
    expected = plain_nanogpt.logits(w, tokens(), HEADS)
    assert torch.allclose(
        from_nanogpt(w, heads=HEADS)(tokens())[0],
        expected,
        rtol=1e-6,
        atol=1e-6 * float(expected.abs().max()),
    )


@pytest.mark.parametrize("bias", [True, False])
def test_round_trip_keeps_every_bit(bias):
    w = plain_nanogpt.weights(bias=bias)
    assert equal(to_nanogpt(from_nanogpt(w, heads=HEADS))["model"], w)
    model = learned(GPT(small_config(bias=bias, **NANO)))
    back = from_nanogpt(to_nanogpt(model))
    assert equal(back.state_dict(), model.state_dict())
    assert torch.equal(back(tokens())[0], model(tokens())[0])
    changes = {
        "initialisation": model.config.initialisation,
        "embedding_std": model.config.embedding_std,
    }
    assert dataclasses.replace(back.config, **changes) == model.config


def test_checkpoint_on_disk_is_read_as_nanogpt_and_its_compiler_write_it(tmp_path):
    w = plain_nanogpt.weights()
    mask = {"transformer.h.0.attn.bias": torch.ones(1, 1, 12, 12).tril()}
    checkpoint = {
        "model": {f"_orig_mod.{name}": value for name, value in {**w, **mask}.items()},
        "model_args": {
            "n_layer": 2,
            "n_head": HEADS,
            "n_embd": 16,
            "block_size": 12,
            "bias": True,
            "vocab_size": 11,
            "dropout": 0.1,
        },
        "optimizer": torch.optim.AdamW([torch.nn.Parameter(torch.ones(2))]).state_dict(),
        "iter_num": 3,
        "best_val_loss": torch.tensor(1.0),
        "config": {"dataset": "shakespeare_char", "learning_rate": 1e-3, "compile": True},
    }
    torch.save(checkpoint, tmp_path / "ckpt.pt")
    assert equal(to_nanogpt(from_nanogpt(tmp_path / "ckpt.pt"))["model"], w)


def test_export_has_the_settings_that_nanogpt_builds_its_model_from():
    arguments = to_nanogpt(GPT(small_config(**NANO)))["model_args"]
    assert arguments == {
        "vocab_size": 11,
        "block_size": 16,
        "n_layer": 3,
        "n_head": 2,
        "n_embd": 16,
        "bias": True,
        "dropout": 0.0,
    }


@pytest.mark.parametrize("placement", [name for name in NAMES if name != "pre"])
def test_placements_that_nanogpt_lacks_are_refused(placement):
    with pytest.raises(ConfigError, match="placement = "):
        to_nanogpt(GPT(small_config(placement, dt=1.0)))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("norm", "rmsnorm"),
        ("dt", 0.1),
        ("activation", "relu"),
        ("ffn_width", 20),
        ("causal", False),
        ("temperature", 2.0),
        ("qk_norm", True),
        ("eps", 1e-6),
        ("depth_weights", "linear"),
    ],
)
def test_settings_that_nanogpt_lacks_are_refused(name, value):
    with pytest.raises(ConfigError, match=f"{name} = "):
        to_nanogpt(GPT(small_config(**{**NANO, name: value})))


class Harmful:
    def __reduce__(self):
        return exec, ("raise SystemExit('code of a checkpoint was run')",)


def test_files_that_hold_code_are_refused_and_not_run(tmp_path):
    torch.save({"model": Harmful()}, tmp_path / "ckpt.pt")
    (tmp_path / "plain.pt").write_bytes(pickle.dumps(Harmful()))
    for name in ("ckpt.pt", "plain.pt"):
        with pytest.raises(ConfigError, match=r"is not read|no whole file") as caught:
            from_nanogpt(tmp_path / name)
        assert "\n" not in str(caught.value)


def spoiled(change):
    w = plain_nanogpt.weights()
    change(w)
    return w


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (
            spoiled(lambda w: w.pop("transformer.h.1.ln_2.weight")),
            r"'transformer.h.1.ln_2.weight' is absent, expected \(16,\)",
        ),
        (spoiled(lambda w: w.update({"extra": torch.ones(1)})), "'extra' is"),
        (spoiled(lambda w: w.update({"lm_head.weight": torch.ones(11, 16)})), "has an untied head"),
        (spoiled(lambda w: w.pop("transformer.wte.weight")), "no nanoGPT model"),
        (spoiled(lambda w: w.update({"note": "text"})), "some entries are not weights"),
        (
            spoiled(lambda w: w.update({"lm_head.weight": torch.ones(11, 16).to_sparse()})),
            "some entries are not weights, which are dense",
        ),
        (
            spoiled(lambda w: w.update({"transformer.ln_f.weight": torch.ones(16, device="meta")})),
            "some entries are not weights",
        ),
        (
            {"model": plain_nanogpt.weights(), "model_args": [HEADS]},
            "its model_args are a list and not a dict of settings",
        ),
        ({}, "no nanoGPT model"),
    ],
)
def test_state_dicts_that_are_none_of_nanogpts_are_refused(source, words):
    with pytest.raises(ConfigError, match=words):
        from_nanogpt(source, heads=HEADS)


def test_heads_must_be_known():
    with pytest.raises(ConfigError, match=r"give heads=\.\.\."):
        from_nanogpt(plain_nanogpt.weights())


def refusal(source):
    """What is said against it, empty where it is read."""
    try:
        from_nanogpt(source)
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@pytest.mark.parametrize("in_zip", [True, False])
def test_a_checkpoint_with_any_byte_changed_is_read_or_refused_in_a_line(in_zip, tmp_path):
    file = io.BytesIO()
    checkpoint = {"model": plain_nanogpt.weights(), "model_args": {"n_head": HEADS}}
    torch.save(checkpoint, file, _use_new_zipfile_serialization=in_zip)
    whole, random, refused = file.getvalue(), np.random.default_rng(0), 0
    start = whole.index(b"model") - 20  # where names and types are, which damage changes most
    for _ in range(150):
        damaged = bytearray(whole)
        damaged[start + random.integers(700)] = random.integers(256)
        (tmp_path / "ckpt.pt").write_bytes(damaged)
        said = refusal(tmp_path / "ckpt.pt")
        assert "\n" not in said
        refused += bool(said)
    assert refused > 50


@pytest.mark.parametrize(
    "error",
    [
        KeyError(3),
        IndexError("pop from empty list"),
        TypeError("a"),
        AttributeError("b"),
        AssertionError(),
    ],
)
def test_whatever_the_reader_of_a_damaged_file_raises_is_a_line(error, tmp_path, monkeypatch):
    def fail(*_, **__):
        raise error

    (tmp_path / "ckpt.pt").touch()
    monkeypatch.setattr(torch, "load", fail)
    words = rf"no whole file of torch.save: copy or save it again \({type(error).__name__}"
    with pytest.raises(ConfigError, match=words):
        from_nanogpt(tmp_path / "ckpt.pt")


def test_a_file_that_was_cut_is_no_whole_one_wherever_it_was_cut(tmp_path):
    path = tmp_path / "ckpt.pt"
    torch.save({"a": torch.ones(1000), "b": torch.ones(1000)}, path)
    content = path.read_bytes()
    for length in (0, 1, 10, 100, len(content) // 2, len(content) - 30, len(content) - 1):
        path.write_bytes(content[:length])
        with pytest.raises(
            ConfigError, match=r"no whole file of torch\.save: copy or save it again"
        ):
            from_nanogpt(path)


def test_files_that_cannot_be_read_are_refused_in_one_line(tmp_path):
    (tmp_path / "cut.pt").write_bytes(b"PK\x03\x04 and no more")
    (tmp_path / "empty.pt").write_bytes(b"")
    torch.save(torch.ones(2), tmp_path / "tensor.pt")
    for name in ("absent.pt", "cut.pt", "empty.pt", "tensor.pt", "."):
        with pytest.raises(ConfigError) as caught:
            from_nanogpt(tmp_path / name)
        assert "\n" not in str(caught.value)


def test_an_archive_that_spans_disks_is_refused(tmp_path):
    locator = b"PK\x06\x07" + bytes(12) + (2).to_bytes(4, "little")
    (tmp_path / "ckpt.pt").write_bytes(
        b"PK\x03\x04" + bytes(56) + locator + b"PK\x05\x06" + bytes(18)
    )
    with pytest.raises(ConfigError, match="no whole file"):
        from_nanogpt(tmp_path / "ckpt.pt")


def pickled(path, bytes_of_pickle):
    """A whole archive of torch.save with that pickle in it."""
    torch.save({}, path.with_suffix(".whole"))
    with (
        zipfile.ZipFile(path.with_suffix(".whole")) as whole,
        zipfile.ZipFile(path, "w") as archive,
    ):
        for name in whole.namelist():
            archive.writestr(
                name, bytes_of_pickle if name.endswith("data.pkl") else whole.read(name)
            )


DOUBLED = b"".join(b"h%c\x86q%c" % (i, i + 1) for i in range(60))
"""Pairs of pairs, of which each has the one before twice."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "bytes_of_pickle",
    [
        b"\x80\x02}X\x01\x00\x00\x00xcbuiltins\nbytearray\n\x8a\x05\x00\xf2\x05*\x01\x85Rs.",
        b"\x80\x02}K\x01q\x00" + DOUBLED + b"K\x01s.",
    ],
    ids=["bytes beyond the file", "a key whose hash takes years"],
)
def test_a_pickle_that_costs_more_than_its_model_is_refused(bytes_of_pickle, tmp_path, monkeypatch):
    monkeypatch.setattr("ctrans.interop.pickled.SECONDS", 2)
    pickled(tmp_path / "ckpt.pt", bytes_of_pickle)
    began = time.monotonic()
    with pytest.raises(ConfigError, match="a model of its size needs less"):
        from_nanogpt(tmp_path / "ckpt.pt")
    assert time.monotonic() - began < 30


def with_attribute(value, name):
    weight = torch.nn.Parameter(value)
    setattr(weight, name, 3)
    return weight


def test_attributes_that_a_file_gives_to_its_objects_are_without_effect(tmp_path):
    w = {name: with_attribute(value, "numel") for name, value in plain_nanogpt.weights().items()}
    model = collections.OrderedDict(w)
    model.__dict__["get"] = model.__dict__["values"] = 3
    torch.save({"model": model, "model_args": {"n_head": HEADS}}, tmp_path / "ckpt.pt")
    assert equal(to_nanogpt(from_nanogpt(tmp_path / "ckpt.pt"))["model"], plain_nanogpt.weights())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"block_size": torch.ones(2)}, "has block_size = a tensor"),
        ({"dropout": 1j}, "has dropout = a complex"),
        ({"random_seed": [[]]}, "has random_seed = "),
        ({"lmbda": 10**400}, "lmbda = a number of 401 digits: it must be at least 0"),
        ({(1, 2): 3}, "unknown setting"),
    ],
)
def test_settings_of_other_kinds_are_named(arguments, words):
    with pytest.raises(ConfigError, match=words):
        from_nanogpt(
            {"model": plain_nanogpt.weights(), "model_args": {"n_head": HEADS, **arguments}}
        )


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            lambda w: w.update({f"_orig_mod.{name}": value + 1 for name, value in [*w.items()]}),
            "twice, once with the prefix",
        ),
        (
            lambda w: w.update({name: value.to(torch.float8_e4m3fn) for name, value in w.items()}),
            "float8",
        ),
        (
            lambda w: w.update({"lm_head.weight": w["lm_head.weight"].double()}),
            "has an untied head",
        ),
    ],
)
def test_weights_of_which_some_would_be_lost_are_refused(change, words):
    with pytest.raises(ConfigError, match=words):
        from_nanogpt(spoiled(change), heads=HEADS)


def test_weights_of_several_dtypes_keep_their_bits():
    names = ("transformer.wte.weight", "lm_head.weight")
    w = {
        name: value.bfloat16() if name in names else value.double()
        for name, value in plain_nanogpt.weights().items()
    }
    assert equal(
        to_nanogpt(from_nanogpt(w, heads=HEADS))["model"],
        {name: value.double() for name, value in w.items()},
    )


def test_a_model_whose_weights_are_not_finite_is_read():
    w = {name: value * torch.nan for name, value in plain_nanogpt.weights().items()}
    assert from_nanogpt(w, heads=HEADS).config.depth == 2

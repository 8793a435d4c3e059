"""Data: batches as functions of the step, an honest split, and files that are not what they should
be.
"""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ctrans.training import data
from ctrans.training.data import Data, from_bin, from_text
from solvers import ConfigError
from tests.typecheck import allow


def counting(tokens, context=8):
    """Tokens that are their own positions, so that a window shows where it was taken."""
    cut = tokens - tokens // 10
    every = np.arange(tokens)
    return data.Data(every[:cut], every[cut:], context, "counting")


def write_bins(directory, train=range(100), validation=range(50)):
    for name, values in (("train.bin", train), ("val.bin", validation)):
        np.array(values, dtype="<u2").tofile(directory / name)
    return directory


@given(
    st.integers(0, 10**9),
    st.integers(0, 5),
    st.integers(0, 2**63 - 1),
    st.sampled_from([1, 2, 3, 4, 6, 12]),
)
def test_processes_share_the_batch_that_one_process_draws(step, micro, seed, world):
    source = counting(1000)
    whole = source.batch(step, micro, batch=12, seed=seed)
    shares = [
        source.batch(step, micro, batch=12, seed=seed, rank=rank, world=world)
        for rank in range(world)
    ]
    for i in range(2):
        assert torch.equal(torch.cat([share[i] for share in shares]), whole[i])


def test_windows_are_consecutive_tokens_and_targets_the_ones_after():
    tokens, targets = counting(1000).batch(3, 0, batch=50, seed=1)
    assert torch.equal(tokens, tokens[:, :1] + torch.arange(8))
    assert torch.equal(targets, tokens + 1)


def test_every_start_is_equally_likely_and_no_window_reaches_into_validation():
    source = counting(100, context=8)
    starts = torch.cat([source.batch(step, 0, batch=100, seed=5)[0][:, 0] for step in range(200)])
    assert source.batch(0, 0, batch=1000, seed=0)[1].max() == 89
    counts = torch.bincount(starts, minlength=82).double()
    assert len(counts) == 82
    chi_square = ((counts - 20000 / 82) ** 2 / (20000 / 82)).sum()
    assert 45 < chi_square < 130  # 81 degrees of freedom: mean 81, standard deviation 12.7


def test_seeds_steps_and_micro_batches_draw_differently():
    source = counting(100_000)
    draws = [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1)]
    starts = {
        tuple(source.batch(step, micro, batch=8, seed=seed)[0][:, 0].tolist())
        for seed, step, micro in draws
    }
    assert len(starts) == 4


def test_the_last_tenth_is_validation_and_its_windows_are_spread_over_all_of_it():
    source = from_text(bytes(range(200)), 4)
    tokens, targets = source.validation_windows(100)
    assert tokens[:, 0].tolist() == list(range(180, 196))  # every window there is, each once
    assert targets.max() == 199
    assert source.validation_windows(2)[0][:, 0].tolist() == [180, 195]
    assert source.batch(0, 0, batch=500, seed=0)[1].max() <= 179


def test_nanogpts_files_are_mapped_and_give_their_tokens(tmp_path):
    source = from_bin(write_bins(tmp_path, train=range(40000, 40100)), 8)
    assert isinstance(source.train, np.memmap)
    tokens, targets = source.batch(0, 0, batch=4, seed=0)
    assert tokens.dtype == torch.int64
    assert tokens.min() >= 40000
    assert torch.equal(targets, tokens + 1)


def test_bins_of_odd_length_missing_or_empty_are_named(tmp_path):
    with pytest.raises(ConfigError, match=r"cannot read .*train\.bin"):
        from_bin(tmp_path, 8)
    write_bins(tmp_path)
    (tmp_path / "val.bin").write_bytes(b"123")
    with pytest.raises(ConfigError, match=r"val\.bin' has 3 bytes"):
        from_bin(tmp_path, 8)
    (tmp_path / "val.bin").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"val\.bin' has 0 bytes"):
        from_bin(tmp_path, 8)


def test_a_token_beyond_the_vocabulary_is_found_in_any_piece(tmp_path, monkeypatch):
    monkeypatch.setattr(data, "PIECE", 7)
    source = from_bin(write_bins(tmp_path, validation=[*range(50), 300, 1]), 8)
    source.check_vocabulary(301)
    with pytest.raises(
        ConfigError, match=r"token 300 in its validation tokens 49 to 51 .*--vocab-size 301"
    ):
        source.check_vocabulary(300)


def test_text_shorter_than_a_sequence_is_refused():
    with pytest.raises(ConfigError, match="9 tokens for training and a sequence needs 10"):
        from_text(b"123456789", 9)
    with pytest.raises(ConfigError, match="2 tokens for validation and a sequence needs 5"):
        from_text(bytes(20), 4)


def test_a_batch_larger_than_the_data_is_refused():
    source = counting(100)
    source.check_batch(11)
    with pytest.raises(
        ConfigError, match="12 sequences of 8 tokens an iteration are more than the 90"
    ):
        source.check_batch(12)


def test_a_batch_that_processes_cannot_share_is_refused():
    with pytest.raises(ConfigError, match="multiple of 3"):
        counting(100).batch(0, 0, batch=4, seed=0, world=3)


def test_the_fingerprint_tells_other_data():
    first = from_text(bytes(range(200)), 4).fingerprint()
    assert from_text(bytes(range(200)), 4).fingerprint() == first
    assert from_text(bytes(range(200)) + b"x", 4).fingerprint() != first
    assert from_text(bytes(199) + b"\x01", 4).fingerprint() != first


BLANK = from_text(bytes(200_000), 4).fingerprint()


@pytest.mark.slow
@given(st.integers(0, 199_999))
def test_the_fingerprint_sees_every_token_of_a_text_of_usual_size(place):
    text = bytearray(200_000)
    text[place] = 1
    assert from_text(bytes(text), 4).fingerprint() != BLANK


def test_a_file_that_gets_another_size_while_it_is_mapped_is_named(tmp_path):
    """To read beyond its end would kill the process."""
    for name in ("train.bin", "val.bin"):
        np.zeros(2000, dtype=np.uint16).tofile(tmp_path / name)
    data = from_bin(tmp_path, 4)
    data.batch(0, 0, batch=2, seed=0)
    (tmp_path / "train.bin").write_bytes(b"")
    for read in (
        lambda: data.batch(1, 0, batch=2, seed=0),
        lambda: data.check_vocabulary(2),
        data.floors,
    ):
        with pytest.raises(ConfigError, match=r"train\.bin' changed while it was read"):
            read()
    (tmp_path / "val.bin").unlink()
    data.validation_windows(1)


def test_the_fingerprint_sees_every_token_of_a_long_text():
    """Also those between the stretches that earlier versions of ctrans sampled."""
    text = bytearray(2_000_000)
    data = from_text(bytes(text), 4)
    sampled = data._sampled_fingerprint()
    saved = data.fingerprint()
    assert data.matches(saved)
    assert data.matches(sampled), "a run of an earlier version goes on"
    text[1500] = 1  # the first stretches begin at tokens 0 and 1758
    changed = from_text(bytes(text), 4)
    assert changed.matches(sampled)
    assert not changed.matches(saved)


@pytest.mark.cases(1)
@pytest.mark.parametrize("wrong", [-1, 2**24, 2**40])
@pytest.mark.parametrize("split", ["train", "validation"])
def test_ids_that_no_vocabulary_has_are_refused_before_they_are_counted(split, wrong):
    splits = {"train": np.arange(99) % 7, "validation": np.arange(99) % 7}
    splits[split] = np.append(splits[split], wrong)
    with pytest.raises(ConfigError, match=rf"token {wrong} in its \w+ tokens.*give ids"):
        Data(**splits, context=8, name="x")
    splits[split][-1] = 2**24 - 1
    assert all(
        math.isfinite(loss) for loss in Data(**splits, context=8, name="x").floors().values()
    )


@pytest.mark.parametrize("value", [1.5, float("nan"), True])
def test_tokens_that_are_no_integers_are_refused_with_one(value):
    tokens = np.full(100, value)
    allow(False)  # the tests' type checks would find it first
    with pytest.raises(ConfigError, match=f"the training token {value} of type"):
        Data(tokens, tokens, 8, "it")


@pytest.mark.parametrize("kind", ["<u4", "<i4", "<i8"])
@pytest.mark.parametrize("most", [200, 50_000, 100_000])
def test_ids_of_four_bytes_are_not_read_as_twice_as_many_of_two(kind, most, tmp_path):
    ids = np.random.default_rng(0).integers(1, most, 4000)
    ids.astype(kind).tofile(tmp_path / "train.bin")
    ids.astype("<u2").tofile(tmp_path / "val.bin")
    with pytest.raises(ConfigError, match=r"train\.bin' has at most 15 at every second .*uint16"):
        from_bin(tmp_path, 8)


@pytest.mark.parametrize("most", [2, 10, 256, 50_000])
def test_ids_of_two_bytes_are_read_however_few_kinds_there_are(most, tmp_path):
    ids = np.random.default_rng(0).integers(0, most, 4000)
    for name in ("train.bin", "val.bin"):
        ids.astype("<u2").tofile(tmp_path / name)
    assert np.array_equal(from_bin(tmp_path, 8).train, ids % 65536)
    np.zeros(4000, "<u2").tofile(tmp_path / "train.bin")
    assert not from_bin(tmp_path, 8).train.any()


def test_a_long_text_is_counted_all_over(monkeypatch):
    """A text whose halves have other words: its start alone would know half of them."""
    halves = np.repeat(np.arange(2), 3200) * 50 + np.random.default_rng(0).integers(0, 50, 6400)
    data = Data(halves, halves, 8, "two halves")
    whole = data.frequencies_loss()
    monkeypatch.setattr("ctrans.training.data.COUNTED", 1600)
    assert data.frequencies_loss() == pytest.approx(whole, abs=0.05)

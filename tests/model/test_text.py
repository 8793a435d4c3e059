import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ctrans.model.text import VOCABULARY, default_text, read_text, to_tokens, windows
from solvers import ConfigError


def test_the_default_text_is_long_english_prose():
    text = default_text()
    assert len(text) > 300_000
    assert text.decode().count(" the ") > 1000


@given(
    data=st.binary(min_size=2, max_size=200), batch=st.integers(1, 5), length=st.integers(1, 300)
)
def test_windows_are_bytes_of_the_text_spread_from_its_start_to_its_end(data, batch, length):
    tokens = to_tokens(data, batch, length)
    size = min(length, len(data))
    assert tokens.shape == (batch, size)
    assert 0 <= int(tokens.min()) <= int(tokens.max()) < VOCABULARY
    assert bytes(tokens[0].tolist()) == data[:size]
    for window in tokens:
        assert bytes(window.tolist()) in data
    if batch > 1:
        assert bytes(tokens[-1].tolist()) == data[len(data) - size :]


def test_a_file_is_read_as_it_is(tmp_path):
    data = np.random.default_rng(0).integers(0, 256, 1000, dtype=np.uint8).tobytes()
    (tmp_path / "x").write_bytes(data)
    assert read_text(tmp_path / "x") == data
    assert read_text(text="é") == "é".encode()


def test_what_cannot_be_read_is_named(tmp_path):
    for name, words in [
        (tmp_path / "absent", "No such file"),
        (tmp_path, "directory"),
        ("a\0b", "null"),
    ]:
        with pytest.raises(ConfigError, match=words):
            read_text(name)
    with pytest.raises(ConfigError, match="choose one"):
        read_text("a", "b")
    with pytest.raises(ConfigError, match="1 tokens"):
        to_tokens(b"a", 1, 4)


def test_tokens_index_an_embedding():
    assert to_tokens(b"hello", 2, 3).dtype == torch.int64


@pytest.mark.parametrize(
    ("ids", "words"),
    [
        (np.array([1.0, 2.5]), "numbers of float64, such as 1.0"),
        (np.array([np.nan, 1.0]), "such as nan"),
        (np.array([True, False]), "numbers of bool"),
        (np.array([1, 2**64 - 1], dtype=np.uint64), "18446744073709551615 is too large"),
    ],
)
def test_ids_that_are_no_whole_numbers_of_64_bits_are_refused(ids, words):
    with pytest.raises(ConfigError, match=words):
        windows(ids, 1, 2)

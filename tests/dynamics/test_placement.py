"""How a model's placements are spelt: one text for all that mean the same, and the arrangement is
got back from it.
"""

import dataclasses
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ctrans.dynamics.placement import PLACEMENTS, arrange, check_arrangement, spell, spell_for
from ctrans.model.config import GPTConfig
from solvers import ConfigError

names = st.sampled_from(sorted(PLACEMENTS))
entries = st.one_of(names, st.tuples(names, names))
blocks = st.lists(entries, min_size=1, max_size=12)


def config(depth, placement):
    """What a user makes, who may give what the field's annotation does not say."""
    made = object.__new__(GPTConfig)
    for key, value in {
        **dataclasses.asdict(GPTConfig()),
        "depth": depth,
        "placement": placement,
    }.items():
        object.__setattr__(made, key, value)
    made.__post_init__()
    return made


def pair(entry):
    return (entry, entry) if isinstance(entry, str) else entry


def arranged(text, count):
    return [(block.attention.name, block.ffn.name) for block in arrange(text, count)]


@given(blocks)
def test_a_list_by_block_is_got_back_from_its_text(listed):
    assert arranged(spell(listed), len(listed)) == [pair(entry) for entry in listed]
    assert spell(spell(listed)) == spell(listed)
    assert arranged(spell_for(listed, len(listed)), len(listed)) == [
        pair(entry) for entry in listed
    ]


@given(st.lists(st.tuples(entries, st.integers(1, 4)), min_size=1, max_size=6), st.booleans())
def test_whatever_means_the_same_has_one_text(runs, doubled):
    """A text with runs cut anywhere, pairs of equal names written out, counts of 1 left out or
    zeros before them.
    """

    def written(entry, count):
        name = (
            "/".join(pair(entry))
            if doubled
            else entry
            if isinstance(entry, str)
            else "/".join(entry)
        )
        return (
            name
            if count == 1 and not doubled and len(runs) > 1
            else f"{name}*{'0' * doubled}{count}"
        )

    typed = "+".join(written(*run) for run in runs)
    listed = [entry for entry, count in runs for _ in range(count)]
    assert spell(typed) == spell(listed)
    canonical = [len(list(same)) for _, same in itertools.groupby(map(pair, listed))]
    assert spell(typed).count("+") == len(canonical) - 1


@given(names, names)
def test_two_names_for_all_blocks(attention, ffn):
    assert (
        spell((attention, ffn))
        == spell(f"{attention}/{ffn}")
        == (attention if attention == ffn else f"{attention}/{ffn}")
    )
    assert arranged(spell((attention, ffn)), 3) == [(attention, ffn)] * 3


def test_cases_of_the_spelling():
    assert spell("pre/pre") == "pre"
    assert spell("post*3+post*2+pre/pre*9") == "post*5+pre*9"
    assert spell("post+pre") == "post*1+pre*1"
    assert spell("pre") == "pre" != spell("pre*12") == "pre*12"
    assert config(2, ["pre", "pre"]) == config(2, "pre*2") == config(2, "pre")
    assert config(2, ["post", "pre"]).placement == "post*1+pre*1"
    assert config(2, ("post", "pre")).placement == "post/pre"


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (
            ["pre"],
            (
                "'pre*1' is for 1 block and the model has 3: make them agree, or give 'pre' for all"
                " blocks"
            ),
        ),
        (
            ["post", "pre"],
            (
                "'post/pre' for attention and FFN (in Python the tuple ('post', 'pre'); a list goes"
                " by blocks)"
            ),
        ),
        (("post", "pre", "pre"), "a tuple of two names for attention and FFN, or a list"),
        ((), "a tuple of two names"),
        ([], "a list with one of these for each block"),
        (["post*2", "pre"], "'post*2' is an entry of a list"),
        ([("post", "pre", "pre")] * 3, "a tuple of two names"),
        ("post*0+pre*3", "'*0' is no number of blocks"),
        ("post*+pre*3", "'*' is no number of blocks"),
        ("post*1000000", "whole number from 1 to 999999"),
        ("post*999999+post*2", "counts more than 999999 blocks"),
        ("post*3*2", "blocks as post*3+pre*9"),
    ],
)
def test_what_is_ambiguous_or_no_placement_is_refused_with_the_fix(given, words):
    with pytest.raises(ConfigError) as error:
        check_arrangement(spell(given), 3)
    assert words in str(error.value)

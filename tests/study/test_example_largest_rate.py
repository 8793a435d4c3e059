"""`examples/largest_rate.py`."""

import pytest

from examples.largest_rate import main


def test_a_short_sweep_has_no_answer_and_says_why(capsys):
    assert main(steps=2, rates=(1e-3, 1e-2)).rate is None
    assert "no stable rate: the best loss" in capsys.readouterr().out


@pytest.mark.slow
def test_a_whole_sweep_finds_a_rate_and_what_gives_way_above_it(capsys):
    assert 0.03 < main().rate < 0.1
    assert "at 0.1 gives way first: attention logits grow" in capsys.readouterr().out

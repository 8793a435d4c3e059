"""`examples/kinetic_cost.py`, shortened."""

import pytest

from examples.kinetic_cost import BLOCKS, main


@pytest.mark.slow
def test_the_cost_lowers_the_action_and_raises_the_loss_with_all_blocks(capsys):
    arguments = ["--steps", "150", "--seeds", "1", "--kinetic", "0", "1"]
    free, costly = main(arguments)
    assert costly.action.action < free.action.action / 10
    assert costly.action.straightness > free.action.straightness
    assert costly.losses[BLOCKS] > free.losses[BLOCKS]
    # what it buys: a smaller rise with a quarter of the blocks
    rises = [result.losses[BLOCKS // 4] - result.losses[BLOCKS] for result in (free, costly)]
    assert rises[1] < rises[0] / 2
    assert "straightness" in capsys.readouterr().out

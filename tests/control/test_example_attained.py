"""`examples/what_training_attains.py`, shortened."""

import pytest

from examples.what_training_attains import main


@pytest.mark.slow
@pytest.mark.parametrize("placement", ["peri", "pre"])
def test_training_leaves_no_alignment_and_keeps_the_identity(placement, capsys):
    readings = main(["--placement", placement, "--steps", "100", "--polish", "100"])
    assert max(max(reading.identity) for reading in readings) < 1e-13
    first, last = readings[0], readings[-1]
    assert last.loss < first.loss / 4
    assert max(map(abs, last.stationarity)) < max(map(abs, first.stationarity)) / 3
    if placement == "peri":
        shares = [sum(r.pointwise_gap) / (sum(r.pointwise_gap) - sum(r.work)) for r in readings]
        assert (
            min(shares) > 0.95
        )  # the gap is nearly all of H at first and at last: training does not close it
    assert "stationarity" in capsys.readouterr().out


def test_the_identity_holds_from_the_first_steps_on(capsys):
    readings = main(["--steps", "2", "--polish", "2"])
    assert len(readings) == 3
    assert max(max(reading.identity) for reading in readings) < 1e-13
    assert readings[-1].loss < readings[0].loss
    assert "stationarity" in capsys.readouterr().out

"""`examples/turnpike.py`, shortened."""

import pytest

from examples.turnpike import main


@pytest.mark.slow
def test_a_kinetic_cost_makes_velocities_smaller_and_those_of_attention_flatter(capsys):
    found = main(["--depth", "8", "--horizon", "4", "--steps", "120", "--lam", "0", "0.1"])
    table = capsys.readouterr().out.splitlines()
    assert table[1].split()[0] == "lam"
    free, cheap = table[-2].split(), table[-1].split()
    assert [free[0], cheap[0]] == ["0", "0.1"]
    assert float(cheap[2]) < float(free[2])
    assert float(cheap[5]) < float(free[5])
    assert found["0.1"].loss < found["untrained"].loss / 4

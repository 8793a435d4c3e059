"""`examples/figure.py` and `examples/optimal_path.py`, shortened."""

import pytest

from examples import figure, optimal_path


@pytest.mark.slow
def test_the_figure_has_what_its_panels_say(tmp_path):
    picture = tmp_path / "figure.png"
    models = figure.main(["--steps", "20", "--out", str(picture)])
    assert picture.read_bytes().startswith(b"\x89PNG")
    pre, peri = models["pre"], models["peri"]
    growth = pre.check.largest.certificate.growth
    assert growth.values[-1] > 100 * growth.values[0]
    growth = peri.check.largest.certificate.growth
    assert growth.values[-1] < 2 * growth.values[0]
    assert pre.value.found[:-1] == pytest.approx([pre.value.found[0]] * 8)
    assert peri.value.found[-2] > peri.value.found[0]
    for model in (pre, peri):
        assert model.simulation.euler_limit.first_point == "this GPT, bit for bit"
        assert model.simulation.euler_limit.slope == pytest.approx(1, abs=0.1)
        assert max(model.simulation.used) <= 1 + 1e-9


@pytest.mark.slow
def test_the_optimal_path_is_better_than_the_trained_one(tmp_path, capsys):
    picture = tmp_path / "path.png"
    best = optimal_path.main(["--steps", "30", "--out", str(picture)])
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert best.loss < best.model_loss
    assert "optimality gap, nats" in capsys.readouterr().out

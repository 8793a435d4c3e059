"""Theory, sections 1 to 3: each corrected or new line beside the printed form that fails. (Orders
are in tests/convergence.)
"""

import pytest

from tests.helpers import conservation_drift, small_model, tokens


@pytest.mark.slow
@pytest.mark.parametrize("norm_name", ["layernorm", "rmsnorm"])
def test_the_projected_ode_keeps_the_state_on_the_image(norm_name):
    model = small_model("post", norm=norm_name, dt=1.0)
    solution = model.trajectory(tokens(), method="tsit5", rtol=1e-10, atol=1e-12)
    law, drift = conservation_drift(model.depth, solution.states)
    assert law.name == "image"
    assert max(drift) < 1e-8


def test_the_token_mean_grows_by_a_known_amount_in_torchdiffeqs_methods_too():
    """Of the package's own methods ctrans/theory draws one."""
    model = small_model("peri", dt=0.7)
    law, drift = conservation_drift(
        model.depth, model.trajectory(tokens(), method="torchdiffeq:rk4").states
    )
    assert law.name == "mean"
    assert max(drift) < 1e-14


def test_the_law_needs_layernorm_at_the_output():
    for model in (small_model("peri", norm="rmsnorm", scale=0.0), small_model("pre", scale=0.0)):
        states = model.trajectory(tokens()).states
        assert conservation_drift(model.depth, states) is None
        assert float((states[-1].mean(-1) - states[0].mean(-1)).detach().abs().max()) > 1e-2

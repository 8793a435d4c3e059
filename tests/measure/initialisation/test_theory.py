import pytest
import torch

from ctrans.dynamics.norm import NORMS
from ctrans.dynamics.sublayer import Sublayer
from ctrans.measure.initialisation.theory import last_layer_bound
from solvers import ConfigError
from tests.helpers import NAMES, small_model


def noise(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("norm", sorted(NORMS))
@pytest.mark.parametrize("placement", NAMES)
def test_the_last_layers_gradient_is_autograds_and_within_its_bound(placement, norm):
    model = small_model(placement, norm=norm).requires_grad_(True)
    sublayer, x, pull = model.depth.sublayers[-1], noise(2, 5, 16), noise(2, 5, 16, seed=1)
    weight = sublayer.field.down.weight
    (gradient,) = torch.autograd.grad((sublayer.step(x, 0.3) * pull).sum(), weight)
    found = last_layer_bound(sublayer, 0.3, x, pull)
    assert found.measured == pytest.approx(float(torch.linalg.matrix_norm(gradient)), rel=1e-12)
    assert found.measured <= found.bound
    assert last_layer_bound(sublayer.requires_grad_(False), 0.3, x, pull) == found


def test_kims_bound_needs_the_centring_under_layernorm():
    """A nearly constant output a: |a| is large, its centred part small, and the printed sqrt(d)/|a|
    far too small.
    """
    model = small_model("peri", scale=0.0)
    sublayer = model.depth.sublayers[-1]
    sublayer.field.down.bias.fill_(50.0)
    found = last_layer_bound(sublayer, 1.0, noise(1, 1, 16), noise(1, 1, 16, seed=1))
    assert found.printed < found.measured <= found.bound


def test_kims_bound_is_attained_by_one_token_without_norms_behind():
    model = small_model("pre")
    found = last_layer_bound(
        model.depth.sublayers[-1], 0.5, noise(1, 1, 16), noise(1, 1, 16, seed=1)
    )
    assert found.measured == pytest.approx(found.bound, rel=1e-12)


def test_kims_bound_is_about_a_feed_forward():
    with pytest.raises(ConfigError, match="Linear"):
        last_layer_bound(
            Sublayer(torch.nn.Linear(4, 4).double(), "ffn"), 1.0, noise(1, 2, 4), noise(1, 2, 4)
        )

"""Every norm of `NORMS` in a model, before a map, behind it and around the state: what holds for
every architecture holds for each.
"""

import json
import math
import subprocess
import sys

import pytest
import torch

from ctrans import GPT, GPTConfig
from ctrans.dynamics.norm import NORMS, NormOptions
from ctrans.measure.backward.sensitivity import sublayer_sensitivity
from ctrans.measure.forward.bounds import forward_bounds
from ctrans.model.checkpoint import load, save
from solvers import GRADIENTS, ConfigError, solve
from tests.cases import covering
from tests.helpers import learned, small_config, tokens

PLACES = ("pre", "peri", "post")
FULL = ("dyt", "derf", "clip_length", "clip_entries")
"""Norms whose image is full: around the state they are no step of an ODE."""
KINKED = ("clip_length", "clip_entries")
PAIRS = [{"norm": n, "placement": p} for n in range(len(NORMS)) for p in range(len(PLACES))]
pair = pytest.mark.parametrize(
    ("name", "placement"), [(list(NORMS)[c["norm"]], PLACES[c["placement"]]) for c in PAIRS]
)
some = pytest.mark.parametrize(
    ("name", "placement"),
    [(list(NORMS)[PAIRS[k]["norm"]], PLACES[PAIRS[k]["placement"]]) for k in covering(PAIRS)],
)


def config(name, placement, **changes):
    return small_config(placement, **{"heads": 4, "depth": 1, "norm": name, **changes})


def model(name, placement, dtype=torch.float64, **changes):
    return learned(GPT(config(name, placement, **changes)).to(dtype), 0.2).requires_grad_(False)


def has_ode(name, placement):
    return placement != "post" or name not in FULL


@pair
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_an_euler_step_is_the_discrete_model(name, placement, dtype):
    made, ids = model(name, placement, dtype), tokens(2, 6)
    assert torch.equal(made.trajectory(ids).x1, made.depth(made.embed(ids)))
    assert torch.isfinite(made(ids)[0]).all()


@some
def test_no_token_sees_a_later_one(name, placement):
    made, ids = model(name, placement), tokens(1, 8)
    other = ids.clone()
    other[0, 5] = (other[0, 5] + 1) % 11
    assert torch.equal(made(ids)[0][:, :5], made(other)[0][:, :5])
    assert not torch.equal(made(ids)[0][:, 5:], made(other)[0][:, 5:])


@pytest.mark.cases(5)
@pair
@pytest.mark.parametrize(("method", "order", "sizes"), [("euler", 1, (32, 64)), ("rk4", 4, (4, 8))])
def test_methods_have_their_orders_where_there_is_an_ode(name, placement, method, order, sizes):
    made = model(name, placement)
    if not has_ode(name, placement):
        with pytest.raises(ConfigError, match="is no step of an ODE: use the discrete model"):
            made.depth.segments(continuous=True)
        return
    segments, x0 = made.depth.segments(continuous=True), made.embed(tokens(1, 5))
    exact = solve(segments, x0, method="rk4", steps=64).x1
    coarse, fine = (
        float((solve(segments, x0, method=method, steps=n).x1 - exact).norm()) for n in sizes
    )
    if name in KINKED and order > 1:
        assert fine < coarse  # clipping has a kink: the order holds where none is crossed
    else:
        assert math.log2(coarse / fine) == pytest.approx(order, abs=0.15)


@pytest.mark.cases(1)
@pytest.mark.parametrize("name", sorted(set(NORMS) - set(FULL)))
def test_the_ode_stays_on_the_image_of_the_norm_around_it(name):
    made = model(name, "post", depth=2, dt=0.5)
    norms = [sublayer.state_norm for sublayer in made.depth.sublayers]
    states = solve(
        made.depth.segments(continuous=True),
        made.embed(tokens(1, 5)),
        method="rk4",
        steps=32,
        save="segments",
    ).states
    for norm, state in zip(norms, states[1:], strict=True):
        assert float(norm.constraint_violation(state).max()) < 1e-5


@pytest.mark.cases(1)
@some
@pytest.mark.parametrize("gradient", sorted(set(GRADIENTS) - {"backprop"}))
def test_every_kind_of_gradient_is_that_of_backprop(name, placement, gradient):
    if not has_ode(name, placement) or (placement == "post" and gradient == "reversible"):
        placement = "pre"
    made, ids = model(name, placement).requires_grad_(True), tokens(1, 5)
    along = torch.randn(1, 5, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    found = []
    for kind in ("backprop", gradient):
        end = made.trajectory(ids, method="rk4", steps=6, gradient=kind).x1
        parts = torch.autograd.grad(
            (along * end).sum(), list(made.depth.parameters()), allow_unused=True
        )
        found.append(torch.cat([part.flatten() for part in parts if part is not None]))
    # the adjoint is exact to the method's order, which a kink lowers
    assert float((found[1] - found[0]).norm()) <= (1e-2 if name in KINKED else 1e-4) * float(
        found[0].norm()
    )


@pair
def test_every_parameter_is_trained(name, placement):
    made = GPT(config(name, placement))
    made(tokens(), tokens(seed=1))[1].backward()
    for key, parameter in made.named_parameters():
        assert parameter.grad is not None, key
        assert torch.isfinite(parameter.grad).all(), key


@some
def test_it_is_saved_and_drawn_on_demand_bit_for_bit(name, placement, tmp_path):
    made, ids = GPT(config(name, placement)), tokens()
    save(made, tmp_path)
    assert torch.equal(load(tmp_path)(ids)[0], made(ids)[0])
    assert load(tmp_path).config == made.config
    drawn = GPT(config(name, placement), on_demand=True)
    assert torch.equal(drawn(ids)[0], made(ids)[0])


@some
def test_its_sensitivity_is_the_norm_of_the_dense_jacobian(name, placement):
    if not has_ode(name, placement):
        placement = "peri"
    made = model(name, placement)
    sublayer, x = (
        made.depth.sublayers[1],
        torch.randn(1, 4, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0)),
    )
    x = x if sublayer.state_norm is None else sublayer.state_norm.retract(x)
    dense = torch.autograd.functional.jacobian(sublayer.velocity, x).reshape(x.numel(), x.numel())
    assert sublayer_sensitivity(sublayer, x).value == pytest.approx(
        float(torch.linalg.matrix_norm(dense, 2)), rel=2e-3
    )


@pytest.mark.parametrize("name", sorted(NORMS))
@pytest.mark.parametrize("placement", ["peri", "output", "pre", "post"])
def test_states_grow_no_faster_than_by_the_image_of_their_norms(name, placement):
    """Behind an output norm linearly: |X_k| <= |X_0| + sum dt sup|N|, sup|N| from what the norm's
    own image has.
    """
    made = model(name, placement, depth=3, dt=0.7)
    solution = made.trajectory(tokens())
    bounds = forward_bounds(made.depth, solution.states)
    for state, bound in zip(solution.states, bounds.rms, strict=True):
        assert float(state.square().mean().sqrt()) <= bound * (1 + 1e-12)
    if placement in ("peri", "output"):
        levels = [sublayer.output_norm.level for sublayer in made.depth.sublayers]
        assert bounds.rms[-1] == pytest.approx(bounds.rms[0] + 0.7 * sum(levels), rel=1e-12)


@pytest.mark.parametrize("name", sorted(NORMS))
def test_a_sublayer_that_writes_along_one_direction_grows_as_fast_as_is_allowed(name):
    """The bound is met up to what a corner's level leaves: constant raw outputs far out, along a
    maximiser.
    """
    norm = NORMS[name](16, 1e-5).double().requires_grad_(False)
    z = norm(1e6 * norm.maximizer(torch.tensor([1.0, -1.0] * 8, dtype=torch.float64)))
    assert float(z.square().mean().sqrt()) == pytest.approx(norm.level, rel=1e-6)


def test_norm_options_are_kept_and_a_model_without_is_saved_as_it_always_was(tmp_path):
    save(GPT(small_config("peri")), tmp_path)
    names = set(NormOptions.__dataclass_fields__)
    assert not names & set(json.loads((tmp_path / "config.json").read_text()))
    made = GPT(small_config("peri", norm="group_rmsnorm", norm_groups=8))
    assert made.depth.sublayers[0].output_norm.groups == 8
    assert GPT(small_config("peri", norm="group_rmsnorm")).final_norm.groups == 2
    save(made, tmp_path)
    assert load(tmp_path).config.norm_groups == 8
    assert float(
        GPT(small_config("pre", norm="dyt", norm_alpha=0.3)).final_norm.alpha.detach()
    ) == pytest.approx(0.3)
    assert (
        float(GPT(small_config("pre", norm="clip_length", norm_radius=3)).final_norm.gamma[0])
        == 3.0
    )
    for changes, words in (
        ({"norm_alpha": 0.5}, "no meaning for norm 'layernorm'"),
        ({"norm": "dyt", "norm_alpha": -1.0}, "1e-12"),
    ):
        with pytest.raises(ConfigError, match=words):
            GPTConfig(**changes)


COMPILES = """
import torch
from tests.model.test_norms_in_models import NORMS, PLACES, model
from tests.helpers import tokens

for name in NORMS:
    for placement in PLACES:
        torch._dynamo.reset()
        made, ids = model(name, placement, torch.float32), tokens()
        x = made.embed(ids)
        compiled = torch.compile(made.depth, backend="eager", fullgraph=True)
        assert torch.allclose(compiled(x), made.depth(x), atol=1e-5), (name, placement)
"""


@pytest.mark.slow
def test_each_is_one_graph_to_a_compiler():
    # in a process of its own, since the run-time check of annotations is what a compiler cannot
    # trace
    subprocess.run([sys.executable, "-c", COMPILES], check=True)

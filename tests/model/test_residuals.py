"""Every residual, enrolled by its rows in `RESIDUAL_CASES`: what holds for each of them."""

import json
import math
import subprocess
import sys

import pytest
import torch

from ctrans import GPT, GPTConfig
from ctrans.control.costate import costate
from ctrans.control.model_check import check_model
from ctrans.control.regularization import Regularization
from ctrans.control.segment_check import check_segment
from ctrans.dynamics.fields import reference_kernels
from ctrans.dynamics.residual import ALIASES, RESIDUALS, sinkhorn
from ctrans.measure.attention.block_norm import block_gain
from ctrans.measure.attention.bounds import step_bound
from ctrans.measure.backward.sensitivity import sublayer_sensitivity
from ctrans.measure.forward.bounds import BoundsByDepth
from ctrans.measure.forward.mixing import mixing_gains, product_gains
from ctrans.measure.walk import states_of, walk
from ctrans.model.checkpoint import load, save
from solvers import GRADIENTS, ConfigError, solve
from tests.cases import RESIDUAL_CASES
from tests.helpers import conservation_drift, learned, small_config, tokens

each = pytest.mark.parametrize("name", RESIDUAL_CASES)


def config(name, **changes):
    placement, options = RESIDUAL_CASES[name]
    return small_config(placement, **{"heads": 4, "depth": 2, **options, **changes})


def model(name, dtype=torch.float64, **changes):
    return learned(GPT(config(name, **changes)).to(dtype), 0.3).requires_grad_(False)


def test_every_residual_is_enrolled():
    assert {options["residual"] for _, options in RESIDUAL_CASES.values()} == RESIDUALS.keys() - {
        "plain"
    }


@each
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_an_euler_step_is_the_discrete_model(name, dtype):
    made, ids = model(name, dtype), tokens(2, 6)
    assert torch.equal(made.trajectory(ids).x1, made.depth(made.embed(ids)))
    assert torch.isfinite(made(ids)[0]).all()


def state(made, *shape, seed=0):
    """States as the model has them, of all their streams."""
    width = made.config.width * made.config.state_streams
    return torch.randn(
        *shape, width, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)
    )


def by_hand(residual, sublayer, x, block, dt):
    """X after a step, from the equation in the table."""
    if residual in ("hyper_connections", "mhc"):
        part = sublayer.residual
        streams = list(x.split(part.width, -1))
        mixed = [
            sum(part.mixing[s, t] * streams[t] for t in range(part.streams))
            for s in range(part.streams)
        ]
        u = sum(part.reads[s] * mixed[s] for s in range(part.streams))
        v = sublayer.field(u if sublayer.input_norm is None else sublayer.input_norm(u))
        v = v if sublayer.output_norm is None else sublayer.output_norm(v)
        return torch.cat([mixed[s] + dt * part.writes[s] * v for s in range(part.streams)], -1)
    scale = block**-0.5 if residual == "depth_scaled" else 1.0
    u = x if sublayer.input_norm is None else scale * sublayer.input_norm(x)
    v = sublayer.field(u)
    v = v if sublayer.output_norm is None else sublayer.output_norm(v)
    if residual == "ngpt":
        return sublayer.state_norm(
            x + dt * sublayer.residual.gain * (sublayer.residual.image(v) - x)
        )
    gain = (
        1.0
        if residual == "depth_scaled"
        else torch.diag(sublayer.residual.gain.expand(x.shape[-1]))
    )
    y = x + dt * (v @ gain if torch.is_tensor(gain) else v)
    return y if sublayer.state_norm is None else sublayer.state_norm(y)


@each
def test_a_step_is_its_equation(name):
    made, ids = model(name, depth=3), tokens(2, 6)
    x = made.embed(ids)
    for k, sublayer in enumerate(made.depth.sublayers):
        after = by_hand(
            made.config.residual, sublayer, x, 1 + k // made.depth.per_block, made.config.dt
        )
        assert torch.allclose(sublayer.step(x, made.config.dt), after, atol=1e-13)
        x = after


@each
def test_no_token_sees_a_later_one(name):
    made, ids = model(name), tokens(1, 8)
    other = ids.clone()
    other[0, 5] = (other[0, 5] + 1) % 11
    assert torch.equal(made(ids)[0][:, :5], made(other)[0][:, :5])
    assert not torch.equal(made(ids)[0][:, 5:], made(other)[0][:, 5:])


@pytest.mark.cases(1)
@each
@pytest.mark.parametrize(
    ("method", "order", "sizes"), [("euler", 1, (32, 64)), ("rk4", 4, (8, 16))]
)
def test_methods_have_their_orders(name, method, order, sizes):
    made = model(name)
    segments, x0 = made.depth.segments(continuous=True), made.embed(tokens(1, 5))
    exact = solve(segments, x0, method="rk4", steps=64).x1
    coarse, fine = (
        float((solve(segments, x0, method=method, steps=n).x1 - exact).norm()) for n in sizes
    )
    assert math.log2(coarse / fine) == pytest.approx(order, abs=0.15)


@pytest.mark.cases(1)
@each
@pytest.mark.parametrize("gradient", sorted(set(GRADIENTS) - {"backprop"}))
def test_every_kind_of_gradient_is_that_of_backprop(name, gradient):
    made, ids = model(name).requires_grad_(True), tokens(1, 5)
    if gradient == "reversible" and any(
        segment.enter is not None for segment in made.depth.segments(continuous=True)
    ):
        with pytest.raises(ConfigError, match="cannot go back"):
            made.trajectory(ids, method="rk4", steps=6, gradient=gradient)
        return
    found = []
    for kind in ("backprop", gradient):
        end = made.trajectory(ids, method="rk4", steps=6, gradient=kind).x1
        parts = torch.autograd.grad(
            end.square().sum(), list(made.depth.parameters()), allow_unused=True
        )
        found.append(torch.cat([part.flatten() for part in parts if part is not None]))
    assert float((found[1] - found[0]).norm()) <= 1e-4 * float(found[0].norm())


@each
def test_every_parameter_is_trained(name):
    made = GPT(config(name))
    made(tokens(), tokens(seed=1))[1].backward()
    for key, parameter in made.named_parameters():
        assert parameter.grad is not None, key
        assert torch.isfinite(parameter.grad).all(), key


@pytest.mark.cases(14)
@each
def test_it_is_saved_and_drawn_on_demand_bit_for_bit(name, tmp_path):
    made, ids = GPT(config(name)), tokens()
    save(made, tmp_path)
    assert torch.equal(load(tmp_path)(ids)[0], made(ids)[0])
    assert load(tmp_path).config == made.config
    drawn = GPT(config(name), on_demand=True)
    assert torch.equal(drawn(ids)[0], made(ids)[0])


@each
def test_its_costate_is_the_pullback_of_the_maps(name):
    """<P, r> = <pulled(P), v>, from which every Hamiltonian of a residual follows."""
    made = model(name)
    for sublayer in made.depth.sublayers:
        x, p = state(made, 2, 1, 4, seed=2)
        v = sublayer.field(sublayer.given(x))
        v = v if sublayer.output_norm is None else sublayer.output_norm(v)
        v = v if sublayer.image is None else sublayer.image(v) - x
        assert float((p * sublayer(x)).sum()) == pytest.approx(
            float((sublayer.pulled(p) * v).sum()), rel=1e-12
        )


@pytest.mark.cases(14)
@each
def test_states_stay_below_their_bounds(name):
    made = model(name, depth=4, dt=1.0)
    x = walk(made, tokens(), instruments=[bounds := BoundsByDepth()])
    assert bounds.figures() == x[0]
    for state, level in zip(states_of(made.depth, made.embed(tokens())), x[0].rms, strict=True):
        assert float(state.square().mean().sqrt()) <= level * (1 + 1e-12)


@pytest.mark.cases(1)
@each
def test_its_sensitivity_is_the_norm_of_the_dense_jacobian(name):
    made = model(name)
    x = state(made, 1, 4)
    for sublayer in list(made.depth.sublayers)[:2]:
        with reference_kernels(sublayer):
            dense = torch.autograd.functional.jacobian(sublayer.velocity, x).reshape(
                x.numel(), x.numel()
            )
        top = float(torch.linalg.matrix_norm(dense, 2))
        assert sublayer_sensitivity(sublayer, x).value == pytest.approx(top, rel=2e-3)
        if sublayer.image is not None or sublayer.streams > 1:
            with pytest.raises(
                ConfigError, match="of one stream that is linear in the map's output"
            ):
                step_bound(sublayer, 0.5, x)
            continue
        with reference_kernels(sublayer):
            assert block_gain(lambda z, part=sublayer: part.step(z, 0.5), x[0]) <= step_bound(
                sublayer, 0.5, x[0]
            ).corrected * (1 + 1e-9)


@pytest.mark.cases(1)
@each
def test_the_certificates_agree_with_their_verdicts(name):
    made = model(name)
    check = check_model(made, tokens(1, 5), tokens(1, 5, seed=1), thorough=True)
    assert check.agrees, check.failures
    first = made.depth.sublayers[0]
    bounded = first.output_norm is not None or first.image is not None
    assert check.finite == bounded
    found = costate(made, tokens(1, 5), tokens(1, 5, seed=1), form="continuous")
    if bounded:
        for segment, sublayer in zip(check.segments, made.depth.sublayers, strict=True):
            x, p = found.starts[segment.segment]
            assert (
                segment.certificate.hamiltonian + float((p * sublayer.velocity(x)).sum()) >= -1e-9
            )


@pytest.mark.slow
def test_a_silent_sublayer_is_certified_as_what_it_may_become():
    made = GPT(config("rezero, pre")).double().requires_grad_(False)
    assert made.depth.sublayers[0].largest_gain == 0
    check = check_model(made, tokens(1, 5), tokens(1, 5, seed=1), thorough=True)
    assert check.agrees
    assert not check.finite


@pytest.mark.parametrize("residual", ["layerscale", "rezero"])
def test_means_move_as_the_law_says_in_the_coordinates_of_gain_and_norm(residual):
    made = learned(GPT(small_config("peri", residual=residual)).double(), 0.3).requires_grad_(False)
    law, drift = conservation_drift(made.depth, states_of(made.depth, made.embed(tokens())))
    assert law.name == "mean"
    assert max(drift) < 1e-13


@pytest.mark.slow
def test_growth_under_depth_scaling_is_at_most_that_of_the_root_of_the_depth():
    """Maps without offsets: the bound's growth is sum_l 2 a/sqrt(l) <= 4 a sqrt(D), and 2 a D
    without the scaling.
    """
    rise = {}
    for residual in ("plain", "depth_scaled"):
        made = (
            GPT(small_config("pre", depth=64, residual=residual, dt=1.0, bias=False))
            .double()
            .requires_grad_(False)
        )
        one = made.depth.sublayers[0].field, made.depth.sublayers[1].field
        for k, sublayer in enumerate(made.depth.sublayers):
            sublayer.field = one[k % 2]
        rms = walk(made, tokens(), instruments=[BoundsByDepth()])[0].rms
        rise[residual] = [(rms[2 * blocks] - rms[0]) for blocks in (16, 64)]
    assert rise["plain"][1] == pytest.approx(4 * rise["plain"][0])
    assert rise["depth_scaled"][1] <= 2 * math.sqrt(64) / 64 * rise["plain"][1]
    assert rise["depth_scaled"][1] / rise["depth_scaled"][0] == pytest.approx(2, rel=0.15)


def test_weights_of_ngpt_are_on_their_spheres_when_drawn_and_after_every_step():
    made = GPT(config("ngpt, post"))
    optimiser = torch.optim.SGD(made.parameters(), lr=0.5)
    for _ in range(2):
        for sublayer in made.depth.sublayers:
            for matrix in sublayer.field.matrices():
                lengths = matrix.weight.norm(dim=0 if matrix.last else 1)
                assert torch.allclose(lengths, torch.ones_like(lengths), atol=1e-6)
        assert torch.allclose(made.token_embedding.weight.norm(dim=1), torch.ones(11), atol=1e-6)
        made(tokens(), tokens(seed=1))[1].backward()
        optimiser.step()
        made.after_step()


@pytest.mark.slow
def test_the_hamiltonian_of_ngpt_is_reached_by_outputs_of_its_norm_and_by_no_more():
    """Ascent over raw outputs, through the module, against H = H_N(Q) + <Q, X>, Q = a * T_X'P."""
    made = model("ngpt, post")
    sublayer = made.depth.sublayers[0]
    x, p, z = torch.randn(
        3, 1, 3, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(5)
    )
    x = sublayer.state_norm.retract(x)
    given = {
        "continuous": True,
        "segment": 0,
        "time": 0.0,
        "dt": 1.0,
        "regularization": Regularization(),
    }
    found = check_segment(sublayer, (x, p), (x, p), **given).certificate
    z.requires_grad_()
    ascent = torch.optim.LBFGS(
        [z], max_iter=300, line_search_fn="strong_wolfe", tolerance_grad=1e-12
    )

    def value():
        return -(p * sublayer.state_norm.tangent(x, sublayer.joined(z, x))).sum()

    def descend():
        ascent.zero_grad()
        loss = -value()
        loss.backward()
        return loss

    ascent.step(descend)
    assert found.verdict == "well-posed for bounded gains"
    assert float(value().detach()) == pytest.approx(found.hamiltonian, rel=1e-4)
    assert float(value().detach()) <= found.hamiltonian * (1 + 1e-12)


@pytest.mark.cases(1)
@pytest.mark.parametrize("residual", ["hyper_connections", "mhc"])
@pytest.mark.parametrize("placement", ["pre", "output"])
def test_hyper_connections_begin_as_the_plain_residual_and_then_leave_it(residual, placement):
    made, plain = (
        GPT(small_config(placement, residual=name)).double() for name in (residual, "plain")
    )
    assert torch.allclose(made(tokens())[0], plain(tokens())[0], atol=1e-9)
    made(tokens(), tokens(seed=1))[1].backward()
    for sublayer in made.depth.sublayers:
        assert all(
            torch.isfinite(parameter.grad).all() for parameter in sublayer.residual.parameters()
        )
    first = [parameter.grad for parameter in made.depth.sublayers[0].residual.parameters()]
    assert any(
        float((slope - slope.mean()).norm()) > 1e-6 for slope in first[1:]
    )  # streams come apart


@pytest.mark.slow
def test_doubly_stochastic_mixing_keeps_the_mean_stream_and_lengthens_nothing():
    made = model("mhc, peri", depth=12)
    for sublayer in made.depth.sublayers:
        mixing = sublayer.residual.mixing
        x = state(made, 2, 5)
        entered = sublayer.enter(x)
        mean, after = (part.unflatten(-1, (3, 16)).mean(-2) for part in (x, entered))
        assert torch.allclose(mean, after, atol=1e-14)
        assert bool((mixing > 0).all())
        assert float(torch.linalg.matrix_norm(mixing, 2)) <= math.sqrt(
            float(mixing.sum(1).max())
        ) * (1 + 1e-12)
        assert torch.allclose(
            mixing.sum(1), torch.ones(3, dtype=torch.float64), atol=1e-2
        )  # as near as twenty rounds come
        exact = sinkhorn(sublayer.residual.mix.unflatten(0, (3, 3)), 2000)
        assert torch.allclose(exact.sum(1), torch.ones(3, dtype=torch.float64), atol=1e-12)
        assert float(torch.linalg.matrix_norm(exact, 2)) == pytest.approx(1)
    assert all(0.99 < gain < 1.01 for gain in mixing_gains(made.depth))


def test_the_gain_of_free_mixing_is_that_of_the_dense_product_and_may_grow_like_a_power():
    made = model("hyper-connections, pre", depth=12)
    product = torch.eye(3, dtype=torch.float64)
    for k, sublayer in enumerate(made.depth.sublayers):
        product = sublayer.residual.mixing @ product
        assert mixing_gains(made.depth)[k] == pytest.approx(
            float(torch.linalg.svdvals(product)[0]), rel=1e-12
        )
    assert product_gains(1.1 * torch.eye(2, dtype=torch.float64).expand(48, 2, 2))[
        -1
    ] == pytest.approx(1.1**48)
    with pytest.raises(ConfigError, match="mixes no streams"):
        mixing_gains(model("rezero, pre").depth)


COMPILES = """
import torch
from tests.model.test_residuals import RESIDUAL_CASES, model
from tests.helpers import tokens

for name in RESIDUAL_CASES:
    torch._dynamo.reset()
    made, ids = model(name, torch.float32), tokens()
    x = made.embed(ids)
    compiled = torch.compile(made.depth, backend="eager", fullgraph=True)
    assert torch.allclose(compiled(x), made.depth(x), atol=1e-5), name
"""


@pytest.mark.slow
def test_each_is_one_graph_to_a_compiler():
    subprocess.run([sys.executable, "-c", COMPILES], check=True)


def test_another_name_is_the_same_residual_and_the_plain_one_is_saved_as_it_always_was(tmp_path):
    for alias, name in ALIASES.items():
        assert GPTConfig(placement="pre", residual=alias) == GPTConfig(
            placement="pre", residual=name
        )
    save(GPT(small_config("peri")), tmp_path)
    assert (
        not {"residual", "residual_init", "parallel_blocks", "branch_norms", "streams"}
        & json.loads((tmp_path / "config.json").read_text()).keys()
    )


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"residual": "rezzero"}, "unknown residual 'rezzero': did you mean 'rezero'"),
        (
            {"residual": "dynamic_hyper_connections"},
            "by functions of the state, .* Choose the static hyper_connections or mhc",
        ),
        (
            {"residual": "depth_scaled", "placement": "post"},
            "residual 'depth_scaled' with placement 'post' scales",
        ),
        (
            {"residual": "depth_scaled", "placement": "pre", "depth_weights": "linear"},
            "depends on the number of blocks",
        ),
        (
            {"residual": "mhc", "placement": "post"},
            "residual 'mhc' with placement 'post' would have a norm around all streams",
        ),
        ({"residual": "mhc", "streams": 1}, "streams = 1 for residual 'mhc'"),
        ({"streams": 2}, "streams = 2 has no meaning for residual 'plain'"),
        (
            {"residual": "ngpt"},
            (
                "residual 'ngpt' with placement 'peri' moves on the image .*: choose placement post"
                " or pre_post"
            ),
        ),
        (
            {"residual": "ngpt", "placement": "post", "depth_weights": "linear"},
            "on a sphere by itself",
        ),
        ({"residual_init": 0.1}, "residual_init = 0.1 has no meaning for residual 'plain'"),
        (
            {"residual": "layerscale", "residual_init": math.nan},
            "residual_init = nan: give a finite number",
        ),
    ],
)
def test_what_makes_no_sense_is_refused_in_one_line(changes, words):
    with pytest.raises(ConfigError, match=words) as refused:
        GPTConfig(**changes)
    assert "\n" not in str(refused.value)
    with pytest.raises(ConfigError, match="no other depth"):
        GPT(small_config("pre", residual="depth_scaled")).at_depth(5)


def test_ngpt_on_the_unit_sphere_can_be_sure_of_a_token():
    """Unit rows and unit states give logits of at most s, 1 at first: no model with s = 1 ends
    below log(1 + 255 e^-2) = 3.57 nats.
    """
    model = GPT(
        GPTConfig(
            depth=1, width=16, heads=2, context=16, placement="post", norm="l2norm", residual="ngpt"
        )
    )
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 256, (2, 17), generator=generator)
    assert float(model(tokens[:, :-1])[0].detach().abs().max()) <= 1.0
    weight = model.token_embedding.weight
    torch.testing.assert_close(model.head_weight(), weight, rtol=1e-6, atol=0)
    optimiser = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(40):
        loss = model(tokens[:, :-1], tokens[:, 1:])[1]
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        model.after_step()
    torch.testing.assert_close(weight.norm(dim=1), torch.ones(256))
    assert float(loss) < math.log(1 + 255 * math.exp(-2)) - 1

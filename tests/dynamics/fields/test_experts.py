"""A mixture of experts: against a loop over tokens written out, at its switches, and what balances
its load.
"""

import copy
import math

import pytest
import torch
import torch.nn.functional as F

from ctrans import GPT, GPTConfig
from ctrans.dynamics.fields import (
    EXPERTS,
    ROUTERS,
    ExpertOptions,
    MixtureOfExperts,
    reference_kernels,
)
from solvers import ConfigError, Segment, solve
from tests.helpers import learned, small_config

X = torch.randn(2, 7, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
PHI = {"mlp": F.gelu, "swiglu": F.silu, "geglu": F.gelu, "reglu": F.relu}


def mixture(*, bias=True, hidden=6, seed=1, scale=0.3, **options):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        made = MixtureOfExperts(
            16, hidden, options=ExpertOptions(**{"experts": 5, **options}), bias=bias
        ).double()
    made = learned(made, scale, seed).requires_grad_(False)
    made.choice_bias.zero_()  # it is no parameter, and stays as a fresh one is
    return made


def written_out(field, x):
    """f(x) of one token, by the formulas of the papers."""
    options, h = field.options, field.hidden

    def expert(e):
        own = slice(e * h, (e + 1) * h)
        z = field.up.weight[own] @ x + (0 if field.up.bias is None else field.up.bias[own])
        if field.gate is not None:
            gate = field.gate.weight[own] @ x + (
                0 if field.gate.bias is None else field.gate.bias[own]
            )
            return field.down.weight[:, own] @ (PHI[options.expert](gate) * z)
        return field.down.weight[:, own] @ PHI[options.expert](z)

    logits = field.router.weight @ x
    scores = {
        "topk_softmax": logits.softmax(0),
        "softmax_topk": logits.softmax(0),
        "sigmoid": logits.sigmoid(),
    }[options.router]
    chosen = sorted(range(options.experts), key=lambda e: float(scores[e] + field.choice_bias[e]))[
        -options.top_k :
    ]
    if options.router == "topk_softmax":
        gates = dict(zip(chosen, logits[chosen].softmax(0), strict=True))
    elif options.router == "softmax_topk":
        gates = {e: scores[e] for e in chosen}
    else:
        gates = {e: scores[e] / scores[chosen].sum() for e in chosen}
    y = sum(gate * expert(e) for e, gate in gates.items())
    y = y + sum(
        (expert(e) for e in range(options.experts, options.experts + options.shared_experts)),
        torch.zeros(()),
    )
    return y if field.down.bias is None else y + field.down.bias


@pytest.mark.parametrize("router", ROUTERS)
@pytest.mark.parametrize("expert", EXPERTS)
@pytest.mark.parametrize("plain", [True, False])
@pytest.mark.parametrize(("bias", "shared", "k"), [(True, 0, 2), (False, 2, 3)])
def test_it_is_the_sum_of_the_papers(router, expert, plain, bias, shared, k):
    field = mixture(router=router, expert=expert, bias=bias, shared_experts=shared, top_k=k)
    field.choice_bias += torch.linspace(-0.2, 0.2, 5)
    expected = torch.stack([written_out(field, x) for x in X.flatten(0, 1)]).view_as(X)
    field.use_reference_kernel = plain
    assert torch.allclose(field(X), expected, atol=1e-12)


@pytest.mark.parametrize("router", ROUTERS)
def test_both_paths_have_the_same_gradients(router):
    field = mixture(router=router, shared_experts=1).requires_grad_(True)
    found = []
    for plain in (True, False):
        field.use_reference_kernel = plain
        x = X.clone().requires_grad_()
        found.append(torch.autograd.grad(field(x).square().sum(), [x, *field.parameters()]))
    for one, other in zip(*found, strict=True):
        assert torch.allclose(one, other, atol=1e-10)


def test_an_expert_that_no_token_chooses_is_no_error():
    field = mixture(top_k=2)
    field.choice_bias += torch.tensor([9.0, 9.0, 0.0, 0.0, 0.0])
    assert field.load(X).tolist() == [14, 14, 0, 0, 0]
    with reference_kernels(field):
        plain = field(X)
    assert torch.allclose(field(X), plain, atol=1e-12)
    assert field(X[:0]).shape == (0, 7, 16)


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("router", ROUTERS)
def test_no_token_nearer_than_the_distance_goes_elsewhere(router, biased):
    field = mixture(router=router)
    if biased:
        field.choice_bias += torch.linspace(-0.1, 0.1, 5)
    distance, here = field.distance_to_switch(X), field.route(X).chosen
    for seed in range(50):
        direction = torch.randn(
            X.shape, dtype=X.dtype, generator=torch.Generator().manual_seed(seed)
        )
        nearby = X + 0.999 * distance.unsqueeze(-1) * direction / direction.norm(
            dim=-1, keepdim=True
        )
        assert torch.equal(field.route(nearby).chosen, here)
    if not biased:  # and it is attained, along the difference of two rows of the router
        rows, logits = field.router.weight, field.route(X).logits
        for token in range(7):
            pairs = [
                (a, b)
                for a in range(5)
                for b in range(5)
                if here[0, token, a] and not here[0, token, b]
            ]
            a, b = min(
                pairs,
                key=lambda p: float(
                    (logits[0, token, p[0]] - logits[0, token, p[1]])
                    / (rows[p[0]] - rows[p[1]]).norm()
                ),
            )
            normal = (rows[b] - rows[a]) / (rows[b] - rows[a]).norm()
            beyond = X[0, token] + 1.001 * distance[0, token] * normal
            assert not torch.equal(field.route(beyond.unsqueeze(0)).chosen[0], here[0, token])


@pytest.mark.parametrize("router", ROUTERS)
def test_the_jacobian_is_that_of_the_piece(router):
    """Dense Jacobian by autograd against central differences well within the distance to the next
    switch.
    """
    field = mixture(router=router, shared_experts=1)
    x = X[0, :1]
    assert float(field.distance_to_switch(x)) > 1e-4
    with reference_kernels(field):
        dense = torch.autograd.functional.jacobian(field, x)[0, :, 0]
    step = 1e-5
    columns = [
        (field(x + step * e) - field(x - step * e))[0] / (2 * step) for e in torch.eye(16).double()
    ]
    assert torch.allclose(dense, torch.stack(columns, 1), atol=1e-8)


def at_a_switch(field, token):
    """A token on the nearest switch, and the unit normal that leads across it."""
    routing, rows = field.route(token.unsqueeze(0)), field.router.weight
    (z,), (chosen,) = routing.logits, routing.chosen
    pairs = [(a, b) for a in range(len(z)) for b in range(len(z)) if chosen[a] and not chosen[b]]
    gap, a, b = min((float((z[a] - z[b]) / (rows[a] - rows[b]).norm()), a, b) for a, b in pairs)
    normal = (rows[b] - rows[a]) / (rows[b] - rows[a]).norm()
    return token + gap * normal, normal


def test_the_map_jumps_at_a_switch_so_that_no_constant_holds():
    field = mixture()
    on, normal = at_a_switch(field, X[0, 0])
    jumps = [
        float(
            (field((on + e * normal).unsqueeze(0)) - field((on - e * normal).unsqueeze(0))).norm()
        )
        for e in (1e-3, 1e-6, 1e-9)
    ]
    assert min(jumps) > 0.1
    assert jumps[2] == pytest.approx(jumps[1], rel=1e-3)
    assert field.lipschitz(10.0) == math.inf
    assert math.isfinite(mixture(top_k=5).lipschitz(10.0))


class Crossing:
    """A token that is carried across a switch: dx/dt = f(x) + drift n, n the switch's normal, from
    one unit of length before it.

    Each piece of f is smooth everywhere if the choice is held fast by biases, so that the flow is
    known to rounding: along the one piece to the switch n.x = c, whose time Newton's method finds,
    and along the other one to the end.
    """

    def __init__(self):
        self.field = mixture(scale=0.25)
        self.field.use_reference_kernel = True  # the same, with forward-mode derivatives
        self.on, self.normal = at_a_switch(self.field, X[0, 0])
        self.start, self.end = (self.on - 0.5 * self.normal).unsqueeze(0), 0.2
        ahead = (self.on + 1e-6 * self.normal).unsqueeze(0)
        self.first, self.second = (self.held(x) for x in (self.start, ahead))

    def held(self, x):
        piece = copy.deepcopy(self.field)
        piece.choice_bias += 100 * piece.route(x).chosen[0]
        return piece

    def velocity(self, field):
        return lambda t, x: field(x) + 5 * self.normal

    def along(self, field, x, time, steps=12):
        return solve([Segment(0.0, time, self.velocity(field))], x, method="rk4", steps=steps).x1

    def switch(self, x):
        """When and where it crosses."""
        time = 0.1
        for _ in range(8):
            y = self.along(self.first, x, time)
            time -= float(
                (y[0] - self.on)
                @ self.normal
                / (self.velocity(self.first)(time, y)[0] @ self.normal)
            )
        return time, self.along(self.first, x, time)

    def exact(self, x):
        time, y = self.switch(x)
        return self.along(self.second, y, self.end - time)


@pytest.mark.slow
@pytest.mark.parametrize(("method", "order"), [("heun", 2), ("rk4", 4)])
def test_steps_across_a_switch_have_order_one_and_within_a_piece_their_own(method, order):
    made = Crossing()
    exact, piece = made.exact(made.start), made.along(made.first, made.start, made.end, 64)
    assert not torch.equal(made.field.route(exact).chosen, made.field.route(made.start).chosen)

    def errors(field, expected, sizes):
        segments = [Segment(0.0, made.end, made.velocity(field))]
        return [
            float((solve(segments, made.start, method=method, steps=n).x1 - expected).norm())
            for n in sizes
        ]

    # where in its step the switch falls decides on the error's size: the worst of many numbers of
    # steps is what has an order
    coarse, fine = (max(errors(made.field, exact, range(n, 2 * n, n // 8))) for n in (8, 64))
    assert math.log(coarse / fine, 8) == pytest.approx(1, abs=0.35)
    coarse, fine = errors(made.first, piece, (4, 8))
    assert math.log2(coarse / fine) == pytest.approx(order, abs=0.3)


@pytest.mark.slow
def test_a_flows_derivative_takes_the_jump_at_a_switch_that_its_pieces_miss():
    """Saltation: J = J_+ (I + (f+ - f-) n'/(n.f-)) J_-, against differences of the flow; a
    derivative by pieces is J_+ J_-.
    """
    made = Crossing()
    time, y = made.switch(made.start)
    before, after = (made.velocity(piece)(time, y)[0] for piece in (made.first, made.second))
    jump = torch.eye(16, dtype=torch.float64) + torch.outer(after - before, made.normal) / (
        made.normal @ before
    )
    v = torch.randn(1, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    step = 1e-4
    measured = (made.exact(made.start + step * v) - made.exact(made.start - step * v)) / (2 * step)
    carried = torch.func.jvp(lambda x: made.along(made.first, x, time), (made.start,), (v,))[1]
    errors = []
    for jumped in (carried @ jump.T, carried):
        found = torch.func.jvp(
            lambda x: made.along(made.second, x, made.end - time), (y,), (jumped,)
        )[1]
        errors.append(float((found - measured).norm() / measured.norm()))
    assert errors[0] < 1e-5
    assert errors[1] > 1e-2


def test_adaptive_steps_crowd_at_a_switch():
    made = Crossing()
    tolerances = {"method": "dopri5", "rtol": 1e-7, "atol": 1e-9}
    across, within = (
        solve([Segment(0.0, made.end, made.velocity(field))], made.start, **tolerances)
        for field in (made.field, made.first)
    )
    assert across.stats.rejected >= within.stats.rejected + 5
    assert across.stats.evaluations > 2 * within.stats.evaluations
    assert float((across.x1 - made.exact(made.start)).norm()) < 1e-4


@pytest.mark.parametrize("router", ROUTERS)
def test_auxiliary_terms_are_those_of_the_papers(router):
    field = mixture(router=router)
    x = X.flatten(0, 1)
    logits = x @ field.router.weight.T
    scores = logits.sigmoid() if router == "sigmoid" else logits.softmax(-1)
    shares = (scores / scores.sum(-1, keepdim=True)).mean(0)
    chosen = torch.stack([F.one_hot(row.topk(2).indices, 5).sum(0) for row in scores]).double()
    found = field.auxiliary(X)
    assert float(found["balance"]) == pytest.approx(
        5 * float((chosen.mean(0) / 2 * shares).sum()), rel=1e-12
    )
    assert float(found["router_z"]) == pytest.approx(
        float(logits.exp().sum(-1).log().square().mean()), rel=1e-12
    )


def test_balance_is_one_where_all_is_even_and_the_number_of_experts_over_k_at_most():
    field = mixture(router="softmax_topk", top_k=1, experts=4)
    field.router.weight.zero_()
    assert float(field.auxiliary(X)["balance"]) == pytest.approx(1)
    field.router.weight[0] = 100 * X[0, 0]
    assert float(field.auxiliary(X[:1, :1])["balance"]) == pytest.approx(4)


def test_rebalancing_evens_the_load_and_leaves_the_gates():
    field = mixture(experts=4, top_k=1, router="softmax_topk")
    x = X.flatten(0, 1).repeat(20, 1) + torch.randn(
        280, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(5)
    )
    field.router.weight[0] += 0.3 * x.mean(0)
    before = field.load(x)
    routing = field.route(x)
    for _ in range(400):
        field.rebalance(field.load(x), 0.002)
    after = field.load(x)
    assert float(after.max() / after.mean()) < 1.1 < float(before.max() / before.mean())
    assert torch.equal(field.route(x).scores, routing.scores)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"experts": 0}, "experts = 0: give a whole number from 1"),
        ({"top_k": 9}, "top_k = 9 exceeds the 8 experts"),
        ({"shared_experts": -1}, "shared_experts = -1"),
        ({"router": "softmx_topk"}, "did you mean 'softmax_topk'"),
        ({"expert": "moe"}, "unknown expert 'moe'"),
        ({"top_k": 1}, "always has gate 1"),
        (
            {"expert": "swiglu", "activation": "relu"},
            "activation = 'relu' has no meaning for expert 'swiglu'",
        ),
        (
            {"ffn": "mlp", "top_k": 3},
            "top_k = 3 has no meaning for ffn 'mlp': leave it out, or choose ffn moe",
        ),
    ],
)
def test_what_makes_no_sense_is_refused_in_one_line(changes, words):
    with pytest.raises(ConfigError, match=words) as refused:
        GPTConfig(**{"width": 16, "ffn": "moe", **changes})
    assert "\n" not in str(refused.value)


def test_a_token_goes_through_as_many_features_as_in_the_ffn_that_the_experts_are():
    assert GPTConfig(width=128, ffn="moe").hidden_width == 256
    assert GPTConfig(width=128, ffn="moe", top_k=3, shared_experts=1).hidden_width == 128
    assert GPTConfig(width=96, ffn="moe", expert="swiglu", top_k=2).hidden_width == 128
    assert GPTConfig(width=96, ffn="moe", ffn_width=10).hidden_width == 10


def test_biases_of_the_choice_are_saved(tmp_path):
    from ctrans.model.checkpoint import load, save

    made = GPT(small_config("pre", ffn="moe"))
    made.depth.sublayers[1].field.choice_bias += torch.linspace(-1, 1, 8)
    save(made, tmp_path)
    assert torch.equal(
        load(tmp_path).depth.sublayers[1].field.choice_bias, torch.linspace(-1, 1, 8)
    )

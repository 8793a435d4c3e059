"""Each kind of gradient against one that is known: autograd through a plain loop, torchdiffeq's
adjoint, finite differences.
"""

import gc
import math
import subprocess
import sys
import weakref
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
import torchdiffeq
from torch import nn

from solvers import (
    GRADIENTS,
    METHODS,
    Adjoint,
    Checkpoint,
    ConfigError,
    Event,
    HasReversibleForm,
    Reversible,
    Segment,
    SolveError,
    solve,
)
from solvers.reversible_scheme import ReversibleScheme
from tests.helpers import DEVICES, FREE, NAMES, learned, small_config, tokens

OWN = [
    name
    for name, method in METHODS.items()
    if isinstance(method, HasReversibleForm) and not method.implicit
]
IMPLICIT = [name for name, method in METHODS.items() if getattr(method, "implicit", False)]
FIXED = [name for name in OWN if not METHODS[name].adaptive]
IN_TORCH = sorted(set(METHODS) - {"torchdiffeq:scipy_solver"})
EXACT = ["checkpoint", "reversible"]


class Fields(nn.Module):
    """Two fields that share `rate`; `frozen` needs no gradient, `offset` acts in the first only,
    `unused` nowhere.
    """

    def __init__(self):
        super().__init__()
        self.rate = nn.Parameter(torch.tensor([1.2, 0.7, -0.4], dtype=torch.float64))
        self.offset = nn.Parameter(torch.tensor([0.3, 0.1, 0.2], dtype=torch.float64))
        self.frozen = nn.Parameter(
            torch.tensor([0.9, 1.1, 1.3], dtype=torch.float64), requires_grad=False
        )
        self.unused = nn.Parameter(torch.ones(3, dtype=torch.float64))

    def segments(self):
        scale = (
            2 * self.rate.detach().mean() + self.rate.sum()
        )  # a captured tensor that is not a leaf
        return [
            Segment(0, 0.5, lambda t, x: torch.sin(self.rate * x + self.offset) * self.frozen),
            Segment(0.5, 1.25, lambda t, x: self.rate * torch.cos(x.flip(0) + t) * scale),
            Segment(1.25, 2, lambda t, x: torch.tanh(self.rate * x)),
        ]


X0 = torch.tensor([0.3, -0.8, 0.5], dtype=torch.float64)


def loss_of(solution):
    """Depends on every state that was saved."""
    return (
        sum(((i + 1) * state.square()).sum() for i, state in enumerate(solution.states))
        + solution.x1.sin().sum()
    )


def gradients(fields, x0=X0, segments=None, **request):
    x = x0.clone().requires_grad_()
    solution = solve(fields.segments() if segments is None else segments, x, **request)
    found = torch.autograd.grad(
        loss_of(solution), (x, *fields.parameters_with_gradient()), allow_unused=True
    )
    return [torch.zeros_like(x) if g is None else g for g in found]


Fields.parameters_with_gradient = lambda self: [p for p in self.parameters() if p.requires_grad]


def apart(these, those):
    """Relative distance of two lists of gradients."""
    gap = sum(float((a - b).square().sum()) for a, b in zip(these, those, strict=True))
    return math.sqrt(gap / sum(float(b.square().sum()) for b in those))


def request_for(method, steps=5, tolerance=None):
    tolerance = (1e-6 if METHODS[method].order > 3 else 1e-3) if tolerance is None else tolerance
    return {
        "method": method,
        **(
            {"rtol": tolerance, "atol": tolerance} if METHODS[method].adaptive else {"steps": steps}
        ),
    }


@pytest.mark.cases(4)
@pytest.mark.parametrize("save", ["ends", "segments", "steps"])
@pytest.mark.parametrize("method", IN_TORCH)
def test_checkpoint_has_backprops_solution_and_gradient(method, save):
    fields, request = Fields(), {**request_for(method), "save": save}
    plain, recomputed = (
        solve(fields.segments(), X0, gradient=g, **request) for g in ("backprop", "checkpoint")
    )
    assert torch.allclose(plain.x1, recomputed.x1, rtol=1e-13, atol=0)
    assert recomputed.times == pytest.approx(plain.times, rel=1e-14)
    assert recomputed.stats.accepted == plain.stats.accepted
    for kind in ("checkpoint", Checkpoint(every=1), Checkpoint(every=4), Checkpoint(every=1000)):
        assert (
            apart(gradients(fields, gradient=kind, **request), gradients(fields, **request)) < 1e-10
        )


def test_a_stiff_field_takes_the_same_steps_with_checkpoints():
    """x' = -2000 x in its first entry: without the derivatives of its field, Newton's method would
    need steps of 1/1000.
    """
    matrix = torch.tensor([[-2000.0, 0.0], [1.0, -1.0]], dtype=torch.float64, requires_grad=True)
    segments = [Segment(0, 1, lambda t, x: x @ matrix.T)]
    start = torch.ones(2, dtype=torch.float64)
    request = {"method": "esdirk4", "rtol": 1e-5, "atol": 1e-7}
    plain, other = (
        solve(segments, start, gradient=kind, **request) for kind in ("backprop", "checkpoint")
    )
    assert other.stats.accepted == plain.stats.accepted < 100
    assert torch.allclose(other.x1, plain.x1, rtol=1e-9, atol=1e-12)


def test_an_event_of_a_stiff_field_is_found_in_as_few_steps():
    matrix = torch.tensor([[-2000.0, 0.0], [1.0, -1.0]], dtype=torch.float64, requires_grad=True)
    segments = [Segment(0, 1, lambda t, x: x @ matrix.T)]
    start = torch.ones(2, dtype=torch.float64)
    found = solve(
        segments,
        start,
        method="esdirk4",
        rtol=1e-5,
        atol=1e-7,
        events=Event(lambda t, x: x[1] - 0.5),
    )
    # x_2 = (1 + 1/1999) exp(-t) - exp(-2000 t)/1999
    assert float(found.event_time) == pytest.approx(math.log(2 * (1 + 1 / 1999)), abs=1e-4)
    assert found.stats.accepted < 100


def naive_reversible(fields, x0, increment, steps, coupling):
    """The scheme as the paper writes it, in plain torch."""
    y = z = x0
    states = [x0]
    for segment in fields.segments():
        for t0, t1 in pairwise(
            torch.linspace(segment.start, segment.end, steps + 1, dtype=torch.float64)
        ):
            y = coupling * y + (1 - coupling) * z + increment(segment.field, t0, t1 - t0, z)
            z = z - increment(segment.field, t1, t0 - t1, y)
        states.append(y)
    return states


def euler(field, t, h, x):
    return h * field(t, x)


def midpoint(field, t, h, x):
    return h * field(t + h / 2, x + h / 2 * field(t, x))


@pytest.mark.parametrize(("method", "increment"), [("euler", euler), ("midpoint", midpoint)])
def test_reversible_is_the_scheme_of_mccallum_and_foster_and_has_its_gradient(method, increment):
    fields = Fields()
    x = X0.clone().requires_grad_()
    states = naive_reversible(fields, x, increment, 7, 0.99)
    solution = solve(
        fields.segments(), X0, method=method, steps=7, gradient="reversible", save="segments"
    )
    for ours, naive in zip(solution.states, states, strict=True):
        assert torch.allclose(ours, naive, rtol=1e-13, atol=1e-14)
    loss = (
        sum(((i + 1) * state.square()).sum() for i, state in enumerate(states))
        + states[-1].sin().sum()
    )
    expected = torch.autograd.grad(
        loss, (x, fields.rate, fields.offset, fields.unused), allow_unused=True
    )
    expected = [torch.zeros_like(x) if g is None else g for g in expected]
    assert (
        apart(
            gradients(fields, method=method, steps=7, gradient="reversible", save="segments"),
            expected,
        )
        < 1e-12
    )


@pytest.mark.cases(8)
@pytest.mark.parametrize("save", ["ends", "segments", "steps"])
@pytest.mark.parametrize("method", OWN)
def test_reversible_has_the_gradient_of_backprop_through_its_own_scheme(method, save):
    fields, request = Fields(), {**request_for(method), "save": save}
    scheme = ReversibleScheme(METHODS[method], 0.99)
    expected = gradients(fields, **{**request, "method": scheme})
    assert apart(gradients(fields, gradient="reversible", **request), expected) < 1e-10


@pytest.mark.slow
def test_reversible_goes_back_over_512_steps():
    fields = Fields()
    segments = [Segment(0, 4, lambda t, x: torch.sin(fields.rate * x + fields.offset))]
    expected = gradients(
        fields, segments=segments, method=ReversibleScheme(METHODS["rk4"], 0.99), steps=512
    )
    assert (
        apart(
            gradients(fields, segments=segments, method="rk4", steps=512, gradient="reversible"),
            expected,
        )
        < 1e-9
    )


# Steps per segment at which the error of each order is asymptotic and above rounding.
SIZES = {1: (64, 128), 2: (32, 64), 3: (64, 128), 4: (12, 24), 5: (10, 20), 8: (3, 6)}


def assert_order(errors, order):
    slope = math.log(errors[0] / errors[1], 2)
    # the leading coefficient of the higher pairs is made small: they converge faster until rounding
    # is near
    assert order - (0.5 if order >= 5 else 0.25) < slope < order + (1.5 if order >= 5 else 0.25), (
        slope
    )


@pytest.mark.cases(1)
@pytest.mark.parametrize("method", OWN)
def test_the_reversible_solution_converges_at_the_methods_order(method):
    chosen = METHODS[method].fixed()
    segments = Fields().requires_grad_(False).segments()
    exact = solve(segments, X0, method="dopri5", rtol=1e-13, atol=1e-14).x1
    kind = Reversible(
        coupling=0.9
    )  # the pair's difference is a transient of 1/(1 - coupling) steps
    ends = [
        solve(segments, X0, method=chosen, steps=n, gradient=kind).x1 for n in SIZES[chosen.order]
    ]
    assert_order([float((x - exact).norm()) for x in ends], chosen.order)


@pytest.mark.cases(1)
@pytest.mark.parametrize("method", OWN)
def test_the_adjoint_converges_at_the_methods_order(method):
    fields, chosen = Fields(), METHODS[method].fixed()
    request = {"method": chosen, "gradient": "adjoint", "save": "segments"}
    exact = gradients(fields, method="dopri5", rtol=1e-13, atol=1e-14, save="segments")
    errors = [apart(gradients(fields, steps=n, **request), exact) for n in SIZES[chosen.order]]
    assert_order(errors, chosen.order)


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    "method", [name for name in IN_TORCH if METHODS[name].adaptive and name not in IMPLICIT]
)
def test_an_adaptive_adjoint_is_as_good_as_its_tolerance(method):
    fields = Fields()
    exact = gradients(fields, method="dopri5", rtol=1e-13, atol=1e-14, save="segments")
    tolerance = 1e-8 if METHODS[method].order > 3 else 1e-4
    request = {"save": "segments", **request_for(method, tolerance=tolerance)}
    found, backprops = (
        apart(gradients(fields, gradient=g, **request), exact) for g in ("adjoint", "backprop")
    )
    assert found < 10 * max(backprops, tolerance)


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    "method", ["torchdiffeq:euler", "torchdiffeq:rk4", "torchdiffeq:explicit_adams"]
)
def test_torchdiffeqs_adjoint_converges_too(method):
    fields = Fields()
    exact = gradients(fields, method="dopri5", rtol=1e-13, atol=1e-14)
    errors = [
        apart(gradients(fields, method=method, steps=n, gradient="adjoint"), exact) for n in (8, 64)
    ]
    assert errors[1] < errors[0] / 6


def test_our_adjoint_of_euler_is_torchdiffeqs():
    class Field(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(3, 3, dtype=torch.float64)

        def forward(self, t, x):
            return torch.tanh(self.linear(x) + t)

    field = Field()
    x = X0.clone().requires_grad_()
    segments = [Segment(0, 1, field)]
    ours = torch.autograd.grad(
        solve(segments, x, steps=16, gradient="adjoint").x1.sum(), (x, *field.parameters())
    )
    times = torch.tensor([0.0, 1.0], dtype=torch.float64)
    grid = {"step_size": 1 / 16}
    end = torchdiffeq.odeint_adjoint(field, x, times, method="euler", options=grid)[-1]
    theirs = torch.autograd.grad(end.sum(), (x, *field.parameters()))
    assert apart(ours, theirs) < 1e-13


@pytest.mark.cases(1)
@pytest.mark.parametrize("method", ["midpoint", "rk4", "tsit5"])
def test_the_adjoint_reports_how_far_off_it_is(method):
    fields, reports = Fields(), []
    request = request_for(method, steps=8, tolerance=1e-5)
    kind = Adjoint(report=reports.append, restore=False)
    found = gradients(fields, gradient=kind, **request)
    solution = solve(
        fields.segments(), X0, **request
    ).x1  # the report is about the way back from here
    x = solution.detach()
    exact = back_from(fields, x)
    (report,) = reports
    assert apart(found, gradients(fields, gradient=Adjoint(restore=False), **request)) == 0
    assert 0.3 < report.gradient / apart(found, exact) < 3
    assert 0 < report.state < 1e-2


def back_from(fields, x1):
    """The adjoint ODE's solution from that final state, to 1e-12."""
    backward = [Segment(s.t1, s.t0, s.field) for s in reversed(fields.segments())]
    with torch.no_grad():
        start = solve(backward, x1, method="dopri5", rtol=1e-13, atol=1e-14).x1
    exact = gradients(fields, x0=start, method="dopri5", rtol=1e-13, atol=1e-14)
    exact[0] = exact[0] + 2 * (X0 - start)  # the loss's own dependence on the initial state
    return exact


@pytest.mark.cases(5)
@pytest.mark.parametrize("kind", EXACT)
@pytest.mark.parametrize("method", OWN)
def test_gradcheck(method, kind):
    chosen = METHODS[method].fixed()

    def end(x, rate):
        segments = [
            Segment(0, 0.5, lambda t, x: torch.sin(rate * x)),
            Segment(0.5, 1, lambda t, x: rate * torch.cos(x + t)),
        ]
        solution = solve(segments, x, method=chosen, steps=2, gradient=kind, save="segments")
        return solution.states[1], solution.x1

    rate = torch.tensor([1.2, 0.7, -0.3], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(end, (X0.clone().requires_grad_(), rate))


@pytest.mark.parametrize("kind", sorted(GRADIENTS))
def test_without_gradients_asked_for_the_solution_is_the_same(kind):
    fields = Fields()
    with_graph = solve(fields.segments(), X0, method="rk4", steps=4, gradient=kind, save="segments")
    with torch.no_grad():
        without = solve(
            fields.segments(), X0, method="rk4", steps=4, gradient=kind, save="segments"
        )
    frozen = solve(
        fields.requires_grad_(False).segments(),
        X0,
        method="rk4",
        steps=4,
        gradient=kind,
        save="segments",
    )
    assert with_graph.x1.requires_grad
    assert not without.x1.requires_grad
    assert not frozen.x1.requires_grad
    for a, b, c in zip(with_graph.states, without.states, frozen.states, strict=True):
        assert torch.equal(a, b)
        assert torch.equal(a, c)
    assert with_graph.stats == without.stats


@pytest.mark.parametrize("kind", sorted(GRADIENTS))
def test_a_field_that_depends_on_nothing_has_the_identity_as_derivative(kind):
    x = X0.clone().requires_grad_()
    end = solve([Segment(0, 1, lambda t, x: torch.ones_like(x))], x, steps=3, gradient=kind).x1
    assert torch.allclose(torch.autograd.grad(end.sum(), x)[0], torch.ones_like(x), rtol=1e-13)


def saved_bytes(fields, **request):
    """What autograd keeps between forward and backward, parameters apart."""
    storages = {}
    own = {p.untyped_storage().data_ptr() for p in fields.parameters()}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            storages[storage.data_ptr()] = (storage.nbytes(), tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        solution = solve(fields.segments(), X0.repeat(1).requires_grad_(), **request)
    assert solution.x1.requires_grad
    return sum(size for size, _ in storages.values())


def test_the_adjoint_is_better_where_it_starts_from_kept_states():
    fields, reports = Fields(), []
    exact = gradients(fields, steps=16)
    for restore in (True, False):
        gradients(fields, steps=16, gradient=Adjoint(report=reports.append, restore=restore))
    kept, solved = (
        apart(gradients(fields, steps=16, gradient=Adjoint(restore=r)), exact)
        for r in (True, False)
    )
    assert kept < solved
    assert reports[0].state < reports[1].state
    assert (
        saved_bytes(fields, gradient="adjoint")
        == saved_bytes(fields, gradient=Adjoint(restore=False)) + 2 * X0.nbytes
    )


@pytest.mark.cases(1)
@pytest.mark.parametrize("kind", ["reversible", "adjoint", Adjoint(restore=False)], ids=str)
def test_reversible_and_adjoint_keep_the_same_from_8_to_512_steps(kind):
    few, many = (saved_bytes(Fields(), method="midpoint", steps=n, gradient=kind) for n in (8, 512))
    assert few == many


def test_checkpoint_keeps_as_many_states_as_there_are_groups_of_steps():
    fields, state = Fields(), X0.nbytes
    # 3 segments of 3 and of 48 steps: sqrt(9) and sqrt(144) groups
    fewest = saved_bytes(fields, steps=3, gradient="checkpoint")
    assert saved_bytes(fields, steps=48, gradient="checkpoint") == fewest + (12 - 3) * state
    assert saved_bytes(fields, steps=48, gradient=Checkpoint(every=16)) == fewest + (9 - 3) * state


@pytest.mark.slow
@pytest.mark.parametrize("kind", sorted(GRADIENTS))
def test_what_a_solve_keeps_is_freed_with_it(kind):
    solve(
        Fields().segments(), X0, steps=3, gradient=kind
    )  # what torch imports on first use may hold on to a frame
    gc.collect()
    gc.disable()
    try:
        solution = solve(Fields().segments(), X0.clone().requires_grad_(), steps=3, gradient=kind)
        state = weakref.ref(solution.x1)
        del solution
        assert state() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", sorted(GRADIENTS))
def test_under_autocast_the_way_back_computes_in_the_same_precision(kind, device):
    linear = nn.Linear(8, 8).to(device)
    x = torch.randn(4, 8, device=device, requires_grad=True)
    types = []

    def field(t, x):
        v = linear(x)
        types.append(v.dtype)
        return torch.tanh(v)

    method = ReversibleScheme(METHODS["rk4"], 0.99) if kind == "reversible" else "rk4"
    found = {}
    for each, chosen in (("backprop", method), (kind, "rk4")):
        with torch.autocast(device, dtype=torch.bfloat16):
            end = solve([Segment(0, 1, field)], x, method=chosen, steps=4, gradient=each).x1
            again = linear(
                end
            )  # the same weights later, under the same autocast: its cache must not lack their graph
        found[each] = torch.autograd.grad(again.float().square().sum(), (x, *linear.parameters()))
    assert set(types) == {torch.bfloat16}
    assert apart(found[kind], found["backprop"]) < (
        1e-3 if kind in ("backprop", "checkpoint") else 0.05
    )


@pytest.mark.parametrize("kind", sorted(GRADIENTS))
@pytest.mark.parametrize("method", ["rk4", "torchdiffeq:rk4"])
def test_under_ddp_parameters_get_their_gradients(kind, method, tmp_path):
    if kind == "reversible" and method.startswith("torchdiffeq"):
        pytest.skip("not in the table")

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(3, 3, dtype=torch.float64)

        def forward(self, x):
            return self.end(x, kind)

        def end(self, x, kind):
            return solve(
                [Segment(0, 1, lambda t, x: torch.tanh(self.linear(x)))],
                x,
                method=method,
                steps=20,
                gradient=kind,
            ).x1

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    wrapped = None
    try:
        model = Model()
        wrapped = nn.parallel.DistributedDataParallel(model)
        wrapped(X0).square().sum().backward()
        plain = torch.autograd.grad(
            model.end(X0, "backprop").square().sum(), list(model.parameters())
        )
        # the scheme of `reversible` is another one, and the adjoint has an error: what is asked
        # here is that nothing is lost
        tolerance = {"backprop": 1e-14, "checkpoint": 1e-14, "adjoint": 1e-6, "reversible": 1e-2}[
            kind
        ]
        assert apart([p.grad for p in model.parameters()], plain) < tolerance
    finally:
        # if the reducer is the last to hold the group, it waits for gloo's threads with Python's
        # lock held, which once waited for ever
        del wrapped
        gc.collect()
        dist.destroy_process_group()


# What users' fields do.


@pytest.mark.cases(2)
@pytest.mark.parametrize("kind", ["checkpoint", "adjoint"])
@pytest.mark.parametrize("save", ["ends", "segments", "steps"])
@pytest.mark.parametrize(
    "times",
    [
        [(0, 0.1 + 0.2), (0.3, 1)],
        [(k * 0.3, k * 0.3 + 0.3) for k in range(12)],
        [(0, 1), (1, 0), (0, 1)],
    ],
    ids=["rounded", "many rounded", "out and back"],
)
def test_saved_states_get_their_gradient_once_however_times_round(times, save, kind):
    fields = Fields()
    segments = [Segment(t0, t1, lambda t, x: torch.sin(fields.rate * x + t)) for t0, t1 in times]
    request = {"segments": segments, "method": "rk4", "steps": 4, "save": save}
    assert apart(gradients(fields, gradient=kind, **request), gradients(fields, **request)) < 1e-3


@pytest.mark.parametrize("kind", ["reversible", "adjoint"])
def test_what_cannot_be_seen_from_outside_is_no_silent_zero(kind):
    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, w):
            ctx.save_for_backward(x, w)
            return x * w

        @staticmethod
        def backward(ctx, g):
            x, w = ctx.saved_tensors
            return g * w, g * x

    weight = torch.tensor([0.5, -0.2, 0.3], dtype=torch.float64, requires_grad=True)

    def through(field):
        return solve([Segment(0, 1, field)], X0, method="rk4", steps=4, gradient=kind).x1.sum()

    (right,) = torch.autograd.grad(through(lambda t, x: torch.sin(x * weight)), weight)
    (custom,) = torch.autograd.grad(
        through(lambda t, x: torch.sin(Product.apply(x, weight + 0))), weight
    )
    assert torch.allclose(custom, right)
    doubled = 2 * weight
    with pytest.raises(SolveError, match=r"shape \(3,\) in a way that cannot be seen.*checkpoint"):
        through(lambda t, x: Product.apply(x, doubled)).backward()


@pytest.mark.parametrize("kind", ["reversible", "adjoint"])
def test_fields_that_draw_random_numbers_are_refused(kind):
    segments = [Segment(0, 1, lambda t, x: torch.nn.functional.dropout(x, 0.3))]
    x = X0.clone().requires_grad_()
    with pytest.raises(ConfigError, match="draws random numbers"):
        solve(segments, x, steps=3, gradient=kind)
    torch.manual_seed(1)
    expected = torch.autograd.grad(solve(segments, x, steps=3).x1.sum(), x)
    torch.manual_seed(1)
    found = torch.autograd.grad(solve(segments, x, steps=3, gradient="checkpoint").x1.sum(), x)
    assert torch.equal(found[0], expected[0])


@pytest.mark.parametrize("kind", ["reversible", "adjoint"])
def test_a_parameter_changed_between_the_passes_is_noticed(kind):
    fields = Fields()
    end = solve(fields.segments(), X0, steps=3, gradient=kind).x1
    with torch.no_grad():
        fields.offset.mul_(3)
    with pytest.raises(SolveError, match="changed in place"):
        end.sum().backward()


@pytest.mark.cases(1)
@pytest.mark.parametrize("scale", [1.0, 1e-8])
@pytest.mark.parametrize("method", ["dopri5", "tsit5", "torchdiffeq:dopri5"])
def test_an_adaptive_adjoint_is_as_good_for_a_small_loss(method, scale):
    turn = torch.tensor([[0.0, 9.0], [-9.0, 0.0]], dtype=torch.float64)

    def field(
        t, x
    ):  # the state decays slowly while the costate, on the other two coordinates, turns
        return torch.cat([-0.1 * x[:2], x[2:] @ turn])

    x = torch.tensor([1.0, 1.0, 0.0, 0.0], dtype=torch.float64, requires_grad=True)
    end = solve([Segment(0, 3, field)], x, method=method, gradient="adjoint").x1
    (found,) = torch.autograd.grad(scale * end[2:].sum(), x)
    exact = torch.matrix_exp(3 * turn) @ torch.ones(2, dtype=torch.float64)
    assert torch.allclose(found[2:] / scale, exact, atol=1e-4)


@pytest.mark.parametrize("kind", ["backprop", "checkpoint", "adjoint"])
@pytest.mark.parametrize("method", ["dopri5", "torchdiffeq:dopri5"])
def test_a_state_saved_within_a_segment_is_one_at_a_fixed_time(method, kind):
    rate = torch.tensor(1.3, dtype=torch.float64, requires_grad=True)
    request = {"method": method, "rtol": 1e-6, "atol": 1e-8, "save": "steps", "gradient": kind}
    solution = solve(
        [Segment(0, 2, lambda t, x: -rate * x)], torch.ones(1, dtype=torch.float64), **request
    )
    t, x = solution.times[len(solution.times) // 2], solution.states[len(solution.times) // 2]
    (found,) = torch.autograd.grad(x.sum(), rate)
    assert float(found) == pytest.approx(-t * math.exp(-1.3 * t), rel=1e-4)


def edges(end):
    """How many dependencies autograd knows of, all nodes together."""
    nodes, met, count = [end.grad_fn], set(), 0
    while nodes:
        node = nodes.pop()
        if node not in met:
            met.add(node)
            count += len(node.next_functions)
            nodes += [before for before, _ in node.next_functions if before is not None]
    return count


@pytest.mark.cases(1)
@pytest.mark.parametrize("kind", ["reversible", "adjoint"])
def test_fields_that_differentiate_an_energy_keep_no_more_for_more_steps(kind):
    weight = torch.tensor([0.5, -0.2, 0.3], dtype=torch.float64, requires_grad=True)

    def downhill(t, x):
        with torch.enable_grad():
            x = x if x.requires_grad else x.detach().requires_grad_()
            energy = torch.sin(weight * x).sum()
            return -torch.autograd.grad(energy, x, create_graph=True)[0]

    def pair(steps):
        x = X0.clone().requires_grad_()
        found = []
        for each in (kind, "backprop"):
            method = (
                ReversibleScheme(METHODS["rk4"], 0.99)
                if (kind, each) == ("reversible", "backprop")
                else "rk4"
            )
            end = solve([Segment(0, 1, downhill)], x, method=method, steps=steps, gradient=each).x1
            found.append((edges(end), torch.autograd.grad(end.sum(), (x, weight))))
        return found

    (few, _), _ = pair(2)
    (many, ours), (_, expected) = pair(16)
    assert few == many
    assert apart(ours, expected) < (1e-10 if kind == "reversible" else 1e-5)


def test_reversible_refuses_half_precision():
    with pytest.raises(ConfigError, match="cannot go back in bfloat16"):
        solve(
            [Segment(0, 1, lambda t, x: -x)], X0.bfloat16().requires_grad_(), gradient="reversible"
        )


# Transformers.


def transformer_gradients(model, kind, continuous, **request):
    x = model.embed(tokens())
    end = solve(model.depth.segments(continuous=continuous), x, gradient=kind, **request).x1
    loss = model.head(end).square().mean()
    return torch.autograd.grad(loss, list(model.parameters()))


def gpt(placement):
    from ctrans.model.gpt import GPT

    return learned(GPT(small_config(placement, depth=2)).double())


@pytest.mark.cases(6)
@pytest.mark.parametrize("placement", NAMES)
def test_checkpoint_has_backprops_gradient_of_every_placement(placement):
    model = gpt(placement)
    for continuous in (False, True):
        found, expected = (
            transformer_gradients(model, kind, continuous, steps=3)
            for kind in ("checkpoint", "backprop")
        )
        assert apart(found, expected) < 1e-12


@pytest.mark.cases(1)
@pytest.mark.parametrize("placement", NAMES)
def test_the_adjoint_of_every_placements_ode_has_its_gradient(placement):
    model = gpt(placement)
    exact = transformer_gradients(model, "backprop", True, method="rk4", steps=8)
    found = transformer_gradients(model, "adjoint", True, method="rk4", steps=8)
    assert apart(found, exact) < 1e-6


@pytest.mark.parametrize("placement", FREE)
def test_reversible_has_the_gradient_of_its_scheme_on_transformers(placement):
    model = gpt(placement)
    expected = transformer_gradients(
        model, "backprop", False, method=ReversibleScheme(METHODS["heun"], 0.99), steps=2
    )
    assert (
        apart(transformer_gradients(model, "reversible", False, method="heun", steps=2), expected)
        < 1e-10
    )


# What does not work, and what is said.


@pytest.mark.parametrize(
    ("continuous", "what"),
    [(False, "projection of segment 0"), (True, "map on entering segment 0")],
)
def test_reversible_says_that_it_cannot_undo_a_projection(continuous, what):
    with pytest.raises(ConfigError, match=rf"cannot go back through the {what}.*checkpoint"):
        transformer_gradients(gpt("post"), "reversible", continuous)


def test_the_adjoint_says_that_a_projection_step_is_no_ode():
    with pytest.raises(ConfigError, match=r"projects the state after each step.*continuous=True"):
        transformer_gradients(gpt("post"), "adjoint", False)


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (
            {"method": "torchdiffeq:rk4", "gradient": "reversible"},
            "use rk4 or tsit5, or gradient='checkpoint'",
        ),
        ({"gradient": "checkpont"}, "did you mean 'checkpoint'"),
    ],
)
def test_a_gradient_that_a_method_does_not_have_is_refused(request_, message):
    with pytest.raises(ConfigError, match=message):
        solve(Fields().segments(), X0, **request_)


def test_impossible_settings_are_refused():
    with pytest.raises(ConfigError, match="every = 0"):
        Checkpoint(every=0)
    with pytest.raises(ConfigError, match=r"coupling = 1\.5"):
        Reversible(coupling=1.5)


@pytest.mark.slow
def test_scipys_solver_has_the_adjoint_only():
    fields = Fields()
    request = {"method": "torchdiffeq:scipy_solver", "rtol": 1e-9, "atol": 1e-9}
    with pytest.raises(ConfigError, match="'adjoint' only"):
        gradients(fields, **request)
    exact = gradients(fields, method="dopri5", rtol=1e-12, atol=1e-13)
    assert apart(gradients(fields, gradient="adjoint", **request), exact) < 1e-6


@pytest.mark.parametrize("method", ["rk4", "tsit5", "torchdiffeq:dopri5"])
@pytest.mark.parametrize("kind", sorted(GRADIENTS))
def test_a_solve_that_breaks_says_where_whatever_its_gradient(kind, method):
    if kind == "reversible" and method.startswith("torchdiffeq"):
        pytest.skip("not in the table")
    segments = [Segment(0, 1, lambda t, x: -x), Segment(1, 3, lambda t, x: 1e200 * x**3)]
    request = {} if METHODS[method].adaptive else {"steps": 8}
    with pytest.raises(SolveError, match="in segment 1"):
        solve(
            segments,
            torch.ones(2, dtype=torch.float64, requires_grad=True),
            method=method,
            gradient=kind,
            **request,
        )


COMPILES = """
import torch
from solvers import GRADIENTS, Segment, solve

class Model(torch.nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.kind, self.linear = kind, torch.nn.Linear(3, 3, dtype=torch.float64)

    def forward(self, x):
        segments = [Segment(0, 1, lambda t, x: torch.tanh(self.linear(x)))]
        return self.linear(solve(segments, x, method="rk4", steps=3, gradient=self.kind).x1).square().sum()

x = torch.tensor([0.3, -0.8, 0.5], dtype=torch.float64)
for kind in GRADIENTS:
    model = Model(kind)
    both = [torch.autograd.grad(f(x), list(model.parameters())) for f in (model, torch.compile(model, backend="eager"))]
    assert all(torch.allclose(a, b, rtol=1e-12) for a, b in zip(*both)), kind
"""


@pytest.mark.slow
def test_a_model_around_a_solve_compiles():
    # in a process of its own, since the run-time check of annotations is what a compiler cannot
    # trace
    subprocess.run([sys.executable, "-c", COMPILES], check=True)


ONE_GRAPH = """
import torch
from solvers import Segment, solve

w = torch.tensor(0.5, requires_grad=True)
start = 0.2

def end(x, **request):
    segments = [Segment(start, 1, lambda t, x: -w * x), Segment(1, 2, lambda t, x: torch.sin(w * x) * t, project=torch.tanh)]
    solution = solve(segments, x, check=False, **request)
    return torch.stack(solution.states)

for dtype in (torch.float32, torch.float64):
    x = torch.linspace(-1, 1, 3, dtype=dtype)
    for request in ({"method": "rk4", "steps": 3}, {"save": "segments"}, {"method": "midpoint", "steps": 2, "times": [0.5, 1.5]}):
        whole = torch.compile(lambda x: end(x, **request), backend="eager", fullgraph=True)
        both = [(f(x), *torch.autograd.grad(f(x).sum(), w)) for f in (lambda x: end(x, **request), whole)]
        assert all(torch.equal(a, b) for a, b in zip(*both)), request
assert torch.isnan(torch.compile(lambda x: end(x), backend="eager", fullgraph=True)(x / 0)).any()
"""


@pytest.mark.slow
def test_fixed_steps_are_one_graph_segments_made_inside_too():
    subprocess.run([sys.executable, "-c", ONE_GRAPH], check=True)


def test_who_asks_for_no_check_gets_the_state_as_it_is():
    segments = [Segment(0, 1, lambda t, x: x / 0)]
    assert not solve(segments, torch.ones(2), check=False).x1.isfinite().any()
    with pytest.raises(SolveError, match="non-finite in segment 0"):
        solve(segments, torch.ones(2))


@pytest.mark.parametrize("kind", [Adjoint(), Reversible()], ids=["adjoint", "reversible"])
def test_a_stretch_depends_on_its_own_parameters_only_however_deep_the_model(kind):
    """If each stretch had the parameters of all before it, the cost would grow with the square of
    the depth.
    """
    weights = [
        torch.full((3,), 0.1 * (k + 1), dtype=torch.float64, requires_grad=True) for k in range(6)
    ]
    segments = [
        Segment(k, k + 1, lambda t, x, w=w: torch.tanh(w * x)) for k, w in enumerate(weights)
    ]
    x1 = solve(segments, X0, method="heun", steps=4, gradient=kind).x1
    waiting, stretches = [x1.grad_fn], []
    while waiting:
        before = [node for node, _ in waiting.pop().next_functions if node is not None]
        stretches.append([node.variable for node in before if hasattr(node, "variable")])
        waiting += [node for node in dict.fromkeys(before) if not hasattr(node, "variable")]
    found = [id(weight) for own in stretches for weight in own]
    assert sorted(found) == sorted(map(id, weights))

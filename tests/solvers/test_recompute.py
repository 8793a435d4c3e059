"""Recomputation sees what autograd sees: each case against plain backpropagation of the same
solve.
"""

import gc
import math
import weakref

import pytest
import torch
from torch import nn
from torch.func import functional_call

from solvers import GRADIENTS, Checkpoint, ConfigError, Segment, SolveError, solve
from solvers.recompute import recomputed

X0 = torch.tensor([0.3, -0.8, 0.5], dtype=torch.float64)
WEIGHT = torch.tensor([0.5, -0.2, 0.3], dtype=torch.float64)
KINDS = [Checkpoint(every=1), Checkpoint(every=3), Checkpoint()]
kinds = pytest.mark.parametrize("kind", KINDS, ids=str)


def end(field, x, gradient, **request):
    return solve(
        [Segment(0, 1, field), Segment(1, 2, field)],
        x,
        method="heun",
        steps=4,
        gradient=gradient,
        **request,
    )


def inputs():
    return X0.clone().requires_grad_(), WEIGHT.clone().requires_grad_()


def assert_same(make, kind):
    """`make(gradient)` gives tensors to compare."""
    for found, expected in zip(make(kind), make("backprop"), strict=True):
        assert torch.allclose(found, expected, rtol=1e-12, atol=1e-15)


@kinds
def test_gradients_can_be_taken_twice_from_one_graph(kind):
    def twice(gradient):
        x, weight = inputs()
        loss = end(lambda t, x: torch.sin(weight * x), x, gradient).x1.square().sum()
        first = torch.autograd.grad(loss, (x, weight), retain_graph=True)
        return [*first, *torch.autograd.grad(loss, (x, weight))]

    assert_same(twice, kind)


@kinds
def test_second_derivatives_are_backprops(kind):
    def second(gradient):
        x, weight = inputs()
        loss = end(lambda t, x: torch.sin(weight * x), x, gradient).x1.square().sum()
        (slope,) = torch.autograd.grad(loss, x, create_graph=True)
        return torch.autograd.grad(slope.square().sum(), (x, weight))

    assert_same(second, kind)


@kinds
def test_saved_states_in_the_middle_have_their_whole_gradient(kind):
    def costates(gradient):
        x, weight = inputs()
        solution = end(lambda t, x: torch.sin(weight * x), x, gradient, save="steps")
        for state in solution.states[1:]:
            state.retain_grad()
        solution.x1.square().sum().backward()
        return [state.grad for state in solution.states[1:]]

    assert_same(costates, kind)


@kinds
def test_a_captured_tensor_with_a_history_and_what_nothing_looks_into(kind):
    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, w):
            ctx.save_for_backward(x, w)
            return x * w

        @staticmethod
        def backward(ctx, g):
            x, w = ctx.saved_tensors
            return g * w, g * x

    def through(gradient):
        x, weight = inputs()
        doubled = 2 * weight.exp()
        loss = (
            end(lambda t, x: torch.sin(Product.apply(x, doubled) + weight), x, gradient)
            .x1.square()
            .sum()
        )
        return torch.autograd.grad(loss, (x, weight))

    assert_same(through, kind)


@kinds
def test_parameters_substituted_for_a_call_get_the_gradient(kind):
    linear = nn.Linear(3, 3, dtype=torch.float64)

    class Model(nn.Module):
        def __init__(self, gradient):
            super().__init__()
            self.linear, self.gradient = linear, gradient

        def forward(self, x):
            return end(lambda t, x: torch.tanh(self.linear(x)), x, self.gradient).x1

    mine = {
        f"linear.{name}": (2 * p.detach()).requires_grad_() for name, p in linear.named_parameters()
    }

    class Loss(nn.Module):
        """The gradient is taken within the call: there the parameters are the substituted ones both
        times.
        """

        def __init__(self, gradient):
            super().__init__()
            self.model = Model(gradient)

        def forward(self, x):
            mine = list(self.model.linear.parameters())
            return torch.autograd.grad(self.model(x).square().sum(), mine)

    inner = {f"model.{name}": p for name, p in mine.items()}
    assert_same(lambda gradient: functional_call(Loss(gradient), inner, (X0,)), kind)
    loss = functional_call(Model(kind), mine, (X0,)).square().sum()
    with pytest.raises(SolveError, match="uses other tensors when its steps are computed again"):
        loss.backward()


@kinds
def test_random_numbers_are_drawn_again_and_the_generator_goes_on_as_if_not(kind):
    def drawn(gradient):
        x, weight = inputs()
        torch.manual_seed(3)
        solution = end(
            lambda t, x: torch.nn.functional.dropout(torch.sin(weight * x), 0.4), x, gradient
        )
        between = torch.rand(2)
        found = torch.autograd.grad(solution.x1.square().sum(), (x, weight))
        return [*found, between, torch.rand(2)]

    assert_same(drawn, kind)


@kinds
def test_a_field_that_differentiates_an_energy(kind):
    def downhill(gradient):
        x, weight = inputs()

        def field(t, x):
            x = x if x.requires_grad else x.detach().requires_grad_()
            return -torch.autograd.grad(torch.sin(weight * x).exp().sum(), x, create_graph=True)[0]

        return torch.autograd.grad(end(field, x, gradient).x1.square().sum(), (x, weight))

    assert_same(downhill, kind)


@pytest.mark.slow
@kinds
def test_a_solve_within_a_field(kind):
    def nested(gradient):
        x, weight = inputs()

        def field(t, x):
            return end(lambda t, x: torch.sin(weight * x), x, gradient).x1 - x

        return torch.autograd.grad(end(field, x, gradient).x1.square().sum(), (x, weight))

    assert_same(nested, kind)


@kinds
def test_solves_one_after_the_other_with_one_backward_pass(kind):
    def chained(gradient):
        x, weight = inputs()
        y = x
        for k in range(3):
            y = end(lambda t, x, k=k: torch.sin(weight * x + k), y, gradient).x1
        return torch.autograd.grad(y.square().sum(), (x, weight))

    assert_same(chained, kind)


def test_a_field_that_is_not_the_same_twice_is_no_silent_error():
    calls = []

    def field(t, x):
        calls.append(t)
        return torch.sin(x) if len(calls) > 8 else torch.sin(x).exp()

    x = X0.clone().requires_grad_()
    solution = solve([Segment(0, 1, field)], x, steps=8, gradient=Checkpoint(every=4))
    with pytest.raises(SolveError, match="did something else when its steps were computed again"):
        solution.x1.sum().backward()


def test_a_parameter_changed_between_the_passes_is_noticed():
    x, weight = inputs()
    solution = end(lambda t, x: torch.sin(weight * x), x, "checkpoint")
    with torch.no_grad():
        weight.mul_(3)
    with pytest.raises(SolveError, match="changed in place"):
        solution.x1.sum().backward()


def held(states):
    """Whether the call still has the tensors that its graph would keep, by one that only they refer
    to.
    """
    return [reference() is not None for reference in states]


def test_one_call_at_a_time_has_its_tensors():
    inner = []

    def function(x):
        y = x.exp()
        inner.append(weakref.ref(y.untyped_storage()))
        return (y.sin(),)

    gc.disable()
    try:
        x = X0.clone().requires_grad_()
        (first,) = recomputed(function, x, hold=True)
        assert held(inner) == [True]
        (second,) = recomputed(function, first)
        assert held(inner) == [False, False]
        torch.autograd.grad(second.sum(), x, retain_graph=True)
        assert len(inner) == 4
        assert held(inner)[2:] == [False, True]  # both were computed again, the first one last
        del first, second
        assert not any(held(inner))
    finally:
        gc.enable()


class Keeping(nn.Module):
    """-exp(w) x, where exp(w) is computed once and kept, as torch's `parametrize.cached` does: in
    evaluation `first`. With `both` the field uses w too: -exp(w) w x.
    """

    def __init__(self, first=1, both=False):
        super().__init__()
        self.w = nn.Parameter(torch.tensor([0.5, 0.3], dtype=torch.float64))
        self.kept = None
        self.first = first
        self.both = both
        self.evaluations = 0

    def forward(self, t, x):
        self.evaluations += 1
        if self.evaluations < self.first:
            rate = torch.exp(self.w)
        else:
            if self.kept is None:
                self.kept = torch.exp(self.w)
            rate = self.kept
        if self.both:
            rate = rate * self.w
        return -rate * x


def gradient_of_keeping(method, kind, field=None, **request):
    """d sum(x1)/dw by the kind, and in closed form: x1 = x0 exp(-exp(w))."""
    field = field or Keeping()
    if method == "rk4":
        request["steps"] = 100
    x0 = torch.tensor([1.0, 2.0], dtype=torch.float64)
    x1 = solve([Segment(0, 1, field)], x0, method=method, gradient=kind, **request).x1
    x1.sum().backward()
    return field.w.grad, -torch.exp(field.w.detach()) * x1.detach()


@pytest.mark.parametrize(
    ("method", "kind"),
    [
        ("rk4", "adjoint"),
        ("tsit5", "adjoint"),
        ("rk4", "reversible"),
        ("tsit5", "reversible"),
        ("rk4", "checkpoint"),
    ],
)
def test_a_tensor_that_a_field_keeps_is_named(method, kind):
    with pytest.raises(SolveError, match=r"keeps|did something else"):
        gradient_of_keeping(method, kind)
    with pytest.raises(SolveError, match=r"and keeps|did something else"):
        gradient_of_keeping(method, kind, Keeping(both=True))


def test_a_tensor_that_a_field_keeps_from_its_fourth_evaluation_has_its_gradient():
    found, right = gradient_of_keeping("tsit5", "checkpoint", Keeping(first=4))
    assert torch.allclose(found, right, rtol=1e-5)
    with pytest.raises(SolveError, match="did something else"):
        gradient_of_keeping("rk4", "checkpoint", Keeping(first=4))


def test_a_computed_weight_that_changes_before_the_recomputation_is_noticed():
    weight = torch.tensor([0.5, 0.3], dtype=torch.float64, requires_grad=True)
    rate = torch.exp(weight)
    x0 = torch.tensor([1.0, 2.0], dtype=torch.float64)
    segments = [Segment(0, 1, lambda t, x: -rate * x)]
    x1 = solve(segments, x0, method="rk4", steps=60, gradient="checkpoint").x1
    with torch.no_grad():
        rate.mul_(2)
    with pytest.raises(SolveError, match="changed in place before"):
        x1.sum().backward()


@pytest.mark.parametrize("kind", ["adjoint", "reversible"])
def test_a_kept_tensor_that_the_field_detaches_has_no_gradient_with_any_kind(kind):
    def gradient(kind):
        w = torch.tensor(0.5, dtype=torch.float64, requires_grad=True)
        kept = {}

        def field(t, x):
            rate = kept.setdefault("rate", torch.exp(w.detach()))
            torch._foreach_mul_([x.new_ones(2)], 1.0)  # what is written may be in a list
            return -rate * w * x

        x0 = torch.ones(2, dtype=torch.float64)
        x1 = solve([Segment(0, 1, field)], x0, method="rk4", steps=20, gradient=kind).x1
        return float(torch.autograd.grad(x1.sum(), w)[0])

    assert gradient(kind) == pytest.approx(gradient("backprop"), rel=1e-2)


@pytest.mark.parametrize("method", ["rk4", "tsit5"])
@pytest.mark.parametrize("kind", sorted(GRADIENTS))
def test_a_field_that_returns_no_tensor_is_refused_by_every_kind(kind, method):
    x0 = torch.ones(2, dtype=torch.float64, requires_grad=True)
    for value in (None, 1.0, (x0,)):
        with pytest.raises(ConfigError, match="must be a tensor"):
            solve([Segment(0, 1, lambda t, x, v=value: v)], x0, method=method, gradient=kind)


@pytest.mark.parametrize("size", [1.0, 1e25])
def test_states_of_any_size_agree_with_their_recomputation(size):
    w = torch.tensor(0.5, requires_grad=True)
    x0 = torch.full((2,), size)
    segments = [Segment(0, 1, lambda t, x: -w * x)]
    x1 = solve(segments, x0, method="rk4", steps=20, gradient="checkpoint").x1
    (slope,) = torch.autograd.grad(x1.sum(), w)
    assert float(slope) == pytest.approx(-float(x1.detach().sum()), rel=1e-4)


@pytest.mark.parametrize("kind", ["adjoint", "reversible"])
def test_a_kept_tensor_that_no_later_evaluation_uses_is_no_error(kind):
    w = torch.tensor(0.5, dtype=torch.float64, requires_grad=True)
    shown = {}

    def field(t, x):
        shown["rate"] = torch.exp(w)
        return -shown["rate"] * x

    x0 = torch.ones(2, dtype=torch.float64)
    x1 = solve([Segment(0, 1, field)], x0, method="rk4", steps=10, gradient=kind).x1
    (slope,) = torch.autograd.grad(x1.sum(), w)
    assert float(slope) == pytest.approx(-math.exp(0.5) * float(x1.detach().sum()), rel=2e-2)


@pytest.mark.parametrize("kind", sorted(GRADIENTS))
@pytest.mark.parametrize("method", ["rk4", "tsit5"])
def test_a_tensor_that_a_field_keeps_has_its_gradient_where_the_solve_is_repeated(method, kind):
    found, right = gradient_of_keeping(method, kind, on_step=lambda t, x: None)
    assert torch.allclose(found, right, rtol=1e-5)
    if kind == "backprop" or (kind == "checkpoint" and method == "tsit5"):
        found, right = gradient_of_keeping(method, kind)
        assert torch.allclose(found, right, rtol=1e-5)


@pytest.mark.parametrize("kind", ["adjoint", "reversible"])
def test_a_parameter_of_which_only_the_value_is_used_is_no_kept_one(kind):
    w = torch.tensor(0.5, dtype=torch.float64, requires_grad=True)
    v = torch.tensor(1.0, dtype=torch.float64, requires_grad=True)
    segments = [
        Segment(0, 1, lambda t, x: -w.detach() * v * x),
        Segment(1, 2, lambda t, x: -v * x if t > 1.2 else -w * x),
    ]
    x0 = torch.ones(2, dtype=torch.float64)
    x1 = solve(segments, x0, method="rk4", steps=10, gradient=kind).x1
    (slope,) = torch.autograd.grad(x1.sum(), v)
    assert float(slope) == pytest.approx(-1.3 * float(x1.detach().sum()), rel=2e-2)


OF_WEIGHTS = {
    "exp": lambda w, x: -torch.exp(w) * x,
    "negative": lambda w, x: -w * x,
    "sigmoid": lambda w, x: torch.sigmoid(w) * x,
}


@pytest.mark.parametrize("what", ["weight", "state"])
@pytest.mark.parametrize("name", OF_WEIGHTS)
@pytest.mark.parametrize("kind", sorted(set(GRADIENTS) - {"backprop"}))
@pytest.mark.parametrize("method", ["rk4", "tsit5"])
def test_a_weight_that_changes_in_place_between_the_passes_is_named(method, kind, name, what):
    """The initial state may change: a solve has its own copy."""
    w = torch.tensor([0.5, 0.3], dtype=torch.float64, requires_grad=True)
    x0 = torch.tensor([1.0, 2.0], dtype=torch.float64, requires_grad=True)
    x = x0 * 1
    request = {"steps": 60} if method == "rk4" else {}
    segments = [Segment(0, 1, lambda t, x: OF_WEIGHTS[name](w, x))]
    x1 = solve(segments, x, method=method, gradient=kind, **request).x1
    if what == "state":
        right = torch.autograd.grad(x1.sum(), [w, x0], retain_graph=True)
        with torch.no_grad():
            x.mul_(3)
        for found, before in zip(torch.autograd.grad(x1.sum(), [w, x0]), right, strict=True):
            assert torch.equal(found, before)
        return
    with torch.no_grad():
        w.mul_(3)
    with pytest.raises(SolveError, match="changed in place before its gradient"):
        torch.autograd.grad(x1.sum(), [w, x0])

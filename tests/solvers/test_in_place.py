"""What fields, projections and observers must not do in silence: change the state in place, return
a buffer again, or narrow the state. Projections and `enter` may work in place.
"""

import math

import numpy as np
import pytest
import torch

from solvers import GRADIENTS, ConfigError, Event, Segment, odeint, solve, solve_each
from solvers.methods import get_method

METHODS = ["euler", "rk4", "tsit5", "dop853", "esdirk4"]


def in_place(t, x):
    x.mul_(0.5)
    return -x


def in_place_by_numpy(t, x):
    v = -x
    x.numpy()[...] *= 0.5  # torch does not count this change
    return v


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    ("field", "words"),
    [
        (in_place, "the field changed its state x in place"),
        (in_place_by_numpy, "the field changed its state x in place"),
    ],
)
def test_a_field_that_writes_in_place_is_refused(field, words, method):
    x0 = torch.ones(2, dtype=torch.float64)
    options = {} if get_method(method).adaptive else {"steps": 4}
    with torch.no_grad(), pytest.raises(ConfigError, match=words):
        solve([Segment(0, 1, field)], x0, method=method, **options)


def test_one_constant_tensor_may_be_returned_again():
    constant = torch.full((2,), 3.0)
    x1 = solve([Segment(0, 1, lambda t, x: constant)], torch.ones(2), method="tsit5").x1
    assert torch.allclose(x1, torch.full((2,), 4.0))


def test_the_state_may_be_its_own_velocity():
    x1 = solve([Segment(0, 1, lambda t, x: x)], torch.ones(1).double(), method="tsit5").x1
    assert float(x1) == pytest.approx(2.718281828, rel=1e-6)


def test_an_observer_that_zeroes_the_state_is_refused():
    with torch.no_grad(), pytest.raises(ConfigError, match="changed the state in place"):
        solve(
            [Segment(0, 1, lambda t, x: -x)],
            torch.ones(2),
            method="tsit5",
            on_step=lambda t, x: x.zero_(),
        )


@pytest.mark.parametrize("name", ["project", "enter"])
def test_a_map_that_narrows_the_state_is_refused(name):
    segment = Segment(0, 1, lambda t, x: -x, **{name: lambda x: x.float()})
    with pytest.raises(ConfigError, match=f"the {name} returned float32 for a state of float64"):
        solve([segment], torch.ones(2, dtype=torch.float64), method="tsit5")


def negated(t, x):
    return x.neg_()


PAIR = torch.tensor([[1.0, 2.0]], dtype=torch.float64)


def options_for(method):
    return {} if get_method(method).adaptive else {"steps": 400}


def by_out(count):
    buffers = [torch.zeros(1, 2, dtype=torch.float64) for _ in range(count)]
    return lambda i, x: torch.neg(x, out=buffers[i % count])


def by_numpy(count):
    buffers = [np.zeros((1, 2)) for _ in range(count)]
    return lambda i, x: torch.from_numpy(np.negative(x.numpy(), out=buffers[i % count]))


def by_data(count):
    buffers = [torch.zeros(1, 2, dtype=torch.float64) for _ in range(count)]

    def write(i, x):
        buffers[i % count].data.copy_(-x)
        return buffers[i % count]

    return write


def by_view(count):
    write = by_data(count)
    return lambda i, x: write(i, x).data


def in_turn(write):
    """A field that writes -x by `write(call, x)` into buffers in turn."""
    calls = 0

    def field(t, x):
        nonlocal calls
        calls += 1
        return write(calls, x)

    return field


@pytest.mark.parametrize("method", ["euler", "rk4", "tsit5", "bosh3", "dop853"])
@pytest.mark.parametrize("count", [1, 2, 6, 20])
@pytest.mark.parametrize("buffers", [by_out, by_numpy, by_data, by_view])
def test_a_field_may_return_a_buffer_that_it_writes_to_again(buffers, count, method):
    segments = [Segment(0, 1, in_turn(buffers(count)))]
    right = solve([Segment(0, 1, lambda t, x: -x)], PAIR, method=method, **options_for(method))
    x1 = solve(segments, PAIR, method=method, **options_for(method)).x1
    assert torch.equal(x1, right.x1)
    if get_method(method).adaptive:
        found = odeint(in_turn(buffers(count)), PAIR, torch.tensor([0.0, 1.0]))
        assert torch.allclose(found[-1], PAIR * math.exp(-1), atol=1e-6)
        each = solve_each([Segment(0, 1, in_turn(buffers(count)))], PAIR, method=method)
        assert torch.allclose(each.x1, right.x1, atol=1e-6)
        curve = solve(segments, PAIR, method=method, save="curve").curve
        assert torch.allclose(curve(0.01), PAIR * math.exp(-0.01), atol=1e-6)


def test_a_cubic_between_grid_points_takes_a_buffer():
    options = {"step_size": 0.25, "interp": "cubic"}
    times = torch.tensor([0.0, 0.1, 1.0])
    found = odeint(in_turn(by_numpy(1)), PAIR, times, method="rk4", options=options)
    right = odeint(lambda t, y: -y, PAIR, times, method="rk4", options=options)
    assert torch.equal(found, right)


class IntoOneBuffer(torch.autograd.Function):
    """-x, written to the memory of the value before, as by a graphed CUDA callable."""

    buffer = torch.zeros(1, 2, dtype=torch.float64)

    @staticmethod
    def forward(ctx, x):
        IntoOneBuffer.buffer.data.copy_(-x)
        return IntoOneBuffer.buffer.detach()

    @staticmethod
    def backward(ctx, gradient):
        return -gradient


@pytest.mark.parametrize("method", ["rk4", "tsit5", "dop853"])
def test_a_graph_whose_values_share_their_memory_is_refused(method):
    x0 = PAIR.clone().requires_grad_()
    segments = [Segment(0, 1, lambda t, x: IntoOneBuffer.apply(x))]
    with pytest.raises(ConfigError, match="a buffer that it"):
        solve(segments, x0, method=method, **options_for(method))


@pytest.mark.parametrize("method", ["rk4", "tsit5", "dop853"])
def test_a_buffer_that_holds_a_graph_is_refused(method):
    buffer = torch.zeros(1, 2, dtype=torch.float64)
    x0 = PAIR.clone().requires_grad_()
    with pytest.raises(ConfigError, match="a buffer that it"):
        solve([Segment(0, 1, lambda t, x: buffer.copy_(-x))], x0, method=method)


def test_solve_each_refuses_what_solve_does():
    with pytest.raises(ConfigError, match="the field changed its state x in place"):
        solve_each([Segment(0, 1, negated)], PAIR.clone())


def test_a_kept_tensor_with_a_graph_may_be_returned_again():
    rate = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
    kept = rate * torch.ones(2, 2, dtype=torch.float64)
    for field in (lambda t, x: kept, lambda t, x: kept[:], lambda t, x: rate.expand(2, 2)):
        x1 = solve([Segment(0, 1, field)], torch.zeros(2, 2).double(), method="tsit5").x1
        (slope,) = torch.autograd.grad(x1.sum(), rate, retain_graph=True)
        assert float(slope) == pytest.approx(4)


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("method", ["euler", "rk4", "tsit5"])
def test_inference_mode_where_torch_counts_no_changes_has_the_right_result(method, count):
    right = PAIR * math.exp(-1)
    with torch.inference_mode():
        for field in (negated, in_turn(by_out(count))):
            x0 = PAIR.clone()
            x1 = solve([Segment(0, 1, field)], x0, method=method, **options_for(method)).x1
            assert torch.allclose(x1, right, atol=2e-3 if method == "euler" else 1e-6)
            assert torch.equal(x0, PAIR)
            each = solve_each([Segment(0, 1, field)], x0).x1
            assert torch.allclose(each, right, atol=1e-6)
        ends = odeint(negated, PAIR.clone(), torch.tensor([0.0, 1.0]))
        assert torch.allclose(ends[-1], right, atol=1e-6)


def by_numpy_view(t, x):
    x.detach().numpy()[...] = 5.0


def by_data_view(t, x):
    x.data.mul_(5.0)


@pytest.mark.parametrize("gradient", ["backprop", "adjoint"])
@pytest.mark.parametrize("change", [by_numpy_view, by_data_view])
@pytest.mark.parametrize("method", ["rk4", "tsit5"])
def test_an_observer_cannot_change_the_state_where_torch_does_not_count_it(
    method, change, gradient
):
    def event(t, x):
        value = x[0, 0] - 0.5
        change(t, x)
        return value

    def result(**request):
        segments = [Segment(0, 1, lambda t, x: -x)]
        x0 = PAIR.clone().requires_grad_()
        x1 = solve(
            segments, x0, method=method, gradient=gradient, **request, **options_for(method)
        ).x1
        return x1, torch.autograd.grad(x1.sum(), x0)[0]

    plain = result(on_step=lambda t, x: None)
    for one, other in zip(result(on_step=change), plain, strict=True):
        assert torch.equal(one, other)
    plain = result(events=Event(lambda t, x: x[0, 0] - 0.5))
    for one, other in zip(result(events=Event(event)), plain, strict=True):
        assert torch.equal(one, other)


def test_the_event_of_odeint_cannot_change_the_initial_value():
    def event(t, y):
        value = y.min() - 0.5
        y.data.mul_(5.0)
        return value

    y0 = PAIR.clone()
    times = torch.tensor([0.0, 1.0], dtype=torch.float64)
    found = odeint(lambda t, y: -y, y0, times, event_fn=event)[0]
    assert float(found) == pytest.approx(math.log(2), rel=1e-5)
    assert torch.equal(y0, PAIR)


def test_an_observer_in_inference_mode_gets_a_copy():
    with torch.inference_mode():
        solution = solve(
            [Segment(0, 1, lambda t, x: -x)],
            PAIR.clone(),
            method="tsit5",
            on_step=lambda t, x: x.zero_(),
            events=Event(lambda t, x: x.add_(1).min()),
        )
    assert torch.allclose(solution.x1, PAIR * math.exp(-1), atol=1e-6)


def rotated(t, x):
    return x @ torch.tensor([[3.0, 2.0], [-2.0, 1.0]], dtype=torch.float64)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("method", ["tsit5", "bosh3", "rk4"])
def test_a_projection_may_work_in_place(method, mode):
    """Against the same map out of place, bit for bit."""

    def solutions(project):
        segments = [Segment(0, 2, rotated, project=project)]
        x0 = torch.tensor([[1.0, 0.0]], dtype=torch.float64)
        options = {"steps": 20} if method == "rk4" else {"rtol": 1e-3, "atol": 1e-5}
        whole = solve(segments, x0, method=method, **options)
        if method == "rk4":
            return [whole]
        return [whole, solve_each(segments, x0, method=method, **options)]

    with mode():
        in_place = solutions(lambda x: x.div_(torch.linalg.vector_norm(x)))
        out_of_place = solutions(lambda x: x / torch.linalg.vector_norm(x))
    for one, other in zip(in_place, out_of_place, strict=True):
        assert torch.equal(one.x1, other.x1)
        assert one.stats == other.stats


def shrunk(x):
    return 0.9 * x


@pytest.mark.parametrize("write", [by_out, by_numpy, by_data, by_view])
@pytest.mark.parametrize("save", ["ends", "segments", "steps", "curve", "times"])
@pytest.mark.parametrize("method", ["euler", "rk4", "tsit5", "dop853"])
def test_maps_of_the_state_may_return_a_buffer_that_they_write_to_again(method, save, write):
    """Against the same maps out of place, also after the buffer has changed once more."""

    def solved(project, enter):
        segments = [
            Segment(0, 1, rotated, project=project, enter=enter),
            Segment(1, 2, rotated, project=project, enter=enter),
        ]
        options = {"rtol": 1e-3, "atol": 1e-5}
        if not get_method(method).adaptive:
            options = {"steps": 4}
        if save == "times":
            options["times"] = [0.3, 1.0, 1.6]
        else:
            options["save"] = save
        return solve(segments, PAIR, method=method, **options)

    to_buffer = write(1)

    def by_buffer(x):
        return to_buffer(0, -0.9 * x)

    right = solved(shrunk, shrunk)
    found = solved(by_buffer, by_buffer)
    if save == "curve":
        assert torch.allclose(found.curve(0.4), right.curve(0.4), rtol=1e-12)
    by_buffer(torch.full_like(PAIR, math.nan))
    assert torch.allclose(found.x1, right.x1, rtol=1e-12)
    for one, other in zip(found.states, right.states, strict=True):
        assert torch.allclose(one, other, rtol=1e-12)


def test_a_projections_buffer_with_a_graph_gives_the_states_and_their_gradients():
    def states_and_slope(project):
        rate = torch.tensor(1.0, dtype=torch.float64, requires_grad=True)
        segment = Segment(0, 1, lambda t, x: rate * rotated(t, x), project=project)
        solution = solve([segment], PAIR, method="rk4", steps=4, save="steps")
        (slope,) = torch.autograd.grad(sum(state.sum() for state in solution.states), rate)
        return [*solution.states, slope]

    buffer = torch.zeros_like(PAIR)

    def by_buffer(x):
        return buffer.copy_(0.9 * x)

    for one, other in zip(states_and_slope(by_buffer), states_and_slope(shrunk), strict=True):
        assert torch.allclose(one, other, rtol=1e-12)


@pytest.mark.parametrize("gradient", sorted(set(GRADIENTS) - {"reversible"}))
@pytest.mark.parametrize("method", ["rk4", "tsit5"])
def test_enter_may_work_in_place(method, gradient):
    """Against the same map out of place: saved states, an event's time and gradients. The initial
    state stays.
    """

    def results(enter):
        rate = torch.tensor(1.0, dtype=torch.float64, requires_grad=True)
        x0 = torch.ones(2, dtype=torch.float64)
        segments = [
            Segment(0, 0.5, lambda t, x: -rate * x, enter=enter),
            Segment(0.5, 1, lambda t, x: -rate * x, enter=enter),
        ]
        options = {"method": method, "gradient": gradient}
        if method == "rk4":
            options["steps"] = 20
        saved = solve(segments, x0, save="segments", **options)
        stopped = solve(segments, x0, events=Event(lambda t, x: x[0] - 1.3), **options)
        (slope,) = torch.autograd.grad(saved.x1.sum() + stopped.event_time, rate)
        assert torch.equal(x0, torch.ones(2, dtype=torch.float64))
        return [*saved.states, stopped.event_time, stopped.x1, slope]

    for one, other in zip(results(lambda x: x.mul_(2)), results(lambda x: x * 2), strict=True):
        assert torch.equal(one, other)


def test_enter_by_rows_may_work_in_place():
    x0 = PAIR.clone()
    segments = [Segment(0, 1, lambda t, x: -x, enter=lambda x: x.mul_(2))]
    assert torch.allclose(solve_each(segments, x0).x1, 2 * PAIR * math.exp(-1), atol=1e-6)
    assert torch.equal(x0, PAIR)

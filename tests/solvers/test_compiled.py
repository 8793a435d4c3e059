"""Compiled steps against the same steps without a compiler."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from solvers import GRADIENTS, METHODS, ConfigError, Segment, runge_kutta, solve
from tests import typecheck
from tests.helpers import DEVICES
from tests.solvers.test_gradients import X0, Fields

EXPLICIT = [
    name
    for name, method in METHODS.items()
    if getattr(method, "adaptive", False) and getattr(method, "used", 0)
]
EXPLICIT.remove("esdirk4")


@pytest.fixture
def traced(monkeypatch):
    """Steps are traced, and then run as they are: what a compiler sees, without its minutes."""
    typecheck.allow(False)  # jaxtyping's checks cannot be compiled
    runge_kutta._compiled_attempt.cache_clear()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    yield
    runge_kutta._compiled_attempt.cache_clear()
    torch.compiler.reset()


def both(segments, x0, **how):
    return [solve(segments, x0, compiled=compiled, **how) for compiled in (False, True)]


@pytest.mark.parametrize(
    "method",
    [pytest.param(name, marks=[pytest.mark.slow] * (name != "tsit5")) for name in EXPLICIT],
)
def test_steps_are_the_same(traced, method):
    how = {
        "rtol": 1e-6,
        "atol": 1e-8,
        "times": [0.2, 0.9, 2.0],
        "on_step": lambda t, x: seen.append((t, x)),
    }
    seen = []
    plain, compiled = both(Fields().requires_grad_(False).segments(), X0, method=method, **how)
    assert plain.stats == compiled.stats
    assert plain.stats.accepted > 3
    for a, b in zip(plain.states, compiled.states, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    half = len(seen) // 2
    assert [float(t) for t, _ in seen[:half]] == pytest.approx(
        [float(t) for t, _ in seen[half:]], rel=1e-10
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "gradient", [name for name, kind in GRADIENTS.items() if not kind.detached]
)
def test_gradients_are_the_same(traced, gradient):
    found = []
    for compiled in (False, True):
        fields, x0 = Fields(), X0.clone().requires_grad_()
        x1 = solve(
            fields.segments(),
            x0,
            method="tsit5",
            rtol=1e-6,
            atol=1e-8,
            gradient=gradient,
            compiled=compiled,
        ).x1
        found.append(torch.autograd.grad(x1.square().sum(), [x0, fields.rate, fields.offset]))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-10)


@pytest.mark.cases(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex128])
def test_every_type_keeps_its_accuracy(traced, dtype):
    resolution = torch.finfo(dtype).eps
    segments = [Segment(0, 1, lambda t, x: torch.cos(3 * t) * x)]
    for solution in both(
        segments,
        torch.ones(4, dtype=dtype),
        method="tsit5",
        rtol=8 * resolution,
        atol=8 * resolution,
    ):
        assert solution.x1.dtype == dtype
        error = abs(solution.x1 - torch.tensor(3.0).sin().div(3).exp()).max()
        assert float(error) < 40 * max(resolution, 1e-7)


def test_a_field_sees_its_own_segment_only(traced):
    ends = []

    def field(t, x):
        ends.append(t)
        return -x

    with torch.compiler.set_stance("force_eager"):  # the numbers themselves
        solve([Segment(0, 1, field), Segment(1, 2, field)], X0, method="tsit5", compiled=True)
    inside = [float(t) for t in ends if t.numel()]
    assert min(inside) >= 0
    assert max(inside) <= 2
    assert 1.0 not in inside


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    "late", [lambda x: x.mean(-1, keepdim=True), lambda x: x[0, 0], lambda x: x > 0, lambda x: 1.0]
)
def test_what_a_field_returns_is_checked_at_every_stage(traced, late):
    x0 = torch.ones(6, 4, dtype=torch.float64)
    with pytest.raises(ConfigError, match="the field returned"):
        solve(
            [Segment(0, 1, lambda t, x: late(x) if t > 0.01 else -x)],
            x0,
            method="bosh3",
            compiled=True,
        )


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
def test_by_the_real_compiler(device):
    typecheck.allow(False)
    segments, x0 = (
        [Segment(0, 3, lambda t, x: torch.tanh(x.roll(1, -1)) - x * t)],
        torch.randn(64, 8, device=device).double(),
    )
    plain, compiled = both(segments, x0, method="tsit5", rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(plain.x1, compiled.x1, rtol=1e-12, atol=1e-12)
    torch.compiler.reset()


@pytest.mark.parametrize("method", ["euler", "rk4", "esdirk4", "torchdiffeq:dopri5"])
def test_methods_that_are_not_compiled_say_so(method):
    with pytest.raises(ConfigError, match=r"compiled.*tsit5"):
        solve([Segment(0, 1, lambda t, x: -x)], X0, method=method, compiled=True)


@pytest.mark.parametrize("gradient", [name for name, kind in GRADIENTS.items() if kind.detached])
def test_gradients_that_are_not_compiled_say_so(gradient):
    with pytest.raises(ConfigError, match=f"{gradient}.*compiled.*backprop"):
        solve(
            [Segment(0, 1, lambda t, x: -x)], X0, method="tsit5", gradient=gradient, compiled=True
        )
    with pytest.raises(ConfigError, match=f"{gradient}.*compiled.*backprop"):
        solve(
            [Segment(0, 1, lambda t, x: -x)],
            X0,
            method=replace(METHODS["tsit5"], compiled=True),
            gradient=gradient,
        )

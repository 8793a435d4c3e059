"""Every row of a batch by its own steps: each is its solve alone, in result, work and gradient."""

import dataclasses
import math

import pytest
import torch

from solvers import (
    METHODS,
    ConfigError,
    RungeKutta,
    Segment,
    SolveError,
    Status,
    StepControl,
    solve,
    solve_each,
)
from solvers.controller import CONTROLLERS, PI

EXPLICIT = [
    name
    for name, m in METHODS.items()
    if m.adaptive and isinstance(m, RungeKutta) and not m.implicit
]
GENERATOR = torch.Generator().manual_seed(3)
RATES = torch.rand(6, 1, dtype=torch.float64, generator=GENERATOR) * 20
WEIGHTS = torch.randn(3, 3, dtype=torch.float64, generator=GENERATOR)


def batch(rows=6):
    """Rows that move at speeds of their own, which their last entry tells."""
    return torch.cat(
        [
            torch.randn(rows, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1)),
            RATES[:rows],
        ],
        1,
    )


def turning(weights):
    def field(t, x):
        rate = x[..., 3:]
        return torch.cat(
            [rate * torch.tanh(x[..., :3] @ weights) + torch.cos(rate * t), torch.zeros_like(rate)],
            -1,
        )

    return field


def segments(weights=WEIGHTS, project=None):
    return [
        Segment(0, 0.7, turning(weights)),
        Segment(0.7, 1.5, lambda t, x: -turning(weights)(t, x) * x, project=project),
    ]


def halved(x):
    return torch.cat(
        [x[..., :3] / (1 + x[..., :3].square().sum(-1, keepdim=True)).sqrt(), x[..., 3:]], -1
    )


@pytest.mark.cases(1)
@pytest.mark.parametrize("project", [None, halved], ids=["free", "projected"])
@pytest.mark.parametrize("method", EXPLICIT)
def test_each_row_is_its_solve_alone_with_the_same_work(method, project):
    request = {"method": method, "rtol": 1e-3 if METHODS[method].order < 4 else 1e-5, "atol": 1e-6}
    together = solve_each(segments(project=project), batch(), **request)
    for i, x0 in enumerate(batch()):
        alone = solve(segments(project=project), x0, **request)
        assert torch.allclose(together.x1[i], alone.x1, rtol=1e-9, atol=1e-11)
        assert together.stats[i].accepted == alone.stats.accepted
        assert together.stats[i].rejected == alone.stats.rejected
        assert together.stats[i].evaluations == alone.stats.evaluations
    assert len({stats.accepted for stats in together.stats}) > 3
    assert together.message == "reached the end"


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_types_and_directions_are_kept(dtype, backward):
    ends = (1.0, 0.0) if backward else (0.0, 1.0)
    seen = []

    def field(t, x):
        seen.append((t.dtype, t.shape, x.shape))
        return torch.sin(t + x)

    x0 = torch.linspace(-1, 1, 10, dtype=dtype).view(5, 2, 1)
    together = solve_each(
        [Segment(*ends, field)], x0, rtol=1e-4, atol=1e-4, step_control=StepControl(max_step=0.3)
    )
    assert together.x1.dtype == dtype
    assert all(
        (t == dtype) and len(shape) == 3 and shape[1:] == (1, 1) and x[0] == shape[0]
        for t, shape, x in seen
    )
    for i in range(5):
        alone = solve(
            [Segment(*ends, lambda t, x: torch.sin(t + x))],
            x0[i],
            method="tsit5",
            rtol=1e-4,
            atol=1e-4,
            step_control=StepControl(max_step=0.3),
        ).x1
        assert torch.allclose(together.x1[i], alone, atol=1e-6)


@pytest.mark.slow
def test_gradients_are_those_of_the_rows_alone_and_a_row_that_breaks_spoils_none():
    found = []
    for together in (True, False):
        weights, x0 = WEIGHTS.clone().requires_grad_(), batch()
        x0[2, 0] = math.nan
        x0.requires_grad_()
        good = [i for i in range(len(x0)) if i != 2]
        if together:
            solution = solve_each(segments(weights), x0, throw=False)
            assert [status is Status.SUCCESS for status in solution.status] == [
                i != 2 for i in range(len(x0))
            ]
            assert solution.status[2] is Status.NON_FINITE
            assert (solution.segment[2], solution.time[2]) == (0, 0.0)
            ends = solution.x1[good]
        else:
            ends = torch.stack([solve(segments(weights), x0[i], method="tsit5").x1 for i in good])
        found.append((ends, *torch.autograd.grad(ends.square().sum(), (weights, x0))))
    for ours, right in zip(*found, strict=True):
        assert torch.allclose(ours, right, rtol=1e-8, atol=1e-10)
        assert torch.isfinite(ours).all()


@pytest.mark.parametrize("rows", [1000, pytest.param(10_000, marks=pytest.mark.slow)])
def test_a_fast_row_among_many_is_right_and_one_that_is_no_number_spoils_no_other(rows):
    # one norm over all lets the fast one be wrong by many tolerances, and one row that is no number
    # ends them all
    rates = torch.full((rows, 1), 0.1, dtype=torch.float64)
    rates[17] = 30.0

    def swing(t, x):
        return torch.stack([x[..., 2] * x[..., 1], -x[..., 2] * x[..., 0], 0 * x[..., 2]], -1)

    x0 = torch.cat([torch.ones_like(rates), torch.zeros_like(rates), rates], 1)
    exact = torch.cat([torch.cos(rates), -torch.sin(rates), rates], 1)
    request = {"method": "tsit5", "rtol": 1e-6, "atol": 1e-6}
    as_one = solve([Segment(0, 1, swing)], x0, **request)
    assert float((as_one.x1 - exact).abs().max()) > 1e-4
    x0[5, 0] = math.nan
    assert solve([Segment(0, 1, swing)], x0, throw=False, **request).status is Status.NON_FINITE
    together = solve_each([Segment(0, 1, swing)], x0, throw=False, **request)
    good = [i for i in range(rows) if i != 5]
    assert float((together.x1 - exact)[good].abs().max()) < 2e-5
    assert together.stats[17].accepted > 20
    assert all(together.stats[i].accepted < 6 for i in good if i != 17)
    assert {i for i, status in enumerate(together.status) if status is not Status.SUCCESS} == {5}
    assert (together.status[5], together.segment[5], together.time[5]) == (
        Status.NON_FINITE,
        0,
        0.0,
    )


@pytest.mark.slow
def test_rows_end_each_in_its_own_way_and_it_is_said():
    # x' = x^2 blows up at 1/x0
    x0 = torch.tensor([[0.1], [4.0], [-1.0], [0.6]], dtype=torch.float64)
    with pytest.raises(
        SolveError, match=r"1 of 4 rows broke; row 1: .* in segment 0 at t = 0.25"
    ) as caught:
        solve_each([Segment(0, 1, lambda t, x: x**2)], x0, rtol=1e-6, atol=1e-9)
    solution = caught.value.solution
    assert solution.time[1] == pytest.approx(0.25, rel=1e-4)
    alone = solve(
        [Segment(0, 1, lambda t, x: x**2)], x0[1], method="tsit5", rtol=1e-6, atol=1e-9, throw=False
    )
    assert solution.status[1] is alone.status
    good = [0, 2, 3]
    assert torch.allclose(solution.x1[good], x0[good] / (1 - x0[good]), rtol=1e-5)
    few = solve_each(
        [Segment(0, 1, lambda t, x: torch.cos(50 * x))],
        x0,
        step_control=StepControl(max_steps=8),
        throw=False,
    )
    assert set(few.status) == {Status.TOO_MANY_STEPS}


@pytest.mark.parametrize(
    ("x0", "request_", "words"),
    [
        (torch.ones(2, 1), {"method": "rk4"}, "no steps by row"),
        (torch.ones(2, 1), {"method": "esdirk4"}, "no steps by row"),
        (torch.ones(2, 1), {"method": "torchdiffeq:dopri5"}, "no steps by row"),
        (torch.tensor(1.0), {}, "first axis are the rows"),
        (torch.ones(2, 1), {"rtol": -1.0}, "rtol = -1"),
        (torch.ones(2, 1), {"rtol": torch.full((1,), 1e-3)}, "give one number"),
    ],
)
def test_what_rows_have_not_is_named(x0, request_, words):
    with pytest.raises(ConfigError, match=words):
        solve_each([Segment(0, 1, lambda t, x: -x)], x0, **request_)


class Doubling:
    """A rule as a user writes it: of numbers only."""

    def accepted(self, size, proposed, errors, q):
        assert type(size) is float
        return proposed if errors[0] > 0.01 else 2 * size

    def rejected(self, size, error, q):
        return size / 2


class Gentle(PI):
    """A rule of numbers that inherits one of the package's."""

    def accepted(self, size, proposed, errors, q):
        return super().accepted(size, proposed, errors, q) if errors[0] < 0.9 else 0.9 * size


@pytest.mark.parametrize(
    "rule", [*CONTROLLERS.values(), Doubling(), Gentle()], ids=[*CONTROLLERS, "own", "child"]
)
@pytest.mark.parametrize(
    "control",
    [
        StepControl(),
        StepControl(max_step=0.02),
        StepControl(first_step=0.3, min_step=0.05),
        StepControl(max_steps=25, norm="max"),
    ],
    ids=["free", "short", "forced", "few"],
)
@pytest.mark.parametrize("method", ["bosh3", pytest.param("dop853", marks=pytest.mark.slow)])
def test_a_row_has_the_steps_of_its_solve_alone_by_every_rule(rule, control, method):
    chosen = RungeKutta(METHODS[method].tableau, adaptive=True, controller=rule)
    request = {
        "method": chosen,
        "rtol": 1e-5,
        "atol": 1e-7,
        "step_control": control,
        "throw": False,
    }
    together = solve_each(segments(), batch(3), **request)
    for i, x0 in enumerate(batch(3)):
        alone = solve(segments(), x0, **request)
        assert (together.status[i], together.segment[i]) == (alone.status, alone.segment)
        assert together.stats[i] == dataclasses.replace(alone.stats, stiff_at=None)
        assert together.time[i] == (
            None if alone.time is None else pytest.approx(alone.time, rel=1e-9)
        )
        assert torch.allclose(together.x1[i], alone.x1, rtol=1e-9, atol=1e-11)


def test_rows_have_the_warnings_of_solves_alone():
    """Of times that the type does not resolve, and of steps that min_step forced."""
    start = 1e8
    words = "near t = 1e+08 the times of float32 are 8 apart"

    def rate(t, x):
        return -x * (t - start) / 100

    x0 = torch.tensor([[1.0], [2.0], [3.0]])
    coarse = [Segment(start, start + 16, rate)]
    together = solve_each(coarse, x0)
    for sentence, row in zip(together.unresolved, x0, strict=True):
        (alone,) = solve(coarse, row, method="tsit5").warnings
        assert sentence.startswith(words)
        assert alone.startswith(words)
    assert together.warnings == (f"3 of 3 rows; row 0: {together.unresolved[0]}",)

    near = [Segment(0, 1, lambda t, x: torch.cos(20 * t) * x)]
    control = StepControl(rtol=1e-4, atol=1e-4, min_step=0.2, first_step=0.2)
    forced = solve_each(near, x0, step_control=control)
    alone = solve(near, x0[0], method="tsit5", step_control=control)
    (sentence,) = alone.warnings
    assert forced.warnings == (f"3 of 3 rows; row 0: {sentence}",)
    assert solve_each([Segment(1000, 1001, lambda t, x: -x)], x0, rtol=1e-4).warnings == ()


def test_a_row_that_broke_has_no_warning_of_its_steps():
    x0 = torch.tensor([[1.0], [math.nan]])
    found = solve_each([Segment(1e8, 1e8 + 16, lambda t, x: -x)], x0, throw=False)
    assert [bool(sentence) for sentence in found.unresolved] == [True, False]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_steps_of_few_times_are_said_although_each_is_longer_than_their_distance(dtype):
    """Stages inside of a step have times of their own: at 4 spacings a step they are far off."""
    start = 5e4

    def rate(t, x):
        return 10 * torch.cos(torch.as_tensor(100 * (float(t) - start))) * x

    found = solve(
        [Segment(start, start + 1, rate)], torch.ones(1, dtype=dtype), method="rk4", steps=60
    )
    exact = math.exp(0.1 * math.sin(100.0))
    is_wrong = abs(float(found.x1) - exact) > 0.1
    assert is_wrong == (dtype == torch.float32)
    assert bool(found.warnings) == is_wrong

"""The costate against autograd, closed forms and the adjoint equation's own laws."""

from __future__ import annotations

import functools
import math
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ctrans.control.costate import costate
from ctrans.dynamics.depth import Depth
from ctrans.dynamics.placement import PLACEMENTS
from ctrans.dynamics.sublayer import Sublayer
from ctrans.model.gpt import GPT
from ctrans.model.orders import own_methods
from solvers import METHODS, ConfigError, SolveError, solve
from tests.cases import PAPERS
from tests.helpers import small_model

STATE_NORM = [name for name, placement in PLACEMENTS.items() if placement.state_norm]


def text(*shape: int) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(
        11, (*shape[:-1], shape[-1] + 1), generator=torch.Generator().manual_seed(5)
    )
    return tokens[..., :-1].clone(), tokens[..., 1:].clone()


def toy(field: nn.Module, width: int, *, dt: float = 1.0, head: float = 1.0) -> SimpleNamespace:
    """A model that is only a depth with an embedding and a head, as imported ones are."""
    generator = torch.Generator().manual_seed(6)
    table, readout = torch.randn(2, 11, width, dtype=torch.float64, generator=generator)
    depth = Depth([Sublayer(field, "ffn")], dt, per_block=1)
    return SimpleNamespace(
        depth=depth, embed=lambda tokens: table[tokens], head=lambda x: head * x @ readout.T
    )


def gradients_of_ode_loss(
    model: GPT, tokens: Tensor, targets: Tensor, steps: int
) -> tuple[Tensor, ...]:
    """Autograd through a fine fixed-step solution: the oracle, which knows nothing of an adjoint
    equation.
    """
    x0 = model.embed(tokens).requires_grad_()
    solution = solve(
        model.depth.segments(continuous=True),
        x0,
        method=METHODS["dopri5"].fixed(),
        steps=steps,
        save="segments",
    )
    loss = F.cross_entropy(model.head(solution.x1).flatten(0, -2), targets.flatten())
    return torch.autograd.grad(loss, solution.states)


def distance(actual: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> float:
    return max(float((a - e).norm() / e.norm()) for a, e in zip(actual, expected, strict=True))


@pytest.mark.parametrize("norm", PAPERS)
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_discrete_costate_is_autograds_gradient(placement: str, norm: str) -> None:
    model, (tokens, targets) = small_model(placement, norm=norm, depth=2), text(2, 3, 6)
    targets[0, 0, :4] = -1
    states = [model.embed(tokens).requires_grad_()]
    for sublayer in model.depth.sublayers:
        states.append(sublayer.step(states[-1], model.depth.dt))
    loss = F.cross_entropy(
        model.head(states[-1]).flatten(0, -2), targets.flatten(), ignore_index=-1
    )
    result = costate(model, tokens, targets)
    assert result.loss == model(tokens, targets)[1].item()
    assert all(torch.equal(a, b) for a, b in zip(result.states, states, strict=True))
    assert distance(result.costates, torch.autograd.grad(loss, states)) < 1e-12
    assert result.times == model.depth.times


def test_discrete_costate_holds_the_graph_of_one_segment_at_a_time() -> None:
    def peak(depth: int) -> int:
        alive = most = 0

        class Saved:
            def __init__(self, tensor: Tensor):
                nonlocal alive, most
                self.tensor = tensor
                alive += 1
                most = max(most, alive)

            def __del__(self) -> None:
                nonlocal alive
                alive -= 1

        model = small_model("peri", depth=depth)
        with torch.autograd.graph.saved_tensors_hooks(Saved, lambda saved: saved.tensor):
            costate(model, *text(6))
        return most

    assert 0 < peak(8) == peak(2)


@pytest.mark.cases(1)
@pytest.mark.parametrize("norm", PAPERS)
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_continuous_costate_is_the_gradient_of_the_odes_loss(placement: str, norm: str) -> None:
    model, (tokens, targets) = small_model(placement, norm=norm, depth=2), text(2, 6)
    result = costate(model, tokens, targets, form="continuous", rtol=1e-10, atol=1e-10)
    assert distance(result.costates, gradients_of_ode_loss(model, tokens, targets, 12)) < 1e-7
    assert max(result.drift) <= 1e-8


@functools.cache
def fine_gradients(placement: str) -> tuple[Tensor, ...]:
    return gradients_of_ode_loss(small_model(placement, depth=2, dt=0.05), *text(6), 24)


@pytest.mark.cases(1)
@pytest.mark.parametrize("placement", ["pre", "peri", "post"])
@pytest.mark.parametrize("method", own_methods())
def test_continuous_costate_has_the_methods_order(method: str, placement: str) -> None:
    model, fixed = small_model(placement, depth=2, dt=0.05), METHODS[method].fixed()

    def error(steps: int) -> float:
        costates = costate(model, *text(6), form="continuous", method=fixed, steps=steps).costates
        return distance(costates, fine_gradients(placement))

    assert math.log2(error(4) / error(8)) == pytest.approx(fixed.order, abs=0.15)


def test_continuous_costate_refuses_a_method_whose_steps_are_not_seen() -> None:
    model, (tokens, targets) = small_model("peri", depth=1), text(6)
    with pytest.raises(
        ConfigError,
        match="scipy_solver' takes no save='steps': use an adaptive method of the package",
    ):
        costate(model, tokens, targets, form="continuous", method="torchdiffeq:scipy_solver")


@pytest.mark.cases(1)
@pytest.mark.parametrize("method", ["torchdiffeq:rk4", "torchdiffeq:dopri5"])
def test_continuous_costate_takes_torchdiffeqs_methods(method: str) -> None:
    model, (tokens, targets) = small_model("peri", depth=1), text(6)
    options = {"rtol": 1e-9, "atol": 1e-9} if METHODS[method].adaptive else {"steps": 32}
    result = costate(model, tokens, targets, form="continuous", method=method, **options)
    assert distance(result.costates, gradients_of_ode_loss(model, tokens, targets, 12)) < 1e-6


def test_tolerances_mean_the_same_to_a_costate_far_below_them() -> None:
    """At rest, X asks for no steps: v = W x, x = 0, so that P_0 = exp(W') P_1, and P alone has to
    ask for them.
    """
    field = nn.Linear(3, 3, bias=False).double()
    nn.init.normal_(field.weight, std=3.0)
    model, (tokens, targets) = toy(field, 3, head=1e-12), text(6)
    model.embed = lambda tokens: torch.zeros(*tokens.shape, 3, dtype=torch.float64)
    result = costate(model, tokens, targets, form="continuous", rtol=1e-7, atol=1e-7)
    exact = result.costates[-1] @ torch.linalg.matrix_exp(field.weight.detach())
    assert 0 < float(result.costates[-1].norm()) < 1e-11
    assert float((result.costates[0] - exact).norm() / exact.norm()) < 1e-6


@pytest.mark.cases(1)
@pytest.mark.parametrize("placement", STATE_NORM)
def test_continuous_segment_behind_a_state_norm_starts_on_its_image(placement: str) -> None:
    model = small_model(placement)
    result = costate(model, *text(6), form="continuous", rtol=1e-9, atol=1e-9)
    ends = zip(result.states, result.costates, strict=True)
    for sublayer, (x, p), (start, p_start) in zip(
        model.depth.sublayers, ends, result.starts, strict=False
    ):
        before = x.clone().requires_grad_()
        entered = sublayer.state_norm.retract(before)
        assert torch.equal(start, entered.detach())
        assert torch.allclose(
            p, torch.autograd.grad(entered, before, p_start)[0], rtol=0, atol=1e-14
        )


def test_starts_are_the_states_themselves_where_nothing_is_entered() -> None:
    for form, placement in (("discrete", "post"), ("discrete", "pre"), ("continuous", "peri")):
        result = costate(small_model(placement), *text(6), form=form)
        for x, p, (start, p_start) in zip(
            result.states, result.costates, result.starts, strict=False
        ):
            assert torch.equal(x, start)
            assert torch.equal(p, p_start)


def test_drift_of_the_discrete_form_falls_with_the_steps_square() -> None:
    whole, quarter = (
        max(costate(small_model("peri", dt=dt), *text(6)).drift) for dt in (0.02, 0.005)
    )
    assert quarter == pytest.approx(whole / 16, rel=0.2)


@pytest.mark.cases(1)
@pytest.mark.parametrize("form", ["discrete", "continuous"])
def test_costate_works_in_float32_and_leaves_parameter_gradients_alone(form: str) -> None:
    model = small_model("peri", torch.float32).requires_grad_()
    with torch.no_grad():
        result = costate(model, *text(6), form=form)
    double = costate(model.double(), *text(6), form=form)
    assert result.costates[0].dtype == torch.float32
    assert not result.costates[0].requires_grad
    assert all(parameter.grad is None for parameter in model.parameters())
    assert distance(tuple(p.double() for p in result.costates), double.costates) < 1e-4


@pytest.mark.parametrize("form", ["discrete", "continuous"])
def test_zero_costate_stays_zero_without_drift(form: str) -> None:
    model = toy(nn.Tanh(), 3, head=0.0)
    result = costate(model, *text(6), form=form)
    assert all(not p.any() for p in result.costates)
    assert result.drift == (0.0,)


def test_stats_count_both_directions() -> None:
    model, (tokens, targets) = small_model("peri", depth=2), text(6)
    assert costate(model, tokens, targets).stats.evaluations == 2 * 4
    stats = costate(model, tokens, targets, form="continuous", method="rk4", steps=3).stats
    assert (stats.evaluations, stats.accepted, stats.rejected) == (2 * 4 * 3 * 4, 2 * 3 * 4, 0)


def test_a_head_without_logits_of_every_token_is_said_with_both_sizes() -> None:
    model, (tokens, targets) = toy(nn.Identity(), 4), text(2, 6)
    model.head = lambda x: x
    with pytest.raises(
        ConfigError,
        match=(
            r"and the head gives 4 numbers per token.*a model whose head has a logit for every"
            r" token"
        ),
    ):
        costate(model, tokens, targets)
    model.head = lambda x: x.mean(-2)
    with pytest.raises(
        ConfigError,
        match=r"gives \(2, 4\) for targets \(2, 6\): take a model with logits of every token",
    ):
        costate(model, tokens, targets)


def test_wrong_requests_name_the_value_and_the_fix() -> None:
    model, (tokens, targets) = small_model("peri", depth=2), text(6)
    with pytest.raises(ConfigError, match=r"'continous'.*did you mean 'continuous'"):
        costate(model, tokens, targets, form="continous")
    with pytest.raises(ConfigError, match=r"leave method, rtol out, or choose form 'continuous'"):
        costate(model, tokens, targets, method="tsit5", rtol=1e-6)
    with pytest.raises(ConfigError, match=r"shape \(5,\) and tokens \(6,\)"):
        costate(model, tokens, targets[:-1])
    with pytest.raises(
        ConfigError,
        match=r"targets run from 3 to 11: give token ids, which start at 0 and end at 10",
    ):
        costate(model, tokens, targets.clamp(3).index_fill(0, torch.tensor(2), 11))
    with pytest.raises(ConfigError, match=r"targets run from -2 to \d+: give"):
        costate(model, tokens, targets.index_fill(0, torch.tensor(2), -2))
    with pytest.raises(ConfigError, match="every target is -1"):
        costate(model, tokens, torch.full_like(targets, -1))
    with pytest.raises(ConfigError, match="fixed steps"):
        costate(model, tokens, targets, form="continuous", method="rk4", rtol=1e-6)


@pytest.mark.parametrize("options", [{}, {"form": "continuous", "method": "rk4"}])
def test_overflow_says_where_it_happened(options: dict[str, str]) -> None:
    model = small_model("none")
    with torch.no_grad():
        model.depth.sublayers[1].field.down.weight.fill_(1e308)
    with pytest.raises(SolveError, match="non-finite in segment 1"):
        costate(model, *text(6), **options)


class Kink(nn.Module):
    """v = 0, with a derivative that autograd cannot form."""

    def forward(self, x: Tensor) -> Tensor:
        return (0 * x).sqrt()


def test_costate_without_a_value_says_where_it_happened() -> None:
    with pytest.raises(SolveError, match="costate became non-finite in segment 0"):
        costate(toy(Kink(), 3), *text(6))
    with pytest.raises(
        SolveError, match=r"costate's equation failed at t = 0, on the way back from 1 to 0"
    ):
        costate(toy(Kink(), 3), *text(6), form="continuous", method="euler")

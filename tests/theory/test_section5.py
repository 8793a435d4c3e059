"""Theory, section 5, line by line: costate, its conserved product, the maximum principle's gap and
alignment.
"""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest
import scipy.integrate
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ctrans.control.costate import costate
from ctrans.control.maximum_principle import maximum_principle
from ctrans.dynamics.depth import Depth
from ctrans.dynamics.fields import Attention, FeedForward
from ctrans.dynamics.norm import NORMS, Norm
from ctrans.dynamics.sublayer import Sublayer
from solvers import METHODS, Segment, solve

WIDTH, TOKENS, VOCABULARY = 6, 4, 5
TEXT = torch.tensor([0, 3, 1, 4]), torch.tensor([3, 1, 4, 2])


def make_norm(kind: str, generator: torch.Generator, eps: float = 1e-5) -> Norm:
    norm = NORMS[kind](WIDTH, eps).double()
    with torch.no_grad():
        norm.gamma.copy_(torch.randn(WIDTH, generator=generator).abs() + 0.5)
        norm.beta.copy_(
            0.5 * torch.randn(WIDTH, generator=generator)
        )  # RMSNorm has none, and drops it
    return norm


def make_model(
    output_norm: str | None = None,
    state_norm: str | None = None,
    *,
    seed: int = 0,
    eps: float = 1e-5,
    dt: float = 0.4,
) -> SimpleNamespace:
    """Attention and FFN with the norms asked for, behind a random embedding and before a linear
    head.
    """
    generator = torch.Generator().manual_seed(seed)
    fields = Attention(WIDTH, 2).double(), FeedForward(WIDTH, 8).double()
    sublayers = [
        Sublayer(
            field,
            kind,
            output_norm=make_norm(output_norm, generator, eps) if output_norm else None,
            state_norm=make_norm(state_norm, generator, eps) if state_norm else None,
        )
        for field, kind in zip(fields, ("attention", "ffn"), strict=True)
    ]
    with torch.no_grad():
        for parameter in (p for field in fields for p in field.parameters()):
            parameter.copy_(0.5 * torch.randn(parameter.shape, generator=generator))
    return with_head(Depth(sublayers, dt), WIDTH, generator)


def with_head(depth: Depth, width: int, generator: torch.Generator) -> SimpleNamespace:
    table, readout = torch.randn(2, VOCABULARY, width, dtype=torch.float64, generator=generator)
    return SimpleNamespace(
        depth=depth, embed=lambda tokens: table[tokens], head=lambda x: x @ readout.T
    )


def loss_from(model: SimpleNamespace, k: int, x: Tensor) -> float:
    """L as a function of the state at the start of segment k, the rest of the ODE solved by a fine
    fixed-step method.
    """
    segments = model.depth.segments(continuous=True)[k:]
    if segments:
        x = solve(segments, x, method=METHODS["dopri5"].fixed(), steps=12).x1
    return F.cross_entropy(model.head(x), TEXT[1]).item()


MODELS = {
    "none": (None, None),
    "output": ("layernorm", None),
    "output, rms": ("rmsnorm", None),
    "post": (None, "layernorm"),
}


@pytest.mark.cases(1)
@pytest.mark.parametrize("norms", MODELS.values(), ids=MODELS)
def test_costate_is_the_derivative_of_the_loss_by_the_state(
    norms: tuple[str | None, str | None],
) -> None:
    model = make_model(*norms)
    with torch.no_grad():
        result = costate(model, *TEXT, form="continuous", rtol=1e-9, atol=1e-9)
        direction = torch.randn(
            TOKENS, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1)
        )
        for k, (x, p) in enumerate(zip(result.states, result.costates, strict=True)):
            h = 1e-5
            slope = (
                loss_from(model, k, x + h * direction) - loss_from(model, k, x - h * direction)
            ) / (2 * h)
            assert float((p * direction).sum()) == pytest.approx(slope, abs=1e-6)


@pytest.mark.slow
def test_costate_solves_the_adjoint_equation_with_the_dense_jacobian() -> None:
    model = make_model("layernorm")
    result = costate(model, *TEXT, form="continuous", rtol=1e-9, atol=1e-9)
    for k, sublayer in reversed(list(enumerate(model.depth.sublayers))):
        shape, size = result.states[k].shape, result.states[k].numel()

        def right_hand_side(
            t: float, z: np.ndarray, sublayer=sublayer, shape=shape, size=size
        ) -> np.ndarray:
            x, p = torch.tensor(z).split(size)
            dense = torch.autograd.functional.jacobian(sublayer.velocity, x.reshape(shape)).reshape(
                size, size
            )
            with torch.no_grad():
                return torch.cat(
                    [sublayer.velocity(x.reshape(shape)).flatten(), -dense.T @ p]
                ).numpy()

        end = torch.cat([result.states[k + 1].flatten(), result.costates[k + 1].flatten()])
        span = result.times[k + 1], result.times[k]
        z = scipy.integrate.solve_ivp(
            right_hand_side, span, end.numpy(), method="DOP853", rtol=1e-8, atol=1e-10
        ).y[:, -1]
        assert np.abs(z[size:] - result.costates[k].flatten().numpy()).max() < 1e-6


@pytest.mark.parametrize("norms", MODELS.values(), ids=MODELS)
def test_product_of_costate_and_velocity_jumps_where_segments_meet(
    norms: tuple[str | None, str | None],
) -> None:
    model = make_model(*norms)
    result = costate(model, *TEXT, form="continuous", rtol=1e-9, atol=1e-9)
    with torch.no_grad():
        first, second = model.depth.sublayers
        x, p = result.states[1], result.costates[1]
        before, after = float((p * first.velocity(x)).sum()), float((p * second.velocity(x)).sum())
    assert abs(before - after) > 1e-3 * max(abs(before), abs(after))


class SlowManifold(nn.Module):
    """y' = 1, z' = -a (z - sin y), w' = z w: states contract to z = sin y - cos(y)/a + ..., and
    expand from it backward.
    """

    rate = 25.0

    def forward(self, x: Tensor) -> Tensor:
        y, z, w = x.unbind(-1)
        return torch.stack([torch.ones_like(y), -self.rate * (z - y.sin()), z * w], -1)

    def flow(self, x: Tensor) -> Tensor:
        """The solution at t = 1, in closed form."""
        a, (y, z, w) = self.rate, x.unbind(-1)
        away = z - (a * a * y.sin() - a * y.cos()) / (1 + a * a)
        end = (a * a * (y + 1).sin() - a * (y + 1).cos()) / (1 + a * a)
        primitive = [(-a * a * s.cos() - a * s.sin()) / (1 + a * a) for s in (y, y + 1)]
        area = primitive[1] - primitive[0] + away * (1 - math.exp(-a)) / a
        return torch.stack([y + 1, end + away * math.exp(-a), w * area.exp()], -1)


@pytest.mark.slow
def test_conserved_product_does_not_show_an_error_of_the_state_it_is_computed_on() -> None:
    """Corrected: drift is error, but not every error drifts. With X carried back over the segment,
    P is 10 % wrong.
    """
    field = SlowManifold()
    model = with_head(
        Depth([Sublayer(field, "ffn")], 1.0, per_block=1), 3, torch.Generator().manual_seed(6)
    )
    result = costate(model, *TEXT, form="continuous", rtol=1e-10, atol=1e-10)
    x0 = model.embed(TEXT[0]).requires_grad_()
    (exact,) = torch.autograd.grad(field.flow(x0), x0, result.costates[-1])

    def state_and_adjoint(t: Tensor, z: Tensor) -> Tensor:
        _, pullback = torch.func.vjp(field, z[0])
        return torch.stack([field(z[0]), -pullback(z[1])[0]])

    end = torch.stack([result.states[-1], result.costates[-1]])
    carried = solve(
        [Segment(1, 0, state_and_adjoint)],
        end,
        method="tsit5",
        rtol=1e-10,
        atol=1e-10,
        save="steps",
    )
    products = torch.stack([(p * field(x)).sum() for x, p in carried.states])
    assert float((carried.x1[1] - exact).norm() / exact.norm()) > 0.01
    assert float((products.max() - products.min()) / products.abs().max()) < 1e-10
    assert float((result.costates[0] - exact).norm() / exact.norm()) < 1e-8


def test_gap_and_alignment_are_reported_by_depth() -> None:
    model = make_model("layernorm")
    for form in ("discrete", "continuous"):
        reading = maximum_principle(model.depth, costate(model, *TEXT, form=form))
        assert len(reading.gap) == len(reading.alignment) == len(reading.times) == 2
        assert reading.kinds == ["attention", "ffn"]
        assert min(reading.gap) > 0
        assert max(map(abs, reading.alignment)) < 1

"""No token of a velocity exceeds its bound: at states that are sought to exceed it, and in
trainings of every entry of every table.
"""

import math

import pytest
import torch

from ctrans import GPT, GPTConfig
from ctrans.dynamics.fields import ATTENTIONS, FFNS
from ctrans.dynamics.fields.query_key_norm import QK_NORMS
from ctrans.dynamics.norm import NORMS
from ctrans.dynamics.placement import PLACEMENTS
from ctrans.dynamics.residual import RESIDUALS
from ctrans.measure.forward.bounds import needs_radius, velocity_bound
from ctrans.training.monitor import Monitor
from ctrans.training.monitor import probes as probing
from ctrans.training.monitor.bound_shares import dropped
from ctrans.training.monitor.probes import Held, bounds
from ctrans.training.monitor.sites import sites_of
from solvers import ConfigError
from tests.cases import RESIDUAL_CASES, VARIANTS
from tests.training.monitor.test_bits import hugging_face


def makeable(**options):
    try:
        GPTConfig(**SMALL, **options)
    except ConfigError:
        return False
    return True


SMALL = {"vocab_size": 32, "context": 6, "depth": 2, "width": 16, "heads": 4}
CASES = {
    **{
        f"{norm}, {placement}": {"norm": norm, "placement": placement}
        for norm in NORMS
        for placement in ("pre", "peri")
    },
    **{
        f"{residual}, {placement}": {"residual": residual, "placement": placement}
        for residual in RESIDUALS
        for placement in PLACEMENTS
        if makeable(residual=residual, placement=placement, norm="rmsnorm")
    },
    **{f"attention {name}": {"attention": name, "placement": "pre"} for name in ATTENTIONS},
    **{f"ffn {name}": {"ffn": name, "placement": "pre"} for name in FFNS},
    **{f"qk_norm {name}": {"qk_norm": name, "placement": "pre"} for name in QK_NORMS},
    **{f"{name}, pre": {**options, "placement": "pre"} for name, options in VARIANTS.items()},
    "parallel, norms behind": {"parallel_blocks": True},
    "experts, without norms": {"ffn": "moe", "placement": "none"},
    **{
        name: {**options, "placement": placement}
        for name, (placement, options) in RESIDUAL_CASES.items()
    },
}


def made(case):
    """The model in float64, every weight off what it begins at: gains and offsets by as much as
    they are.
    """
    model = GPT(GPTConfig(**SMALL, **CASES[case]), seed=1).double()
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for weight in model.parameters():
            size = 0.5 if weight.dim() == 1 else float(weight.square().mean().sqrt())
            weight += size * torch.randn(weight.shape, generator=generator, dtype=weight.dtype)
    return model


def share(sublayer, x, bound):
    """The longest token of r(X) over its bound at this X."""
    longest = (
        float(torch.linalg.vector_norm(x.detach(), dim=-1).max())
        if needs_radius(sublayer)
        else math.nan
    )
    return torch.linalg.vector_norm(sublayer(x), dim=-1).max() / velocity_bound(
        sublayer, longest, bound
    )


@pytest.mark.cases(21)
@pytest.mark.parametrize("case", CASES)
def test_no_state_that_is_sought_has_a_velocity_beyond_its_bound(case):
    model = made(case)
    tokens = torch.zeros(1, 1, dtype=torch.int64)
    found = bounds(probing.Probed(sites_of(model), model, Held(tokens, tokens), None, [], tokens))[
        "map_bounds"
    ]
    generator = torch.Generator().manual_seed(3)
    for sublayer, bound in zip(model.depth.sublayers, found, strict=True):
        best = 0.0
        for size in (0.03, 1.0, 30.0):
            x = size * torch.randn(
                2, 6, sublayer.streams * 16, generator=generator, dtype=torch.float64
            )
            for _ in range(12):
                x = x.requires_grad_()
                value = share(sublayer, x, bound)
                best = max(best, float(value.detach()))
                (slope,) = torch.autograd.grad(value, x)
                x = (x + 0.3 * size * slope / slope.abs().max().clamp(min=1e-300)).detach()
        assert best <= 1 + 1e-9
        assert (
            best > 0.1 or sublayer.output_norm is None
        )  # gains are uneven, and the bound is of the largest


@pytest.mark.cases(14)
@pytest.mark.parametrize("case", CASES)
def test_no_step_of_a_training_has_a_share_beyond_one(case, monkeypatch):
    monkeypatch.setattr(probing, "PROBES", {"bounds": bounds})
    model = made(case)
    rows = torch.randint(32, (4, 7), generator=torch.Generator().manual_seed(0))
    monitor = Monitor(model, every=1, probe_every=1, held=(rows, rows))
    optimiser = torch.optim.AdamW(model.parameters(), lr=0.03)
    for _ in range(4):
        loss = model(rows[:, :-1], rows[:, 1:])[1]
        loss.backward()
        monitor.step(loss, optimiser)
        optimiser.step()
        optimiser.zero_grad()
        model.after_step()
    monitor.close()
    assert monitor.gauges.missing == {}
    for _, figures in monitor.past.reports:
        assert len(figures["bound_share"]) == len(model.depth.sublayers)
        assert all(
            0 < each <= 1 + 1e-6 for each in figures["bound_share"]
        )  # a report is in float32


@pytest.mark.slow
def test_a_bound_that_a_probe_found_is_not_kept_for_other_weights():
    model = GPT(GPTConfig(**SMALL, placement="pre"))
    rows = torch.randint(32, (2, 7))
    monitor = Monitor(model, every=1, probe_every=3, held=(rows[:, :-1], rows[:, 1:]))
    for _ in range(6):
        loss = model(rows[:, :-1], rows[:, 1:])[1]
        loss.backward()
        monitor.step(loss)
    assert [step for step, figures in monitor.past.reports if "bound_share" in figures] == [1, 3, 6]


def test_dropout_makes_the_bound_as_much_larger_as_it_can_make_the_velocity():
    """GPT-2's attention: rows and output are dropped with p = 0.5 each, so that a velocity can be 4
    times as long.
    """
    model = hugging_face()
    for part in model.modules():
        if isinstance(part, torch.nn.Dropout):
            part.p = 0.5
    first = sites_of(model).by_depth[0]
    assert dropped(first.sublayer) == pytest.approx(4.0)
    model.eval()
    assert dropped(first.sublayer) == 1.0

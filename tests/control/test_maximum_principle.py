"""Gap and alignment by depth: which measure a model has, what it says, and what it refuses."""

from __future__ import annotations

import json
import math

import pytest
import torch
from torch import Tensor, nn

from ctrans.base.json_values import plain
from ctrans.control.costate import Costate, costate
from ctrans.control.maximum_principle import maximum_principle
from ctrans.dynamics.depth import Depth
from ctrans.dynamics.fields import FeedForward
from ctrans.dynamics.norm import NORMS, RMSNorm
from ctrans.dynamics.placement import PLACEMENTS
from ctrans.dynamics.sublayer import Sublayer
from ctrans.report.contents import page_of
from ctrans.report.files import png, to_json
from ctrans.report.picture import draw
from solvers import ConfigError, Stats
from tests.cases import PAPERS
from tests.helpers import small_model, tokens

BOUNDED = [name for name, placement in PLACEMENTS.items() if placement.output_norm]
UNBOUNDED = [name for name in PLACEMENTS if name not in BOUNDED]


def solved(placement: str, form: str = "discrete", **changes) -> tuple[Depth, Costate]:
    model, text = small_model(placement, depth=2, **changes), tokens(2, 7)
    return model.depth, costate(model, text[:, :-1], text[:, 1:], form=form)


def at(sublayer: Sublayer, x: Tensor, p: Tensor) -> tuple[Depth, Costate]:
    """A depth of one sublayer, and a costate that says (X, P) at its start."""
    return Depth([sublayer], 1.0, per_block=1), Costate(
        "discrete", 0.0, (0.0, 1.0), (x, x), (p, p), ((x, p),), (0.0,), Stats()
    )


@pytest.mark.parametrize("form", ["discrete", "continuous"])
@pytest.mark.parametrize("norm", PAPERS)
@pytest.mark.parametrize("placement", BOUNDED)
def test_gap_is_what_the_hamiltonian_leaves(placement: str, norm: str, form: str) -> None:
    depth, solution = solved(placement, form, norm=norm)
    reading = maximum_principle(depth, solution)
    assert reading.measures == ["gap"] * 4
    for k, (sublayer, (x, p)) in enumerate(zip(depth.sublayers, solution.starts, strict=True)):
        v, best = sublayer(x), sublayer.output_norm.maximizer(-p)
        assert reading.gap[k] == pytest.approx((p * (v - best)).sum().item(), rel=1e-12)
        assert reading.hamiltonian[k] == pytest.approx(-(p * best).sum().item(), rel=1e-12)
        middle = v - sublayer.output_norm.beta, best - sublayer.output_norm.beta
        assert reading.alignment[k] == pytest.approx(
            ((p * middle[0]).sum() / (p * middle[1]).sum()).item(), rel=1e-9
        )
        assert (
            reading.gap[k] > 0
        )  # eps > 0 keeps v strictly inside, even if it pointed the right way
        assert reading.velocity_norm[k] == pytest.approx(v.norm().item(), rel=1e-12)
        assert reading.costate_norm[k] == pytest.approx(p.norm().item(), rel=1e-12)


@pytest.mark.cases(1)
@pytest.mark.parametrize("placement", UNBOUNDED)
def test_cosine_stands_in_where_the_hamiltonian_is_infinite(placement: str) -> None:
    depth, solution = solved(placement, "continuous")
    reading = maximum_principle(depth, solution)
    assert reading.measures == ["cosine"] * 4
    assert reading.hamiltonian == reading.gap == [math.inf] * 4
    for alignment, sublayer, (x, p) in zip(
        reading.alignment, depth.sublayers, solution.starts, strict=True
    ):
        v = sublayer.velocity(x)
        assert alignment == pytest.approx(
            torch.cosine_similarity(v.flatten(), -p.flatten(), dim=0).item(), rel=1e-9
        )


@pytest.mark.parametrize("placement", UNBOUNDED)
def test_gap_of_an_unbounded_placement_is_refused_by_name(placement: str) -> None:
    depth, solution = solved(placement)
    with pytest.raises(
        ConfigError, match=f"placement '{placement}' has no output norm on its attention sublayer"
    ):
        maximum_principle(depth, solution, measure="gap")


def test_cosine_can_be_asked_of_every_placement() -> None:
    depth, solution = solved("peri")
    reading = maximum_principle(depth, solution, measure="cosine")
    x, p = solution.starts[0]
    expected = -reading.product[0] / (reading.costate_norm[0] * reading.velocity_norm[0])
    assert reading.gap == [None] * 4
    assert reading.alignment[0] == pytest.approx(expected, rel=1e-12)
    assert reading.product[0] == pytest.approx((p * depth.sublayers[0](x)).sum().item(), rel=1e-12)


def test_unknown_measure_names_the_allowed_ones() -> None:
    depth, solution = solved("peri")
    with pytest.raises(ConfigError, match=r"'cosin'.*did you mean 'cosine'.*cosine, gap"):
        maximum_principle(depth, solution, measure="cosin")


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_every_field_is_plain_json(placement: str) -> None:
    reading = maximum_principle(*solved(placement))
    text = to_json(reading)
    assert json.loads(text)["placements"] == [placement] * 4
    assert json.loads(text)["kinds"] == ["attention", "ffn"] * 2


@pytest.mark.parametrize("norm", PAPERS)
def test_zero_costate_is_a_tie_without_alignment(norm: str) -> None:
    sublayer = Sublayer(FeedForward(6, 4).double(), "ffn", output_norm=NORMS[norm](6).double())
    x, p = torch.randn(3, 6, dtype=torch.float64), torch.zeros(3, 6, dtype=torch.float64)
    reading = maximum_principle(*at(sublayer, x, p))
    assert (reading.hamiltonian, reading.gap, reading.alignment) == ([0.0], [0.0], [None])


def test_costate_along_the_gains_normal_is_a_tie_for_layernorm_only() -> None:
    x, p = torch.randn(3, 6, dtype=torch.float64), torch.full((3, 6), 0.1, dtype=torch.float64)
    for norm in PAPERS:
        sublayer = Sublayer(FeedForward(6, 4).double(), "ffn", output_norm=NORMS[norm](6).double())
        alignment = maximum_principle(*at(sublayer, x, p)).alignment[0]
        assert (alignment is None) == (norm == "layernorm")


def test_zero_velocity_has_no_cosine() -> None:
    field = FeedForward(6, 4).double()
    nn.init.zeros_(field.down.weight)
    nn.init.zeros_(field.down.bias)
    x, p = torch.randn(2, 3, 6, dtype=torch.float64)
    assert maximum_principle(*at(Sublayer(field, "ffn"), x, p)).alignment == [None]


def test_gain_of_a_sublayer_scales_its_admissible_set() -> None:
    norm, x, p = NORMS["layernorm"](6).double(), *torch.randn(2, 3, 6, dtype=torch.float64)
    nn.init.normal_(norm.bias)
    field = FeedForward(6, 4).double()
    plain, scaled = (
        maximum_principle(*at(Sublayer(field, "ffn", output_norm=norm, gain=g), x, p))
        for g in (1.0, 0.25)
    )
    assert scaled.gap[0] == pytest.approx(plain.gap[0] / 4, rel=1e-12)
    assert scaled.alignment[0] == pytest.approx(plain.alignment[0], rel=1e-12)


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_placement_is_recognised_from_the_norms(placement: str) -> None:
    assert all(
        sublayer.placement.name == placement for sublayer in small_model(placement).depth.sublayers
    )


def test_norms_of_no_placement_are_refused() -> None:
    sublayer = Sublayer(FeedForward(6, 4), "ffn", output_norm=RMSNorm(6), state_norm=RMSNorm(6))
    with pytest.raises(ConfigError, match="leave one out"):
        _ = sublayer.placement


def control_charts(readings):
    page = page_of(
        {"control": plain({"command": "control", "placements": readings, "attained": {}})}
    )
    return {chart.title: chart for chapter in page.chapters for chart in chapter.charts}


def test_picture_draws_a_line_for_each_model_and_none_where_there_is_no_hamiltonian() -> None:
    readings = {name: maximum_principle(*solved(name)) for name in ("pre", "peri", "output")}
    charts = control_charts({**readings, "peri again": readings["peri"]})
    assert [line.model for line in charts["Costate"].lines] == [
        "pre",
        "peri",
        "output",
        "peri again",
    ]
    gaps = [line for line in charts["Gap to free velocities"].lines if not line.bound]
    assert [line.y for line in gaps] == [readings[name].gap for name in ("peri", "output", "peri")]
    figure = draw(list(charts.values()), "")
    sizes, drawn, alignments = figure.axes[:3]
    assert [text.get_text() for text in figure.legends[0].get_texts()][:4] == [
        "pre",
        "peri",
        "output",
        "peri again",
    ]
    lines = [
        line
        for line in drawn.lines
        if len(line.get_xdata()) == 4 and line.get_marker() not in ("", "None")
    ]
    assert len({(line.get_color(), line.get_linestyle()) for line in lines}) == 3
    assert (sizes.get_yscale(), drawn.get_yscale(), alignments.get_yscale()) == (
        "log",
        "log",
        "linear",
    )


def test_unbounded_models_have_no_gap_in_the_picture() -> None:
    charts = control_charts({"pre": maximum_principle(*solved("pre"))})
    assert "Gap to free velocities" not in charts
    assert png(draw(list(charts.values()), "")).startswith(b"\x89PNG")

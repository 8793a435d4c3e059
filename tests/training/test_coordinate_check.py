"""The coordinate check against closed forms, and on small models."""

import dataclasses
import json
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ctrans import GPTConfig
from ctrans.model.parametrisation import PARAMETRISATIONS
from ctrans.training.coordinate_check import (
    FLAT,
    LOGITS,
    PlaceGrowth,
    Transfer,
    coordinate_check,
    transfer_check,
)
from ctrans.training.data import from_text
from ctrans.training.settings import TrainConfig
from solvers import ConfigError
from tests.cli.test_commands import run
from tests.training.helpers import TEXT

CONFIG = GPTConfig(
    vocab_size=256,
    context=8,
    depth=4,
    width=32,
    heads=2,
    placement="pre",
    initialisation="lecun",
    embedding_std=1.0,
    tied=False,
)


class Sum(nn.Module):
    """y = b sum_l W_l x for x of entries +-1, and the loss v'y for v of entries +-1: each gradient
    is b v x'.
    """

    def __init__(self, width, depth, branch):
        super().__init__()
        self.maps = nn.ModuleList(
            nn.Linear(width, width, bias=False).double() for _ in range(depth)
        )
        self.branch = branch

    def forward(self, x):
        return self.branch * sum(layer(x) for layer in self.maps)


def signs(width):
    return 1 - 2 * (torch.arange(width) % 3 == 0).double()


def loss(module):
    x = signs(module.maps[0].weight.shape[1])
    return (
        (signs(len(x)) @ module(x)) / len(x) ** module.power
        if hasattr(module, "power")
        else signs(len(x)) @ module(x)
    )


def linear(power_of_branch=0.0, make=torch.optim.SGD, power_of_rate=0.0, mean=False, **more):
    """The check of `Sum` with b = L^power and the rate times n^power."""

    def build(width, depth):
        module = Sum(width, depth, depth**power_of_branch)
        module.power = float(mean)
        return module

    def optimiser(module, rate):
        return make(module.parameters(), lr=rate * len(module.maps[0].weight) ** power_of_rate)

    sizes = {"widths": (4, 8, 16, 32), "depths": (2, 4, 8)} | more
    return transfer_check(build, optimiser, loss, rates=(0.1,), seeds=2, updates=1, **sizes)


@pytest.mark.parametrize(
    ("options", "width", "depth"),
    [
        # SGD: dW_l = -r b v x', so that dy = -r b^2 L n v
        ({}, 1, 1),
        ({"power_of_branch": -0.5}, 1, 0),
        ({"power_of_branch": -1.0}, 1, -1),
        ({"power_of_branch": -0.5, "mean": True}, 0, 0),  # the loss over n: dy = -r b^2 L v
        # Adam: dW_l = -r sign(v x'), so that dy = -r b L n v
        ({"make": torch.optim.Adam}, 1, 1),
        ({"make": torch.optim.Adam, "power_of_branch": -0.5}, 1, 0.5),
        ({"make": torch.optim.Adam, "power_of_branch": -1.0, "power_of_rate": -1.0}, 0, 0),
        ({"make": torch.optim.Adam, "power_of_branch": -1.0, "power_of_rate": -2.0}, -1, 0),
    ],
)
def test_a_linear_model_has_the_exponents_of_its_closed_form(options, width, depth):
    found = linear(**options)
    outputs = {each.axis: each for each in found.growths if each.place == "output"}
    assert outputs["width"].exponent == pytest.approx(width, abs=1e-6)
    assert outputs["depth"].exponent == pytest.approx(depth, abs=1e-6)
    assert outputs["width"].error == pytest.approx(0, abs=1e-6)
    inner = next(each for each in found.growths if each.axis == "depth" and each.place == "maps.*")
    assert inner.exponent == pytest.approx(depth - 1 - options.get("power_of_branch", 0), abs=1e-6)


def test_the_change_is_the_mean_of_its_entries():
    found = linear()
    at = next(each for each in found.growths if each.place == "output" and each.axis == "width")
    assert at.changes == pytest.approx([0.1 * 2 * width for width in (4, 8, 16, 32)])


def test_dropout_is_no_change():
    """What three updates change, at a rate so small that they change next to nothing."""

    class Noise(torch.nn.Module):
        def forward(self, x):
            return x + torch.randn(x.shape)

    def build(width, depth):
        layers = [torch.nn.Linear(width, width), torch.nn.Dropout(0.5), Noise()]
        return torch.nn.Sequential(*layers, torch.nn.Linear(width, 1))

    found = transfer_check(
        build,
        lambda module, rate: torch.optim.SGD(module.parameters(), lr=rate),
        lambda module: module(torch.ones(4, module[0].in_features)).square().mean(),
        widths=(4, 8),
        depths=(1,),
        rates=(1e-6,),
        seeds=1,
    )
    assert found.growths
    assert max(max(each.changes) for each in found.growths) < 1e-3


def test_an_axis_of_one_size_is_not_checked():
    assert linear(depths=(2,)).sizes == {"width": [4, 8, 16, 32]}
    with pytest.raises(ConfigError, match="give at least two widths or two depths"):
        linear(widths=(4,), depths=(2,))


def test_rate_times_decay_has_its_place():
    def make(scale):
        return lambda parameters, lr: torch.optim.AdamW(
            parameters, lr=lr, weight_decay=scale(len(next(iter(parameters))))
        )

    def decay(scale):
        def made(module, rate):
            return make(scale)(list(module.parameters()), rate * 4 / len(module.maps[0].weight))

        found = transfer_check(
            lambda w, d: Sum(w, d, 1 / d),
            made,
            loss,
            widths=(4, 8, 16),
            depths=(2,),
            rates=(1e-3,),
            updates=1,
        )
        return next(each for each in found.growths if each.place == "decay of maps.*.weight"), found

    at, found = decay(lambda width: 0.1)
    assert at.exponent == pytest.approx(-1)
    assert found.verdict == "does not transfer"
    assert decay(lambda width: 0.1 * width)[0].exponent == pytest.approx(0, abs=1e-9)


def growth(exponent, error, axis="width", place="x"):
    return PlaceGrowth(axis, place, [1.0], exponent, error, 0.0)


def test_a_verdict_needs_an_interval_on_one_side_of_the_limit():
    assert growth(0.2, 0.05).verdict == "transfers"
    assert growth(-0.5, 0.05).verdict == "does not transfer"
    assert growth(FLAT, 0.01).verdict == "undecided"
    assert growth(0.5, 0.2).verdict == "undecided"
    assert growth(math.nan, math.nan).verdict == "undecided"


def test_one_place_that_moves_decides_and_the_loss_does_not():
    sizes = {"width": [1, 2], "depth": [1, 2]}
    flat = [growth(0.1, 0.0), growth(0.1, 0.0, "depth"), growth(2.0, 0.0, "depth", "loss")]
    assert Transfer(sizes, [1.0], 1, 1, flat).verdict == "transfers"
    unsure = [*flat, growth(0.3, 0.1, "depth")]
    assert Transfer(sizes, [1.0], 1, 1, unsure).verdict == "undecided"
    assert Transfer(sizes, [1.0], 1, 1, [*unsure, growth(-0.6, 0.0)]).verdict == "does not transfer"


def test_attention_logits_that_shrink_decide_nothing():
    """Trained from width 32 to 256, the best rate of such a model moves by a factor of 1.07."""
    flat = growth(0.1, 0.0)
    sizes = {"width": [1, 2]}
    for exponent, verdict in ((-0.5, "transfers"), (0.5, "does not transfer")):
        found = Transfer(sizes, [1.0], 1, 1, [flat, growth(exponent, 0.0, place=LOGITS)])
        assert found.verdict == verdict
    assert Transfer(sizes, [1.0], 1, 1, [growth(-0.5, 0.0)]).verdict == "does not transfer"


def test_a_model_that_diverges_is_undecided():
    def make(module, rate):
        return torch.optim.SGD(module.parameters(), lr=1e308)

    found = transfer_check(
        lambda w, d: Sum(w, d, 1.0),
        make,
        lambda m: loss(m) ** 3,
        widths=(4, 8),
        depths=(2,),
        rates=(1.0,),
        seeds=1,
    )
    assert found.verdict == "undecided"


def check(name, optimiser="adamw", widths=(32, 64, 128), depths=(4, 8, 16), **changes):
    config = dataclasses.replace(CONFIG, parametrisation=name)
    settings = TrainConfig(batch=4, weight_decay=0.0, optimiser=optimiser)
    options = {"rates": (2e-3,), "seeds": 2} | changes
    return coordinate_check(
        config, from_text(TEXT, 8), settings, widths=widths, depths=depths, **options
    )


def test_adams_updates_grow_with_the_width_in_the_standard_parametrisation():
    found = check("standard", depths=(4,))
    output = next(each for each in found.growths if each.place == "output")
    assert found.verdict == "does not transfer"
    assert output.exponent > 0.5  # 1 for large widths: see the closed form
    assert abs(found.growths[0].at_start) < 0.1  # the embeddings


@pytest.mark.slow
def test_models_that_pass_a_check_of_widths_are_told_apart_by_their_depth():
    found = {name: check(name) for name in ("mup", "completep")}
    PARAMETRISATIONS["half"] = dataclasses.replace(PARAMETRISATIONS["completep"], branch=-0.5)
    try:
        found["half"] = check("half")
    finally:
        del PARAMETRISATIONS["half"]
    verdicts = {
        name: tuple(each.worst(axis).verdict for axis in ("width", "depth"))
        for name, each in found.items()
    }
    assert {each[0] for each in verdicts.values()} == {"transfers"}
    assert (verdicts["mup"][1], verdicts["half"][1]) == ("does not transfer", "does not transfer")
    assert verdicts["completep"][1] != "does not transfer"
    assert abs(found["completep"].worst("depth").exponent) < FLAT


def test_attention_logits_are_seen_in_the_fused_kernel_and_in_a_softmax():
    class Attending(nn.Module):
        def __init__(self, width, fused):
            super().__init__()
            self.map, self.fused = nn.Linear(width, 3 * width), fused

        def forward(self, x):
            q, k, v = self.map(x).chunk(3, -1)
            if self.fused:
                return F.scaled_dot_product_attention(q, k, v)
            return (q @ k.mT * q.shape[-1] ** -0.5).softmax(-1) @ v

    def found(fused):
        x = torch.linspace(-1, 1, 12).view(1, 3, 4)
        built = lambda w, d: Attending(w, fused)  # noqa: E731
        ran = transfer_check(
            built,
            lambda m, rate: torch.optim.SGD(m.parameters(), lr=rate),
            lambda m: m(x.repeat(1, 1, m.map.in_features // 4)).square().sum(),
            widths=(4, 8, 16),
            depths=(1,),
            rates=(1e-2,),
        )
        return next(each for each in ran.growths if each.place == "attention logits")

    assert found(True).changes == pytest.approx(found(False).changes, rel=1e-4)
    assert found(True).exponent == pytest.approx(found(False).exponent, abs=1e-4)


def test_a_multiplier_behind_a_module_hides_no_transfer():
    """y = c W x with c = 1/n and Adam at the rate r: the change of y is r |x|_1/n = r, and that of
    W x is r n.
    """

    class Scaled(nn.Module):
        def __init__(self, width):
            super().__init__()
            self.inner = nn.Linear(width, 3, bias=False)

        def forward(self, x):
            return self.inner(x) / x.shape[-1]

    found = transfer_check(
        lambda width, depth: Scaled(width),
        lambda module, rate: torch.optim.Adam(module.parameters(), lr=rate),
        lambda module: module(torch.ones(2, module.inner.in_features)).sum(),
        widths=(8, 16, 32),
        depths=(1,),
        rates=(1e-2,),
        updates=1,
    )
    assert {each.place for each in found.growths} == {"output", "loss"}
    assert found.worst("width").exponent == pytest.approx(0, abs=1e-3)


def test_the_generator_is_as_it_was():
    before = torch.get_rng_state()
    linear()
    assert torch.equal(before, torch.get_rng_state())


def test_widths_that_make_no_models_are_refused():
    with pytest.raises(ConfigError, match="give multiples of a head's width 16"):
        check("standard", widths=(32, 40))


@pytest.mark.slow
def test_the_command_gives_the_verdict_and_the_places(tmp_path):
    options = [item for width in (16, 32) for item in ("--widths", width)]
    result = run(
        *(
            "coordinate-check",
            "--context",
            8,
            "--batch",
            2,
            "--depth",
            2,
            "--width",
            16,
            "--depths",
            2,
            "--depths",
            4,
        ),
        *(
            *options,
            "--seeds",
            1,
            "--updates",
            1,
            "--rates",
            0.002,
            "--parametrisation",
            "mup",
            "--out",
            tmp_path,
        ),
    )
    assert result.exit_code == 0, result.stderr
    found = json.loads((tmp_path / "coordinate-check.json").read_text())
    assert found["sizes"] == {"width": [16, 32], "depth": [2, 4]}
    places = {(each["axis"], each["place"]) for each in found["growths"]}
    assert {
        ("width", "output"),
        ("depth", "attention logits"),
        ("width", "depth.sublayers.*.field.up"),
    } <= places
    assert (
        found["answer"].startswith(f"The rate {found['verdict']}")
        or found["verdict"] == "undecided"
    )
    assert (tmp_path / "coordinate-check.png").stat().st_size > 10_000

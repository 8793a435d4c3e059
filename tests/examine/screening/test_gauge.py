"""Weights that make the same function: whatever the screening reports is the same, or is named as
what is not, with the reason.

Exact changes of weights need eps to be scaled where it is added to what is scaled: behind an output
norm eps goes with the square of the map. Factors are powers of 2, so that rounding is the same too.
"""

import dataclasses
import functools
import math

import pytest
import torch

from ctrans.examine.screening.screen import EFFORTS, screen
from ctrans.examine.screening.screening_checks import measures_of_steps
from tests.helpers import small_model, tokens

FULL = dataclasses.replace(
    EFFORTS["full"], tokens=6, certified=2, layers=2, tolerance=1e-7, lanczos=60
)
FACTOR = 4.0

IN_JSON: dict[str, str] = {
    "segments.slope": (
        "slope and radii bound the last map's weights, whose features scale against them"
    ),
    "segments.certificate.growth": "the same, by ascent",
    "segments.certificate.gained": "the same, by ascent over gains and weights together",
    "segments.training_threshold": (
        "a weight decay acts on the weights: its threshold scales with the gain before them"
    ),
    "gradients": "|dL/dW| by sublayer and matrix are derivatives by the weights",
    "last": (
        "|dL/dW_2| of the last FFN and Kim's bound on it are derivatives by the weights; their"
        " ratio is gauge-free"
    ),
    "curvature": "lambda_max, trace and tangent kernel are made of derivatives by the weights",
    "updates": "r_k is of a step in the weights",
    "layers.measured": (
        "the local value of the map alone, without the norms around it; `path` has them"
    ),
    "layers.bound": "theorem 5.1 bounds that value",
    "layers.printed": "the same as it is printed",
    "layers.value_path": "its first term, |W_O| sum_h |V_h|",
    "layers.attention_path": "its second term",
    "layers.B": "the longest token of the map's input, which grows with the input norm's gain",
    "layers.G": "|W_O||W_Q||W_K||W_V|",
    "layers.S": "S = (theta/tau) B^2 G has both",
    "layers.log_sensitivity": "the logarithms of its factors",
}
"""Figures of `screen.json` that are not gauge-free either, by the end of their path, and why."""


def behind_output_norm(model):
    """Peri's last maps times c, with eps c^2."""
    for sublayer in model.depth.sublayers:
        for parameter in sublayer.field.output_projection.parameters():
            parameter.mul_(FACTOR)
        sublayer.output_norm.eps *= FACTOR**2


def gain_against_matrix(model):
    """An input norm's gain and offset times c, the matrix behind it divided by c."""
    for sublayer in model.depth.sublayers:
        for parameter in sublayer.input_norm.parameters():
            parameter.mul_(FACTOR)
        field = sublayer.field
        (field.qkv if sublayer.kind == "attention" else field.up).weight.div_(FACTOR)


def values_against_out(model):
    """V times c, W_O divided by c."""
    for field in attentions(model):
        for parameter in field.qkv.parameters():
            parameter.chunk(3)[2].mul_(FACTOR)
        field.out.weight.div_(FACTOR)


def queries_against_keys(model):
    """Q times c, K divided by c."""
    for field in attentions(model):
        for parameter in field.qkv.parameters():
            query, key, _ = parameter.chunk(3)
            query.mul_(FACTOR)
            key.div_(FACTOR)


def up_against_down(model):
    """W_1 and b_1 times c, W_2 divided by c: the same for ReLU, as phi(c z) = c phi(z)."""
    for sublayer in model.depth.sublayers:
        if sublayer.kind == "ffn":
            for parameter in sublayer.field.up.parameters():
                parameter.mul_(FACTOR)
            sublayer.field.down.weight.div_(FACTOR)


def attentions(model):
    return [sublayer.field for sublayer in model.depth.sublayers if sublayer.kind == "attention"]


CHANGES = {
    "peri: last map behind the output norm": ("peri", behind_output_norm),
    "pre: input norm's gain against the matrix behind it": ("pre", gain_against_matrix),
    "peri: input norm's gain against the matrix behind it": ("peri", gain_against_matrix),
    "pre: W_V against W_O": ("pre", values_against_out),
    "post: W_V against W_O": ("post", values_against_out),
    "pre: W_Q against W_K": ("pre", queries_against_keys),
    "pre: W_1 against W_2": ("pre", up_against_down),
    "post: W_1 against W_2": ("post", up_against_down),
}


def model_of(name):
    return small_model(name, depth=2, activation="relu")


@functools.cache
def screened(placement, change=None):
    model = model_of(placement)
    if change is not None:
        CHANGES[change][1](model)
    text = tokens(2, 9)
    return screen(model, text[:, :-1], text[:, 1:], FULL, other=tokens(2, 8, seed=5))


def leaves(value, path=""):
    """Every number of a finding, by the path to it: lists are told apart by their place."""
    if dataclasses.is_dataclass(value):
        value = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from leaves(inner, f"{path}.{name}" if path else str(name))
    elif isinstance(value, (list, tuple)):
        for inner in value:
            yield from leaves(inner, path)
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        yield path, float(value)


def named(path):
    """Whether the table of what is not gauge-free has it."""
    parts = path.split(".")
    return any(
        parts[i : i + len(name.split("."))] == name.split(".")
        for name in IN_JSON
        for i in range(len(parts))
    )


def differ(one, other):
    if math.isnan(one) or math.isnan(other):
        return math.isnan(one) != math.isnan(other)
    return abs(one - other) > 1e-6 * max(abs(one), abs(other)) + 1e-9


@pytest.mark.parametrize("change", CHANGES)
def test_the_function_is_the_same(change):
    placement, rescale = CHANGES[change]
    model, other = model_of(placement), model_of(placement)
    rescale(other)
    x = model.head(model.depth(model.embed(tokens())))
    assert torch.allclose(other.head(other.depth(other.embed(tokens()))), x, rtol=1e-12, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("change", CHANGES)
def test_every_quantity_is_gauge_free_or_says_why_not(change):
    placement, _ = CHANGES[change]
    for step, finding in screened(placement).steps.items():
        other = screened(placement, change).steps[step]
        assert finding.verdict == other.verdict or step == "updates"
        for what, value in finding.quantities.items():
            assert not differ(value, other.quantities[what]) or measures_of_steps()[what].gauge, (
                what,
                value,
                other.quantities[what],
            )


@pytest.mark.slow
@pytest.mark.parametrize("change", CHANGES)
def test_every_figure_in_the_json_is_gauge_free_or_named(change):
    placement, _ = CHANGES[change]
    for step, finding in screened(placement).steps.items():
        pairs = zip(
            leaves(finding.result),
            leaves(screened(placement, change).steps[step].result),
            strict=True,
        )
        changed = {path: (a, b) for (path, a), (_, b) in pairs if differ(a, b) and not named(path)}
        assert not changed, f"{step}: {changed}"


@pytest.mark.slow
def test_what_is_named_as_not_gauge_free_is_not():
    moved, paths = set(), set()
    for change, (placement, _) in CHANGES.items():
        for step, finding in screened(placement).steps.items():
            other = screened(placement, change).steps[step]
            moved |= {
                what
                for what, value in finding.quantities.items()
                if differ(value, other.quantities[what])
            }
            pairs = zip(leaves(finding.result), leaves(other.result), strict=True)
            paths |= {path for (path, a), (_, b) in pairs if differ(a, b)}
    assert moved == {name for name, quantity in measures_of_steps().items() if quantity.gauge}
    assert [name for name in IN_JSON if not any(name in path for path in paths)] == []

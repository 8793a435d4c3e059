"""Rounding in arithmetic beside torch's real casts, its inequalities at their bounds, and a
measured step of a training.
"""

import itertools
import math

import pytest
import torch
from torch import nn

import ctrans
from ctrans import low_precision
from ctrans.examine.diagnosis import low_precision as room
from ctrans.examine.diagnosis.low_precision import PRECISION_CHECKS, InFormats, weights_in
from ctrans.examine.diagnosis.number_formats import FORMATS, format_of
from solvers import ConfigError

DTYPES = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "e4m3": torch.float8_e4m3fn,
    "e5m2": torch.float8_e5m2,
}


def numbers_of(form):
    """All positive numbers of a format of fp8, and 0; of one of 16 bits, those of some powers of 2;
    in float64.
    """
    p, last = form.digits, math.frexp(form.largest)[1] - 1
    levels = range(form.least, last + 1) if p < 8 else (form.least, form.least + 1, -3, 0, last)
    normal = [m * 2.0 ** (e - p + 1) for e in levels for m in range(2 ** (p - 1), 2**p)]
    return torch.tensor(
        [m * 2.0 ** (form.least - p + 1) for m in range(2 ** (p - 1))] + normal, dtype=torch.float64
    )


@pytest.mark.parametrize("name", FORMATS)
def test_the_table_has_torch_s_numbers(name):
    form, about = FORMATS[name], torch.finfo(DTYPES[name])
    assert (form.largest, 2.0**form.least, 2.0 ** (1 - form.digits)) == (
        about.max,
        about.smallest_normal,
        about.eps,
    )
    numbers = numbers_of(form)
    assert torch.equal(
        numbers[numbers <= about.max].to(DTYPES[name]).double(), numbers[numbers <= about.max]
    )


@pytest.mark.parametrize("name", FORMATS)
def test_rounding_is_torch_s_cast_of_any_float_bit_for_bit(name):
    """Random bits of float32, all midpoints of neighbours and their float32 neighbours. Beyond the
    range torch gives inf, nan or the largest number, by format and version.
    """
    form = FORMATS[name]
    bits = torch.randint(-(2**31), 2**31, (2**18,), generator=torch.Generator().manual_seed(0))
    numbers = numbers_of(form)
    middle = ((numbers[1:] + numbers[:-1]) / 2).float()
    near = [
        middle,
        middle.nextafter(torch.tensor(0.0)),
        middle.nextafter(torch.tensor(math.inf)),
        numbers.float(),
    ]
    beyond = torch.tensor(
        [form.largest * (1 + 2.0**-form.digits * k / 4) for k in range(-8, 9)], dtype=torch.float32
    )
    x = torch.cat([bits.to(torch.int32).view(torch.float32), *near, beyond])
    x = torch.cat([x, -x])[x.isfinite().repeat(2)]
    mine, real = form.rounded(x.double()), x.to(DTYPES[name]).double()
    over = mine.isinf()
    assert torch.equal(mine[~over], real[~over])
    assert torch.equal(mine[~over].signbit(), x[~over].signbit())
    assert ((~real.isfinite()) | (real.abs() == form.largest))[over].all()
    if name != "e4m3":
        assert real[over].isinf().all()


def test_the_largest_number_of_e4m3_has_an_even_significand_so_464_does_not_overflow():
    """Its neighbour 480 would be nan. For the others the middle goes up."""
    tie = torch.tensor([464.0, 464.0000001, 61440.0, 65520.0], dtype=torch.float64)
    assert FORMATS["e4m3"].rounded(tie).tolist()[:2] == [448.0, math.inf]
    assert FORMATS["e5m2"].rounded(tie)[2] == FORMATS["fp16"].rounded(tie)[3] == math.inf


@pytest.mark.parametrize("name", FORMATS)
def test_the_relative_error_is_at_most_2_to_minus_p_and_comes_close(name):
    form = FORMATS[name]
    x = 1 + torch.rand(2**14, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    x = torch.cat([x, torch.tensor([1 + 2.0**-form.digits], dtype=torch.float64)])
    error = (form.rounded(x) - x).abs() / x
    assert error.max() <= 2.0**-form.digits
    assert error.max() >= 0.8 * 2.0**-form.digits


def lost(form, w, dw):
    return bool(form.rounded(torch.tensor([w + dw], dtype=torch.float64)) == w)


@pytest.mark.parametrize("name", FORMATS)
def test_an_update_is_lost_exactly_where_the_docstring_says(name):
    """For numbers of the format: below ulp/4 always, above ulp/2 never, between unless a normal
    power of 2 shrinks.
    """
    form = FORMATS[name]
    unit = 2.0 ** (form.least - form.digits + 1)
    numbers = [
        *numbers_of(form).tolist()[1::37],
        2.0 ** (form.least + 1),
        2.0**form.least,
        1.0,
        unit,
    ]
    for w, sign, away in itertools.product(numbers, (1, -1), (1, -1)):
        ulp = max(2.0 ** (math.frexp(w)[1] - form.digits), unit)
        shrinks = away < 0 and math.frexp(w)[0] == 0.5 and w > 2.0**form.least
        for share, expected in (
            (0.24, True),
            (0.26, not shrinks),
            (0.49, not shrinks),
            (0.51, False),
        ):
            if w < form.largest:
                assert lost(form, sign * w, sign * away * share * ulp) is expected, (
                    w,
                    sign,
                    away,
                    share,
                )


@pytest.mark.parametrize("name", ["bf16", "fp16"])
def test_lost_updates_are_those_that_torch_loses(name):
    g = torch.Generator().manual_seed(0)
    w = torch.randn(2**14, generator=g).to(DTYPES[name])
    dw = torch.randn(2**14, generator=g) * 10 ** (-1 - 5 * torch.rand(2**14, generator=g))
    mine = FORMATS[name].rounded(w.double() + dw.double()) == w.double()
    real = (w.float() + dw).to(DTYPES[name]) == w
    assert 0.2 < real.double().mean() < 0.8
    assert torch.equal(mine, real)


def counted(tensor, name):
    """Error and shares by the real cast, block by block."""
    base, _, scale = name.partition(":")
    form, dtype = FORMATS[base], DTYPES[base]
    x = tensor.double()
    rows = (
        [x.reshape(-1)]
        if scale in ("", "tensor")
        else [part for row in x for part in row.split(int(scale))]
    )
    over, zero, small, entries, missed, size = 0, 0, 0, 0, 0.0, 0.0
    for row in rows:
        unit = (
            row.abs().max() / form.largest
            if scale and row.any()
            else torch.ones((), dtype=torch.float64)
        )
        y = (row / unit).float()
        real = y.to(dtype).double()
        out = ~real.isfinite() | (
            (y.abs() > 464) & (base == "e4m3")
        )  # some versions of torch take 448 there
        over, entries = over + int(out.sum()), entries + int((row != 0).sum())
        zero += int(((real == 0) & (row != 0)).sum())
        small += int(((real != 0) & (real.abs() < 2.0**form.least)).sum())
        missed += float(((real * unit - row)[~out]).square().sum())
        size += float(row[~out].square().sum())
    return over, zero, small, entries, math.sqrt(missed / size)


@pytest.mark.parametrize(
    "name", [*FORMATS, "e4m3:tensor", "e5m2:tensor", "e4m3:7", "e4m3:32", "fp16:64"]
)
@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e4])
def test_shares_and_error_of_a_tensor_are_those_of_the_cast(name, scale, monkeypatch):
    """Log-normal entries, of which some are 0, in rows of 100 in several chunks; blocks do not fill
    the last axis.
    """
    monkeypatch.setattr("ctrans.examine.diagnosis.matrix_norms.AT_ONCE", 700)
    g = torch.Generator().manual_seed(0)
    x = scale * torch.randn(40, 100, generator=g) * torch.exp(2 * torch.randn(40, 100, generator=g))
    x[3], x[:, 5] = 0, 0
    found = InFormats(name)
    found.add("it", None, x)
    diagnosis = found.diagnoses()[name]
    values = {quantity: reading.value for quantity, (reading,) in diagnosis.readings.items()}
    over, zero, small, entries, error = counted(x, name)
    assert values["entries that overflow"] == over / entries
    assert values["entries that become zero"] == zero / entries
    assert values["rounding error"] == pytest.approx(error, rel=1e-6)
    assert f"{small / entries:.2%} are subnormal" in diagnosis.readings["rounding error"][0].figure


def test_a_tensor_outside_of_a_range_is_found_and_a_scale_heals_it():
    g = torch.Generator().manual_seed(0)
    tensors = {
        "large": 1e5 * torch.randn(64, 64, generator=g),
        "small": 1e-9 * torch.randn(64, 64, generator=g),
    }
    readers = {f"blocks.{i}.{name}": value.clone for i, (name, value) in enumerate(tensors.items())}
    found = weights_in("bf16,fp16,e4m3,e4m3:tensor", readers, lambda done: None)
    assert found["bf16"].healthy
    assert found["e4m3:tensor"].healthy
    for name in ("fp16", "e4m3"):
        places = {
            finding.check: [each.place for each in finding.readings]
            for finding in found[name].findings
        }
        small = ["block 1: the weight blocks.1.small"]
        assert places == {
            "overflow": ["block 0: the weight blocks.0.large"],
            "range too small": small,
            "entries become zero": small,
        }
    assert [each.severity for each in found["fp16"].findings] == ["broken", "serious", "note"]


@pytest.mark.parametrize("name", PRECISION_CHECKS)
def test_a_check_has_a_quantity_that_is_measured(name):
    model = nn.Linear(3, 3)
    with low_precision(model, "bf16") as step:
        model(torch.randn(2, 3)).sum().backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()
    assert name in step.diagnoses()["bf16"].examined


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x).tanh()
        return {"state": x, "ids": x.argmax(-1), "pair": (x.sum(), None)}


def stepped(model, optimiser, formats="bf16,e4m3", scale=1.0):
    torch.manual_seed(1)
    x = torch.randn(5, 8)
    with low_precision(model, formats) as found:
        (scale * model(x)["state"].square().mean()).backward()
        optimiser.step()
    return found


def test_a_step_is_measured_at_every_place_and_leaves_the_training_as_it_was():
    """The same step without it gives the same bits; no hook remains; what is measured is what the
    tensors are.
    """
    torch.manual_seed(0)
    model, other = Net(), Net()
    other.load_state_dict(model.state_dict())
    hooks = [len(each._forward_hooks) for each in model.modules()]
    before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    found = stepped(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    torch.manual_seed(1)
    x = torch.randn(5, 8)
    optimiser = torch.optim.AdamW(other.parameters(), lr=1e-3)
    other(x)["state"].square().mean().backward()
    optimiser.step()
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(one, two)
        assert torch.equal(one.grad, two.grad)
        assert one.requires_grad
        assert not one._backward_hooks
    assert [len(each._forward_hooks) for each in model.modules()] == hooks
    assert model.training
    readings = found.diagnoses()["bf16"].readings
    places = {reading.place: reading.segment for reading in readings["rounding error"]}
    for i, kind in itertools.product(range(2), ("weight", "bias")):
        assert places[f"block {i}: the weight blocks.{i}.{kind}"] == i
        assert f"block {i}: the gradient of blocks.{i}.{kind}" in places
        assert f"block {i}: the gradient of the output of blocks.{i}" in places
    assert "the output of the model" in places
    gradient = other.blocks[1].weight.grad
    expected = (gradient - gradient.bfloat16()).double().norm() / gradient.double().norm()
    (value,) = [
        r.value
        for r in readings["rounding error"]
        if r.place == "block 1: the gradient of blocks.1.weight"
    ]
    assert value == pytest.approx(float(expected), rel=1e-5)
    for reading in readings["lost updates"]:
        name = reading.place.rpartition("the update of ")[2]
        low = before[name].bfloat16()
        dw = (dict(model.named_parameters())[name] - before[name]).detach()
        real = ((low.float() + dw).bfloat16() == low)[dw != 0].double().mean()
        assert reading.value == pytest.approx(float(real), abs=1e-9), name


def test_the_share_of_lost_updates_falls_with_the_learning_rate():
    shares = []
    for rate in (1e-6, 1e-3, 1e-1):
        torch.manual_seed(0)
        model = Net()
        found = stepped(model, torch.optim.AdamW(model.parameters(), lr=rate), "bf16").diagnoses()[
            "bf16"
        ]
        shares.append(
            max(
                reading.value
                for reading in found.readings["lost updates"]
                if "weight" in reading.place
            )
        )
        worst = max(reading.value for reading in found.readings["lost updates"])
        worst = max(reading.value for reading in found.readings["lost updates"])
        assert ("updates lost" in [each.check for each in found.findings]) is (worst > 0.5)
    assert shares[0] > 0.95
    assert shares == sorted(shares, reverse=True)
    assert shares[-1] < 0.2


def test_of_a_large_weight_a_sample_of_all_its_columns_is_compared(monkeypatch):
    monkeypatch.setattr(room, "SAMPLE", 100)
    model = nn.Linear(64, 64, bias=False)
    with low_precision(model, "bf16") as found, torch.no_grad():
        model.weight[:, :32] += 1.0
        model.weight[:, 32:] *= 1 + 1e-6
    (reading,) = found.diagnoses()["bf16"].readings["lost updates"]
    assert "100 updates" in reading.figure or "99 updates" in reading.figure
    assert 0.4 < reading.value < 0.6


def test_microbatches_and_shared_modules_are_counted_together():
    """The share is that of all entries, as of one tensor with all of them."""
    model = nn.Sequential(block := nn.Linear(4, 4, bias=False), block)
    with torch.no_grad():
        block.weight.copy_(torch.eye(4))
    with low_precision(model, "e4m3") as found:
        for value in (1.0, 2.0**-12):
            model(torch.full((1, 4), value))
    values = {
        r.place: r.value for r in found.diagnoses()["e4m3"].readings["entries that become zero"]
    }
    assert values["block 0: the output of 0"] == 0.5
    assert found.diagnoses()["e4m3"].readings.keys() == {*room.ROUNDED}


def test_an_exception_in_the_step_leaves_no_hook():
    model = nn.Linear(3, 3)
    with pytest.raises(RuntimeError, match="mine"), low_precision(model, "bf16"):
        raise RuntimeError("mine")
    assert not model._forward_hooks
    assert not model.weight._backward_hooks


ODD = {
    "integers": torch.arange(6).reshape(2, 3),
    "booleans": torch.ones(4, dtype=torch.bool),
    "complex": torch.ones(4, dtype=torch.complex64),
    "empty": torch.empty(0, 5),
    "empty axis": torch.empty(5, 0),
    "meta": torch.empty(3, 4, device="meta"),
    "sparse": torch.eye(3).to_sparse(),
}


@pytest.mark.parametrize("kind", ODD)
def test_what_has_no_numbers_is_left_out(kind):
    found = InFormats("bf16,e4m3:tensor,e4m3:32")
    found.add("it", None, ODD[kind])
    for diagnosis in found.diagnoses().values():
        assert diagnosis.examined == []


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor(3.7),
        torch.tensor(3.7, dtype=torch.float64),
        torch.zeros(3, 4),
        torch.tensor([math.nan, math.inf, -math.inf, 1.0]),
        torch.full((3,), math.nan),
        torch.tensor([1e300, 1e-300, 5e-324], dtype=torch.float64),
        torch.tensor([1e-45, 1e-40]),
        torch.randn(2, 3, 4, 5),
        torch.randn(4, 6).t(),
        torch.randn(1, 3).expand(4, 3),
        torch.randn(3).to(torch.float8_e4m3fn),
        torch.randn(3).half(),
    ],
    ids=[
        "0-d",
        "float64",
        "zeros",
        "nan and inf",
        "nan",
        "wide",
        "subnormal",
        "4-d",
        "transposed",
        "expanded",
        "fp8",
        "half",
    ],
)
def test_unusual_tensors_have_finite_figures(tensor):
    names = "bf16,fp16,e4m3,e5m2:tensor,e4m3:2"
    found = InFormats(names)
    found.add("it", None, tensor)
    for diagnosis in found.diagnoses().values():
        assert all(
            0 <= each.value < math.inf
            for several in diagnosis.readings.values()
            for each in several
        )


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("fp8", "unknown format 'fp8': did you mean 'fp16'"),
        ("", "unknown format ''"),
        ("bf16,", "unknown format ''"),
        ("e4m3:0", "e4m3:tensor for one scale"),
        ("e4m3:-1", "e4m3:N for a scale of each N entries"),
        ("e4m3:1e3", "e4m3:N"),
        ("e4m3:" + "9" * 5000, "e4m3:N"),
        ("e4m3:٣", "e4m3:N"),
        ("e4m3:tensor:4", "e4m3:N"),
    ],
)
def test_wrong_formats_get_one_line(name, words):
    with pytest.raises(ConfigError, match=words) as caught:
        InFormats(name)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 6000


def test_wrong_arguments_get_one_line():
    for wrong in ((nn.Linear(2, 2), 3), (3, "bf16"), (nn.Linear(2, 2), ["bf16"])):
        with pytest.raises(ConfigError), low_precision(*wrong):
            pass


def test_a_format_with_a_scale_is_named_so():
    assert format_of("e4m3").block is None
    assert format_of("e4m3:tensor").block == 0
    assert format_of("e4m3:128").block == 128


def test_a_model_on_the_meta_device_frozen_weights_and_one_without_parameters_are_measured_as_far_as_they_go():
    with low_precision(nn.Linear(3, 3, device="meta"), "bf16") as found:
        pass
    assert found.diagnoses()["bf16"].examined == []
    model = nn.Sequential(nn.Linear(3, 3).requires_grad_(False), nn.ReLU(inplace=True))
    with low_precision(model, "bf16") as found:
        model(torch.randn(2, 3))
    assert len(found.diagnoses()["bf16"].examined) == 3
    with low_precision(nn.ReLU(), "bf16") as found:
        nn.ReLU()(torch.randn(2, 3))
    assert found.diagnoses()["bf16"].examined == []


def test_a_block_that_is_longer_than_a_row_is_the_row():
    """Otherwise each row would be filled with zeros."""
    x = torch.randn(2000, 3)
    found = InFormats("e4m3:3,e4m3:9999999")
    found.add("it", None, x)
    one, other = found.diagnoses().values()
    assert one.readings == other.readings


def test_lazy_weights_are_measured_once_they_are_there():
    model = nn.Sequential(nn.LazyLinear(3), nn.ReLU())
    with low_precision(model, "bf16") as found:
        model(torch.randn(2, 4)).sum().backward()
    places = {reading.place for reading in found.diagnoses()["bf16"].readings["rounding error"]}
    assert "block 0: the output of 0" in places
    assert "block 0: the weight 0.weight" not in places


@pytest.mark.parametrize("formats", [0, b"bf16", ["bf16"], torch.ones(2), None])
def test_formats_are_a_text(formats):
    with pytest.raises(ConfigError, match="formats = "):
        ctrans.low_precision(torch.nn.Linear(2, 2), formats)

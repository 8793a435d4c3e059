"""Models whose weights come on demand: compared as in memory, with two sublayers in memory."""

import collections
import copy
import dataclasses
import weakref

import pytest
import torch

from ctrans.dynamics.weights.on_demand import readers_of, resident, watch
from ctrans.examine.comparison.compare import compare
from ctrans.interop import from_transformers, streamed
from tests.interop.models import inputs, made


def pair(name, change, path, **settings):
    """A saved model, a saved copy that is changed, and what they read."""
    model = made(name).float()
    if settings:
        config = copy.deepcopy(model.config)
        config.update(settings)
        torch.manual_seed(0)
        model = type(model)(config).eval()
    other = copy.deepcopy(model)
    with torch.no_grad():
        change(other)
    model.save_pretrained(path / "first")
    other.save_pretrained(path / "second")
    return inputs(model)


def opened(path, *, on_demand):
    return tuple(
        from_transformers(path / name, dtype=torch.float32, on_demand=on_demand)
        for name in ("first", "second")
    )


def compared(path, x, **options):
    return compare(*opened(path, **options), x, x.roll(1, -1))


def transpose(model):
    weight = dict(model.named_parameters())[TRANSPOSED[model.config.model_type]]
    weight.copy_(weight.t().clone())


def rounded(model):
    for weight in model.parameters():
        weight.copy_(weight.bfloat16().float())


TRANSPOSED = {
    "llama": "model.layers.1.self_attn.o_proj.weight",
    "gpt2": "transformer.h.1.attn.c_proj.weight",
}


@pytest.mark.cases(1)
@pytest.mark.parametrize("name", TRANSPOSED)
def test_a_change_is_found_as_in_memory(name, tmp_path):
    """Defects and shares have the same bits. Rounding is drawn anew."""
    x = pair(name, transpose, tmp_path)
    whole, found = (compared(tmp_path, x, on_demand=each) for each in (False, True))
    assert [part.name for part in found.changed] == ["block 1, attention"]
    for part, expected in zip(found.parts, whole.parts, strict=True):
        assert part.ratio == pytest.approx(expected.ratio, rel=0.5)
        assert part.rounding == pytest.approx(expected.rounding, rel=0.5)
        random = {"ratio": 0.0, "rounding": 0.0}
        assert repr(dataclasses.replace(part, **random)) == repr(
            dataclasses.replace(expected, **random)
        )
    assert found.losses == whole.losses
    assert found.weights == whole.weights
    assert found.weights[0].name == TRANSPOSED[name]
    assert (found.equal_weights, found.unmatched) == (whole.equal_weights, ())
    assert found.explanations == whole.explanations != ()
    assert [(stage.name, stage.changed, stage.kind) for stage in found.inside] == [
        (stage.name, stage.changed, stage.kind) for stage in whole.inside
    ]
    assert found.missing == {}


def test_weights_that_are_rounded_are_no_change_on_demand(tmp_path):
    x = pair("llama", rounded, tmp_path)
    whole, found = (compared(tmp_path, x, on_demand=each) for each in (False, True))
    assert not found.changed
    assert {weight.kind for weight in found.weights} == {"rounded"}
    assert found.weights == whole.weights
    assert found.kept == whole.kept != ()
    # three draws of each tell little: six texts
    sums = {False: 0.0, True: 0.0}
    for shift in range(6):
        for on_demand in sums:
            again = compared(tmp_path, x.roll(shift, -1), on_demand=on_demand)
            sums[on_demand] += again.rounding_of_loss
    assert sums[True] == pytest.approx(sums[False], rel=0.4)
    assert max(part.ratio for part in found.parts) == pytest.approx(
        max(part.ratio for part in whole.parts), rel=0.5
    )


@pytest.mark.cases(1)
@pytest.mark.parametrize("change", [transpose, rounded])
def test_at_most_two_sublayers_are_in_memory_at_once(change, tmp_path, monkeypatch):
    """The weights that were read from files and are still alive, at each reading."""
    x = pair("llama", change, tmp_path)
    alive = {}
    sizes = []
    peaks = []
    read = streamed.read_numbers

    def counted(stored):
        weights = read(stored)
        sizes.append(sum(weight.nbytes for weight in weights.values()))
        for weight in weights.values():
            storage = weight.untyped_storage()
            alive[id(storage)] = storage.nbytes()
            weakref.finalize(storage, alive.pop, id(storage))
        peaks.append(sum(alive.values()))
        return weights

    monkeypatch.setattr(streamed, "read_numbers", counted)
    models = opened(tmp_path, on_demand=True)
    compare(*models, x, x.roll(1, -1))
    assert max(sizes) <= max(peaks) <= 2 * max(sizes)
    everything = sum(weight.read().nbytes for _, weight in readers_of(models[0].model))
    assert 2 * max(sizes) < everything  # else nothing would be shown


@pytest.mark.slow
def test_a_sublayer_is_read_no_more_often_in_a_deeper_model(tmp_path):
    """Shares need passes from each part on: all go through a part together."""
    reads = []
    for blocks in (3, 12):
        path = tmp_path / str(blocks)
        x = pair("llama", rounded, path, num_hidden_layers=blocks)
        models = opened(path, on_demand=True)
        counts = collections.Counter()
        for model in models:
            watch(model, lambda piece, counts=counts: counts.update([piece]))
        compare(*models, x, x.roll(1, -1))
        reads.append(max(count for piece, count in counts.items() if ".layers." in piece))
    assert reads[1] <= reads[0] + 3


def test_resident_weights_are_parameters_and_come_on_demand_again(tmp_path):
    pair("llama", rounded, tmp_path)
    model, _ = opened(tmp_path, on_demand=True)
    layer = model.model.model.layers[1].self_attn.q_proj
    before = layer.weight.clone()
    kind = type(layer)
    with resident(model.model, [layer.place.names["weight"]]):
        assert isinstance(layer.weight, torch.nn.Parameter)
        layer.weight.data = 2 * layer.weight.data
        assert torch.equal(layer.weight, 2 * before)
    assert type(layer) is kind
    assert "weight" not in layer._parameters
    assert torch.equal(layer.weight, before)

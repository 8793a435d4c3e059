"""A diagnosis of weights alone, and of what changed: each figure beside a dense or counted one,
each finding from a planted fault.
"""

import math
import weakref

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from ctrans import GPT, GPTConfig
from ctrans.examine.diagnosed import answer_of_change
from ctrans.examine.diagnosis.weight_checks import CHANGE_CHECKS, WEIGHT_CHECKS
from ctrans.examine.diagnosis.weights_only import change, updates, weight_diagnosis
from ctrans.interop.checkpoint_weights import read_checkpoint
from ctrans.measure.findings import Reading

UP, NORM = "layers.1.mlp.up.weight", "layers.1.input_layernorm.weight"


def model(width=24, hidden=40):
    torch.manual_seed(0)
    weights = {"embed.weight": torch.randn(60, width)}
    for i in range(3):
        weights[f"layers.{i}.input_layernorm.weight"] = 1 + 0.1 * torch.randn(width)
        weights[f"layers.{i}.mlp.up.weight"] = torch.randn(hidden, width)
        weights[f"layers.{i}.mlp.up.bias"] = torch.randn(hidden)
        weights[f"layers.{i}.mlp.down.weight"] = torch.randn(width, hidden).bfloat16()
    return weights


def readers(weights):
    return {name: value.clone for name, value in weights.items()}


def diagnosed(weights):
    return weight_diagnosis(readers(weights))


def values(found, quantity):
    return {
        reading.place.split("the weight ")[1]: reading.value for reading in found.readings[quantity]
    }


@pytest.mark.parametrize("entry", [complex(0, math.nan), complex(-math.inf, 1)])
@pytest.mark.parametrize("pickled", [False, True])
def test_nan_and_inf_in_complex_numbers_are_found(entry, pickled, tmp_path):
    table = torch.ones(4, 4, dtype=torch.complex64)
    table[1, 2] = entry
    weights = {"a.weight": torch.ones(2, 2), "freqs_cis": table, "spare": torch.ones(2) + 0j}
    if pickled:
        path = tmp_path / "model.pt"
        torch.save(weights, path)
    else:
        path = tmp_path / "model.safetensors"
        save_file(weights, path)
    checkpoint = read_checkpoint(path, allow_pickle=True)
    found = weight_diagnosis(checkpoint.weights, buffers=checkpoint.buffers)
    broken = found.readings["entries that are not finite"][-1]
    assert (broken.place, broken.value) == ("the complex tensor freqs_cis", 1.0)
    assert [finding.check for finding in found.findings] == ["not finite"]


@pytest.mark.parametrize("entry", [math.nan, math.inf])
@pytest.mark.parametrize(
    "name", ["h.1.attn.bias", "h.1.attn.masked_bias", "h.1.attn.rotary_emb.inv_freq"]
)
def test_nan_in_a_buffer_that_is_no_weight_is_found(name, entry, tmp_path):
    buffer = torch.ones(1, 1, 4, 4)
    buffer[0, 0, 1, 2] = entry
    save_file({"a.weight": torch.ones(2, 2), name: buffer}, tmp_path / "model.safetensors")
    checkpoint = read_checkpoint(tmp_path)
    found = weight_diagnosis(checkpoint.weights, buffers=checkpoint.buffers)
    assert [finding.check for finding in found.findings] == ["not finite"]
    assert f"block 1: the buffer {name}" in str(found)
    assert "1 of 16 entries are inf or nan" in str(found)


def test_a_mask_may_hide_tokens_by_infinite_scores_and_be_of_truth_values(tmp_path):
    hidden = torch.full((1, 1, 4, 4), -math.inf).triu(1)
    masks = {"h.0.attn.bias": hidden, "h.1.attn.bias": hidden == 0}
    masks["h.0.attn.masked_bias"] = torch.tensor(-math.inf)
    save_file({"a.weight": torch.ones(2, 2)} | masks, tmp_path / "model.safetensors")
    checkpoint = read_checkpoint(tmp_path)
    found = weight_diagnosis(checkpoint.weights, buffers=checkpoint.buffers)
    assert found.healthy


def test_norms_and_stable_ranks_are_those_of_dense_algebra():
    weights = model()
    found = diagnosed(weights)
    assert found.healthy
    for name, norm in values(found, "spectral norm").items():
        dense = weights[name].double()
        assert norm == pytest.approx(float(torch.linalg.matrix_norm(dense, 2)), rel=1e-5)
        rank = float(dense.square().sum() / torch.linalg.matrix_norm(dense, 2) ** 2)
        assert values(found, "stable rank")[name] == pytest.approx(rank, rel=1e-5)
        lengths = [dense.norm(dim=k) for k in (0, 1)]
        outlier = max(float(each.max()) / float(np.median(each.numpy())) for each in lengths)
        assert values(found, "outlier channel")[name] == pytest.approx(outlier, rel=1e-5)


@pytest.mark.parametrize(
    ("spectrum", "low"),
    [(lambda n: torch.ones(n), 0.93), (lambda n: torch.arange(1, n + 1) ** -0.5, 0.999)],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_large_matrices_have_a_norm_from_below(spectrum, low, dtype):
    """For random entries and for a decaying spectrum; 600 rows are several parts at once."""
    torch.manual_seed(1)
    weight = (torch.randn(3000, 600) * spectrum(600)).to(dtype)
    exact = float(torch.linalg.matrix_norm(weight.double(), 2))
    (norm,) = values(diagnosed({"layers.0.w.weight": weight}), "spectral norm").values()
    assert low * exact <= norm <= exact * 1.0001


@pytest.mark.parametrize("size", [1e-300, 1e-200, 1e-30, 1e30, 1e200, 1e300])
@pytest.mark.parametrize("shape", [(24, 40), (700, 400)])
def test_figures_do_not_overflow_or_underflow(size, shape):
    torch.manual_seed(2)
    plain = torch.randn(shape, dtype=torch.float64)
    plain[3] = 0
    plain[4] *= 1e-7
    name = "layers.0.w.weight"
    expected = diagnosed({name: plain})
    found = diagnosed({name: plain * size})
    for quantity, readings in expected.readings.items():
        scale = size if quantity in ("spectral norm", "largest entry of a matrix") else 1.0
        (value,) = values(found, quantity).values()
        assert value == pytest.approx(readings[0].value * scale, rel=1e-5), quantity
    assert values(found, "units of zeros") == {name: 1.0}


def test_small_rows_beside_large_ones_are_not_zero():
    weight = torch.ones(24, 40, dtype=torch.float64)
    weight[3] = 1e-200
    weight[:, 5] = 1e-250
    assert values(diagnosed({"layers.0.w.weight": weight}), "units of zeros") == {
        "layers.0.w.weight": 0.0
    }


@pytest.mark.parametrize("size", [1e-200, 1e200])
def test_an_update_of_extreme_weights_is_measured(size):
    weight = torch.ones(24, 40, dtype=torch.float64) * size
    name = "layers.0.w.weight"
    (reading,) = updates(readers({name: weight}), readers({name: weight * 1.5}))
    assert reading.value == pytest.approx(0.5)


FAULTS = {
    "not finite": lambda w: w[UP].__setitem__((3, 4), torch.inf),
    "dead norm": lambda w: w[NORM].fill_(1e-5),
    "dead gain": lambda w: w[NORM].__setitem__(5, 1e-6),
    "zero weight": lambda w: w[UP].zero_(),
    "gain too large": lambda w: w[NORM].__setitem__(5, 100),
    "dead units": lambda w: w[UP].__setitem__(7, 0),
    "rank near one": lambda w: w[UP].copy_(torch.outer(torch.randn(40), torch.randn(24))),
    "outlier channel": lambda w: w[UP].__setitem__((slice(None), 5), 1e3),
}


def test_every_check_of_weights_is_tried():
    elsewhere = {"block untrained", "weight untrained", "block lacks weights"}
    assert FAULTS.keys() | elsewhere == set(WEIGHT_CHECKS)


@pytest.mark.parametrize("check", FAULTS)
def test_a_planted_fault_is_found_at_its_place(check):
    weights = model()
    FAULTS[check](weights)
    finding = next(each for each in diagnosed(weights).findings if each.check == check)
    assert (
        finding.place == f"block 1: the weight {NORM if 'norm' in check or 'gain' in check else UP}"
    )


def test_a_vector_that_is_no_gain_and_rows_of_an_embedding_are_no_dead_parts():
    weights = model()
    weights["layers.0.mlp.up.bias"][3] = 0
    weights["embed.weight"][0] = 0
    assert diagnosed(weights).healthy


def test_experts_are_examined_one_by_one():
    torch.manual_seed(0)
    stack = torch.randn(4, 20, 30)
    stack[2, 5] = 0
    (finding,) = diagnosed({"layers.0.experts.up": stack}).findings
    assert (finding.check, finding.place) == (
        "dead units",
        "block 0: the weight layers.0.experts.up[2]",
    )


def test_one_tensor_is_in_memory_at_a_time():
    alive = []

    def read(name):
        def made():
            assert (
                sum(each() is not None for each in alive) <= 1
            )  # the one before may not be dropped yet
            weight = torch.randn(64, 64)
            alive.append(weakref.ref(weight))
            return weight

        return made

    weight_diagnosis({f"layers.{i}.w.weight": read(i) for i in range(6)})
    assert len(alive) == 6


def both(alter):
    before, after = model(), model()
    alter(after)
    old, new = readers(before), readers(after)
    return change(weight_diagnosis(old).readings, weight_diagnosis(new).readings, updates(old, new))


@pytest.mark.parametrize("count", [9, 13, 20])
def test_dead_gains_are_found_however_many_there_are(count):
    weights = model()
    weights[NORM][:count] = 0
    assert "dead gain" in [finding.check for finding in diagnosed(weights).findings]


def test_a_stack_of_another_number_of_matrices_has_no_update():
    before, after = model(), model()
    before["experts"], after["experts"] = torch.randn(4, 20, 20), torch.randn(8, 20, 20)
    assert "experts" not in " ".join(
        reading.place for reading in updates(readers(before), readers(after))
    )


def test_an_update_of_known_size_is_measured_in_its_block_and_nowhere_else():
    step = torch.zeros(40, 24)

    def alter(weights):
        step.copy_(torch.randn(40, 24))
        step.mul_(0.07 * weights[UP].norm() / step.norm())
        weights[UP] += step

    found = both(alter)
    moved = values(found, "update over weight")
    assert moved.pop(UP) == pytest.approx(0.07, rel=1e-5)
    assert set(moved.values()) == {0.0}
    assert found.healthy


def spike(weights):
    weights[UP] += 200 * torch.outer(torch.ones(40), torch.ones(24)) / (40 * 24) ** 0.5


CHANGES = {
    "not finite now": FAULTS["not finite"],
    "units died": FAULTS["dead units"],
    "spectral norm grew": spike,
    "stable rank fell": spike,
    "gains moved": lambda w: w[NORM].__setitem__(5, 30),
    "weight replaced": lambda w: w[UP].mul_(-1.01),
    "outlier channel moved": lambda w: w[UP][:, 5].mul_(6),
    "figure moved": lambda w: w[UP].__setitem__((3, 4), 60),
}


@pytest.mark.parametrize("check", CHANGES)
def test_a_planted_change_is_found_in_its_block(check):
    finding = next(each for each in both(CHANGES[check]).findings if each.check == check)
    assert finding.place == f"block 1: the weight {NORM if check == 'gains moved' else UP}"


def of_loss(nats):
    return {"loss on this text": [Reading(nats, "the head", f"the loss is {nats} nats")]}


def test_a_loss_that_rose_is_found_and_one_that_fell_is_not():
    (finding,) = change(of_loss(2.0), of_loss(2.2)).findings
    assert (finding.check, finding.value) == ("loss rose", pytest.approx(0.2))
    assert "before, the loss is 2.0 nats; now, the loss is 2.2 nats" in finding.figure
    assert change(of_loss(2.0), of_loss(2.05)).healthy
    assert change(of_loss(2.0), of_loss(0.1)).healthy


def test_every_check_of_a_change_is_tried():
    assert {*CHANGES, "loss rose"} == set(CHANGE_CHECKS)


def test_a_checkpoint_has_not_changed_from_itself():
    found = both(lambda weights: None)
    assert found.healthy
    assert set(values(found, "update over weight").values()) == {0.0}


def test_weights_of_one_checkpoint_only_are_counted():
    before, after = model(), model()
    del before[UP]
    found = change(diagnosed(before).readings, diagnosed(after).readings)
    assert found.healthy
    assert found.missing == {
        "figures of one of the two": f"0 of the first only, {6} of the second only"
    }


def test_checkpoints_without_a_name_in_common_are_not_compared_and_not_good():
    before = model()
    after = {f"module.{name}": weight for name, weight in before.items()}
    found = change(
        diagnosed(before).readings,
        diagnosed(after).readings,
        updates(readers(before), readers(after)),
    )
    answer = answer_of_change("a to b", found)
    assert answer.mark == "note"
    assert "not compared, as no weight and no figure of the one has a name of the" in answer.text
    same = change(diagnosed(before).readings, diagnosed(before).readings)
    assert answer_of_change("a to b", same).mark == "good"


def test_weights_of_ours_are_placed_by_block_and_not_by_sublayer():
    model = GPT(GPTConfig(depth=3, width=32, heads=2, context=8, vocab_size=16))
    found = diagnosed(dict(model.state_dict()))
    places = {reading.place for readings in found.readings.values() for reading in readings}
    for k, kind in enumerate(("attention", "ffn") * 3):
        name = f"depth.sublayers.{k}."
        assert {place.split(":")[0] for place in places if name in place} == {f"block {k // 2}"}, (
            kind
        )


def test_a_number_in_a_name_with_thousands_of_digits_is_no_block():
    found = diagnosed({f"layers.{'9' * 5000}.w.weight": torch.full((4, 4), torch.nan)})
    (finding,) = found.findings
    assert finding.check == "not finite"
    assert [reading.segment for reading in finding.readings] == [None]

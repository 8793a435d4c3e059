"""A recording as one side of `compare`: what the model itself would have said, and bad files."""

import copy

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file as save_arrays
from safetensors.torch import load_file, save_file

import ctrans
from ctrans.examine.comparison.compare import compare
from ctrans.examine.comparison.recording import read_recording
from solvers import ConfigError
from tests.examine.comparison.test_compare import gpt, matrix_name, moved, text


def recorded(model, tokens, path, *, each=1, dtype=None, **more):
    """The recorder of docs/commands/compare.md, for each sublayer or each n-th one."""
    with torch.no_grad():
        states = [model.embed(tokens)]
        for sublayer, length in zip(model.depth.sublayers, model.depth.lengths, strict=True):
            states.append(sublayer.step(states[-1], length))
        logits = model.head(states[-1])
    kept = states[::each]
    tensors = {f"state.{k}": x.to(dtype or x.dtype).contiguous() for k, x in enumerate(kept)}
    save_file({"tokens": tokens.contiguous(), "logits": logits, **tensors, **more}, path)
    return path


@pytest.mark.cases(1)
def test_a_recording_says_what_its_model_would(tmp_path):
    model = gpt()
    other = moved(model, 1, 0.1, matrix_name(model))
    tokens, targets = text()
    path = recorded(other, tokens, tmp_path / "port.safetensors", targets=targets.contiguous())

    found = ctrans.compare(path, model)
    swapped = ctrans.compare(model, str(path))
    expected = compare(other, model, tokens, targets)

    assert [part.name for part in found.changed] == ["block 1, attention"]
    assert [part.share for part in found.parts] == pytest.approx(
        [part.share for part in expected.parts], abs=1e-12
    )
    assert [part.first_order for part in found.parts[:-1]] == pytest.approx(
        [part.first_order for part in expected.parts[:-1]], abs=1e-12
    )
    assert found.changed[0].defect == pytest.approx(expected.changed[0].defect, rel=1e-6)
    assert found.losses == pytest.approx(expected.losses)
    assert swapped.losses == found.losses
    assert "a recording has no weights" in found.missing.values()


@pytest.mark.cases(1)
def test_states_of_blocks_are_compared_by_block(tmp_path):
    model = gpt()
    other = moved(model, 1, 0.1, matrix_name(model))
    tokens, targets = text()
    path = recorded(
        other, tokens, tmp_path / "port.safetensors", each=2, targets=targets.contiguous()
    )

    found = ctrans.compare(path, model)

    assert [part.name for part in found.changed] == ["block 1"]
    assert len(found.parts) == 3 + 2
    assert sum(part.share for part in found.parts) == pytest.approx(found.difference, abs=1e-12)


@pytest.mark.cases(1)
def test_numbers_of_few_digits_in_a_wider_file_are_rounding(tmp_path):
    model = gpt(torch.float32)
    tokens, _ = text()
    path = recorded(copy.deepcopy(model).bfloat16(), tokens, tmp_path / "a.safetensors")
    wide = tmp_path / "wide.safetensors"
    states = read_recording(path).states
    arrays = {f"state.{k}": x.float().numpy() for k, x in enumerate(states)}
    save_arrays({"tokens": tokens.numpy().astype(np.int32), **arrays}, wide)

    found = ctrans.compare(wide, model)

    assert not found.changed
    assert not found.equal
    assert found.head is None
    assert "logits" in found.missing["the head"]


@pytest.mark.cases(1)
def test_a_model_beside_its_own_recording_is_rounding(tmp_path):
    model = gpt(torch.float32)
    path = recorded(model, text()[0], tmp_path / "a.safetensors")

    assert not ctrans.compare(path, model).changed


@pytest.mark.cases(1)
def test_a_first_state_of_few_digits_does_not_hide_a_change_of_later_ones(tmp_path):
    """The rows of a table in bfloat16, as trainings leave it, in a program of many digits."""
    model = gpt(positions="rotary")
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if not name.startswith("depth."):
                weight.copy_(weight.bfloat16())
    other = moved(model, 1, 1e-5, matrix_name(model))
    tokens, _ = text()
    path = recorded(other, tokens, tmp_path / "port.safetensors")

    states = read_recording(path).states
    assert torch.equal(states[0].bfloat16().double(), states[0])
    assert {x.dtype for x in states} == {torch.float64}
    assert [part.name for part in ctrans.compare(path, model).changed] == ["block 1, attention"]


STATES = {f"state.{k}": torch.zeros(2, 8, 16) for k in range(7)}
IDS = {"tokens": torch.zeros(2, 8, dtype=torch.int64)}
BAD = {
    "no state": (IDS, "holds no state"),
    "a gap": ({**IDS, "state.0": STATES["state.0"], "state.2": STATES["state.2"]}, "2 states, and"),
    "no tokens": (STATES, "holds no tensor tokens"),
    "integers": ({**IDS, **STATES, "state.1": torch.zeros(2, 8, 16).long()}, "state.1 as I64"),
    "shapes": ({**IDS, **STATES, "state.1": torch.zeros(2, 8, 15)}, "of the shapes"),
    "one axis": ({**IDS, "state.0": torch.zeros(3)}, "of the shapes"),
    "tokens of booleans": ({**STATES, "tokens": torch.zeros(2, 8).bool()}, "tokens as BOOL"),
    "another number": ({**IDS, "state.0": STATES["state.0"]}, "holds 1 states: record those"),
    "another width": ({**IDS, **{k: x[..., :8] for k, x in STATES.items()}}, "have the shapes"),
    "two names of a state": ({**IDS, **STATES, "state.01": torch.ones(2, 8, 16)}, "under one name"),
    "logits of one sequence": ({**IDS, **STATES, "logits": torch.zeros(1, 8, 256)}, "holds logits"),
    "padded logits": ({**IDS, **STATES, "logits": torch.zeros(2, 8, 320)}, "without padding"),
    "logits in a row": ({**IDS, **STATES, "logits": torch.zeros(16, 256)}, "holds logits"),
    "a single token": ({**STATES, "tokens": torch.tensor(3)}, "as a single number"),
    "other targets": (
        {**IDS, **STATES, "targets": IDS["tokens"] + 256},
        "start at 0 and end at 255",
    ),
    "other tokens": ({"tokens": IDS["tokens"] + 256, **STATES}, "256"),
}


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_recording_is_refused_in_a_line(kind, tmp_path):
    tensors, words = BAD[kind]
    path = tmp_path / "bad.safetensors"
    save_file({name: x.contiguous() for name, x in tensors.items()}, path)

    with pytest.raises(ConfigError, match=words) as error:
        ctrans.compare(path, gpt(torch.float32))

    assert "\n" not in str(error.value)


def test_what_is_no_recording_is_refused(tmp_path):
    broken = tmp_path / "broken.safetensors"
    broken.write_bytes(b"{}")
    tokens, _ = text()
    good = recorded(gpt(), tokens, tmp_path / "good.safetensors")

    for pair, words in (
        ((broken, gpt()), "no complete safetensors file"),
        ((tmp_path / "none.safetensors", gpt()), "cannot read"),
        ((good, good), "both are recordings"),
    ):
        with pytest.raises(ConfigError, match=words):
            ctrans.compare(*pair)
    with pytest.raises(ConfigError, match="leave tokens out"):
        ctrans.compare(good, gpt(), tokens)


def test_states_whose_squares_overflow_are_compared(tmp_path):
    model = gpt(positions="rotary")
    tokens, _ = text()
    path = recorded(model, tokens, tmp_path / "large.safetensors")
    tensors = load_file(path)
    large = {name: 1e300 * x for name, x in tensors.items() if name.startswith("state.")}
    save_file({**tensors, **large}, path)
    assert ctrans.compare(path, model).changed

"""Padding masks reach every map: states are the library's, nobody reads padding, and costates there
are zero.
"""

import dataclasses

import pytest
import torch
import transformers

from ctrans import screen
from ctrans.control import costate
from ctrans.dynamics.fields import ExposesHeads
from ctrans.examine.diagnosis.diagnose import diagnose
from ctrans.examine.diagnosis.state_instruments import StatesByDepth
from ctrans.examine.diagnosis.unit_instruments import HeadRows
from ctrans.examine.screening.attention import LastLayerGradient
from ctrans.interop import from_transformers, open_model
from ctrans.interop.example_inputs import reads_tokens
from ctrans.interop.families import FAMILIES, small_model
from ctrans.measure.attention.by_depth import AttentionByDepth, AttentionLayer
from ctrans.measure.forward.bounds import BoundsByDepth
from ctrans.measure.forward.carried import GrowthWithWeights
from ctrans.measure.forward.depth_share import DepthShares, token_similarity
from ctrans.measure.forward.moments import moments
from ctrans.measure.forward.simulation import simulate
from ctrans.measure.walk import States, walk
from ctrans.measure.walk.instrument import Attempt
from solvers import ConfigError
from tests.helpers import learned
from tests.interop.plain_modules import plain
from tests.interop.test_all_families import SUPPORTED, batch, own_states

MASK = torch.tensor([[1] * 9, [1] * 6 + [0] * 3])
KEPT = MASK.bool()
TEXT = [name for name in SUPPORTED if not FAMILIES[name].part and not name.endswith("vision_model")]


def made(name):
    model = learned(small_model(name), 0.1)
    return model if reads_tokens(model) else None


@pytest.mark.cases(4)
@pytest.mark.parametrize("name", TEXT)
def test_states_of_padded_sequences_are_the_librarys(name):
    model = made(name)
    if model is None:
        return
    x, imported = batch(model), from_transformers(model)
    masked = lambda **inputs: model.__class__.forward(model, **inputs, attention_mask=MASK)  # noqa: E731
    with torch.no_grad():
        model.forward, own = masked, model.forward
        expected, _ = own_states(model, x)
        del model.forward
        assert model.forward == own
        with imported.padded(MASK):
            states = imported.trajectory(x).states[
                imported.depth.per_block :: imported.depth.per_block
            ]
    for mine, theirs in zip(states, expected, strict=True):
        assert torch.allclose(mine[KEPT], theirs[KEPT], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("row", [[1, 1, 0, 0, 1, 1, 1, 1], [0, 1, 1, 0, 0, 1, 1, 0]])
def test_positions_of_a_sequence_do_not_depend_on_the_others(row):
    """Learned positions count the text alone, as in `generate`, wherever the padding is."""
    model = made("gpt2").double()
    imported = from_transformers(model)
    ids = torch.randint(3, 31, (1, 8), generator=torch.Generator().manual_seed(0))
    mask = torch.tensor([row])
    beside = torch.tensor([row, [0, 1, 1, 1, 1, 1, 1, 1]])
    with torch.no_grad():
        with imported.padded(mask):
            alone = imported.embed(ids)
        with imported.padded(beside):
            both = imported.embed(ids.repeat(2, 1))
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        expected = model.transformer.wte(ids) + model.transformer.wpe(positions)
    kept = mask.bool()
    torch.testing.assert_close(alone[kept], expected[kept])
    torch.testing.assert_close(both[:1][kept], expected[kept])


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_a_mask_that_is_filled_anew_is_another_one(name):
    """As that of a loader which has one buffer for all batches."""
    model = made(name).double()
    imported = from_transformers(model)
    ids = torch.randint(3, 31, (2, 8), generator=torch.Generator().manual_seed(0))
    masks = torch.tensor([[[1] * 8, [1] * 5 + [0] * 3], [[0, 0] + [1] * 6, [1] * 8]])
    buffer = torch.empty(2, 8, dtype=torch.int64)
    for mask in masks:
        buffer.copy_(mask)
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        with torch.no_grad():
            expected = model(ids, attention_mask=mask, position_ids=positions).logits
            with imported.padded(buffer):
                logits = imported.head(imported.trajectory(ids).states[-1])
        # the library's rotary tables are float32
        torch.testing.assert_close(logits[mask.bool()], expected[mask.bool()], rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", ["roberta", "mpnet"])
def test_a_table_with_a_row_for_padding_counts_the_text_by_the_mask(name):
    """Not by ids: padding may have any."""
    model = made(name).double()
    imported = from_transformers(model)
    ids = torch.randint(3, 31, (1, 8), generator=torch.Generator().manual_seed(0))
    mask = torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1]])
    with torch.no_grad():
        alone = imported.embed(ids[:, 2:])
        with imported.padded(mask):
            padded = imported.embed(ids)
    torch.testing.assert_close(padded[:, 2:], alone)


@pytest.mark.cases(1)
@pytest.mark.parametrize("name", ["bert", "llama", "gpt_neox", "bloom", "t5", "deberta", "mixtral"])
def test_no_map_reads_padding(name):
    imported = from_transformers(made(name))
    x = torch.randn(2, 9, 32, generator=torch.Generator().manual_seed(0))
    moved = torch.where(KEPT.unsqueeze(-1), x, x + 1)
    with torch.no_grad(), imported.padded(MASK):
        for part in imported.depth.sublayers:
            assert torch.allclose(part(moved)[KEPT], part(x)[KEPT], atol=1e-5)
            lanes = part(torch.stack([x, moved]))  # several copies of all sequences
            assert torch.allclose(lanes[0], part(x), atol=1e-5)
            if isinstance(part.field, ExposesHeads):
                rows = part.field.probabilities(x)
                assert float(rows[1, :, :6, 6:].abs().max()) < 1e-6
    with torch.no_grad():
        open_again = imported.depth.sublayers[0]
        assert open_again(moved).shape == x.shape  # and outside the mask is gone


def test_costates_of_padding_are_zero():
    imported = from_transformers(made("bert"))
    tokens = torch.randint(3, 31, (2, 9), generator=torch.Generator().manual_seed(1))
    targets = torch.where(KEPT, tokens, -1)
    with imported.padded(MASK):
        found = costate(imported, tokens, targets)
    for p in found.costates:
        assert float(p[~KEPT].abs().max()) == 0
        assert float(p[KEPT].abs().max()) > 0


@pytest.mark.cases(1)
@pytest.mark.parametrize("name", ["bert", "llama", "gptj"])
def test_what_is_a_mean_over_tokens_is_that_of_the_text_alone(name):
    imported = from_transformers(made(name))
    text = torch.randint(3, 31, (1, 9), generator=torch.Generator().manual_seed(2))

    def found(ids):
        each = [States(moments), DepthShares(), HeadRows(), StatesByDepth(), BoundsByDepth(), GrowthWithWeights([1.0, 2.0]), Attempt(
            AttentionByDepth())]  # fmt: skip
        return numbers_in(walk(imported, ids, instruments=each))

    with imported.padded(torch.tensor([[1] * 6 + [0] * 3])):
        padded = found(text)
    alone = found(text[:, :6])
    assert len(alone) > 50
    assert padded == pytest.approx(alone, rel=1e-3, abs=1e-6, nan_ok=True)


@pytest.mark.cases(1)
@pytest.mark.parametrize("loss", [None, "mean"])
def test_an_opened_model_and_its_simulation_leave_padding_out(loss):
    """Whatever stands around the model, and whichever states are observed."""
    opened = open_model(made("llama"), loss=loss)
    imported = opened.model.model if loss else opened.model
    text = torch.randint(3, 31, (1, 9), generator=torch.Generator().manual_seed(2))
    with imported.padded(torch.tensor([[1] * 6 + [0] * 3])):
        simulated = simulate(opened, text, reference=False)
        walked = walk(opened, text, text, [States(moments), gradient := LastLayerGradient()])[0]
    alone, x = (
        walk(imported, text[:, :6], instruments=[States(moments)])[0],
        imported.embed(text[:, :6]),
    )
    assert simulated.rms == pytest.approx([m.rms for m in alone], rel=1e-4)
    assert [m.rms for m in walked] == pytest.approx([m.rms for m in alone], rel=1e-4)
    growth = float(imported.depth(x).square().mean() - x.square().mean())
    assert gradient.added == pytest.approx(growth, rel=1e-4)


def test_sequences_of_different_lengths_count_by_their_tokens():
    x, kept = (
        torch.randn(2, 9, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0)),
        KEPT,
    )
    each = [token_similarity(x[0]), token_similarity(x[1, :6])]
    assert token_similarity(x, kept) == pytest.approx(sum(each) / 2, rel=1e-12)
    one = kept.clone()
    one[1, 1:] = False
    assert token_similarity(x, one) == pytest.approx(each[0], rel=1e-12)


def numbers_in(found):
    """Every number of an instrument's figures, in order; what is said of theta is of rows, and
    bounds and measured values of sequences.
    """
    if isinstance(found, (int, float)) and not isinstance(found, bool):
        return [float(found)]
    if isinstance(found, AttentionLayer):
        return numbers_in([found.theta_mean, found.theta_max, found.theta_min])
    if dataclasses.is_dataclass(found):
        found = [getattr(found, field.name) for field in dataclasses.fields(found)]
    if isinstance(found, dict):
        found = list(found.values())
    return (
        [number for each in found for number in numbers_in(each)]
        if isinstance(found, (list, tuple))
        else []
    )


def test_wrong_masks_get_a_line():
    imported = from_transformers(made("llama"))
    tokens = torch.ones(2, 5, dtype=torch.long)
    with (
        imported.padded(MASK),
        pytest.raises(ConfigError, match="2 sequences of 9 tokens, but the model reads 2 of 5"),
    ):
        imported(tokens)
    for mask in (torch.ones(3), torch.full((2, 9), 2), torch.zeros(2, 9)):
        with pytest.raises(ConfigError, match="a padding mask is"), imported.padded(mask):
            pass
    with (
        pytest.raises(ConfigError, match="takes no padding mask here"),
        open_model(plain("language")).model.padded(MASK),
    ):
        pass


@pytest.mark.cases(1)
@pytest.mark.parametrize("side", ["left", "right"])
def test_scores_of_another_scale_are_those_of_the_text(side):
    config = transformers.LlamaConfig(
        vocab_size=61,
        hidden_size=24,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=40,
    )
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).eval()
    with torch.no_grad():
        model.model.layers[0].self_attn.q_proj.weight.mul_(2000)
    text = torch.randint(5, 61, (3, 8), generator=torch.Generator().manual_seed(0))
    opened = from_transformers(model)
    alone = diagnose(opened, text, text)
    padding = torch.zeros(3, 3, dtype=torch.long)
    tokens, mask = {
        "left": (torch.cat([padding, text], 1), torch.cat([padding, torch.ones_like(text)], 1)),
        "right": (torch.cat([text, padding], 1), torch.cat([torch.ones_like(text), padding], 1)),
    }[side]
    with opened.padded(mask):
        padded = diagnose(opened, tokens, tokens)
    name = "scores over the other layers'"
    expected = [reading.value for reading in alone.readings[name]]
    assert [reading.value for reading in padded.readings[name]] == pytest.approx(expected, rel=1e-4)
    checks = [finding.check for finding in padded.findings]
    assert "scores of another scale" in checks


@pytest.mark.slow
def test_rows_of_left_padding_have_the_dtype_of_the_states():
    config = transformers.LlamaConfig(
        vocab_size=61,
        hidden_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=40,
    )
    opened = from_transformers(transformers.LlamaForCausalLM(config).double().eval())
    tokens = torch.tensor([[0, 0, 7, 8, 9]])
    with opened.padded((tokens > 0).long()):
        states = opened.trajectory(tokens).states
        sublayer = opened.depth.sublayers[0]
        rows = sublayer.attention.field.probabilities(sublayer.given(states[0]))
        assert rows.dtype == torch.float64
        assert screen(opened, tokens, tokens, "quick")


@pytest.mark.parametrize("longest", ["1e3", {}, -1, True])
def test_a_longest_sequence_that_is_no_number_is_none(longest):
    """BLOOM's configuration has no such entry, and keeps any that a file has."""
    model = small_model("bloom")
    model.config.max_position_embeddings = longest
    assert from_transformers(model).config.context is None

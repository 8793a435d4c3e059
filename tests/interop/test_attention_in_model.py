"""What is read of a foreign attention: rows, values, bounds and theorem 5.1, against the library's
own numbers and worst inputs.
"""

import copy
import json
import math

import pytest
import torch
import transformers
from click.testing import CliRunner

from ctrans.cli import main
from ctrans.dynamics.fields import (
    ExplainsUnsupported,
    ExposesHeads,
    ExposesRows,
    ExposesWeights,
    HasBound,
    HasLipschitz,
    MixesTokens,
    spectral_norm,
)
from ctrans.interop import from_transformers
from ctrans.interop.families import small_model
from ctrans.measure.attention.balanced_mass import balanced_mass
from ctrans.measure.attention.bounds import attention_bound, attention_theta, local_attention_bound
from ctrans.measure.attention.by_depth import attention_layers
from solvers import ConfigError
from tests.helpers import gradient_norms, learned
from tests.interop.models import FAMILIES, TEXT, inputs, made
from tests.interop.worst_inputs import longest_output

NORMALISED = ("qwen3", "gemma3", "olmo2")
each_family = pytest.mark.parametrize("name", FAMILIES)
bilinear = pytest.mark.parametrize("name", [name for name in FAMILIES if name not in NORMALISED])


def opened(name, dtype=torch.float64, scale=0.1):
    """The imported model in that precision, the states that enter its segments, and its input."""
    model = made(name, scale).to(dtype).requires_grad_(False)
    imported, x = from_transformers(model), inputs(model)
    x = x.to(dtype) if x.is_floating_point() else x
    return imported, imported.trajectory(x).states, x


def attentions(imported, states):
    """Every attention with the input that it gets."""
    for sublayer, x in zip(imported.depth.sublayers[::2], states[::2], strict=False):
        yield sublayer.field, x if sublayer.input_norm is None else sublayer.input_norm(x)


def theta_of(attention, u):
    """The largest theta of each head's rows."""
    return attention_theta(attention, u).upper.movedim(-2, 0).flatten(1).amax(1).tolist()


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    ("name", "adds"),
    [("bloom", True), ("mpt", True), ("t5", True), ("gpt2", False), ("llama", False)],
)
def test_scores_with_numbers_by_position_are_said(name, adds):
    attention = from_transformers(small_model(name)).config.attention
    assert adds == ("(positions add a number to its scores)" in attention)


@pytest.mark.cases(1)
@each_family
def test_rows_are_those_that_the_library_returns(name):
    imported, states, x = opened(name)
    own = imported.model.config._attn_implementation
    imported.model.set_attn_implementation("eager")
    expected = imported.model(x, output_attentions=True).attentions
    imported.model.set_attn_implementation(own)
    for (attention, u), rows in zip(attentions(imported, states), expected, strict=True):
        found = attention.probabilities(u)
        assert torch.allclose(found, rows, atol=1e-6)
        assert torch.allclose(found.sum(-1), torch.ones((), dtype=found.dtype), atol=1e-12)
        theta = attention_theta(attention, u).lower
        assert torch.allclose(
            theta,
            balanced_mass(rows.double() / rows.double().sum(-1, keepdim=True)).lower,
            atol=1e-5,
        )
    assert imported.model.config._attn_implementation == own


@pytest.mark.cases(1)
@each_family
def test_the_heads_matrices_and_rows_give_what_the_module_computes(name):
    imported, states, _ = opened(name)
    for attention, u in attentions(imported, states):
        rows, bias = attention.probabilities(u), attention.reading.value.bias(attention)
        groups = attention.reading.groups
        offsets = [0.0] * groups if bias is None else bias.chunk(groups)
        found = sum(
            rows[:, h] @ (u @ head.value.T + offsets[h * groups // attention.heads]) @ head.out.T
            for h, head in enumerate(attention.head_matrices())
        )
        last = attention.reading.out.bias(attention)
        found = found if last is None else found + last
        assert float((found - attention(u)).norm() / attention(u).norm()) < 1e-6


@pytest.mark.cases(1)
@bilinear
def test_queries_and_keys_give_the_rows_of_the_first_two_tokens_at_one_position(name):
    """Where positions do not tell tokens apart, rows are the softmax of <q, k>/(tau sqrt(d_h))."""
    imported, states, _ = opened(name)
    attention, u = next(attentions(imported, states))
    context = dict(attention.adapter.block_context(0, u))
    if "position_embeddings" in context:
        cosines, sines = context["position_embeddings"]
        context["position_embeddings"] = torch.ones_like(cosines), torch.zeros_like(sines)
    attention.adapter.block_context = lambda block, x: context
    reading, chain = attention.reading, attention
    rows = attention.rows(u)
    key_bias = reading.key.bias(chain)
    for h, head in enumerate(attention.head_matrices()):
        offset = (
            0.0
            if key_bias is None
            else key_bias.chunk(reading.groups)[h * reading.groups // attention.heads]
        )
        q = u @ head.query.T + (0.0 if head.query_offset is None else head.query_offset)
        scores = (
            q
            @ (u @ head.key.T + offset).transpose(-1, -2)
            / (attention.temperature * math.sqrt(len(head.query)))
        )
        scores = 50 * torch.tanh(scores / 50) if name == "gemma2" else scores
        expected = torch.where(rows[:, h] > 0, scores, -math.inf).softmax(-1)
        assert torch.allclose(rows[:, h], expected, atol=1e-6)


@pytest.mark.cases(1)
@each_family
def test_what_is_shown_and_what_is_not_is_said(name):
    imported, _, _ = opened(name)
    attention = imported.depth.sublayers[0].field
    for protocol in (ExposesHeads, ExposesWeights, HasBound, MixesTokens, ExplainsUnsupported):
        assert isinstance(attention, protocol)
    assert not isinstance(attention, HasLipschitz)
    assert attention.heads == 4
    assert attention.reading.groups == (2 if name not in ("gpt2", "bert", "vit") else 4)
    assert attention.normalised_scores == (name in NORMALISED)
    assert (attention.why_not == "") == (name not in NORMALISED)
    assert imported.config.unread == (
        ("attention: " + attention.why_not,) if attention.why_not else ()
    )
    if name in NORMALISED:
        assert attention.why_not == "norms act on its queries and keys (q_norm, k_norm)"
        assert attention.why_not in str(imported.config)
        with pytest.raises(
            ConfigError, match=r"does not cover qk_norm.*norms act on its queries and keys"
        ):
            attention_bound(attention, 1.0, [1.0] * 4)
    else:
        assert attention.temperature == pytest.approx(1.0, rel=1e-12)


@pytest.mark.cases(1)
@each_family
def test_no_input_makes_an_output_token_longer_than_the_bound(name):
    imported, states, _ = opened(name)
    for attention, u in attentions(imported, states):
        bound = attention.bound()
        for radius in (0.1, 3.0, 100.0):
            found = longest_output(attention, u, radius)
            assert 0.05 * bound.at(radius) < found <= bound.at(radius) * (1 + 1e-6)


@pytest.mark.cases(1)
@bilinear
@pytest.mark.parametrize("scale", [0.1, 0.4])
def test_theorem_5_1_lies_above_the_local_value(name, scale):
    imported, states, _ = opened(name, scale=scale)
    for layer, (attention, u) in zip(
        attention_layers(imported.depth, states), attentions(imported, states), strict=True
    ):
        assert 0 < layer.measured <= layer.bound
        assert layer.measured <= local_attention_bound(attention, u)
        assert layer.theta_max == pytest.approx(
            theta_of(*list(attentions(imported, states))[layer.index // 2])
        )
        assert layer.G > 0


@pytest.mark.slow
def test_offsets_of_keys_count_where_positions_turn_them():
    """With rotary embeddings an offset k_0 of keys moves the scores by <q_i, R_(j-i) k_0>, which
    differs within a row.
    """
    imported, states, _ = opened("qwen2", scale=0.3)
    attention, u = next(attentions(imported, states))
    key = attention.get_submodule(attention.reading.key.path)
    before = attention_bound(attention, 1.0, [1.0] * 4).bound
    rows = attention.probabilities(u)
    key.bias.add_(100.0)
    assert not torch.allclose(attention.probabilities(u), rows, atol=1e-2)
    assert attention_bound(attention, 1.0, [1.0] * 4).bound > 2 * before
    assert (
        attention_layers(imported.depth, states)[0].measured
        <= attention_layers(imported.depth, states)[0].bound
    )
    plain, states, _ = opened("gpt2")
    attention, u = next(attentions(plain, states))
    rows = attention.probabilities(u)
    reading = attention.reading
    reading.key.bias(attention).add_(100.0)
    assert torch.allclose(attention.probabilities(u), rows, atol=1e-3)
    assert all(head.key_offset is None for head in attention.head_matrices())


def test_the_local_bound_counts_from_keys_as_they_are_turned():
    """Equal long keys and far values: queries of 0 read them alike, and a small query tells turned
    keys apart.

    The dense Jacobian's largest block is 116; with the radius of the keys before they are turned,
    0, the bound would be 1.
    """
    size = {
        "hidden_size": 4,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
    }
    config = transformers.LlamaConfig(
        vocab_size=64, num_key_value_heads=1, attn_implementation="eager", **size
    )
    model = transformers.LlamaForCausalLM(config).double().eval().requires_grad_(False)
    maps = model.model.layers[0].self_attn
    for name, entry in (("q_proj", (0, 2)), ("k_proj", (0, 0)), ("v_proj", (0, 1))):
        getattr(maps, name).weight.zero_()
        getattr(maps, name).weight[entry] = 1.0
    maps.o_proj.weight.copy_(torch.eye(4))
    attention = from_transformers(model).depth.sublayers[0].field
    x = torch.zeros(1, 6, 4, dtype=torch.float64)
    x[..., 0], x[0, :, 1] = 30.0, 30.0 * torch.tensor([-1.0, 1.0] * 3)
    J = torch.autograd.functional.jacobian(attention, x)[0, :, :, 0]
    moved = max(float(torch.linalg.matrix_norm(J[i, :, j], 2)) for i in range(6) for j in range(6))
    assert 116 < moved <= local_attention_bound(attention, x)
    assert all(head.key_offset is not None for head in attention.head_matrices())


def test_stretched_rotations_are_part_of_the_scale():
    """YaRN multiplies cosines and sines by m, so that scores are m^2 times what they were."""
    yarn = {
        "rope_type": "yarn",
        "factor": 4.0,
        "rope_theta": 10000.0,
        "original_max_position_embeddings": 8,
    }
    torch.manual_seed(0)
    model = (
        transformers.LlamaForCausalLM(transformers.LlamaConfig(**TEXT, rope_parameters=yarn))
        .eval()
        .double()
    )
    attention = from_transformers(model).depth.sublayers[0].field
    stretch = model.model.rotary_emb.attention_scaling
    assert stretch > 1.1
    assert 1 / attention.temperature == pytest.approx(stretch**2, rel=1e-5)


@pytest.mark.cases(1)
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_gradients_by_matrix_have_the_names_of_the_maps_matrices(name):
    imported, _, x = opened(name)
    found = gradient_norms(imported, x, x.roll(1, -1)).sublayers
    assert set(found[0].matrices) == {"W_Q", "W_K", "W_V", "W_O"}
    assert set(found[1].matrices) == ({"W_1", "W_2"} if name == "gpt2" else {"W_G", "W_1", "W_2"})
    imported.model.requires_grad_(True)
    torch.nn.functional.cross_entropy(
        imported(x)[0].flatten(0, 1), x.roll(1, -1).flatten()
    ).backward()
    attention = imported.depth.sublayers[0].field
    weight = attention.get_submodule(attention.reading.value.path).weight
    rows = slice(attention.reading.value.start, attention.reading.value.stop)
    own = weight.grad.T[rows] if name == "gpt2" else weight.grad[rows]
    assert found[0].matrices["W_V"] == pytest.approx(float(own.norm()), rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "gemma2"])
def test_reading_is_the_same_for_weights_on_demand(name, tmp_path):
    made(name).save_pretrained(tmp_path)
    whole, streamed = from_transformers(tmp_path), from_transformers(tmp_path, on_demand=True)
    x = inputs(whole.model)
    for k, (one, other) in enumerate(
        zip(whole.depth.sublayers, streamed.depth.sublayers, strict=True)
    ):
        assert type(one.field) is type(other.field)
        assert one.field.reading == other.field.reading
        assert one.field.bound() == other.field.bound(), k
    first, second = (
        gradient_norms(model, x, x.roll(1, -1)).sublayers for model in (whole, streamed)
    )
    for one, other in zip(first, second, strict=True):
        assert one.matrices == pytest.approx(other.matrices, rel=1e-6)


def test_a_copy_in_another_precision_reads_its_own_weights():
    imported, _, _ = opened("llama", torch.float32)
    twin = copy.deepcopy(imported).double()
    for head in twin.depth.sublayers[0].field.head_matrices():
        assert head.query.dtype == torch.float64
    norms = [spectral_norm(matrix.weight) for matrix in twin.depth.sublayers[0].field.matrices()]
    assert norms == pytest.approx(
        [spectral_norm(matrix.weight) for matrix in imported.depth.sublayers[0].field.matrices()]
    )


class Sunk(torch.nn.Module):
    """Attention of one head whose rows lose part to a sink, as gpt-oss's do."""

    def __init__(self, attention, sink):
        super().__init__()
        self.attention = attention
        self.sinks = torch.nn.Parameter(torch.tensor([sink], dtype=torch.float64))
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (
            getattr(attention, f"{letter}_proj") for letter in ("q", "k", "v", "o")
        )

    def forward(self, hidden_states, mask=None, **context):
        q, k, v = (
            part(hidden_states).unflatten(-1, (4, -1)).transpose(1, 2)
            for part in (self.q_proj, self.k_proj, self.v_proj)
        )
        scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
        sinks = self.sinks.expand(*scores.shape[:-1], 1)
        rows = torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]
        return self.o_proj((rows @ v).transpose(1, 2).flatten(-2)), rows


@pytest.mark.cases(1)
@pytest.mark.parametrize("sink", [-30.0, 0.0, 3.0])
def test_rows_that_lose_part_to_a_sink_have_a_bound_and_no_theta(sink):
    model = made("vit").double().requires_grad_(False)
    for block in model.vit.layers:
        block.attention = Sunk(block.attention, sink)
    imported = from_transformers(model)
    attention = imported.depth.sublayers[0].field
    assert isinstance(attention, HasBound)
    assert isinstance(attention, ExposesWeights)
    assert not isinstance(attention, ExposesHeads)
    assert "sink" in attention.why_not
    assert attention.why_not in str(imported.config)
    x = imported.embed(inputs(model).double())
    bound = attention.bound()
    for radius in (0.1, 10.0):
        assert 0 < longest_output(attention, x, radius) <= bound.at(radius) * (1 + 1e-6)


class Normed(torch.nn.Module):
    """Attention with a norm on its values."""

    def __init__(self, attention):
        super().__init__()
        self.attention, self.norm = attention, torch.nn.LayerNorm(32)

    def forward(self, hidden_states, mask=None, **context):
        output, rows = self.attention(hidden_states, **context)
        return (
            self.attention.o_proj(self.norm(self.attention.v_proj(hidden_states)) + 0 * output),
            rows,
        )


def test_values_that_are_not_linear_are_said_and_nothing_is_shown():
    model = made("vit").requires_grad_(False)
    for block in model.vit.layers:
        block.attention = Normed(block.attention)
    attention = from_transformers(model).depth.sublayers[0].field
    assert not isinstance(attention, (ExposesHeads, ExposesWeights, HasBound))
    assert (
        "maps before the last are not queries, keys and values" in attention.why_not
        or "linear" in attention.why_not
    )


@pytest.mark.slow
@pytest.mark.parametrize("streamed", ["--stream", "--no-stream"])
def test_commands_show_bounds_and_theta_of_an_architecture(streamed, tmp_path):
    transformers.LlamaConfig(**{**TEXT, "vocab_size": 256}).save_pretrained(tmp_path)
    shared = [
        "--architecture",
        str(tmp_path),
        streamed,
        "--tokens",
        "8",
        "--batch",
        "2",
        "--json",
        "-",
    ]
    found = {}
    for name, more in (("simulate", ["--no-reference"]), ("screen", ["--quick"])):
        result = CliRunner().invoke(main, [name, *shared, *more, "--out", str(tmp_path)])
        assert result.exit_code == 0, result.output
        answer = json.loads(result.stdout)
        (found[name],) = answer["placements" if name == "simulate" else "models"].values()
    assert all(0 < share <= 1 for share in found["simulate"]["used"])
    findings = found["screen"]["steps"]
    assert 0 < findings["forward"]["result"]["used"] <= 1
    layers = findings["attention"]["result"]["layers"]
    assert all(0 < max(layer["theta_max"]) <= 1 and layer["ratio"] > 1 for layer in layers)
    assert all(each["bound"] is not None for each in findings["transport"]["result"]["distances"])


@pytest.mark.cases(1)
@pytest.mark.parametrize("name", ["t5", "mpt", "mpnet"])
def test_theta_with_a_bias_by_position_is_exact_and_theorem_5_1_holds(name):
    """Scores <Q x, K x> + c_ij with numbers c_ij that no state changes: rows are the library's, and
    derivatives as without c.
    """
    model = learned(small_model(name), 0.3).double().requires_grad_(False)
    imported = from_transformers(model)
    x = torch.randint(3, 31, (2, 7), generator=torch.Generator().manual_seed(0))
    states = imported.trajectory(x).states
    layers = attention_layers(imported.depth, states)
    for layer, (attention, u) in zip(layers, attentions(imported, states), strict=True):
        reading, rows = attention.reading, attention.probabilities(u)
        assert attention.why_not == ""
        shift = attention.probabilities(torch.zeros_like(u)).log()
        for h, head in enumerate(attention.head_matrices()):
            q = u @ head.query.T + (0.0 if head.query_offset is None else head.query_offset)
            scores = (
                q
                @ (u @ head.key.T).transpose(-1, -2)
                / (attention.temperature * math.sqrt(len(head.query)))
            )
            assert torch.allclose((scores + shift[:, h]).softmax(-1), rows[:, h], atol=1e-5)
        assert float(shift.exp().std()) > 1e-3  # the positions do count
        assert reading.whole_rows
        assert layer.theta_max == pytest.approx(theta_of(attention, u))
        assert 0 < layer.measured <= layer.bound
        assert layer.measured <= local_attention_bound(attention, u)
    assert layers[0].softmax_norm == pytest.approx(max(layers[0].theta_max) / attention.temperature)
    if name == "t5":
        assert attention.temperature == pytest.approx(
            8**-0.5, rel=1e-4
        )  # it has no 1/sqrt(d_h), d_h = 8


@pytest.mark.cases(1)
@pytest.mark.parametrize("name", ["deberta", "deberta-v2"])
def test_terms_of_relative_positions_leave_the_rows_alone(name):
    model = small_model(name).double()
    imported = from_transformers(model)
    attention = imported.depth.sublayers[0].field
    assert isinstance(attention, ExposesRows), attention.why_not
    assert not isinstance(attention, ExposesHeads)
    ids = torch.randint(3, 31, (2, 7), generator=torch.Generator().manual_seed(0))
    states = imported.trajectory(ids).states
    returned = model(ids, output_attentions=True).attentions
    layers = attention_layers(imported.depth, states)
    assert len(returned) == len(layers)
    of_attention = zip(imported.depth.sublayers[::2], states[:-1:2], returned, layers, strict=True)
    for sublayer, x, rows, layer in of_attention:
        mass = balanced_mass(rows)
        assert torch.allclose(sublayer.field.probabilities(sublayer.enter(x)), rows, atol=1e-6)
        assert layer.theta_max == pytest.approx(mass.upper.amax((0, 2)).tolist())
        assert math.isnan(layer.bound)
        assert attention.why_not in layer.note
    said = {"deberta-v2": "query_proj is called 2 times in a pass"}  # also of the positions
    assert said.get(name, "not applied to the state: ") in attention.why_not
    assert "relative positions" in attention.why_not
    assert len(attention.why_not) < 200


def test_heads_that_lie_side_by_side_in_one_map_are_read_and_their_gradients_told_apart():
    """BLOOM's map holds q, k, v of head 1, then of head 2; the gradient of all is that of the parts
    together.
    """
    model = learned(small_model("bloom"), 0.3).double()
    imported = from_transformers(model)
    x = torch.randint(3, 31, (2, 7), generator=torch.Generator().manual_seed(0))
    imported(x, x.roll(1, -1))[1].backward()
    whole = model.transformer.h[1].self_attention.query_key_value.weight.grad.unflatten(
        0, (4, 3, 8)
    )
    found = gradient_norms(imported, x, x.roll(1, -1)).sublayers[2].matrices
    for i, name in enumerate(("W_Q", "W_K", "W_V")):
        assert found[name] == pytest.approx(float(whole[:, i].norm()), rel=1e-9)

"""What is read of a foreign FFN: its matrices, its activation, and bounds that no input exceeds."""

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import nn

from ctrans.dynamics.fields import ExposesWeights, HasBound, HasLipschitz, MixesTokens, mixes_tokens
from ctrans.interop import from_transformers
from ctrans.interop.ffn_in_model import (
    KNOWN,
    GatedFeedForward,
    PlainFeedForward,
    ffn_in_model,
    read_ffn,
)
from ctrans.interop.module_chain import ModuleChain
from ctrans.measure.attention.by_depth import block_layers
from ctrans.measure.forward.bounds import forward_bounds
from ctrans.measure.forward.moments import moments
from ctrans.measure.transport.transport import token_spreads
from solvers import ConfigError
from tests.helpers import learned
from tests.interop.models import FAMILIES, TEXT
from tests.interop.test_attention_in_model import NORMALISED, opened
from tests.interop.worst_inputs import longest_output

PLAIN = {"gpt2": "gelu_tanh", "bert": "gelu", "vit": "gelu"}
GATED = {
    "llama": "silu",
    "qwen2": "silu",
    "qwen3": "silu",
    "gemma2": "gelu_tanh",
    "gemma3": "gelu_tanh",
    "olmo2": "silu",
}
each_family = pytest.mark.parametrize("name", FAMILIES)


class Mlp(torch.nn.Module):
    """A gated or plain FFN with biases, its maps registered in another order than they act, gate
    and up in one map if asked for.
    """

    def __init__(self, activation, gated, fused=False, swapped=False):
        super().__init__()
        self.down = torch.nn.Linear(12, 8)
        self.inner = torch.nn.ModuleList(
            [torch.nn.Linear(8, 24)]
            if fused
            else [torch.nn.Linear(8, 12) for _ in range(1 + gated)]
        )
        self.activation, self.gated, self.swapped = activation, gated, swapped

    def forward(self, x):
        parts = list(torch.cat([part(x) for part in self.inner], -1).split(12, -1))
        parts = parts[::-1] if self.swapped else parts
        return self.down(
            self.activation(parts[0]) * parts[1] if self.gated else self.activation(parts[0])
        )


def read(module):
    """The module as a map, read."""
    chain, x = (
        ModuleChain([learned(module.double(), 0.5).requires_grad_(False)]),
        torch.randn(1, 6, 8, dtype=torch.float64),
    )
    chain.find_output_projection(x)
    return ffn_in_model(chain, read_ffn(chain, x))


@pytest.mark.cases(1)
@each_family
def test_matrices_and_activation_give_what_the_module_computes(name):
    imported, states, _ = opened(name)
    for sublayer, x in zip(imported.depth.sublayers[1::2], states[1::2], strict=False):
        field, u = sublayer.field, x if sublayer.input_norm is None else sublayer.input_norm(x)
        assert isinstance(field, PlainFeedForward if name in PLAIN else GatedFeedForward)
        assert field.reading.activation == (PLAIN | GATED)[name]
        assert field.why_not == ""
        for protocol in (ExposesWeights, HasBound, HasLipschitz):
            assert isinstance(field, protocol)
        assert not isinstance(field, MixesTokens)
        assert not mixes_tokens(field, "ffn")
        weights = {matrix.role: matrix.weight for matrix in field.matrices()}
        phi, up = (
            KNOWN[field.reading.activation],
            F.linear(u, weights["up"], field.reading.up.bias(field)),
        )
        hidden = phi(F.linear(u, weights["gate"])) * up if name in GATED else phi(up)
        found = F.linear(hidden, weights["down"], field.reading.down.bias(field))
        assert float((found - field(u)).norm()) < 1e-6 * float(field(u).norm())


@pytest.mark.cases(2)
@pytest.mark.parametrize("activation", KNOWN)
@pytest.mark.parametrize("shape", ["plain", "gated", "swapped", "fused", "fused and swapped"])
def test_no_input_exceeds_the_bound_and_no_slope_the_lipschitz_constant(activation, shape):
    torch.manual_seed(3)
    field = read(Mlp(KNOWN[activation], shape != "plain", "fused" in shape, "swapped" in shape))
    if KNOWN[activation].degree > 1 and shape != "plain":
        assert (
            "not recognised as a plain or gated FFN" in field.why_not
        )  # its bound would be of the third degree
        return
    assert field.reading.activation == activation
    x = torch.randn(1, 6, 8, dtype=torch.float64)
    for radius in (0.1, 2.0, 30.0):
        found, allowed = longest_output(field, x, radius), field.bound().at(radius)
        assert 0.01 * allowed < found <= allowed * (1 + 1e-12)
        u = radius * x / x.norm(dim=-1, keepdim=True)
        slopes = torch.func.vmap(torch.func.jacrev(field))(u[0])
        assert float(torch.linalg.matrix_norm(slopes, 2).max()) <= field.lipschitz(radius)


@pytest.mark.parametrize("activation", KNOWN)
def test_activations_lie_within_what_bounds_rely_on(activation):
    z = torch.linspace(-30, 30, 600_001, dtype=torch.float64, requires_grad=True)
    phi = KNOWN[activation]
    (slope,) = torch.autograd.grad(phi(z).sum(), z)
    assert float((phi(z).abs() - z.abs() ** phi.degree).max()) <= 0
    steepest = slope.abs() / z.abs().clamp_min(1e-9) ** (phi.degree - 1)
    assert 0 <= phi.slope - float(steepest.max()) < 1e-4


@pytest.mark.parametrize(
    ("module", "words"),
    [
        # equal to relu and gelu at usual arguments, and bounded
        (lambda: Mlp(F.relu6, False), "not recognised as a plain or gated FFN"),
        (
            lambda: Mlp(lambda z: F.gelu(z).clamp(-10, 10), False),
            "not recognised as a plain or gated FFN",
        ),
        (lambda: Mlp(torch.square, False), "not recognised as a plain or gated FFN"),
        (lambda: Mlp(torch.sigmoid, True), "not recognised as a plain or gated FFN"),
        (
            lambda: torch.nn.Sequential(
                torch.nn.Linear(8, 8), torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)
            ),
            "last act on its input",
        ),
        (
            lambda: torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU()),
            "does not end in one linear map",
        ),
    ],
)
def test_what_is_no_ffn_of_a_known_kind_shows_nothing_and_says_why(module, words):
    field = read(module())
    assert words in field.why_not
    assert not isinstance(field, (ExposesWeights, HasBound, HasLipschitz))


@pytest.mark.cases(1)
@each_family
def test_no_input_of_an_imported_ffn_exceeds_its_bound(name):
    imported, states, _ = opened(name)
    field, x = imported.depth.sublayers[1].field, states[1]
    for radius in (0.1, 5.0, 100.0):
        assert longest_output(field, x, radius) <= field.bound().at(radius) * (1 + 1e-6)


@pytest.mark.cases(1)
@each_family
def test_moments_stay_below_their_bounds_and_distances_have_one(name):
    imported, states, _ = opened(name)
    bounds = forward_bounds(imported.depth, states)
    for state, mean_abs, rms in zip(states, bounds.mean_abs, bounds.rms, strict=True):
        assert moments(state).mean_abs <= mean_abs * (1 + 1e-12)
        assert moments(state).rms <= rms * (1 + 1e-12)
    assert all(spread is not None for spread in token_spreads(imported.depth))


@pytest.mark.cases(1)
@pytest.mark.parametrize("name", [name for name in FAMILIES if name not in NORMALISED])
def test_blocks_have_theorem_5_2_for_gated_ffns_too(name):
    imported, states, _ = opened(name)
    for layer in block_layers(imported.depth, states):
        assert 0 < layer.measured <= layer.bound


def test_experts_are_said_to_be_unread():
    torch.manual_seed(0)
    model = transformers.MixtralForCausalLM(
        transformers.MixtralConfig(**TEXT, num_local_experts=4)
    ).eval()
    imported = from_transformers(model)
    assert imported.depth.sublayers[1].field.why_not == "it does not end in one linear map"
    assert imported.config.unread == ("FFN: it does not end in one linear map",)
    assert isinstance(imported.depth.sublayers[0].field, HasBound)
    x = torch.randn(2, 3, 5, 32)
    field = imported.depth.sublayers[1].field
    assert torch.allclose(field(x)[1], field(x[1]), atol=1e-6)


class AddsKey(nn.Module):
    """An attention with a key of its own."""

    def __init__(self, **options):
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, **options)


@pytest.mark.parametrize(
    ("stage", "reason"),
    [
        (AddsKey(add_zero_attn=True), "adds a key of its own"),
        (AddsKey(add_bias_kv=True), "adds a key of its own"),
        (nn.Sequential(nn.Linear(8, 8), nn.Conv1d(8, 8, 1)), "ends in a convolution (Conv1d)"),
        (nn.Sequential(nn.Conv1d(8, 8, 1), nn.Bilinear(8, 8, 8)), "does not end in one linear map"),
    ],
)
def test_a_chain_without_an_output_projection_says_what_it_has(stage, reason):
    with pytest.raises(ConfigError) as caught:
        _ = ModuleChain([stage]).output_projection
    assert reason in str(caught.value)

"""How much a block adds of a map: fitted, and taken as the block has it."""

import math
from fractions import Fraction

import pytest
import torch
import transformers
from torch import nn

from ctrans.dynamics.depth import Depth
from ctrans.interop import continuize, from_transformers
from ctrans.interop.residual_scale import fitted_scale
from tests.helpers import learned
from tests.interop.models import SMALL, TEXT, VOCABULARY, block_outputs, inputs


class Holding(nn.Module):
    """A block that says a number, and one for each channel."""

    def __init__(self, number):
        super().__init__()
        self.factor, self.gamma = number, nn.Parameter(torch.linspace(0.1, 0.5, 8))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("number", [1 / 3, 0.22, -0.7, 1e-3, 40.0])
def test_a_number_is_the_blocks_own_to_the_last_bit(number, dtype):
    values = torch.randn(2, 5, 8, dtype=dtype, generator=torch.Generator().manual_seed(0))
    assert fitted_scale(Holding(number), number * values, values) == number


def test_a_number_that_the_block_does_not_say_has_few_digits_or_is_the_fit():
    values = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(0))
    assert fitted_scale(nn.Linear(2, 2), 0.125 * values, values) == 0.125
    found = fitted_scale(nn.Linear(2, 2), values / math.sqrt(24), values)
    assert math.isclose(found, 1 / math.sqrt(24), rel_tol=1e-6)


@pytest.mark.parametrize(("dtype", "digits"), [(torch.float32, 6), (torch.float64, 14)])
def test_a_number_that_a_function_makes_is_not_rounded_beyond_the_fit(dtype, digits):
    values = torch.randn(2, 5, 8, dtype=dtype, generator=torch.Generator().manual_seed(0))
    number = 1 / (1 + math.exp(-0.3))  # a gate's sigmoid: near 0.57444, which is not it
    assert math.isclose(
        fitted_scale(nn.Linear(2, 2), number * values, values), number, rel_tol=10**-digits
    )


def test_one_for_each_channel_is_the_blocks_parameter():
    block = Holding(1.0)
    values = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(0))
    assert fitted_scale(block, block.gamma.detach() * values, values) is block.gamma
    assert fitted_scale(block, values.roll(1, -1), values) is None


def granite(multiplier=0.22):
    torch.manual_seed(0)
    config = transformers.GraniteConfig(**TEXT, residual_multiplier=multiplier)
    return learned(transformers.GraniteForCausalLM(config).eval(), 0.1)


def opt(before=True, activation="relu"):
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 32,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "ffn_dim": 48,
        "word_embed_proj_dim": 32,
    }
    config = transformers.OPTConfig(
        vocab_size=VOCABULARY,
        max_position_embeddings=32,
        do_layer_norm_before=before,
        activation_function=activation,
        **sizes,
    )
    return learned(transformers.OPTForCausalLM(config).eval(), 0.1)


def modernbert():
    torch.manual_seed(0)
    config = transformers.ModernBertConfig(
        **SMALL, pad_token_id=0, cls_token_id=1, sep_token_id=2, bos_token_id=1, eos_token_id=2
    )
    return learned(transformers.ModernBertForMaskedLM(config).eval(), 0.1)


NEW = {
    "granite": (granite, "pre", 0.22, lambda model: model.model.layers),
    "opt": (opt, "pre", 1.0, lambda model: model.model.decoder.layers),
    "opt, post": (
        lambda: opt(False, "gelu"),
        "post",
        1.0,
        lambda model: model.model.decoder.layers,
    ),
    "modernbert": (modernbert, "none/pre, pre", 1.0, lambda model: model.model.layers),
}


@pytest.mark.cases(1)
@pytest.mark.parametrize("name", NEW)
def test_states_and_logits_are_the_librarys_bit_for_bit(name):
    make, placement, dt, blocks = NEW[name]
    model = make()
    imported, x = from_transformers(model), inputs(model)
    assert (imported.config.placement, imported.config.dt) == (placement, dt)
    with torch.no_grad():
        outputs, logits = block_outputs(model, blocks(model), x)
        states = imported.trajectory(x).states
        assert torch.equal(imported(x)[0], logits)
    assert all(map(torch.equal, states[2::2], outputs))


def test_dt_multiplies_the_models_own_and_is_said():
    imported = from_transformers(granite(), dt=0.5)
    assert imported.depth.dt == 0.11
    assert "placement pre, dt = 0.11," in str(imported.config)
    assert "dt =" not in str(from_transformers(opt()).config).partition("attention")[0]


def test_a_scaled_model_is_continuized_at_its_own_length():
    model, x = granite(), torch.arange(1, 7).unsqueeze(0)
    with torch.no_grad():
        expected = model(x).logits
        assert torch.equal(continuize(model)(x).logits, expected)


@pytest.mark.cases(1)
@pytest.mark.parametrize("blocks", [1, 2, 3, 6, 12])
def test_blocks_of_unequal_length_keep_their_time_when_resampled(blocks):
    model = from_transformers(opt())
    spans = [Fraction(1), Fraction(2), Fraction(3), Fraction(4), Fraction(5), Fraction(6)]
    depth = Depth(list(model.depth.sublayers), 0.1, spans=spans)
    found = depth.resample(blocks)
    assert math.isclose(found.times[-1], depth.times[-1], rel_tol=1e-12)
    assert math.isclose(
        sum(found.lengths[::2]), 0.1 * (1 + 3 + 5), rel_tol=1e-12
    )  # attention's share


def test_norms_without_weights_are_norms():
    torch.manual_seed(0)
    config = transformers.OlmoConfig(
        **{key: TEXT[key] for key in TEXT if key != "num_key_value_heads"}
    )
    model = learned(transformers.OlmoForCausalLM(config).eval(), 0.1)
    imported, x = from_transformers(model), inputs(model)
    assert imported.config.placement == "pre"
    assert imported.depth.sublayers[0].input_norm.gamma.tolist() == [1.0] * 32
    with torch.no_grad():
        assert torch.equal(imported(x)[0], model(x).logits)

"""Blocks of a discrete model made into ODEs: unchanged at one Euler step, an ODE beyond it, and
back.
"""

import copy

import pytest
import torch
import transformers

from ctrans.interop import Anatomy, continuize, discretize, from_transformers
from solvers import ConfigError
from tests.helpers import learned
from tests.interop.models import FAMILIES, VOCABULARY, inputs, made, without_dropout
from tests.interop.plain_nanogpt import NanoGPT

each_family = pytest.mark.parametrize("name", FAMILIES)


@pytest.mark.cases(7)
@each_family
def test_at_one_euler_step_logits_keep_their_bits(name):
    model = made(name)
    x = inputs(model)
    expected = model(x).logits
    assert torch.equal(continuize(model)(x).logits, expected)


@each_family
def test_hidden_states_and_padding_masks_go_on_working(name):
    model = made(name)
    options = {"output_hidden_states": True}
    if model.main_input_name == "input_ids":
        options["attention_mask"] = torch.ones(inputs(model).shape, dtype=torch.long)
        options["attention_mask"][0, :3] = 0
    expected = model(inputs(model), **options).hidden_states
    got = continuize(model, [1])(inputs(model), **options).hidden_states
    assert len(got) == len(expected)
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


@each_family
def test_names_and_values_in_the_state_dict_stay(name):
    model = made(name)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    after = continuize(model, method="midpoint").state_dict()
    assert list(after) == list(before)
    assert all(torch.equal(after[key], before[key]) for key in before)


@pytest.mark.cases(6)
@each_family
def test_discretize_takes_it_back(name):
    model = made(name)
    x = inputs(model)
    expected, kinds = model(x).logits, [type(part) for part in model.modules()]
    config = copy.deepcopy(model.config)
    continuize(model, method="rk4", dt=0.5)
    assert not torch.allclose(model(x).logits, expected)
    assert torch.equal(discretize(model)(x).logits, expected)
    assert [type(part) for part in model.modules()] == kinds
    assert model.config.to_dict() == config.to_dict()


@pytest.mark.cases(1)
@pytest.mark.parametrize("name", ["gpt2", "bert", "gemma2"])
def test_continuous_blocks_solve_the_ode_of_the_imported_model(name):
    model = made(name)
    x, imported = inputs(model), from_transformers(copy.deepcopy(model), dt=0.3)
    expected = imported.head(imported.trajectory(x, method="rk4", steps=2).x1)
    assert torch.allclose(
        continuize(model, dt=0.3, method="rk4", steps=2)(x).logits, expected, atol=1e-4
    )


def test_padding_does_not_reach_the_tokens_behind_it_at_any_stage():
    model = continuize(made("llama"), method="rk4")
    x = inputs(model)
    mask = torch.ones_like(x)
    mask[:, :3] = 0
    other = x.clone()
    other[:, :3] = (x[:, :3] + 1) % VOCABULARY
    got = [model(tokens, attention_mask=mask).logits[:, 3:] for tokens in (x, other)]
    assert torch.equal(*got)
    assert not torch.allclose(model(other).logits[:, 3:], got[0], atol=1e-3)


@pytest.mark.cases(1)
@pytest.mark.parametrize("gradient", ["backprop", "checkpoint", "adjoint"])
def test_trains_and_its_state_dict_loads_into_the_discrete_model(gradient):
    model = continuize(
        without_dropout(made("gpt2", scale=0.02)), [0, 2], method="midpoint", gradient=gradient
    )
    x = inputs(model)
    optimiser = torch.optim.AdamW(model.parameters(), lr=5e-3)
    losses = []
    for _ in range(12):
        loss = model(x, labels=x).loss
        optimiser.zero_grad()
        loss.backward()
        assert all(p.grad is not None for p in model.parameters())
        optimiser.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.8 * losses[0]
    other = FAMILIES["gpt2"].make().eval()
    other.load_state_dict(model.state_dict())
    continuize(other, [0, 2], method="midpoint")
    assert torch.equal(other(x).logits, model.eval()(x).logits)


def test_the_librarys_own_gradient_checkpointing_works_on_continuous_blocks():
    found = []
    for checkpointed in (False, True):
        model = continuize(without_dropout(made("gpt2")), method="midpoint")
        if checkpointed:
            model.activation_checkpointing_enable()
        model(inputs(model), labels=inputs(model)).loss.backward()
        found.append([p.grad for p in model.parameters()])
    for a, b in zip(*found, strict=True):
        assert torch.allclose(a, b, atol=1e-7)


def test_saved_model_is_the_librarys_and_becomes_continuous_again(tmp_path):
    model = continuize(made("gpt2"), method="heun")
    model.save_pretrained(tmp_path)
    back = transformers.GPT2LMHeadModel.from_pretrained(tmp_path, local_files_only=True).eval()
    assert torch.equal(
        continuize(back, method="heun")(inputs(back)).logits, model(inputs(model)).logits
    )


def test_copies_are_continuous_and_independent():
    model = continuize(made("gemma2"), method="midpoint")
    twin, x = copy.deepcopy(model), inputs(model)
    assert torch.equal(twin(x).logits, model(x).logits)
    expected = model(x).logits
    learned(twin)
    assert torch.equal(model(x).logits, expected)
    assert not torch.allclose(twin(x).logits, expected)


def test_cache_works_at_one_euler_step_and_is_refused_beyond():
    model = made("gpt2")
    x = inputs(model)
    mask = torch.ones_like(x)
    expected = model.generate(
        x, attention_mask=mask, max_new_tokens=5, do_sample=False, pad_token_id=0
    )
    assert torch.equal(
        continuize(model).generate(
            x, attention_mask=mask, max_new_tokens=5, do_sample=False, pad_token_id=0
        ),
        expected,
    )
    continuize(discretize(model), [1], method="midpoint")
    assert model(x).past_key_values is None
    with pytest.raises(ConfigError, match="use_cache=False"):
        model(x, use_cache=True)
    model.generate(x, attention_mask=mask, max_new_tokens=2, use_cache=False, pad_token_id=0)


def test_nanogpt_becomes_continuous_and_keeps_its_logits_names_and_loss():
    torch.manual_seed(0)
    model = learned(NanoGPT())
    tokens = torch.randint(0, 11, (2, 7))
    names, (expected, loss) = list(model.state_dict()), model(tokens, tokens)
    assert torch.equal(continuize(model)(tokens, tokens)[0], expected)
    assert list(model.state_dict()) == names
    continuize(discretize(model), 1, method="rk4", gradient="adjoint")
    assert not torch.allclose(model(tokens)[0], expected)
    model(tokens, tokens)[1].backward()
    assert model.transformer["h"][1].attn.c_attn.weight.grad.abs().max() > 0
    assert torch.equal(discretize(model)(tokens, tokens)[1], loss)


def test_only_chosen_layers_change():
    model = continuize(made("llama"), [1], method="midpoint")
    kinds = [type(block).__name__ for block in model.model.layers]
    assert kinds == ["LlamaDecoderLayer", "ContinuousLlamaDecoderLayer", "LlamaDecoderLayer"]
    assert isinstance(model.model.layers[1], type(model.model.layers[0]))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"layers": 3}, "layer 3: the model has blocks 0 to 2"),
        ({"layers": [-1]}, "layer -1"),
        ({"layers": []}, "no layers given"),
        ({"method": "rk5"}, "rk5"),
        ({"dt": 0.0}, "dt = 0.0"),
        ({"anatomy": Anatomy(blocks="transformer.layers")}, "transformer.h: 3 GPT2Block"),
        ({"anatomy": Anatomy(attention="attention")}, "no list of blocks"),
        (
            {"anatomy": Anatomy(blocks="transformer.h", ffn="ffn")},
            r"no FFN found in GPT2Block, which has ln_1 \(LayerNorm\)",
        ),
    ],
)
def test_requests_without_sense_are_refused_and_leave_the_model_as_it_was(options, words):
    model = made("gpt2")
    with pytest.raises(ConfigError, match=words):
        continuize(model, **options)
    assert "flow" not in vars(model.transformer.h[0])
    assert "forward" not in vars(model.transformer.h[0])


def test_making_a_block_continuous_twice_is_refused():
    with pytest.raises(ConfigError, match="call discretize"):
        continuize(continuize(made("gpt2"), [0]), [0])


def test_training_mode_of_every_module_is_kept():
    model = made("gpt2").train()
    model.transformer.drop.eval()
    before = [part.training for part in model.modules()]
    assert [part.training for part in continuize(model).modules()] == before


def test_an_encoder_with_a_decoder_is_opened_at_its_encoder():
    config = transformers.T5Config(
        vocab_size=31, d_model=32, num_layers=2, num_heads=4, d_kv=8, d_ff=48, pad_token_id=0
    )
    model = learned(transformers.T5ForConditionalGeneration(config).eval())
    tokens = torch.arange(1, 6).unsqueeze(0)
    with torch.no_grad():
        expected = model.get_encoder()(tokens).last_hidden_state
        assert torch.allclose(from_transformers(model)(tokens)[0], expected, atol=1e-5)


def test_two_towers_are_opened_one_at_a_time():
    sizes = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 48,
    }
    model = transformers.CLIPModel(
        transformers.CLIPConfig(
            text_config={
                **sizes,
                "vocab_size": 31,
                "max_position_embeddings": 16,
                "eos_token_id": 2,
            },
            vision_config={**sizes, "image_size": 8, "patch_size": 4},
        )
    ).eval()
    with pytest.raises(ConfigError, match="two towers: give its vision_model or its text_model"):
        from_transformers(model)
    assert (
        from_transformers(model.vision_model).depth.blocks
        == from_transformers(model.text_model).depth.blocks
        == 2
    )


def test_blocks_of_attention_and_ffn_at_once_are_continuized():
    sizes = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 48,
        "vocab_size": 31,
    }
    model = learned(transformers.GPTNeoXForCausalLM(transformers.GPTNeoXConfig(**sizes)).eval())
    tokens = torch.arange(1, 6).unsqueeze(0)
    with torch.no_grad():
        expected = model(tokens).logits
        assert torch.allclose(continuize(model)(tokens).logits, expected, atol=1e-5)


def tupled():
    """A model whose blocks return (state, ...), as older ones do."""
    config = {
        "vocab_size": VOCABULARY,
        "n_embd": 32,
        "n_layer": 2,
        "n_head": 4,
        "rotary_dim": 4,
        "n_positions": 32,
    }
    return transformers.GPTJForCausalLM(
        transformers.GPTJConfig(**config, bos_token_id=1, eos_token_id=2)
    ).eval()


RETURNS_TUPLES = pytest.mark.skipif(
    tuple(map(int, transformers.__version__.split(".")[:2])) >= (5, 24),
    reason="GPT-J's blocks return the state alone",
)


@RETURNS_TUPLES
def test_models_that_take_no_plain_state_from_a_block_are_refused_and_stay_as_they_were():
    model = tupled()
    words = (
        r"does not run with blocks that return the state alone: its GPTJBlocks return"
        r" tuples.*\(RuntimeError: shape"
    )
    with pytest.raises(ConfigError, match=words) as caught:
        continuize(model)
    assert "\n" not in str(caught.value)
    assert model(torch.arange(1, 5).unsqueeze(0)).logits.isfinite().all()


def test_what_fails_before_the_first_block_is_the_models_own_error():
    with pytest.raises(IndexError, match="out of range"):
        continuize(made("gpt2"), example={"input_ids": torch.tensor([[VOCABULARY]])})


@pytest.mark.parametrize(
    ("value", "words"), [(0.0, "cannot be read"), (torch.nan, "not finite, such as ln_1.weight")]
)
def test_blocks_that_show_no_structure_are_refused(value, words):
    model = made("gpt2")
    with torch.no_grad():
        for parameter in model.transformer.h.parameters():
            parameter.fill_(value)
    with pytest.raises(ConfigError, match=words):
        continuize(model)


@pytest.mark.cases(1)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@each_family
def test_structure_is_read_in_other_dtypes_too(name, dtype):
    model = made(name).to(dtype)
    assert from_transformers(model).config.placement == FAMILIES[name].placement


def test_user_can_name_the_parts():
    class Odd(NanoGPT):
        def __init__(self):
            super().__init__()
            for block in self.transformer["h"]:
                block.mixing, block.squashing = block.attn, block.mlp
                del block.attn, block.mlp

    class OddBlock(type(NanoGPT().transformer["h"][0])):
        def forward(self, x):
            x = x + self.mixing(self.ln_1(x))
            return x + self.squashing(self.ln_2(x))

    model = learned(Odd())
    for block in model.transformer["h"]:
        block.__class__ = OddBlock
    tokens = torch.randint(0, 11, (2, 7))
    expected = model(tokens)[0]
    with pytest.raises(
        ConfigError, match=r"transformer.h: 2 OddBlock \(ln_1, ln_2, mixing, squashing\)"
    ):
        continuize(model)
    named = Anatomy(blocks="transformer.h", attention="mixing", ffn="squashing")
    assert torch.equal(continuize(model, anatomy=named)(tokens)[0], expected)


@RETURNS_TUPLES
def test_blocks_that_return_more_than_the_state_are_refused():
    model = transformers.GPTJForCausalLM(
        transformers.GPTJConfig(
            vocab_size=VOCABULARY, n_embd=32, n_layer=1, n_head=4, rotary_dim=4, n_positions=16
        )
    )
    with pytest.raises(ConfigError, match=r"GPTJBlock returns a tuple|return tuples"):
        continuize(model)

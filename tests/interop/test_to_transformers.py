"""Our GPT written as a Hugging Face model, and a Llama of theirs as our GPT: the same logits both
ways.
"""

import dataclasses

import pytest
import torch
import transformers

from ctrans.interop import from_transformers, to_gpt, to_transformers, write_transformers
from ctrans.model.config import GPTConfig
from ctrans.model.gpt import GPT
from solvers import ConfigError
from tests.helpers import learned

SIZES = {"vocab_size": 31, "context": 24, "depth": 2, "width": 32, "heads": 4}
LLAMA = GPTConfig(
    **SIZES, placement="pre", norm="rmsnorm", positions="rotary", ffn="swiglu", bias=False
)
NEOX = GPTConfig(
    **SIZES, placement="pre", positions="rotary", parallel_blocks=True, branch_norms=True
)
CASES = {
    "llama": (LLAMA, "LlamaForCausalLM"),
    "llama, grouped heads, own head": (
        dataclasses.replace(LLAMA, kv_heads=2, tied=False, eps=1e-6, rotary_base=5e5, ffn_width=40),
        "LlamaForCausalLM",
    ),
    "granite": (dataclasses.replace(LLAMA, kv_heads=1, dt=0.3), "GraniteForCausalLM"),
    "gpt_neox": (NEOX, "GPTNeoXForCausalLM"),
    "gpt_neox, part of a head turned": (
        dataclasses.replace(
            NEOX, rotary_fraction=0.25, rotary_base=500.0, tied=False, ffn_width=40, eps=1e-6
        ),
        "GPTNeoXForCausalLM",
    ),
    "gpt2": (GPTConfig(**SIZES, placement="pre"), "GPT2LMHeadModel"),
    "gpt2, own head": (
        GPTConfig(**SIZES, placement="pre", tied=False, ffn_width=40),
        "GPT2LMHeadModel",
    ),
}
TOKENS = torch.randint(0, 31, (2, 24), generator=torch.Generator().manual_seed(0))


def ours(config):
    return learned(GPT(config), 0.1).eval().requires_grad_(False)


@pytest.mark.cases(1)
@pytest.mark.parametrize("name", CASES)
def test_logits_are_ours_from_a_directory_that_the_library_reads(name, tmp_path):
    config, kind = CASES[name]
    model = ours(config)
    write_transformers(model, tmp_path)
    read = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, local_files_only=True)
    assert type(read).__name__ == type(to_transformers(model)).__name__ == kind
    with torch.no_grad():
        expected = model(TOKENS)[0]
        for found in (read, to_transformers(model)):
            assert torch.allclose(found(TOKENS).logits, expected, rtol=1e-5, atol=1e-5)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "model.safetensors"]
    imported = from_transformers(tmp_path)
    assert (imported.config.placement, imported.depth.dt) == ("pre", config.dt)


@pytest.mark.parametrize("name", [name for name in CASES if not name.startswith("gpt2")])
def test_ours_written_and_read_again_is_ours_bit_for_bit(name, tmp_path):
    model = ours(CASES[name][0])
    write_transformers(model, tmp_path)
    again = to_gpt(tmp_path)
    assert {k: v for k, v in vars(again.config).items() if k != "ffn_width"} == {
        k: v for k, v in vars(model.config).items() if k != "ffn_width"
    }
    assert torch.equal(again(TOKENS)[0], model(TOKENS)[0])


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_a_llama_of_theirs_has_the_same_logits_and_gradients_as_ours(groups):
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 48,
        "vocab_size": 31,
    }
    config = transformers.LlamaConfig(
        **sizes, num_key_value_heads=groups, max_position_embeddings=24, tie_word_embeddings=False
    )
    theirs = learned(transformers.LlamaForCausalLM(config).eval(), 0.1)
    model = to_gpt(theirs)
    logits, loss = model(TOKENS[:, :-1], TOKENS[:, 1:])
    own = theirs(TOKENS[:, :-1]).logits
    assert torch.allclose(logits, own, rtol=1e-5, atol=1e-5)
    loss.backward()
    torch.nn.functional.cross_entropy(own.flatten(0, 1), TOKENS[:, 1:].flatten()).backward()
    expected = theirs.model.layers[0].mlp.gate_proj.weight.grad
    assert torch.allclose(
        model.depth.sublayers[1].field.gate.weight.grad, expected, rtol=1e-4, atol=1e-6
    )
    assert torch.allclose(
        model.unembedding.weight.grad, theirs.lm_head.weight.grad, rtol=1e-4, atol=1e-6
    )


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"placement": "peri"},
            "nearest is Llama, which differs in placement = 'peri' \\('pre' there\\)",
        ),
        ({"window": 4}, "window = 4"),
        ({"sinks": True}, "sinks = True"),
        ({"ffn": "geglu"}, "ffn = 'geglu'"),
        ({"bias": True}, "bias = True"),
        ({"parallel_blocks": True}, "parallel_blocks = True"),
    ],
)
def test_what_no_family_computes_is_refused_in_a_line(changes, words, tmp_path):
    model = GPT(dataclasses.replace(LLAMA, **changes))
    with pytest.raises(ConfigError, match=words) as caught:
        write_transformers(model, tmp_path / "there")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "there").exists()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"attention_bias": True}, "attention_bias = True"),
        (
            {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}},
            "rope_parameters = ",
        ),
        ({"head_dim": 12}, "head_dim = 12"),
    ],
)
def test_a_llama_that_computes_something_else_is_refused_in_a_line(changes, words):
    config = transformers.LlamaConfig(
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=4,
        intermediate_size=48,
        vocab_size=31,
        **changes,
    )
    with pytest.raises(ConfigError, match=words):
        to_gpt(transformers.LlamaForCausalLM(config))


def test_a_gpt_neox_of_theirs_has_the_same_logits_and_gradients_as_ours():
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 48,
        "vocab_size": 31,
    }
    theirs = learned(
        transformers.GPTNeoXForCausalLM(
            transformers.GPTNeoXConfig(**sizes, max_position_embeddings=24)
        ).eval(),
        0.1,
    )
    model = to_gpt(theirs)
    assert model.config.rotary_fraction == 0.25
    logits, loss = model(TOKENS[:, :-1], TOKENS[:, 1:])
    own = theirs(TOKENS[:, :-1]).logits
    assert torch.allclose(logits, own, rtol=1e-5, atol=1e-5)
    loss.backward()
    torch.nn.functional.cross_entropy(own.flatten(0, 1), TOKENS[:, 1:].flatten()).backward()
    for i, (block, sublayer) in enumerate(
        zip(theirs.gpt_neox.layers, model.depth.sublayers, strict=True)
    ):
        both = sublayer.field
        assert torch.allclose(
            both.ffn_gains.weight.grad,
            block.post_attention_layernorm.weight.grad,
            rtol=1e-4,
            atol=1e-6,
        ), i
        expected = (
            block.attention.query_key_value.weight.grad.view(2, 3, 16, 32)
            .transpose(0, 1)
            .reshape(96, 32)
        )
        assert torch.allclose(both.attention.qkv.weight.grad, expected, rtol=1e-4, atol=1e-6), i


def test_a_gpt_neox_one_after_the_other_is_refused_in_a_line():
    sizes = {
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 48,
        "vocab_size": 31,
    }
    with pytest.raises(ConfigError, match="use_parallel_residual = False"):
        to_gpt(
            transformers.GPTNeoXForCausalLM(
                transformers.GPTNeoXConfig(**sizes, use_parallel_residual=False)
            )
        )


def test_a_directory_that_cannot_be_written_gets_a_line(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot write a model"):
        write_transformers(GPT(LLAMA), tmp_path / "file")

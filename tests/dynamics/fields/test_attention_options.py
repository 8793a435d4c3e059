"""Softmax attention with every option against loops, and against the modules of transformers that
have them.
"""

import math

import pytest
import torch
import transformers
from transformers.models.gemma2 import modeling_gemma2
from transformers.models.gpt_oss import modeling_gpt_oss
from transformers.models.llama import modeling_llama

from ctrans import GPT, GPTConfig
from ctrans.dynamics.fields import (
    AttentionOptions,
    DifferentialAttention,
    SoftmaxAttention,
    reference_kernels,
)
from ctrans.dynamics.fields.positions import falling_scores, slopes, turn, turns
from tests.cases import VARIANTS
from tests.helpers import learned, tokens


def states(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def by_loops(attention, x):
    """f(x) as its docstring has it, token by token."""
    options, width, heads = attention.options, attention.width, attention.heads
    head, groups = width // heads, options.kv_heads or heads
    w, b = attention.qkv.weight, attention.qkv.bias
    b = torch.zeros(len(w), dtype=w.dtype) if b is None else b
    rows = []
    for i in range(len(x)):
        mixed = []
        for h in range(heads):
            g = h * groups // heads
            q_at, k_at = head * h, width + head * g
            v_at = width + head * (groups + g)
            q = turned(
                attention,
                normed(
                    attention.query_norm, w[q_at : q_at + head] @ x[i] + b[q_at : q_at + head], h
                ),
                i,
            )
            weights, values = [], []
            for j in range(len(x)):
                far = abs(i - j) >= (options.window or len(x))
                if far or (attention.causal and j > i):
                    continue
                k = turned(
                    attention,
                    normed(
                        attention.key_norm, w[k_at : k_at + head] @ x[j] + b[k_at : k_at + head], h
                    ),
                    j,
                )
                score = float(q @ k) / (attention.temperature * math.sqrt(head))
                if options.softcap is not None:
                    score = options.softcap * math.tanh(score / options.softcap)
                if options.positions == "alibi":
                    score -= 2 ** (-8 * (h + 1) / heads) * abs(i - j)
                weights.append(math.exp(score))
                values.append(w[v_at : v_at + head] @ x[j] + b[v_at : v_at + head])
            sink = math.exp(float(attention.sinks[h])) if options.sinks else 0.0
            mixed.append(
                sum(a * v for a, v in zip(weights, values, strict=True)) / (sum(weights) + sink)
            )
        features = torch.cat(mixed)
        rows.append(
            attention.out(
                features
                if attention.gate is None
                else features * torch.sigmoid(attention.gate(x[i]))
            )
        )
    return torch.stack(rows)


def normed(norm, z, h):
    if type(norm).__name__ == "Identity":
        return z
    if type(norm).__name__ == "UnitLength":
        return (
            z / (z.square().sum() + norm.eps).sqrt() * (1 if norm.scale is None else norm.scale[h])
        )
    return norm(z)


def turned(attention, z, place):
    """Each pair as a complex number times e^(i angle)."""
    options, head = attention.options, len(z)
    if options.positions != "rotary":
        return z
    pairs = int(head * options.rotary_fraction / 2)
    angles = place * options.rotary_base ** (-torch.arange(pairs, dtype=z.dtype) / pairs)
    spun = torch.complex(z[:pairs], z[pairs : 2 * pairs]) * torch.polar(
        torch.ones_like(angles), angles
    )
    return torch.cat([spun.real, spun.imag, z[2 * pairs :]])


@pytest.mark.parametrize(
    "name",
    [
        name
        for name, changes in VARIANTS.items()
        if not {"ffn", "activation", "attention"} & changes.keys()
    ],
)
@pytest.mark.parametrize("causal", [True, False])
def test_attention_is_its_formula_token_by_token(name, causal):
    config = GPTConfig(
        width=16,
        heads=4,
        depth=1,
        causal=causal,
        temperature=1.3,
        initialisation="xavier",
        **VARIANTS[name],
    )
    attention = learned(
        GPT(config).double().depth.sublayers[0].attention.field, 0.3
    ).requires_grad_(False)
    x = states(6, 16)
    found = by_loops(attention, x)
    assert torch.allclose(attention(x), found, atol=1e-12)
    assert torch.allclose(
        attention.at_tokens(x.expand(3, 6, 16), torch.tensor([4, 0, 5])),
        found[[4, 0, 5]],
        atol=1e-12,
    )


@pytest.mark.parametrize("base", [10000.0, 500.0])
def test_turns_are_those_of_llama_and_leave_scores_to_the_distance(base):
    x = states(1, 2, 7, 8)
    config = transformers.LlamaConfig(
        hidden_size=16,
        num_attention_heads=2,
        rope_parameters={"rope_type": "default", "rope_theta": base},
    )
    rotary = modeling_llama.LlamaRotaryEmbedding(config)
    theirs, _ = modeling_llama.apply_rotary_pos_emb(x, x, *rotary(x, torch.arange(7)[None]))
    ours = turn(x, turns(7, 8, base, x))
    assert torch.allclose(ours, theirs, atol=1e-6)  # it takes its angles in float32
    assert torch.allclose(ours.norm(dim=-1), x.norm(dim=-1))
    q, k = (
        turn(part.expand(9, 8), turns(9, 6, base, x))
        for part in (states(1, 8), states(1, 8, seed=1))
    )
    scores = q @ k.T
    assert torch.allclose(scores[1:, 1:], scores[:-1, :-1], atol=1e-12)


def test_differential_rows_are_two_softmaxes_and_sum_to_one_less_lambda():
    attention, x = (
        learned(DifferentialAttention(16, 2).double(), 0.5).requires_grad_(False),
        states(5, 16),
    )
    q, k, v = (part.unflatten(-1, (2, 8)).transpose(0, 1) for part in attention.qkv(x).chunk(3, -1))
    later = torch.ones(5, 5, dtype=torch.bool).triu(1)
    first, second = (
        (q[..., part] @ k[..., part].mT / 2).masked_fill(later, -math.inf).softmax(-1)
        for part in (slice(0, 4), slice(4, 8))
    )
    rows = first - attention.share[:, None, None] * second
    assert torch.allclose(attention.rows(x), rows, atol=1e-14)
    assert torch.allclose(rows.sum(-1), (1 - attention.share).unsqueeze(-1).expand(2, 5))
    assert torch.allclose(
        attention.pre_projection(x), (rows @ v).transpose(0, 1).flatten(-2), atol=1e-13
    )


def test_slopes_are_those_of_the_paper():
    assert slopes(8) == [2.0**-h for h in range(1, 9)]
    assert slopes(6) == pytest.approx([2**-2, 2**-4, 2**-6, 2**-8, 2**-1, 2**-3])
    assert torch.equal(
        falling_scores(2, 3, torch.zeros(()))[1],
        -torch.tensor([[0.0, 1, 2], [1, 0, 1], [2, 1, 0]]) * 2**-8,
    )


class Theirs(torch.nn.Module):
    """What transformers' attention functions ask of their module."""

    def __init__(self, groups, sinks=None):
        super().__init__()
        self.num_key_value_groups, self.sinks = groups, sinks


@pytest.mark.parametrize("what", ["softcap", "sinks"])
def test_caps_and_sinks_are_gemmas_and_gpt_oss(what):
    options = AttentionOptions(
        positions="none", kv_heads=2, **({"softcap": 1.5} if what == "softcap" else {"sinks": True})
    )
    attention = learned(
        SoftmaxAttention(16, 4, causal=False, options=options).double(), 0.5
    ).requires_grad_(False)
    x = states(2, 5, 16)
    q, k, v = (
        part.unflatten(-1, (-1, 4)).transpose(1, 2)
        for part in attention.qkv(x).split([16, 8, 8], -1)
    )
    if what == "softcap":
        y, _ = modeling_gemma2.eager_attention_forward(
            Theirs(2), q, k, v, None, scaling=0.5, softcap=1.5
        )
    else:
        y, _ = modeling_gpt_oss.eager_attention_forward(
            Theirs(2, attention.sinks), q, k, v, torch.zeros(()), scaling=0.5
        )
    assert torch.allclose(
        attention.pre_projection(x), y.flatten(-2).double(), atol=1e-6
    )  # theirs in float32


def test_a_native_llama_has_its_logits():
    """The same weights in our blocks: pre-LN, RMSNorm, rotary positions, grouped queries, SwiGLU,
    no biases, a tied head.
    """
    theirs = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=11,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=16,
            rms_norm_eps=1e-5,
            tie_word_embeddings=True,
            initializer_range=0.2,
        )
    ).eval()
    learned(theirs, 0.1)
    shape = {
        "vocab_size": 11,
        "context": 16,
        "depth": 2,
        "width": 32,
        "heads": 4,
        "kv_heads": 2,
        "ffn_width": 48,
    }
    ours = GPT(
        GPTConfig(
            **shape,
            placement="pre",
            norm="rmsnorm",
            positions="rotary",
            ffn="swiglu",
            bias=False,
            eps=1e-5,
        )
    )
    with torch.no_grad():
        ours.token_embedding.weight.copy_(theirs.model.embed_tokens.weight)
        ours.final_norm.weight.copy_(theirs.model.norm.weight)
        for layer, (attention, ffn) in zip(
            theirs.model.layers, zip(*[iter(ours.depth.sublayers)] * 2, strict=True), strict=True
        ):
            projections = layer.self_attn
            rows = [
                part.weight for part in (projections.q_proj, projections.k_proj, projections.v_proj)
            ]
            attention.field.qkv.weight.copy_(torch.cat(rows))
            attention.field.out.weight.copy_(projections.o_proj.weight)
            for name in ("gate", "up", "down"):
                getattr(ffn.field, name).weight.copy_(getattr(layer.mlp, f"{name}_proj").weight)
            attention.input_norm.weight.copy_(layer.input_layernorm.weight)
            ffn.input_norm.weight.copy_(layer.post_attention_layernorm.weight)
        ids = tokens(2, 12)
        expected = theirs(ids).logits
        assert float((ours(ids)[0] - expected).abs().max()) <= 1e-5 * float(expected.abs().max())
        with reference_kernels(ours):
            assert float((ours(ids)[0] - expected).abs().max()) <= 1e-5 * float(
                expected.abs().max()
            )

"""Calls of attention, seen from outside."""

import pytest
import torch
import torch.nn.functional as F

from ctrans.measure.attention.attention_calls import (
    KERNEL,
    SOFTMAXES,
    AttentionCalls,
    KernelCall,
    looks,
    softmax_input,
)


def qkv():
    draws = torch.Generator().manual_seed(0)
    return [torch.randn(2, 3, 5, 4, generator=draws) for _ in range(3)]


@pytest.mark.parametrize("softmax", [*SOFTMAXES, lambda x, dim: torch.softmax(input=x, dim=dim)])
def test_a_softmax_is_looked_at_before_and_after_and_stays_what_it_is(softmax):
    x, before, after = torch.linspace(-1, 1, 6).view(2, 3), [], []
    with AttentionCalls(
        before={f: lambda *a, **k: before.append(softmax_input(*a, **k)) for f in SOFTMAXES},
        after={f: lambda output, *a, **k: after.append(output) for f in SOFTMAXES},
    ):
        rows = softmax(x, dim=-1)
    assert before[0] is x
    assert after[0] is rows
    assert len(before) == len(after) == 1
    assert torch.equal(rows, x.softmax(-1))


def test_arguments_of_the_kernel_have_names_wherever_they_stand():
    q, k, v = qkv()
    calls = []
    with AttentionCalls(before={KERNEL: lambda *a, **kw: calls.append(KernelCall(*a, **kw))}):
        F.scaled_dot_product_attention(q, k, v, None, 0.0, True)
        F.scaled_dot_product_attention(query=q, key=k, value=v, is_causal=True, scale=0.5)
    assert calls[0].key is calls[1].key is k
    assert [call.is_causal for call in calls] == [True, True]
    assert [call.scale for call in calls] == [None, 0.5]


def test_what_a_function_itself_calls_and_other_functions_are_not_looked_at():
    seen = []
    attention = torch.nn.MultiheadAttention(4, 2, batch_first=True)
    x = torch.randn(2, 5, 4, generator=torch.Generator().manual_seed(0))
    with AttentionCalls(before=looks(lambda *a, **k: seen.append(a), lambda *a: seen.append(a))):
        attention(x, x, x)
        x.exp()
    assert seen == []

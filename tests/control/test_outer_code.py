"""Code of a subclass before or behind the sublayers of a GPT is named: nobody examined it."""

import pytest
import torch
from torch import nn

import ctrans
from ctrans.control.model_check import check_model
from ctrans.control.outer_code import BEFORE, BEHIND, outer_code
from ctrans.interop.ot_transformer import OTTransformer

WIDTH = 8


def config(**options):
    return ctrans.GPTConfig(
        vocab_size=11, context=6, width=WIDTH, heads=2, depth=1, placement="peri", **options
    )


class WithAnotherHead(ctrans.GPT):
    def head(self, x):
        return super().head(x + (x @ torch.ones(WIDTH, WIDTH, dtype=x.dtype)).relu())


class WithAnotherEmbedding(ctrans.GPT):
    def embed(self, tokens):
        x = super().embed(tokens)
        return x + x.tanh()


class WithNothingChanged(ctrans.GPT):
    def accuracy(self, tokens):
        return self(tokens)[0].argmax(-1)


class Residual(nn.Linear):
    def forward(self, x):
        return x + super().forward(x)


def with_another_part(model):
    model.final_norm = Residual(WIDTH, WIDTH)
    return model


def with_torchs_encoder(model):
    model.final_norm = nn.TransformerEncoderLayer(WIDTH, 2, 16, batch_first=True)
    return model


def with_a_hook(model):
    model.final_norm.register_forward_hook(lambda part, given, output: output + given[0].tanh())
    return model


def with_a_hook_of_the_depth(model):
    model.depth.register_forward_hook(lambda part, given, output: output + output.tanh())
    return model


def with_a_patch(model):
    head = model.head
    model.head = lambda x: head(x + x.tanh())
    return model


@pytest.mark.parametrize(
    ("model", "where"),
    [
        (WithAnotherHead(config()), [BEHIND]),
        (WithAnotherEmbedding(config()), [BEFORE]),
        (with_another_part(ctrans.GPT(config())), [BEHIND]),
        (with_torchs_encoder(ctrans.GPT(config())), [BEHIND]),
        (with_a_hook(ctrans.GPT(config())), [BEHIND]),
        (with_a_hook_of_the_depth(ctrans.GPT(config())), [BEHIND]),
        (with_a_patch(ctrans.GPT(config())), [BEHIND]),
        (WithNothingChanged(config()), []),
        (ctrans.GPT(config()), []),
        (ctrans.GPT(config(positions="learned")), []),
        (OTTransformer(ctrans.GPT(config()), steps=2), []),
    ],
    ids=lambda value: type(value).__name__,
)
def test_changed_code_is_named_by_its_place(model, where):
    assert list(outer_code(model)) == where


@pytest.mark.cases(1)
def test_a_verdict_is_open_behind_a_head_of_its_own():
    tokens = torch.randint(0, 11, (1, 7), generator=torch.Generator().manual_seed(0))
    plain = check_model(ctrans.GPT(config()).double(), tokens[:, :-1], tokens[:, 1:])
    changed = check_model(WithAnotherHead(config()).double(), tokens[:, :-1], tokens[:, 1:])

    assert plain.step_verdict.startswith("well-posed")
    assert changed.step_verdict == "open"
    assert "WithAnotherHead.head" in changed.missing[BEHIND]


@pytest.mark.cases(1)
@pytest.mark.parametrize("part", ["", "output_norm"])
def test_a_verdict_is_open_where_a_hook_may_add_a_map(part):
    tokens = torch.randint(0, 11, (1, 7), generator=torch.Generator().manual_seed(0))
    model = ctrans.GPT(config()).double()
    adapter = torch.randn(WIDTH, WIDTH, dtype=torch.float64)
    first = next(iter(model.depth.sublayers))
    first.get_submodule(part).register_forward_hook(lambda _, given, y: y + given[0] @ adapter)

    check = check_model(model, tokens[:, :-1], tokens[:, 1:])
    assert check.step_verdict == "open"
    reason = check.missing["segment 0 (attention)"]
    assert "hook" in reason or "its norm does not bound large inputs" in reason

"""A padding mask in example=: the figures of a diagnosis are those of the text alone."""

import pytest
import torch
from torch import nn

from ctrans import diagnose, open_model
from ctrans.interop.hidden_tokens import text_of
from ctrans.measure.forward.moments import moments
from ctrans.measure.walk import States, walk
from tests.helpers import learned
from tests.interop.models import made

TEXT = torch.tensor([[True] * 6 + [False] * 3])
IDS = torch.randint(3, 31, (2, 9), generator=torch.Generator().manual_seed(2))
WIDTH = 16


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.before = nn.LayerNorm(WIDTH)
        self.between = nn.LayerNorm(WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x, mask):
        y = self.before(x)
        x = x + self.attention(y, y, y, key_padding_mask=mask, need_weights=False)[0]
        return x + self.down(torch.relu(self.up(self.between(x))))


class Encoder(nn.Module):
    def __init__(self, blocks=3):
        super().__init__()
        self.embed = nn.Embedding(31, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.head = nn.Linear(WIDTH, 31)

    def forward(self, ids, padding_mask):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x, padding_mask)
        return self.head(x)


def encoder(blocks=3):
    torch.manual_seed(0)
    return learned(Encoder(blocks), 0.1).eval()


MODELS = {
    "own": (encoder, lambda ids, text: {"ids": ids, "padding_mask": ~text}),
    "llama": (lambda: made("llama"), lambda ids, text: {"input_ids": ids, "attention_mask": text}),
    "bert": (lambda: made("bert"), lambda ids, text: {"input_ids": ids, "attention_mask": text}),
}


def readings(model, tokens, targets):
    found = diagnose(model, tokens, targets).readings
    return {(name, each.place): each.value for name, several in found.items() for each in several}


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_a_diagnosis_of_a_padded_sequence_is_that_of_the_text_alone(name):
    make, inputs = MODELS[name]
    model = make()
    short = IDS[:1, :6]
    padded = open_model(model, example=inputs(IDS[:1], TEXT))
    alone = open_model(model, example=inputs(short, TEXT[:, :6]))
    targets = torch.where(TEXT, IDS[:1].roll(-1, 1), -1)
    found = readings(padded, IDS[:1], targets)
    expected = readings(alone, short, targets[:, :6])
    assert len(expected) > 100
    assert found == pytest.approx(expected, rel=2e-3, abs=1e-5, nan_ok=True)


def test_means_over_a_batch_are_those_of_hooks_on_each_sequence_without_padding():
    model = encoder(blocks=1)
    text = torch.cat([torch.ones_like(TEXT), TEXT])
    opened = open_model(model, example={"ids": IDS, "padding_mask": ~text})
    found = walk(opened, IDS, instruments=[States(moments)])[0]
    rows = []
    hook = model.blocks[-1].register_forward_hook(lambda *call: rows.append(call[-1][0]))
    with torch.no_grad():
        for sequence, kept in zip(IDS, text, strict=True):
            ids = sequence[kept].unsqueeze(0)
            model(ids, torch.zeros_like(ids, dtype=torch.bool))
    hook.remove()
    expected = float(torch.cat(rows).square().mean().sqrt())
    assert found[-1].rms == pytest.approx(expected, rel=1e-5)
    assert "hides 3 of 18 tokens" in opened.described
    one = walk(opened, IDS[:1], instruments=[States(moments)])[0]
    assert one[-1].rms == pytest.approx(float(rows[0].square().mean().sqrt()), rel=1e-5)


@pytest.mark.parametrize(
    ("name", "mask", "text"),
    [
        ("attention_mask", TEXT, TEXT),
        ("attention_mask", TEXT.float().log(), TEXT),
        ("mask", TEXT, TEXT),
        ("key_padding_mask", ~TEXT, TEXT),
        ("attention_mask", ~TEXT, None),  # it says that the text is hidden, which others read
        ("attention_mask", torch.ones_like(TEXT), None),
        ("loss_mask", ~TEXT, None),
        ("token_type_ids", TEXT, None),
        ("attention_mask", TEXT[:, :4], None),
    ],
)
def test_what_a_mask_hides_is_known_by_its_name_and_by_what_tokens_read(name, mask, text):
    x = torch.randn(1, 9, 4, generator=torch.Generator().manual_seed(0))

    def depth(x):
        return x + (x * TEXT.unsqueeze(-1)).mean(-2, keepdim=True)

    found = text_of({name: mask}, depth, x)
    assert (found is None) if text is None else torch.equal(found, text)


def test_a_mask_whose_tokens_are_read_hides_none():
    x = torch.randn(1, 9, 4, generator=torch.Generator().manual_seed(0))
    assert text_of({"mask": TEXT}, lambda x: x + x.mean(-2, keepdim=True), x) is None

"""A padding mask in example=: the figures of a diagnosis are those of the text alone."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ctrans import diagnose, open_model
from ctrans.interop.computed_masks import hidden_tokens
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


PAD = 0
LOW = -1e9
CAUSAL = torch.ones(9, 9, dtype=torch.bool).tril()
OWN = torch.eye(9, dtype=torch.bool)


def keys(text):
    return text[:, None, None]


def pairs(text):
    return (text[:, None, :, None] & text[:, None, None]) | OWN


COMPUTED = {
    "keys": keys,
    "keys that are added": lambda text: torch.where(keys(text), 0.0, LOW),
    "pairs": pairs,
    "heads": lambda text: (keys(text) & CAUSAL).expand(-1, 2, -1, -1),
    "causal pairs": lambda text: pairs(text) & CAUSAL,
    "keys, and itself": lambda text: (keys(text) & CAUSAL) | OWN,
}
"""Masks of other shapes than (batch, tokens), from where there is text. True shows a token."""


class MaskedBlock(nn.Module):
    def __init__(self, kernel):
        super().__init__()
        self.before = nn.LayerNorm(WIDTH)
        self.between = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        self.kernel = kernel

    def forward(self, x, mask):
        parts = self.qkv(self.before(x)).chunk(3, -1)
        q, k, v = (part.unflatten(-1, (2, -1)).transpose(1, 2) for part in parts)
        if self.kernel == "fused":
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        else:
            scores = q @ k.mT / (WIDTH // 2) ** 0.5
            if mask.dtype == torch.bool:
                scores = scores.masked_fill(~mask, LOW)
            else:
                scores = scores + mask
            y = scores.softmax(-1) @ v
        x = x + self.out(y.transpose(1, 2).flatten(-2))
        return x + self.down(torch.relu(self.up(self.between(x))))


class MasksItself(nn.Module):
    """Its mask is made from the ids, unless it is given."""

    def __init__(self, computed, kernel="fused"):
        super().__init__()
        self.embed = nn.Embedding(31, WIDTH)
        self.blocks = nn.ModuleList([MaskedBlock(kernel)])
        self.head = nn.Linear(WIDTH, 31)
        self.computed = computed

    def forward(self, ids, mask=None):
        x = self.embed(ids)
        if mask is None:
            mask = self.computed(ids != PAD)
        for block in self.blocks:
            x = block(x, mask)
        return self.head(x)


@pytest.mark.slow
@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("kernel", ["fused", "written out"])
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", COMPUTED)
def test_the_mask_that_a_model_computes_or_gets_by_head_hides_its_padding(
    name, side, kernel, given
):
    text = torch.cat([TEXT, torch.ones_like(TEXT)])
    if side == "left":
        text = text.flip(-1)
    ids = torch.where(text, IDS, PAD)
    mask = COMPUTED[name]
    torch.manual_seed(0)
    model = MasksItself(mask, kernel).eval()
    example = {"ids": ids, "mask": mask(text)} if given else ids
    if kernel == "fused" and name == "heads" and side == "left":
        return  # rows that read nothing are nan
    opened = open_model(model, example=example)
    found = walk(opened, ids, instruments=[States(moments)])[0]
    states = []
    hook = model.blocks[-1].register_forward_hook(lambda *call: states.append(call[-1]))
    with torch.no_grad():
        model(ids)
    hook.remove()
    assert "hides 3 of 18 tokens" in opened.described
    assert found[-1].rms == pytest.approx(float(states[0][text].square().mean().sqrt()), rel=1e-5)


@pytest.mark.parametrize("mask", COMPUTED.values(), ids=COMPUTED)
@pytest.mark.parametrize("text", [TEXT, TEXT.flip(-1)], ids=["right", "left"])
def test_padding_is_what_no_other_token_reads(mask, text):
    shown = mask(text)
    if shown.dtype != torch.bool:
        shown = shown == 0
    reads = shown.expand(1, 2, 9, 9).any(1)
    expected = ~text
    if text[0, 0] and mask is COMPUTED["keys, and itself"]:
        expected[..., -1] = False  # as the last token of a text: its id tells, not the mask
    assert torch.equal(hidden_tokens(~reads), expected)


def unread(reads):
    return ~reads.reshape(-1, 9, 9)


def documents(*lengths):
    """Texts after one another in a sequence, which do not read each other."""
    blocks = [torch.ones(length, length, dtype=torch.bool) for length in lengths]
    return torch.block_diag(*blocks).bool()


@pytest.mark.parametrize(
    "reads",
    [
        CAUSAL,
        torch.ones_like(CAUSAL),
        CAUSAL.triu(-2),
        documents(5, 4),
        documents(5, 4) & CAUSAL,
        documents(3, 2, 4) & CAUSAL,
        CAUSAL | (torch.arange(9) < 4),
    ],
)
def test_no_text_is_hidden_because_it_comes_last_or_in_another_document(reads):
    assert not hidden_tokens(unread(reads)).any()


def test_padding_whose_mask_is_lifted_for_its_own_rows_is_hidden():
    text = TEXT.flip(-1)
    reads = text & CAUSAL
    reads[:3] = True  # as libraries do, lest its softmax be nan
    assert torch.equal(hidden_tokens(unread(reads)), ~text)


@pytest.mark.slow
def test_equal_ids_at_the_end_that_no_mask_hides_are_named():
    ids = torch.where(torch.cat([TEXT, torch.ones_like(TEXT)]), IDS, PAD)
    torch.manual_seed(0)
    unmasked = MasksItself(lambda text: CAUSAL).eval()
    assert "3 tokens at the ends" in open_model(unmasked, example=ids).described
    assert "at the ends" not in open_model(unmasked, example=IDS).described


def test_tokens_alone_are_padding_only_in_runs_that_end_with_the_sequence():
    """Three documents of one token, of the separator that the text begins with: the first and the
    last tokens of a sequence are no run.
    """
    alone = [0, 6, 7]
    unread = torch.ones(8, 8, dtype=torch.bool).triu(1)
    unread[alone] = True
    unread[:, alone] = True
    unread[alone, alone] = False
    text = torch.ones(8, 8, dtype=torch.bool).triu(1)  # a second sequence, whose separator is read
    ids = torch.tensor([[9, 1, 2, 3, 4, 5, 9, 8], [9, 1, 2, 3, 4, 5, 6, 8]])
    ids[1, 3] = 8
    hidden = hidden_tokens(torch.stack([unread, text]), ids)
    assert not hidden.any()
    unread[5] = True
    unread[:, 5] = True
    unread[5, 5] = False
    ids[0, 5] = 9
    hidden = hidden_tokens(torch.stack([unread, text]), ids)
    assert hidden[0].tolist() == [False] * 5 + [True] * 3

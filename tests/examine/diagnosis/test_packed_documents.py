"""Several documents in one sequence, which a mask keeps apart: readings of rows beside the same
figures written out with the mask that the model has.
"""

import math
import statistics

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import ctrans

WIDTH, HEADS, TOKENS, SEPARATOR = 32, 4, 16, 0


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, mask):
        q, k, v = (
            each.unflatten(-1, (HEADS, -1)).transpose(1, 2) for each in self.qkv(x).chunk(3, -1)
        )
        with torch.no_grad():
            scores = q @ k.mT / math.sqrt(WIDTH // HEADS)
            self.scores = scores
            self.rows = scores.masked_fill(~mask, -math.inf).softmax(-1)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.out(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.before, self.between = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = Attention()
        self.ffn = nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, WIDTH))

    def forward(self, x, mask):
        x = x + self.attention(self.before(x), mask)
        return x + self.ffn(self.between(x))


class Packed(nn.Module):
    """A document begins at each separator, and tokens read their own document alone."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(50, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 50, bias=False)

    def mask_of(self, ids):
        document = (ids == SEPARATOR).cumsum(1)
        same = document[:, :, None] == document[:, None]
        return (same & torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril())[:, None]

    def forward(self, ids):
        mask = self.mask_of(ids)
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x, mask)
        return self.head(self.norm(x))


BORDERS = {
    "no": [],
    "one": [(0, 5)],
    "other ones": [(0, 5), (1, 9)],
    "many": [(row, place) for row in range(2) for place in range(0, TOKENS, 3)],
}


def packed(borders):
    torch.manual_seed(1)
    model = Packed().double()
    with torch.no_grad():
        for block in model.blocks:
            block.attention.qkv.weight[: 2 * WIDTH].mul_(3)
        model.blocks[1].attention.qkv.weight[: 2 * WIDTH].mul_(1 / 20)
    ids = torch.randint(1, 50, (2, TOKENS + 1))
    for row, place in borders:
        ids[row, place] = SEPARATOR
    return model, ids[:, :-1], ids[:, 1:]


@pytest.mark.cases(2)
@pytest.mark.parametrize("borders", BORDERS)
def test_rows_are_judged_by_what_each_may_read(borders):
    model, ids, targets = packed(BORDERS[borders])
    found = ctrans.diagnose(model, ids, targets)
    model(ids)
    count = model.mask_of(ids).sum(-1)[:, 0]  # of the tokens that a row may read
    mask = model.mask_of(ids).expand(2, HEADS, TOKENS, TOKENS)
    entropies, spreads = [], []
    for block in model.blocks:
        rows, scores = block.attention.rows, block.attention.scores
        of_rows = -(rows * rows.clamp_min(1e-300).log()).sum(-1)
        entropies.append(min(float(of_rows[:, h][count > 1].mean()) for h in range(HEADS)))
        deviations = [
            float(scores[b, h, i][mask[b, h, i]].std(correction=0))
            for b in range(2)
            for h in range(HEADS)
            for i in range(TOKENS)
            if count[b, i] > 2
        ]
        spreads.append(statistics.median_low(deviations))
    least = [reading.value for reading in found.readings["least entropy of a head"]]
    assert least == pytest.approx(entropies, rel=1e-9)
    if borders == "many":  # a document of three tokens has one row that counts
        return
    for k, reading in enumerate(found.readings["scores over the other layers'"]):
        others = statistics.median(spread for j, spread in enumerate(spreads) if j != k)
        assert reading.value == pytest.approx(spreads[k] / others, rel=0.02)
    assert "scores of another scale" in [finding.check for finding in found.findings]


def test_a_document_of_one_token_at_the_end_is_no_padding():
    model, ids, _ = packed([(0, TOKENS - 1), (1, 8)])
    opened = ctrans.open_model(model, example=ids)
    assert "padding" not in opened.described
    states = ctrans.simulate(opened, ids, reference=False)
    every_token = model.embedding(ids).square().mean().sqrt()
    assert states.rms[0] == pytest.approx(every_token.item(), rel=1e-12)

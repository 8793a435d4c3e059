"""The loss beside guessing, counting and shuffled targets: closed forms and brute force."""

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import ctrans
from ctrans.examine.diagnosis.loss_rivals import _of_logits, counting_pairs, counting_tokens

WIDTH = 16
VOCABULARY = 11


def test_counting_leaves_out_the_token_that_it_predicts():
    y = torch.tensor([3, 3, 1, 4, 3, 1])
    by_hand = []
    for i in range(6):
        others = [int(y[j]) for j in range(6) if j != i]
        by_hand.append(-math.log((others.count(int(y[i])) + 1) / (5 + VOCABULARY)))
    assert math.isclose(counting_tokens(y, VOCABULARY), sum(by_hand) / 6)


def test_counting_pairs_leaves_out_the_pair_that_it_predicts():
    before = torch.tensor([2, 2, 5, 2, 5, 2])
    y = torch.tensor([3, 3, 1, 4, 1, 3])
    by_hand = []
    for i in range(6):
        others = [j for j in range(6) if j != i]
        p1 = (sum(int(y[j] == y[i]) for j in others) + 1) / (5 + VOCABULARY)
        pairs = sum(int(y[j] == y[i] and before[j] == before[i]) for j in others)
        firsts = sum(int(before[j] == before[i]) for j in others)
        by_hand.append(-math.log((pairs + p1) / (firsts + 1)))
    assert math.isclose(counting_pairs(before, y, VOCABULARY), sum(by_hand) / 6)


class Successor(nn.Module):
    """It predicts the id after the one that it reads. Its blocks add nothing, or little."""

    def __init__(self, trained=True):
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(VOCABULARY, WIDTH)
        nn.init.orthogonal_(self.table.weight)
        self.blocks = nn.ModuleList(Block(trained) for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        with torch.no_grad():
            self.head.weight.copy_(8 * self.table.weight.roll(1, 0))

    def forward(self, ids):
        x = self.table(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Block(nn.Module):
    def __init__(self, trained):
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attn = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.ffn = nn.Sequential(nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH))
        with torch.no_grad():
            for matrix in (self.attn.out_proj.weight, self.ffn[2].weight):
                matrix.mul_(0.02)
            if trained:
                for norm in (self.n1, self.n2):
                    norm.weight.add_(0.1 * torch.randn(WIDTH))

    def forward(self, x):
        u = self.n1(x)
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1]).to(x)
        x = x + self.attn(u, u, u, attn_mask=mask, need_weights=False)[0]
        return x + self.ffn(self.n2(x))


def text():
    ids = torch.arange(40).unsqueeze(0) + torch.tensor([[0], [4]])
    return (ids * ids % 7 + ids) % VOCABULARY


def found(model, ids, targets, **options):
    opened = ctrans.open_model(model.double(), example=ids, **options)
    diagnosis = ctrans.diagnose(opened, ids, targets)
    checks = {"targets are not predicted", "worse than counting"}
    return diagnosis, checks & {finding.check for finding in diagnosis.findings}


@pytest.mark.cases(3)
def test_a_model_that_predicts_its_targets_has_no_finding_of_its_loss():
    ids = text()
    model = Successor()
    diagnosis, findings = found(model, ids, successors(model, ids))
    assert not findings
    (loss,) = diagnosis.readings["loss on this text"]
    assert "guessing has 2.4, counting tokens" in loss.figure


def successors(model, ids):
    with torch.no_grad():
        return model.double()(ids).argmax(-1)


@pytest.mark.cases(3)
@pytest.mark.parametrize("loss", [None, "given"])
def test_a_head_drawn_anew_predicts_no_targets(loss):
    ids = text()
    model = Successor()
    targets = successors(model, ids)
    nn.init.normal_(model.head.weight, std=0.02)
    options = {}
    if loss:
        options["loss"] = lambda output, y: F.cross_entropy(output.flatten(0, 1), y.flatten())
    _, findings = found(model, ids, targets, **options)
    assert findings == {"targets are not predicted"}


@pytest.mark.cases(3)
def test_targets_that_are_shifted_once_more_are_not_predicted():
    ids = text()
    model = Successor()
    targets = successors(model, ids)
    order = torch.randperm(targets.numel(), generator=torch.Generator().manual_seed(1))
    _, findings = found(model, ids, targets.flatten()[order].view(targets.shape))
    assert findings == {"targets are not predicted"}


@pytest.mark.cases(3)
def test_an_untrained_model_is_not_asked_for_its_loss():
    ids = text()
    model = Successor(trained=False)
    targets = successors(model, ids)
    nn.init.normal_(model.head.weight, std=0.02)
    diagnosis, findings = found(model, ids, targets)
    assert not findings
    assert "loss on this text" in diagnosis.readings
    assert "loss against shuffled targets" not in diagnosis.readings


def test_shuffled_losses_have_the_mean_and_spread_of_all_orders():
    """All 8! orders would take long: 8 targets of two kinds have 70."""
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(1, 8, 3, generator=generator, dtype=torch.float64)
    y = torch.tensor([[0, 0, 0, 0, 1, 1, 1, 1]])
    log_p = logits.log_softmax(-1)[0]
    every = []
    for ones in itertools.combinations(range(8), 4):
        order = torch.tensor([int(i in ones) for i in range(8)])
        every.append(float(F.nll_loss(log_p, order)))
    rivals = _of_logits(logits, y, y)
    expected = torch.tensor(every)
    assert abs(rivals.shuffled - float(expected.mean())) < 4 * float(expected.std()) / 200**0.5
    assert abs(rivals.spread / float(expected.std(correction=0)) - 1) < 0.2

import math

import pytest
import torch

from ctrans import GPT, GPTConfig, diagnose
from ctrans.examine.diagnosis import unit_instruments
from ctrans.measure.attention.row_entropy import entropy_of_rows
from ctrans.training.monitor import scores


def causal_scores(heads=2, tokens=6):
    drawn = torch.randn(heads, tokens, tokens, generator=torch.Generator().manual_seed(0)).double()
    later = torch.ones(tokens, tokens, dtype=torch.bool).triu(1)
    return drawn.masked_fill(later, -math.inf)


def test_the_entropy_of_a_row_is_that_of_its_definition():
    weights = causal_scores().softmax(-1)
    for row, entropy in zip(
        weights.flatten(0, -2), entropy_of_rows(weights).flatten(), strict=True
    ):
        expected = -sum(float(a) * math.log(a) for a in row if a > 0)
        assert float(entropy) == pytest.approx(expected, abs=1e-14)


def test_the_monitor_reports_the_share_of_the_largest_entropy():
    of_model = causal_scores()
    entropies = entropy_of_rows(of_model.softmax(-1))
    counts = torch.arange(1, 7).double()
    # the first row reads one token
    expected = (entropies[:, 1:] / counts[1:].log()).mean(-1)
    torch.testing.assert_close(scores.row_entropy(of_model), expected)


def reported_by_monitor():
    return float(scores.row_entropy(causal_scores())[0])


def reported_by_diagnosis():
    config = GPTConfig(vocab_size=11, context=8, depth=1, width=8, heads=2, placement="pre", dt=1.0)
    tokens = torch.randint(11, (2, 8), generator=torch.Generator().manual_seed(0))
    readings = diagnose(GPT(config, seed=0), tokens).readings
    return readings["median entropy of a head"][0].value


@pytest.mark.parametrize(
    ("module", "report"),
    [(scores, reported_by_monitor), (unit_instruments, reported_by_diagnosis)],
)
def test_the_monitor_and_the_diagnosis_take_it_from_here(module, report, monkeypatch):
    before = report()
    monkeypatch.setattr(module, "entropy_of_rows", lambda weights: 2 * entropy_of_rows(weights))
    assert report() == pytest.approx(2 * before, rel=1e-12)

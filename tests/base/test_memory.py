"""Maps whose matrices do not fit are refused before they are allocated."""

import pytest
import torch

from ctrans.dynamics.fields import (
    Attention,
    DifferentialAttention,
    FeedForward,
    GatedLinearAttention,
    GatedLinearUnits,
    LinearAttention,
    MixtureOfExperts,
)
from solvers import ConfigError

ATTENTIONS = [Attention, LinearAttention, GatedLinearAttention, DifferentialAttention]
FFNS = [FeedForward, GatedLinearUnits, MixtureOfExperts]


@pytest.mark.parametrize(
    ("kind", "size"), [*((kind, 2) for kind in ATTENTIONS), *((kind, 32) for kind in FFNS)]
)
def test_matrices_that_exceed_the_memory_are_refused(kind, size, monkeypatch):
    """Either side of the threshold, which small matrices, as those of a router or of gates, may
    move by a tenth.
    """
    entries = sum(weight.numel() for weight in kind(16, size).parameters() if weight.dim() > 1)
    monkeypatch.setattr("ctrans.base.memory.memory", lambda: 4 * entries)
    kind(16, size)
    monkeypatch.setattr("ctrans.base.memory.memory", lambda: 3.6 * entries)
    with pytest.raises(ConfigError, match="lower the width"):
        kind(16, size)
    with torch.device("meta"):  # needs none of this memory
        kind(16, size)


def test_more_entries_than_any_machine_holds_are_refused():
    with pytest.raises(ConfigError, match="the weights need"):
        LinearAttention(10**8, 2)

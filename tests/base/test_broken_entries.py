"""Entries of buffers that are nan or inf, counted beside the planted ones."""

import math

import pytest
import torch
from torch import nn

from ctrans import diagnose
from ctrans.base.broken_entries import broken_entries, broken_tensors
from solvers import ConfigError
from tests.interop.test_refused_inputs import IDS, Model


@pytest.mark.parametrize(
    ("buffer", "broken"),
    [
        (torch.tensor([0, math.nan, math.inf, -math.inf]), 2),
        (torch.tensor([0, math.nan]).half().expand(3, 2), 3),
        (torch.tensor([1, complex(0, math.nan), complex(-math.inf, 0), complex(math.inf, 2)]), 3),
        (torch.tensor([[complex(1, math.inf)]]).conj(), 1),
        (torch.tensor(complex(math.nan, math.nan)), 1),
        (torch.tensor(math.inf), 0),
        (torch.tensor(math.nan), 1),
        (torch.full((3, 3), -math.inf).triu(1), 0),
        (torch.arange(4), 0),
        (torch.ones(2, 2, device="meta"), 0),
        (torch.ones(0) + 0j, 0),
        (torch.ones(2, 2).to_sparse(), 0),
    ],
)
def test_broken_entries_are_counted(buffer, broken):
    assert broken_entries(buffer) == broken


class Turning(nn.Module):
    """Turns an embedding by complex numbers, as rotary positions turn queries."""

    def __init__(self, embed, factor, is_weight):
        super().__init__()
        self.embed = embed
        turns = torch.ones(10, embed.embedding_dim // 2, dtype=torch.complex64)
        turns[3, 1] = factor
        if is_weight:
            self.turns = nn.Parameter(turns)
        else:
            self.register_buffer("turns", turns)

    def forward(self, ids):
        pairs = torch.view_as_complex(self.embed(ids).unflatten(-1, (-1, 2)))
        return torch.view_as_real(pairs * self.turns).flatten(-2)


def turned(factor, is_weight):
    model = Model()
    model.embed = Turning(model.embed, factor, is_weight)
    return model.eval()


@pytest.mark.parametrize(("is_weight", "kind"), [(True, "weight"), (False, "buffer")])
def test_a_module_that_computes_nan_names_the_complex_numbers_that_are(is_weight, kind):
    with pytest.raises(ConfigError, match=f"The {kind} embed.turns has 1 of 60 entries"):
        diagnose(turned(complex(0, math.nan), is_weight), IDS)


@pytest.mark.slow
def test_nan_in_a_buffer_that_no_example_reads_is_a_finding_with_its_name():
    model = turned(1j, is_weight=False)
    assert not list(broken_tensors(model))
    model.register_buffer("spare", torch.tensor([1, complex(1, math.nan)]))
    found = diagnose(model, IDS)
    places = [finding.place for finding in found.findings if finding.check == "not finite"]
    assert places == ["the buffer spare"]

"""What is said where a module does not run on its example: heads and lengths by their numbers."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ctrans import open_model
from solvers import ConfigError

WIDTH = 12
IDS = torch.arange(10).reshape(1, 10)


class Block(nn.Module):
    def __init__(self, num_heads, mask, cuts_mask):
        super().__init__()
        self.num_heads = num_heads
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.cuts_mask = cuts_mask
        if mask:
            self.register_buffer("tril", torch.ones(mask, mask).tril().bool())

    def forward(self, x):
        parts = self.qkv(self.norm(x)).chunk(3, -1)
        q, k, v = (part.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for part in parts)
        mask = getattr(self, "tril", None)
        if self.cuts_mask:
            mask = mask[: x.shape[1], : x.shape[1]]
        y = F.scaled_dot_product_attention(q, k, v, mask)
        return x + self.out(y.transpose(1, 2).flatten(-2))


class Model(nn.Module):
    def __init__(self, num_heads=3, mask=None, cuts_mask=False, places=None):
        super().__init__()
        self.embed = nn.Embedding(50, WIDTH)
        self.blocks = nn.ModuleList(Block(num_heads, mask, cuts_mask) for _ in range(2))
        self.head = nn.Linear(WIDTH, 50)
        self.place = nn.Embedding(places, WIDTH) if places else None

    def forward(self, ids):
        x = self.embed(ids)
        if self.place is not None:
            x = x + self.place(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@pytest.mark.parametrize(
    ("options", "example", "reason"),
    [
        (
            {"num_heads": 5},
            IDS,
            "blocks.0 has 5 heads, which do not divide its width of 12: make it with heads that do"
            " (1, 2, 3, 4, 6, 12), or with a width that is a multiple of 5",
        ),
        (
            {"mask": 8, "cuts_mask": True},
            IDS,
            "have 10 tokens, and it runs on at most 8 (blocks.0.tril (8, 8) and 1 more): give"
            " sequences of at most 8 tokens, or make",
        ),
        ({"mask": 8}, IDS, "it runs on exactly 8 (blocks.0.tril (8, 8) and 1 more)"),
        ({"mask": 15}, IDS, "it runs on exactly 15 (blocks.0.tril (15, 15) and 1 more)"),
        ({"mask": 8}, {"ids": IDS}, "it runs on exactly 8"),
    ],
)
def test_what_does_not_fit_the_module_is_named_with_its_limit(options, example, reason):
    with pytest.raises(ConfigError) as caught:
        open_model(Model(**options).eval(), example=example)
    assert reason in str(caught.value)


def test_longer_inputs_than_a_table_of_places_are_named_for_an_open_model():
    opened = open_model(Model(places=8).eval(), example=IDS[:, :8])
    with pytest.raises(ConfigError, match=r"at most 8 \(place.weight \(8, 12\)\)"):
        opened.model.embed(IDS)


def test_heads_that_divide_the_width_and_lengths_that_fit_run():
    assert open_model(Model(num_heads=4, mask=10).eval(), example=IDS).depth.blocks == 2

"""What a monitor cannot see it says: once in the logger, and in the header of its log."""

import logging

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ctrans.training.monitor import Monitor, read_log
from ctrans.training.monitor.sites import sites_of, unwatched_blocks
from tests.interop.test_wrong_models import WIDTH, Block, Model, batch


class EncoderAndDecoder(Model):
    """Its output reads the encoder only by a sum outside of the blocks."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.ModuleDict({"layers": nn.ModuleList([Block(), Block(), Block()])})

    def forward(self, ids):
        memory = self.table(ids)
        for block in self.encoder["layers"]:
            memory = block(memory)
        return super().forward(ids) + 0 * memory.mean()


def train(model, *, steps=3, with_optimizer=True, zero_first=False, **options):
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    ids, targets = batch()
    with Monitor(model, every=1, example=ids, **options) as monitor:
        for _ in range(steps):
            loss = F.cross_entropy(model(ids).flatten(0, 1), targets.flatten())
            loss.backward()
            if zero_first:
                optimizer.zero_grad()
            monitor.step(loss, optimizer if with_optimizer else None)
            optimizer.step()
            optimizer.zero_grad()


@pytest.fixture
def logged(caplog):
    with caplog.at_level(logging.WARNING, "ctrans.training.monitor"):
        yield caplog


def test_a_step_without_an_optimizer_says_once_what_is_not_measured(logged):
    train(Model(), with_optimizer=False)
    (record,) = logged.records
    assert "step 1: no optimizer was given, so learning rates" in record.getMessage()


def test_a_step_after_zero_grad_says_once_what_is_not_measured(logged):
    train(Model(), zero_first=True)
    (record,) = logged.records
    assert "step 1: no weight has a gradient" in record.getMessage()
    assert "before optimizer.zero_grad()" in record.getMessage()


def test_a_usual_loop_says_nothing(logged):
    train(Model())
    assert not logged.records


def test_the_header_names_the_blocks_that_are_not_watched(tmp_path):
    train(EncoderAndDecoder(), steps=1, out=tmp_path, blocks="blocks")
    header = read_log(tmp_path).header
    assert len(header.places) == 4
    assert header.unseen == "blocks that are not watched: encoder.layers (3 of 3 Block)"


def test_all_blocks_of_a_usual_model_are_watched(tmp_path):
    train(Model(), steps=1, out=tmp_path)
    assert read_log(tmp_path).header.unseen == ""


def test_a_head_of_several_maps_is_no_block():
    model = Model()
    model.head = nn.Sequential(nn.Linear(WIDTH, 16), nn.GELU(), nn.Linear(16, 11))
    assert unwatched_blocks(sites_of(model, example=batch()[0])) == []

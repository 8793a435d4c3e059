"""A velocity is the raw one, before a norm around the state, in each way of reading a model."""

import pytest
import torch
import torch.nn.functional as F

from ctrans.training.monitor import Monitor
from tests.interop.test_ways_of_writing import ATTENTIONS, Model, ids


@pytest.mark.parametrize("factor", [None, 1.0, 1.5])
def test_the_velocity_of_a_watched_part_is_that_of_its_map(factor):
    """Pre-LN, Post-LN, and DeepNorm with its factor on the state."""
    torch.manual_seed(0)
    module = Model(next(iter(ATTENTIONS.values())), factor=factor).double()
    monitor = Monitor(module, every=1, example=ids())
    loss = F.cross_entropy(module(ids()).flatten(0, 1), ids().roll(-1, 1).flatten())
    loss.backward()
    monitor.step(loss.detach())
    monitor.close()
    figures = monitor.past.reports[-1][1]
    with torch.no_grad():
        states = module.states(ids())
        parts = monitor.sites.model.depth.sublayers
        moves = [part(x) for part, x in zip(parts, states, strict=False)]
    for name, tensors in (("rms", states), ("velocity", moves)):
        expected = [float(each.square().mean().sqrt()) for each in tensors]
        assert figures[name] == pytest.approx(expected, rel=1e-5), name

"""Every family of `ctrans.interop.families` is watched where its states and velocities are: those
of a walk, from the model's own pass.
"""

import pytest
import torch
from torch import nn

pytest.importorskip("transformers")

from ctrans.interop.example_inputs import main_input
from ctrans.interop.families import FAMILIES, small_model
from ctrans.measure.walk import States, walk
from ctrans.training.monitor import Monitor
from ctrans.training.monitor import probes as probing
from ctrans.training.monitor.probes import bounds
from tests.helpers import learned
from tests.interop.test_all_families import batch


def without_dropout(model):
    for part in model.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.0
        for name, value in vars(part).items():
            if "drop" in name and isinstance(value, float):
                setattr(part, name, 0.0)
    return model


@pytest.mark.cases(1)
@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if not family.refused])
def test_a_pass_that_trains_shows_the_states_and_velocities_of_a_walk(name, monkeypatch):
    monkeypatch.setattr(probing, "PROBES", {"bounds": bounds})
    model = without_dropout(learned(small_model(name), 0.1)).train()
    x = batch(model)
    monitor = Monitor(model, every=1, probe_every=1, held=(x, x))
    output = model(**{main_input(model): x})
    loss = (
        next(value for value in output.values() if isinstance(value, torch.Tensor)).square().mean()
    )
    loss.backward()
    monitor.step(loss)
    monitor.close()
    assert monitor.gauges.missing == {}
    figures = monitor.past.reports[-1][1]
    model.eval()
    states = walk(monitor.sites.model, x, instruments=[States()])[0]
    velocities = [
        part(state)
        for part, state in zip(monitor.sites.model.depth.sublayers, states, strict=False)
    ]
    for gauge, found in (("rms", states), ("velocity", velocities)):
        expected = [float(part.square().mean().sqrt()) for part in found]
        assert figures[gauge] == pytest.approx(expected, rel=1e-4), gauge
    assert all(not share > 1 + 1e-5 for share in figures.get("bound_share", []))
    mixing = [site for site in monitor.sites.by_depth if site.sublayer.kind != "ffn"]
    assert len(figures["costate"]) == len(states)
    assert len(mixing) >= 2

"""Loops of other libraries: a hook on the optimiser calls the monitor, and `told` gives reports to
any logger.
"""

import csv

import pytest
import torch

from ctrans.training.monitor import Monitor
from tests.training.monitor.test_bits import gpt


def trained(accelerator, watched, file=None):
    """The weights after 12 steps of an Accelerate loop that accumulates two batches, the monitor,
    and each step's gradient norm.
    """
    torch.manual_seed(0)
    model = gpt()
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-3)
    norms, monitor = [], None
    if watched:
        writer = csv.writer(file)
        monitor = Monitor(
            model,
            every=3,
            told=[lambda step, figures: writer.writerows((step, *row) for row in figures.items())],
        )

        def report(optimiser, *_):
            norms.append(float(torch.stack([p.grad.norm() for p in model.parameters()]).norm()))
            monitor.step(None, optimiser)

        optimiser.register_step_pre_hook(report)
    called, wrapped = accelerator.prepare(model, optimiser)
    generator = torch.Generator().manual_seed(0)
    for _ in range(24):
        tokens = torch.randint(32, (2, 9), generator=generator)
        with accelerator.accumulate(called):
            accelerator.backward(called(tokens[:, :-1], tokens[:, 1:])[1])
            wrapped.step()
            wrapped.zero_grad()
    if monitor is not None:
        monitor.close()
    return model.state_dict(), monitor, norms


def test_a_hook_on_the_optimiser_watches_an_accelerate_loop_and_its_reports_fill_a_csv(tmp_path):
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    without, _, _ = trained(accelerator, False)
    with (tmp_path / "reports.csv").open("w", newline="") as file:
        weights, monitor, norms = trained(accelerator, True, file)
    assert all(torch.equal(weights[name], without[name]) for name in without)
    assert len(norms) == 12
    assert [step for step, _ in monitor.past.reports] == [1, 3, 6, 9, 12]
    assert monitor.gauges.missing == {}
    assert {"rms", "logit", "costate", "update"} <= set(monitor.past.reports[-1][1])
    rows = list(csv.reader((tmp_path / "reports.csv").open()))
    kept = {int(step): float(value) for step, name, value in rows if name == "gradient_norm"}
    assert kept == pytest.approx({step: norms[step - 1] for step in (1, 3, 6, 9, 12)})

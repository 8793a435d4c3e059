"""`ctrans watch RUN --why` names the place and the step at which a known fault was put into a
training.
"""

import math

import numpy as np
import pytest
import torch

from ctrans import GPT, GPTConfig
from ctrans.training.monitor import Monitor
from ctrans.training.monitor.log import LOG, read_log
from ctrans.training.monitor.post_mortem import FLOOR, LEAST, _leaving, post_mortem
from tests.cli.test_commands import run, strict

EVENT, END = 42, 48


def train(directory, fault=None):
    """A training of three blocks on one text of 16 tokens; the fault acts before each step from
    EVENT on.
    """
    model = GPT(
        GPTConfig(vocab_size=17, context=8, depth=3, width=16, heads=2, placement="pre"), seed=1
    )
    draws = torch.Generator().manual_seed(3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    monitor = Monitor(model, every=1, out=directory)
    for step in range(1, END + 1):
        scale = fault(step, model, optimizer) if fault and step >= EVENT else None
        tokens = torch.randint(17, (8, 9), generator=draws).sort(-1).values
        loss = model(tokens[:, :-1], tokens[:, 1:])[1] * (1.0 if scale is None else scale)
        loss.backward()
        monitor.step(loss, optimizer)
        optimizer.step()
        optimizer.zero_grad()
    monitor.close()


@torch.no_grad()
def redraw(step, model, optimizer):
    """The FFN of block 1 is drawn anew, with weights of another size."""
    if step == EVENT:
        for weight in model.depth.sublayers[3].field.parameters():
            weight.normal_(0.0, 1.0)


def jump(step, model, optimizer):
    optimizer.param_groups[0]["lr"] = 0.1


def broken(step, model, optimizer):
    return math.nan if step == EVENT else 1.0


@pytest.fixture(scope="module")
def logs(tmp_path_factory):
    """A directory for each training: healthy, and with each fault."""
    made = {fault: tmp_path_factory.mktemp("run") for fault in (None, redraw, jump, broken)}
    for fault, directory in made.items():
        train(directory, fault)
    return made


@pytest.mark.slow
def test_nothing_leaves_the_past_of_a_healthy_training(logs):
    found = post_mortem(read_log(logs[None]))
    assert (found.deviations, found.loss, found.sigma) == ([], None, None)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "gauge", "place"),
    [
        (redraw, "velocity", "block 1, ffn"),
        (jump, "learning_rate", "the model"),
        (broken, "loss", "the model"),
    ],
)
def test_the_fault_is_what_moved_first(logs, fault, gauge, place):
    found = post_mortem(read_log(logs[fault]))
    first = found.deviations[0]
    assert (first.gauge, first.place, first.step) == (gauge, place, EVENT)
    assert found.loss is None or found.loss >= EVENT
    assert [each.step for each in found.deviations] == sorted(
        each.step for each in found.deviations
    )
    assert not any(
        each.place.startswith("block 0") and each.gauge == "velocity" and each.step == EVENT
        for each in found.deviations
    )


@pytest.mark.slow
def test_what_is_told_of_the_loss_and_of_the_6_sigma_rule(logs):
    found = post_mortem(read_log(logs[broken]))
    assert (found.loss, found.sigma) == (EVENT, EVENT)


@pytest.mark.slow
def test_a_short_run_has_no_past(logs, tmp_path):
    lines = (logs[redraw] / LOG).read_text().splitlines(keepends=True)
    (tmp_path / LOG).write_text("".join(lines[:LEAST]))
    assert post_mortem(read_log(tmp_path)).deviations == []
    result = run("watch", tmp_path, "--once", "--why")
    assert result.exit_code == 0, result.output
    assert f"{LEAST - 1} reports cannot say what moved first" in result.output


@pytest.mark.slow
def test_a_schedule_that_ends_is_no_deviation(logs):
    log = read_log(logs[None])
    rates = log.series("learning_rate")
    rates[:] = 1e-3 * 0.75 ** np.arange(len(rates)).reshape(rates.shape)
    assert [t for t, *_ in _leaving(rates.reshape(-1, 1), growth=True)], "it shrinks along a line"
    assert [t for t, *_ in _leaving(rates.reshape(-1, 1), growth=False)] == []


@pytest.mark.parametrize(("deviations", "told"), [(11, False), (13, True)])
def test_less_than_the_limit_is_noise(deviations, told):
    """A past whose logarithms are all alike is `FLOOR` wide."""
    values = np.ones((2 * LEAST, 1))
    values[LEAST:] = math.exp(deviations * FLOOR)
    assert [t for t, *_ in _leaving(values)] == ([LEAST] if told else [])


@pytest.mark.slow
def test_why_is_shown_and_written(logs, tmp_path):
    result = run("watch", logs[redraw], "--once", "--why", "--out", tmp_path)
    assert result.exit_code == 0, result.output
    assert "block 1, ffn" in result.output
    assert f"step {EVENT}" in result.output
    why = strict((tmp_path / "watch.json").read_text())["why"]
    assert (why["deviations"][0]["place"], why["deviations"][0]["step"]) == ("block 1, ffn", EVENT)

"""Alarms on made-up pasts: each rule sees what it is for, and nothing in a training that is
well.
"""

import dataclasses
import math
import re
from pathlib import Path

import pytest
import torch

from ctrans import GPT, GPTConfig
from ctrans.measure.measures import MEASURES, Measure
from ctrans.report.files import to_json
from ctrans.training.monitor import ALARMS, Monitor
from ctrans.training.monitor.alarms import Watch
from ctrans.training.monitor.past import Past, trend
from ctrans.training.monitor.past_checks import grows, spike
from docs._site.tables import alarms_tables
from solvers import ConfigError

PLACES = [f"block {k // 2}, {'ffn' if k % 2 else 'attention'}" for k in range(6)]


def well(i):
    """A report of a training that is well."""
    return {
        "loss": 5.0 * 0.99**i,
        "gradient_norm": 1.0 + 0.1 * math.sin(i),
        "log_z": 3.7,
        "rms": [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7],
        "largest": [1.0] * 7,
        "costate": [1.0, 0.9, 0.8, 0.7, 0.6, 0.5, math.nan],
        "velocity": [1.0] * 6,
        "spread": [0.9] * 6,
        "step_share": [0.5] * 6,
        "gradient": [0.3] * 6,
        "update": [1e-3] * 6,
        "rate_share": [1.0] * 6,
        "decay_share": [0.1] * 6,
        "unmoved": [0.0] * 6,
        "learning_rate": 1e-3,
        "softmaxes": 1.0,
        "adam_memory": 100.0,
        "update_outside": 1e-3,
        "ahead": [0.0] * 6,
        "copied": 0.2,
        "foreseen": 0.3,
        "adam_gradient_ratio": [1.0] * 6,
        "routing": [math.nan, 0.9] * 3,
        "logit": [2.0] * 6,
        "entropy": [0.8] * 6,
        "target_weight": 1.0,
        "raised_targets": 0.0,
        "backward_passes": 1.0,
        "target_unevenness": 1.0,
        "over_guessing": -1.0 - 0.01 * i,
        "exchanged_targets": -20.0,
        "target_ahead": 1.0,
        "padding_counted": 0.0,
        "same_batch": 0.0,
        "commonest_token": 0.1,
        "unlike_before": 0.1 + 0.01 * math.sin(i),
        "ungrouped": [0.0] * 6,
        "ungrouped_outside": 0.0,
        "lost_entries": [0.1] * 6,
        "optimizer_steps": 1.0,
        "label_smoothing": 0.1,
        "weight_decay": 1e-4,
        "gain_decay": 1e-5,
        "gain_size": 1.0,
    }


def at(name, place, value):
    def change(i, figures):
        row = list(figures[name])
        row[place] = value(i)
        return {name: row}

    return change


def run(name, value):
    return lambda i, figures: {name: value(i)}


FAULTS = {
    "near the end of float16": at("largest", 3, lambda i: 10.0 * 1.6**i),
    "attention logits grow": at("logit", 3, lambda i: 2.0 * 1.3**i),
    "output logits drift": run("log_z", lambda i: 3.7 + 0.5 * 1.5**i),
    "embedding grows": at("rms", 0, lambda i: 0.1 * 1.5**i),
    "hidden states grow too large": at("rms", 5, lambda i: 0.6 * 1.7**i),
    "gradients explode by depth": at("costate", 0, lambda i: 1.0 * 2.5**i),
    "gradients vanish by depth": at("costate", 0, lambda i: 0.5**i),
    "gradient spike": run("gradient_norm", lambda i: 30.0 if i == 12 else 1.0),
    "loss spike": run("loss", lambda i: 9.0 if i == 12 else 5.0 * 0.99**i),
    "updates too large": lambda i, figures: {"update": [0.4] * 6},
    "Adam's second moments too small": lambda i, figures: {"adam_gradient_ratio": [4.0] * 6},
    "Adam's second moments too large": lambda i, figures: {"adam_gradient_ratio": [0.05] * 6},
    "attention collapsed": at("entropy", 1, lambda i: 0.8 * 0.5**i),
    "step larger than the state": lambda i, figures: {"step_share": [3.0] * 6},
    "dead layer": at("velocity", 4, lambda i: 0.0),
    "sublayer outgrows its past": at("velocity", 3, lambda i: 20.0 if i > 20 else 1.0),
    "frozen layer": at("unmoved", 4, lambda i: 0.5),
    "nothing moves": lambda i, figures: {"update": [0.0] * 6, "update_outside": 0.0},
    "updates near zero": lambda i, figures: {
        "update": [1.1e-4] * 6
    },  # all but a tenth of it is weight decay
    "embedding updates too large": run("update_outside", lambda i: 0.2),
    "gradients are not reset": run("earlier_gradient", lambda i: 1e-3),
    "softmax twice": run("softmaxes", lambda i: 2.0),
    "Adam remembers too long": run("adam_memory", lambda i: 1e4),
    "loss stays high": run("loss", lambda i: 5.0 * 0.99**i if i < 40 else 5.01),
    "targets leak": lambda i, figures: {"copied": 1.0, "loss": 0.05},
    "router collapse": at("routing", 3, lambda i: 0.9 if i < 20 else 0.5),
    "learning rate has ended": run("learning_rate", lambda i: 1e-3 if i < 20 else 1e-8),
    "loss is raised": run("raised_targets", lambda i: 1.0),
    "accumulation is not divided": lambda i, figures: {
        "target_weight": 4.0,
        "backward_passes": 4.0,
    },
    "targets count unequally": run("target_unevenness", lambda i: 1.5),
    "no better than guessing": lambda i, figures: {"over_guessing": 0.0, "exchanged_targets": 0.0},
    "targets unrelated to inputs": run("exchanged_targets", lambda i: -1.0),
    "targets are not the next tokens": run("target_ahead", lambda i: 2.0),
    "padding is predicted": run("padding_counted", lambda i: 0.4),
    "same batch again": run("same_batch", lambda i: 1.0),
    "one token fills the batch": run("commonest_token", lambda i: 0.95),
    "tokens unlike those before": run("unlike_before", lambda i: 2.0 if i > 20 else 0.1),
    "weights in no group": at("ungrouped", 2, lambda i: 1.0),
    "embedding or head in no group": run("ungrouped_outside", lambda i: 0.5),
    "steps are lost to rounding": lambda i, figures: {"lost_entries": [0.7] * 6},
    "targets are smoothed away": run("label_smoothing", lambda i: 0.9),
    "weights are forgotten": run("weight_decay", lambda i: 0.03),
    "gains decay": lambda i, figures: {"gain_decay": 1e-3, "gain_size": math.exp(-0.04 * i)},
    "optimizer forgot its past": run("optimizer_steps", lambda i: 0.01 * (i - 20) if i > 20 else 1),
}


def told(change=None, half=False, reports=48):
    past, watch, alarms = Past(PLACES, [2, 0, 2, 0, 2, 0], 40), Watch(), []
    past.half = half
    for i in range(reports):
        figures = well(i)
        if change is not None:
            figures |= change(i, figures)
        step = 50 * (i + 1)
        past.losses.append((step, figures["loss"]))
        past.add(step, figures)
        alarms.extend(watch.look(past))
    return alarms


@pytest.mark.parametrize(
    ("evenness", "collapses"),
    [
        (lambda i: 0.25 + 0.02 * i, False),
        (lambda i: min(0.8, 0.25 + 0.05 * i), False),
        (lambda i: 0.28 + 0.05 * math.sin(i), False),
        (lambda i: 0.26, True),
        (lambda i: 0.9 * 0.97**i, True),
    ],
    ids=["spreads", "has spread", "moves", "never began", "falls"],
)
def test_a_router_is_compared_with_its_own_past(evenness, collapses):
    said = {alarm.check for alarm in told(at("routing", 3, evenness))}
    assert ("router collapse" in said) == collapses


@pytest.mark.parametrize(
    "rate",
    [
        lambda i: 1e-3 * (i + 1) / 48,
        lambda i: 0.5e-3 * (1 + math.cos(math.pi * (i + 1) / 48)),
        lambda i: 1e-3 * 0.9**i,
        lambda i: 0.0,
    ],
    ids=["warm-up", "cosine", "exponential", "none"],
)
def test_a_schedule_of_the_whole_run_has_not_ended_early(rate):
    said = {alarm.check for alarm in told(run("learning_rate", rate))}
    assert "learning rate has ended" not in said


@pytest.mark.parametrize(
    "change",
    [
        at("velocity", 3, lambda i: 20.0 if i == 20 else 1.0),
        lambda i, f: {"velocity": [3.0**i] * 6},
    ],
)
def test_a_sublayer_that_grows_once_or_with_all_others_is_not_told(change):
    assert "sublayer outgrows its past" not in {alarm.check for alarm in told(change)}


def test_nothing_is_said_of_a_training_that_is_well():
    assert told() == []
    assert told(half=True) == []


def test_weights_so_large_that_decay_is_most_of_a_step_tell_nothing_of_updates():
    assert told(lambda i, figures: {"update": [0.9e-4] * 6, "rate_share": [0.1] * 6}) == []


def test_steps_that_are_skipped_are_no_updates_near_zero():
    def skipped(i, figures):
        moved = 0.0 if i % 3 else 3e-3
        return {"update": [moved] * 6, "update_outside": moved}

    assert told(skipped) == []
    rounded = told(lambda i, figures: {"update": [1e-4] * 6, "update_outside": 1e-4})
    assert [alarm.check for alarm in rounded] == ["updates near zero"]


@pytest.mark.cases(15)
@pytest.mark.parametrize("rule", FAULTS)
def test_each_rule_sees_what_it_is_for_first(rule):
    alarms = told(FAULTS[rule], half=rule == "near the end of float16")
    assert alarms[0].check == rule
    assert [alarm.check for alarm in alarms].count(rule) == 1  # told once
    assert to_json(dataclasses.asdict(alarms[0]))
    assert ALARMS[rule].remediation in str(alarms[0])


def test_every_rule_is_tried():
    assert {
        *FAULTS,
        "not finite",
        "beyond the edge of stability",
        "held loss rises",
    } == ALARMS.keys()


def test_the_edge_of_stability_is_told_of_when_a_probe_finds_it_left():
    past, watch = Past(PLACES, [2, 0, 2, 0, 2, 0], 40), Watch()
    told = []
    for i, over in enumerate((0.9, 1.4, 1.6)):
        past.add(50 * i, well(i))
        past.probes.append((50 * i, {"preconditioned_over_edge": over}))
        told += watch.look(past)
    (alarm,) = told
    assert (alarm.check, alarm.step, alarm.value) == ("beyond the edge of stability", 100, 1.6)


@pytest.mark.parametrize(
    ("held", "falls", "step"),
    [
        ((2.0, 1.5, 1.55, 1.65, 1.7), True, 200),
        ((2.0, 1.5, 1.7, 1.55, 1.7), True, None),  # not in two probes in a row
        ((2.0, 1.5, 1.55, 1.65, 1.7), False, None),  # the training's loss rises, too
        ((2.0, 1.9, 1.8, 1.7, 1.6), True, None),
    ],
)
def test_a_held_loss_that_rises_while_the_trainings_falls_is_told_of(held, falls, step):
    past, watch = Past(PLACES, [2, 0, 2, 0, 2, 0], 40), Watch()
    found = []
    for i, loss in enumerate(held):
        change = -0.1 * i if falls else 0.1 * i
        past.add(50 * i, {"loss": 2.0 + change})
        past.probes.append((50 * i, {"held_loss": loss}))
        found += [alarm for alarm in watch.look(past) if alarm.check == "held loss rises"]
    assert [alarm.step for alarm in found] == ([] if step is None else [step])


def test_a_growing_figure_is_told_of_before_it_passes_with_when_it_will():
    alarm = told(FAULTS["embedding grows"])[0]
    limit = ALARMS["embedding grows"].limits["limit"]
    assert (alarm.value < limit, alarm.limit) == (True, "above 100")
    assert alarm.place == "the state before block 0, attention"
    assert alarm.doubling == pytest.approx(50 * math.log(2) / math.log(1.5), rel=0.05)
    passes = next(50 * (i + 1) for i in range(99) if 1.5**i >= limit)
    assert abs(alarm.crossing - passes) <= 50
    assert "doubles every" in str(alarm)
    assert "at about step" in str(alarm)


def test_a_trend_is_the_line_through_the_logarithms():
    steps = torch.arange(5).numpy() * 10.0
    assert trend(steps, 3.0 * 2 ** (steps / 20)).doubling == pytest.approx(20)
    assert trend(steps, -steps).doubling == math.inf


def test_an_alarm_is_told_again_when_it_was_quiet():
    spikes = {6, 7, 14}
    alarms = told(run("gradient_norm", lambda i: 30.0 if i in spikes else 1.0), reports=15)
    assert len(alarms) == 1  # within the recent ones that are looked at it is the same spike
    other = told(lambda i, figures: {"update": [0.4 if i in (3, 12) else 1e-3] * 6})
    assert [alarm.step for alarm in other] == [200, 650]


def spikes(values, **limits):
    return spike(
        enumerate(values),
        {"factor": 1.0, "window": 8, "recent": 1, "least": 8, **limits},
        "it",
        additive=True,
    )


def test_a_robust_deviation_is_1_48_times_the_median_distance():
    """Of normal figures 1.4826 times the median distance from the median is the standard deviation:
    just above it is a spike.
    """
    before = [9.0, 11.0] * 4  # median 10, median distance 1
    assert spikes([*before, 11.48 + 1e-9]).value == 11.48 + 1e-9
    assert spikes([*before, 11.48 - 1e-9]) is None
    assert spikes([*before, 11.48 + 1e-9], floor=2.0) is None
    assert spikes([*before, 12.0 + 1e-9], floor=2.0).limit == 12


def test_an_alarm_that_nothing_measures_is_refused():
    alarm = ALARMS["updates too large"]
    with pytest.raises(ConfigError, match="nothing computes the measure 'mine'"):
        MEASURES["mine"] = Measure(formula="it", checks={"mine": alarm})
    without = dataclasses.replace(alarm, rule=None)
    with pytest.raises(ConfigError, match="the alarm 'mine' of the measure 'mine' has no rule"):
        MEASURES["mine"] = Measure(formula="it", compute=len, checks={"mine": without})
    assert "mine" not in MEASURES


def test_limits_of_an_unknown_alarm_are_refused():
    with pytest.raises(ConfigError, match="unknown alarm"):
        Watch({"loss spikes": {}})


def test_limits_are_options():
    def change(i, figures):
        return {"update": [0.05] * 6}

    assert told(change) == []
    assert told(at("spread", 4, lambda i: 0.0))[0].check == "dead layer"
    watch = Watch({"updates too large": {"limit": 0.01}})
    past = Past(PLACES, [2, 0, 2, 0, 2, 0], 40)
    past.add(1, well(0) | change(0, {}))
    assert [alarm.check for alarm in watch.look(past)] == ["updates too large"]


def test_a_figure_that_is_not_finite_is_told_where_it_is_first():
    model = GPT(GPTConfig(vocab_size=32, context=8, depth=3, width=16, heads=2))
    model.depth.sublayers[3].field.output_projection.weight.data[0, 0] = math.inf
    monitor = Monitor(model, every=1)
    tokens = torch.randint(32, (2, 9))
    loss = model(tokens[:, :-1], tokens[:, 1:])[1]
    loss.backward()
    alarm = monitor.step(loss)[0]
    assert alarm.check == "not finite"
    assert alarm.place.startswith("block 1, ffn")


def test_what_became_nan_between_reports_is_said_to_have_begun_there_and_not_where_all_is_nan():
    model = GPT(GPTConfig(vocab_size=32, context=8, depth=2, width=16, heads=2))
    optimizer = torch.optim.AdamW(model.parameters())
    monitor = Monitor(model, every=5)
    alarms = []
    for step in range(1, 6):
        if step == 3:
            model.depth.sublayers[3].field.output_projection.weight.data[0, 0] = math.nan
        tokens = torch.randint(32, (2, 9))
        loss = model(tokens[:, :-1], tokens[:, 1:])[1]
        loss.backward()
        alarms += monitor.step(loss, optimizer)
        optimizer.step()
        optimizer.zero_grad()
    (alarm,) = [alarm for alarm in alarms if alarm.check == "not finite"]
    assert alarm.place.startswith("the loss of step 3, between reports")
    assert "every=1" in alarm.place
    assert (alarm.step, alarm.since) == (5, 3)


GROWTH = {"low": 15.0, "limit": 50.0, "window": 6, "fit": 0.8, "ahead": 4.0}
COURSES = {
    "flat, at the limit": ([50.0] * 6, True),
    "flat, above the limit": ([60.0] * 6, True),
    "flat, below the limit": ([49.9] * 6, False),
    "on a line to the limit": ([16.0 * 1.1**i for i in range(6)], True),
    "on a line, and below what counts": ([15.0 * 1.1 ** (i - 5) for i in range(6)], False),
    "on a line, and far from the limit": ([16.0 * 1.001**i for i in range(6)], False),
    "up and down, and near the limit": ([20.0, 45.0, 18.0, 46.0, 19.0, 47.0], False),
    "up, in too few reports": ([20.0, 30.0, 45.0], False),
}


@pytest.mark.parametrize("course", COURSES)
def test_a_figure_grows_if_it_is_above_the_limit_or_on_a_line_to_it(course):
    values, expected = COURSES[course]
    past = Past(PLACES, [2, 0, 2, 0, 2, 0], 40)
    for i, value in enumerate(values):
        past.add(50 * (i + 1), {**well(i), "log_z": value})
    assert (grows("log_z")(past, GROWTH) is not None) == expected


def test_the_page_has_every_alarm_and_every_name_of_a_limit():
    page = (Path(__file__).parents[3] / "docs" / "howto" / "alarms.md").read_text()
    for table in alarms_tables():  # python -m docs._site.tables writes both
        assert table in page
    explained = page[page.index("## What the limits are") : page.index("## Measurements")]
    names = {
        name
        for first in re.findall(r"^\| (`.*?) \| ", explained, re.M)
        for name in re.findall(r"\w+", first)
    }
    assert names == {key for check in ALARMS.values() for key in check.limits}

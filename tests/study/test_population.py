"""A population's members have the losses that they have alone."""

import dataclasses

import pytest

from ctrans.dynamics.fields import FIELDS, MapEntry
from ctrans.dynamics.fields.query_key_norm import QK_NORMS
from ctrans.dynamics.norm import NORMS
from ctrans.dynamics.placement import PLACEMENTS
from ctrans.dynamics.residual import RESIDUALS
from ctrans.model.config import GPTConfig
from ctrans.study.description import PlannedRun
from ctrans.study.population import MOST_MEMBERS, grouped, train_population
from ctrans.study.training import train_run
from ctrans.training.data import from_text
from ctrans.training.settings import TrainConfig
from tests.training.helpers import TEXT

MODEL = GPTConfig(context=8, depth=2, width=16, heads=2)
TRAINING = TrainConfig(iterations=50, batch=2, warmup=5, eval_every=20, eval_windows=4, clip=0.3)
TOLERANCE = {"float32": 3e-5, "float64": 1e-12}
"""After 50 steps of Adam rounding in float32 has grown to 1.3e-5 on one processor (AMD EPYC) and to
less than 1e-5 on another (Xeon).
"""
MEMBERS = [
    ({}, {"learning_rate": 1e-2, "seed": 0}),
    ({}, {"learning_rate": 1e-3, "seed": 5, "weight_decay": 0.5, "warmup": 20}),
    (
        {"initialisation": "lecun", "embedding_std": 0.3},
        {"learning_rate": 3e-3, "clip": 5.0, "decay_gains": True, "beta2": 0.95},
    ),
]
KINDS = {
    "pre": {"placement": "pre"},
    "peri": {"placement": "peri", "dt": 0.1, "norm": "rmsnorm"},
    "post": {"placement": "post"},
    "deepnorm": {"placement": "deepnorm", "bias": False},
    "options": {"qk_norm": True, "positions": "rotary", "kv_heads": 1, "ffn": "swiglu"},
}


def members(model=None, **training):
    made = []
    for own_model, own_training in MEMBERS:
        architecture = dataclasses.replace(MODEL, **{**(model or {}), **own_model})
        made.append(
            PlannedRun(
                architecture, dataclasses.replace(TRAINING, **{**training, **own_training}), {}
            )
        )
    return made


def losses(result, what):
    return [row[what] for row in result.curve if what in row]


def same(together, alone, tolerance):
    assert together.ending == alone.ending
    assert losses(together, "loss") == pytest.approx(losses(alone, "loss"), abs=tolerance)
    assert losses(together, "validation_loss") == pytest.approx(
        losses(alone, "validation_loss"), abs=tolerance
    )


def test_models_without_vectors_train_together():
    """No gains and no biases: no parameter has one dimension."""
    runs = members({"norm": "plain_rmsnorm", "bias": False}, iterations=3, eval_every=3, warmup=1)
    runs = [
        dataclasses.replace(run, training=dataclasses.replace(run.training, warmup=1))
        for run in runs
    ]
    data = from_text(TEXT, MODEL.context)
    together = train_population(runs, data)
    for found, run in zip(together, runs, strict=True):
        same(found, train_run(run, data), TOLERANCE["float32"])
    assert len({found.seconds for found in together}) == 1, (
        "members share the processor time evenly"
    )


@pytest.mark.slow
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("kind", KINDS)
def test_losses_of_50_steps_are_those_alone(kind, dtype):
    runs, data = members(KINDS[kind], dtype=dtype), from_text(TEXT, MODEL.context)
    for run, together in zip(runs, train_population(runs, data), strict=True):
        assert len(losses(together, "loss")) == 50
        same(together, train_run(run, data), TOLERANCE[dtype])


ENTRIES = [
    *({"placement": name} for name in PLACEMENTS),
    *({"norm": name, "placement": "peri"} for name in NORMS),
    *(
        {"residual": name, **({"placement": "post", "norm": "l2norm"} if name == "ngpt" else {})}
        for name in RESIDUALS
    ),
    *(
        {kind: name}
        for kind, table in FIELDS.items()
        for name, entry in table.items()
        if isinstance(entry, MapEntry) and entry.batches
    ),
    *({"qk_norm": name} for name in QK_NORMS),
    {"parallel_blocks": True},
    {"stack_steps": 3},
    {
        "tied": False,
        "sinks": True,
        "gated_output": True,
        "window": 4,
        "softcap": 5.0,
        "positions": "alibi",
    },
]


@pytest.mark.cases(1)
@pytest.mark.parametrize("entry", ENTRIES, ids=str)
def test_every_entry_that_batches_has_the_losses_that_it_has_alone(entry):
    """What cannot be batched is no population in the first place: `grouped` leaves it alone."""
    runs, data = (
        members(entry, dtype="float64", iterations=6, eval_every=6),
        from_text(TEXT, MODEL.context),
    )
    if len(grouped(runs)) == len(runs):
        pytest.skip("trained one by one")
    for run, together in zip(runs, train_population(runs, data), strict=True):
        same(together, train_run(run, data), 1e-10)


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    "changes",
    [{"optimiser": "sgd"}, {"accumulate": 2}, {"temperature_start": 3.0, "temperature_steps": 10}],
)
def test_the_optimisers_and_schedules_are_those_alone(changes):
    runs, data = (
        members(dtype="float64", **{"iterations": 12, **changes}),
        from_text(TEXT, MODEL.context),
    )
    for run, together in zip(runs, train_population(runs, data), strict=True):
        same(together, train_run(run, data), 1e-12)


@pytest.mark.slow
def test_a_member_that_diverges_harms_no_other():
    runs, data = members(dtype="float64", iterations=12), from_text(TEXT, MODEL.context)
    wild = dataclasses.replace(
        runs[1], training=dataclasses.replace(runs[1].training, learning_rate=1e200, warmup=0)
    )
    results = train_population([runs[0], wild, runs[2]], data)
    assert [result.ending for result in results] == ["finished", "diverged", "finished"]
    assert results[1].message == train_run(wild, data).message
    for run, together in ((runs[0], results[0]), (runs[2], results[2])):
        same(together, train_run(run, data), 1e-12)


@pytest.mark.slow
def test_measures_are_of_the_trained_member():
    runs = [
        dataclasses.replace(run, measure=("moments",))
        for run in members(dtype="float64", iterations=4)
    ]
    data = from_text(TEXT, MODEL.context)
    for run, together in zip(runs, train_population(runs, data), strict=True):
        alone = train_run(run, data)
        for when in ("before", "after"):
            mine, theirs = (
                result.trained[when]["moments"]["variance"] for result in (together, alone)
            )
            assert mine == pytest.approx(theirs, rel=1e-9)


def test_groups_share_what_they_must_and_pay():
    runs = members()
    assert [len(group) for group in grouped(runs)] == [3]
    assert [len(group) for group in grouped(members({"context": 128}))] == [1, 1, 1]
    assert [len(group) for group in grouped(members({"attention": "linear"}))] == [1, 1, 1]
    other = dataclasses.replace(runs[0], model=dataclasses.replace(MODEL, dt=0.5))
    assert [len(group) for group in grouped([*runs, other])] == [3, 1]
    many = [
        dataclasses.replace(runs[0], training=dataclasses.replace(TRAINING, seed=i))
        for i in range(MOST_MEMBERS + 1)
    ]
    assert sorted(len(group) for group in grouped(many)) == [1, MOST_MEMBERS]

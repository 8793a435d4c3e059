"""The loop: what an iteration computes, how a run ends, and that one taken up again goes on as if
nothing had happened.
"""

import dataclasses
import errno
import json
import os
import shutil
import signal
from types import SimpleNamespace

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ctrans.model.checkpoint import load
from ctrans.model.config import GPTConfig
from ctrans.model.gpt import GPT
from ctrans.model.sums import OPTIMISER, STATE, SUMS, sums
from ctrans.training import log
from ctrans.training.data import Data, from_text
from ctrans.training.loop import Ending, carry_out
from ctrans.training.optimiser import OPTIMISERS
from ctrans.training.parallel import PARALLEL
from ctrans.training.processes import Processes, processes
from ctrans.training.run_checkpoint import optimiser_tensors, restore
from ctrans.training.run_directory import RunDirectory
from ctrans.training.run_start import anew, resumed
from ctrans.training.settings import TrainConfig
from ctrans.training.training_state import read_state
from solvers import ConfigError, SolveError, Status
from tests.training.helpers import (
    ALONE,
    MODEL,
    SETTINGS,
    TEXT,
    resume,
    same,
    start,
    weights,
    weights_after,
)

COMPARED = (
    "step",
    "loss",
    "learning_rate",
    "gradient_norm",
    "temperature",
    "validation_loss",
    "growth",
    "largest",
)


def rows(directory):
    """The log without what depends on the clock."""
    return [{key: row.get(key) for key in COMPARED} for row in log.read(directory)]


def stopped_at(step, number=signal.SIGTERM):
    """An observer by which the process gets a signal during that iteration."""

    def observe(row):
        if row["step"] == step:
            os.kill(os.getpid(), number)

    return observe


@pytest.mark.slow
def test_the_loss_falls_and_the_best_checkpoint_is_the_best(tmp_path):
    run, progress = start(tmp_path, iterations=60, learning_rate=3e-2, eval_every=10)
    outcome = carry_out(run, progress)
    losses = {
        row["step"]: row["validation_loss"]
        for row in log.read(tmp_path)
        if "validation_loss" in row
    }
    assert outcome.ending is Ending.FINISHED
    assert losses[60] < losses[0] - 1
    assert outcome.progress.best == min(losses.values()) == losses[outcome.progress.best_step]
    assert same(load(tmp_path / "last").state_dict(), weights(run))


def test_the_log_has_a_row_for_every_iteration(tmp_path):
    run, progress = start(tmp_path)
    carry_out(run, progress)
    kept = list(log.read(tmp_path))
    assert [row["step"] for row in kept] == list(range(13))
    assert [row["step"] for row in kept if "validation_loss" in row] == [0, 4, 8, 12]
    assert all(row["tokens_per_second"] > 0 for row in kept[1:])


def test_accumulated_micro_batches_give_the_mean_gradient(tmp_path):
    whole, parts = (
        start(tmp_path / str(k), accumulate=k, batch=4, dtype="float64")[0] for k in (1, 2)
    )
    sequences = [parts.data.batch(0, micro, batch=4, seed=0) for micro in (0, 1)]
    tokens, targets = (torch.cat(both) for both in zip(*sequences, strict=True))
    whole.module(tokens, targets).total.backward()
    norm = torch.cat([p.grad.flatten() for p in whole.model.parameters()]).norm()
    assert parts.iterate(0)["gradient_norm"] == pytest.approx(float(norm), rel=1e-12)


def test_clipping_bounds_the_step_that_sgd_takes(tmp_path):
    run, _ = start(tmp_path, optimiser="sgd", clip=1e-3, weight_decay=0.0, beta1=0.0, warmup=0)
    before = weights(run)
    row = run.iterate(0)
    moved = torch.cat([(weights(run)[name] - before[name]).flatten() for name in before]).norm()
    assert row["gradient_norm"] > 1e-2
    assert float(moved) == pytest.approx(1e-3 * row["learning_rate"], rel=1e-3)


def test_temperature_is_warm_in_training_and_the_models_own_in_evaluation(tmp_path):
    run, progress = start(tmp_path, temperature_start=4.0, temperature_steps=8)
    seen = []
    run.module.register_forward_hook(
        lambda module, *_: seen.append(
            (module.training, run.model.depth.sublayers[0].field.temperature)
        )
    )
    carry_out(run, progress)
    assert {tau for training, tau in seen if not training} == {1.0}
    assert [tau for training, tau in seen if training][:3] == pytest.approx(
        [4.0, 4 ** (7 / 8), 4 ** (6 / 8)]
    )
    assert [tau for training, tau in seen if training][8:] == [1.0] * 4


@pytest.mark.slow
def test_a_loss_that_is_not_finite_ends_the_run_without_touching_the_weights(tmp_path):
    run, progress = start(tmp_path)

    def break_weights(row):
        if row["step"] == 7:
            with torch.no_grad():
                next(run.model.parameters()).fill_(torch.nan)

    outcome = carry_out(dataclasses.replace(run, observe=break_weights), progress)
    assert (outcome.ending, outcome.progress.step) == (Ending.DIVERGED, 7)
    assert "iteration 8" in outcome.message
    *_, broken, verdict = log.read(tmp_path)
    assert broken["loss"] == "nan"
    assert verdict["diverged"] == outcome.message
    kept = load(tmp_path / "last")
    assert all(torch.isfinite(value).all() for value in kept.state_dict().values())
    assert RunDirectory(tmp_path).steps()[-1] == 6


def test_validation_losses_above_the_margin_end_the_run_and_are_not_saved(tmp_path):
    run, progress = start(
        tmp_path,
        iterations=40,
        learning_rate=30.0,
        warmup=0,
        clip=1e6,
        eval_every=2,
        save_every=1,
        margin=0.5,
    )
    outcome = carry_out(run, progress)
    assert outcome.ending is Ending.DIVERGED
    assert outcome.progress.above == 3
    assert "by more than the margin for 3 evaluations" in outcome.message
    last = RunDirectory(tmp_path).steps()[-1]
    evaluated = {
        row["step"]: row["validation_loss"]
        for row in log.read(tmp_path)
        if "validation_loss" in row
    }
    assert last < next(step for step, loss in evaluated.items() if loss > evaluated[0] + 0.5)


def test_a_run_keeps_its_end_also_above_the_margin(tmp_path):
    run, progress = start(
        tmp_path,
        iterations=4,
        learning_rate=30.0,
        warmup=0,
        clip=1e6,
        eval_every=2,
        margin=0.5,
    )
    outcome = carry_out(run, progress)
    assert outcome.ending is Ending.FINISHED
    assert outcome.progress.above > 0
    kept = read_state(tmp_path / "last").progress
    assert (kept.step, kept.above) == (4, outcome.progress.above)
    assert RunDirectory(tmp_path).steps()[-1] == 4
    _, progress = resume(tmp_path)
    assert [row["step"] for row in log.read(tmp_path)] == [0, 1, 2, 3, 4]


@pytest.mark.slow
def test_an_adaptive_solver_that_fails_counts_as_divergence(tmp_path):
    run, progress = start(tmp_path, method="tsit5", rtol=1e-3, eval_every=100)

    def stiffen(row):
        if row["step"] == 2:
            with torch.no_grad():
                run.model.depth.sublayers[0].output_norm.weight.fill_(1e38)

    outcome = carry_out(dataclasses.replace(run, observe=stiffen), progress)
    assert outcome.ending is Ending.DIVERGED
    assert "iteration 3" in outcome.message


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_the_run_after_its_iteration_and_saves(tmp_path, number):
    before = signal.signal(
        number, signal.default_int_handler
    )  # whoever runs the tests may ignore it, as nohup does
    try:
        run, progress = start(tmp_path)
        outcome = carry_out(dataclasses.replace(run, observe=stopped_at(5, number)), progress)
        assert (outcome.ending, outcome.progress.step, outcome.signal) == (
            Ending.INTERRUPTED,
            5,
            number,
        )
        assert signal.getsignal(number) is signal.default_int_handler
    finally:
        signal.signal(number, before)
    assert RunDirectory(tmp_path).steps()[-1] == 5


def test_a_signal_that_was_ignored_before_stays_ignored(tmp_path):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        run, progress = start(tmp_path)
        outcome = carry_out(
            dataclasses.replace(run, observe=stopped_at(5, signal.SIGHUP)), progress
        )
    finally:
        signal.signal(signal.SIGHUP, before)
    assert outcome.ending is Ending.FINISHED


@pytest.mark.slow
def test_after_divergence_last_is_the_newest_checkpoint_up_to_the_last_good_evaluation(tmp_path):
    run, progress = start(
        tmp_path, iterations=40, eval_every=10, save_every=3, patience=1, margin=0.5
    )

    def worsen(row):
        if row["step"] == 14:
            with torch.no_grad():
                run.model.final_norm.weight.fill_(1e3)

    outcome = carry_out(dataclasses.replace(run, observe=worsen), progress)
    assert (outcome.ending, outcome.progress.step, outcome.progress.good) == (
        Ending.DIVERGED,
        20,
        10,
    )
    assert (
        max(step for step in RunDirectory(tmp_path).steps() if step <= 10)
        == read_state(tmp_path / "last").progress.step
    )
    run, progress = resume(tmp_path, learning_rate=1e-3)
    assert carry_out(run, progress).ending is Ending.FINISHED
    verdicts = [row for row in log.read(tmp_path) if "diverged" in row or "settings" in row]
    assert [(row["step"], row["settings"]) for row in verdicts] == [
        (progress.step, {"learning_rate": 1e-3})
    ]


@pytest.fixture(autouse=True, scope="module")
def _no_waiting_for_the_disk():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda handle: None)
        yield


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Weights and log of uninterrupted runs, each made once."""
    made = {}

    def get(**changes):
        key = json.dumps(changes, sort_keys=True)
        if key not in made:
            directory = tmp_path_factory.mktemp("whole")
            made[key] = weights_after(directory, **changes), rows(directory)
        return made[key]

    return get


VARIANTS = {
    **{name: {"optimiser": name} for name in OPTIMISERS},
    "accumulated": {"accumulate": 2, "temperature_start": 3.0, "temperature_steps": 9},
    "through the ODE": {"method": "heun", "gradient": "checkpoint", "kinetic": 0.1},
    "bfloat16": {"dtype": "bfloat16"},
    "float64": {"dtype": "float64"},
}


def interrupted(directory, stops, **changes):
    """The weights of a run that is stopped after each of these iterations and taken up again."""
    run, progress = start(directory, **changes)
    for stop in sorted(stops):
        outcome = carry_out(dataclasses.replace(run, observe=stopped_at(stop)), progress)
        assert outcome.ending is Ending.INTERRUPTED
        run, progress = resume(directory)
    carry_out(run, progress)
    return weights(run)


@pytest.mark.slow
@settings(max_examples=10)
@given(stops=st.sets(st.integers(1, 12), min_size=1, max_size=3))
def test_a_run_interrupted_anywhere_ends_with_the_same_bits_and_log(stops, whole, tmp_path_factory):
    directory = tmp_path_factory.mktemp("parts")
    weights_then, rows_then = whole()
    assert same(interrupted(directory, stops), weights_then)
    assert rows(directory) == rows_then


@pytest.mark.cases(1)
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_part_of_the_state_is_restored(variant, whole, tmp_path):
    weights_then, rows_then = whole(**VARIANTS[variant])
    assert same(interrupted(tmp_path, [5], **VARIANTS[variant]), weights_then)
    assert rows(tmp_path) == rows_then


@pytest.mark.slow
def test_weights_in_depth_are_resumed_exactly_too(tmp_path):
    model = {"depth_weights": "chebyshev", "knots": 2, "depth": 4}
    expected = weights_after(tmp_path / "whole", model=model)
    run, progress = start(tmp_path / "parts", model=model)
    carry_out(dataclasses.replace(run, observe=stopped_at(7)), progress)
    run, progress = resume(tmp_path / "parts")
    carry_out(run, progress)
    assert same(weights(run), expected)


def test_more_iterations_continue_a_finished_run(tmp_path):
    run, progress = start(tmp_path)
    carry_out(run, progress)
    run, progress = resume(tmp_path, iterations=15)
    assert carry_out(run, progress).progress.step == 15


def test_fewer_iterations_than_are_done_are_refused(tmp_path):
    carry_out(*start(tmp_path))
    with pytest.raises(ConfigError, match="iterations = 5, and the run has made 12"):
        resume(tmp_path, iterations=5)


def test_other_data_are_refused_on_resume(tmp_path):
    carry_out(*start(tmp_path))
    with pytest.raises(ConfigError, match="the data differ from those"):
        resume(tmp_path, text=TEXT + b"more")


def test_a_second_run_does_not_overwrite_the_first_unless_told_to(tmp_path):
    carry_out(*start(tmp_path))
    with pytest.raises(ConfigError, match="has a run already"):
        start(tmp_path)
    before = RunDirectory(tmp_path).steps()
    run, progress = start(tmp_path, overwrite=True)
    assert RunDirectory(tmp_path).steps() == before  # until the new one has a checkpoint
    carry_out(run, progress)
    assert [path.name for path in tmp_path.glob("checkpoints*")] == ["checkpoints-2"]
    assert [row["step"] for row in log.read(tmp_path)][:2] == [0, 1]


def test_a_run_goes_on_with_its_own_log_when_another_that_was_to_overwrite_it_came_to_nothing(
    tmp_path,
):
    carry_out(*start(tmp_path))
    rows = list(log.read(tmp_path))
    start(tmp_path, overwrite=True)
    carry_out(*resume(tmp_path))
    assert list(log.read(tmp_path)) == rows
    assert not list(tmp_path.glob(".*.jsonl"))


@pytest.mark.parametrize("killed", ["_link", "prune", "forget_others"])
def test_a_run_that_overwrites_has_its_own_log_and_a_monitors_whenever_the_one_before_was_killed(
    killed, tmp_path, monkeypatch
):
    """Killed as `last` moves, before old checkpoints go or after: the log of the first run is then
    set aside, and is no more.
    """

    class Killed(BaseException):
        pass

    def kill(*of, **options):
        raise Killed

    carry_out(*start(tmp_path))
    rows = [row["step"] for row in log.read(tmp_path)]
    (tmp_path / "monitor.jsonl").write_text('{"header": {"model": "the first", "places": []}}')
    run, progress = start(tmp_path, overwrite=True)
    with monkeypatch.context() as patch:
        patch.setattr(RunDirectory, killed, kill)
        with pytest.raises(Killed):
            carry_out(run, progress)
    carry_out(*start(tmp_path, overwrite=True))
    assert [row["step"] for row in log.read(tmp_path)] == rows
    assert not list(tmp_path.glob("*monitor.jsonl"))
    assert not list(tmp_path.glob(".*.jsonl"))


def test_results_of_a_run_go_with_its_logs_when_another_overwrites_it(tmp_path):
    """They are back if the new run has no checkpoint, and gone with its first one. A file of a user
    stays.
    """
    carry_out(*start(tmp_path))
    results = {"train.json": '{\n "command": "train", "options": {}}', "loss.png": "of the first"}
    for name, text in results.items():
        (tmp_path / name).write_text(text)
    start(tmp_path, overwrite=True)
    assert not any((tmp_path / name).exists() for name in results)
    carry_out(*resume(tmp_path))
    assert {name: (tmp_path / name).read_text() for name in results} == results
    run, progress = start(tmp_path, overwrite=True)
    carry_out(dataclasses.replace(run, observe=stopped_at(1)), progress)
    assert not list(tmp_path.glob("*.png"))
    assert not list(tmp_path.glob("train.json"))
    assert [path.name for path in tmp_path.glob(".*")] == []
    (tmp_path / "train.json").write_text("mine")
    (tmp_path / "loss.png").write_text("mine")
    carry_out(*start(tmp_path, overwrite=True))
    assert (tmp_path / "loss.png").read_text() == "mine"


def test_a_monitors_log_of_another_training_is_not_taken_over(tmp_path):
    (tmp_path / "monitor.jsonl").write_text("of another")
    with pytest.raises(ConfigError, match=r"would replace .*monitor\.jsonl"):
        start(tmp_path)
    run, _ = start(tmp_path / "unsaved")
    run.report({"step": 0, "run": "this", "validation_loss": 5.0})
    (tmp_path / "unsaved" / "monitor.jsonl").write_text(
        '{"header": {"model": "of that run", "places": []}}'
    )
    start(tmp_path / "unsaved")
    assert not list((tmp_path / "unsaved").glob("*.jsonl"))


def test_a_run_that_overwrites_one_without_a_checkpoint_keeps_its_row_of_step_0(
    tmp_path, monkeypatch
):
    """The first row of the run before did not fit on the disk, and left an empty log."""

    def full(*of):
        (tmp_path / log.LOG).touch()
        raise ConfigError("cannot write")

    run, progress = start(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(log, "append", full)
        with pytest.raises(ConfigError, match="cannot write"):
            carry_out(run, progress)
    (tmp_path / "monitor.jsonl").write_text('{"header": {"model": "the first", "places": []}}')
    carry_out(*start(tmp_path, overwrite=True))
    assert [row["step"] for row in log.read(tmp_path)][:2] == [0, 1]
    assert not list(tmp_path.glob("*monitor.jsonl"))
    assert not list(tmp_path.glob(".*.jsonl"))


def test_lack_of_memory_names_batch_and_context(tmp_path, monkeypatch):
    run, progress = start(tmp_path)
    monkeypatch.setattr(run.module, "forward", lambda *_: torch.empty(10**18))
    with pytest.raises(
        ConfigError, match="out of memory with a batch of 4 sequences and a context of 8"
    ):
        carry_out(run, progress)


def test_settings_are_those_that_were_given(tmp_path):
    run, _ = start(tmp_path)
    assert {name: getattr(run.config, name) for name in SETTINGS} == SETTINGS


def solved(status):
    """A solution that ended so."""
    return SimpleNamespace(status=status)


def test_theta_is_the_balanced_mass_of_the_attention_rows(tmp_path):
    run, progress = start(tmp_path, theta=True, iterations=1)
    carry_out(run, progress)
    tokens, _ = run.data.validation_windows(1)
    found = []
    for k in (0, 2):
        sublayer, x = run.model.depth.sublayers[k], run.model.trajectory(tokens).states[k]
        rows = sublayer.field.probabilities(sublayer.input_norm(x)).detach().double()
        for row in rows[..., 1:, :].flatten(0, -2):  # the first token reads itself alone
            masses = [float(row[[bool(s >> i & 1) for i in range(8)]].sum()) for s in range(2**8)]
            found.append(max(4 * mass * (1 - mass) for mass in masses))
    *_, last = log.read(tmp_path)
    assert last["theta"] == pytest.approx(sum(found) / len(found), abs=1e-5)


@pytest.mark.parametrize(
    ("error", "is_divergence"),
    [
        (SolveError("the state became non-finite", solved(Status.NON_FINITE)), True),
        (SolveError("the step became too small", solved(Status.STEP_UNDERFLOW)), True),
        (SolveError("the two states drifted apart", solved(Status.PAIR_APART)), False),
        (SolveError("the backward pass misses the initial state"), False),
    ],
)
def test_a_solver_that_cannot_keep_its_promise_is_no_divergence(
    error, is_divergence, tmp_path, monkeypatch
):
    run, progress = start(tmp_path)

    def refuse(*_):
        raise error

    carry_on = run.module.forward
    calls = iter([carry_on] * 3 + [refuse] * 99)
    monkeypatch.setattr(run.module, "forward", lambda *given: next(calls)(*given))
    if is_divergence:
        assert carry_out(run, progress).ending is Ending.DIVERGED
    else:
        with pytest.raises(SolveError, match=r"iteration \d+: "):
            carry_out(run, progress)


def test_a_compiler_that_is_missing_is_one_sentence(tmp_path, monkeypatch):
    run, progress = start(tmp_path)
    failure = type("CompilerError", (RuntimeError,), {"__module__": "torch._inductor.exc"})

    def compile_and_fail(*_):
        raise failure("no g++\n\nlong trace")

    monkeypatch.setattr(run.module, "forward", compile_and_fail)
    with pytest.raises(
        ConfigError, match="cannot compile the model here: no g\\+\\+; leave out --compile"
    ):
        carry_out(run, progress)


def crowded(directory):
    """One process of three, as it sees itself before it talks to the others."""
    return anew(
        GPT(GPTConfig(**MODEL), seed=0),
        TrainConfig(**SETTINGS),
        from_text(TEXT, MODEL["context"]),
        RunDirectory(directory),
        PARALLEL["none"],
        Processes(torch.device("cpu"), 0, 3),
        source={},
        overwrite=True,
    )


def test_a_batch_that_processes_cannot_share_removes_no_run(tmp_path):
    carry_out(*start(tmp_path))
    with pytest.raises(ConfigError, match="multiple of 3"):
        crowded(tmp_path)
    assert RunDirectory(tmp_path).steps()[-1] == 12
    store = RunDirectory(tmp_path)
    with pytest.raises(ConfigError, match="multiple of 3"):
        resumed(
            read_state(store.verified_last()),
            from_text(TEXT, MODEL["context"]),
            store,
            PARALLEL["none"],
            Processes(torch.device("cpu"), 0, 3),
        )


def test_a_run_that_ended_before_its_first_checkpoint_may_be_started_again(tmp_path):
    run, _ = start(tmp_path)
    run.report({"step": 0, "run": "this", "validation_loss": 5.0})
    run, progress = start(tmp_path)
    carry_out(run, progress)
    assert [row["step"] for row in log.read(tmp_path)] == list(range(13))


def test_a_run_whose_directory_is_replaced_adds_no_row_to_the_log_of_another(tmp_path):
    directory = tmp_path / "run"
    with RunDirectory(directory).locked() as store:
        run, progress = start(directory)
        run = dataclasses.replace(
            run, store=store, observe=lambda row: replaced(directory, row["step"])
        )
        with pytest.raises(ConfigError, match="is no longer the directory"):
            carry_out(run, progress)
    assert [row["step"] for row in log.read(directory)] == [0]
    assert [row["step"] for row in log.read(tmp_path / "moved")] == [0, 1, 2]


def replaced(directory, step):
    """Moves the run away after step 2, and puts the log of another in its place."""
    if step == 2:
        directory.rename(directory.with_name("moved"))
        directory.mkdir()
        log.append(directory, {"step": 0})


def test_a_checkpoint_or_a_log_of_another_run_is_refused_and_nothing_is_removed(tmp_path):
    for seed in (0, 1):
        carry_out(*start(tmp_path / str(seed), iterations=3, seed=seed))
    place = tmp_path / "0"
    (place / "log.jsonl").rename(place / "mine")
    shutil.copy(tmp_path / "1" / "log.jsonl", place)
    before = sorted(place.rglob("*"))
    with pytest.raises(ConfigError, match="is the log of another run than the checkpoint"):
        resume(place, iterations=6)
    (place / "mine").replace(place / "log.jsonl")
    last = (place / "last").resolve()
    shutil.rmtree(last)
    shutil.copytree((tmp_path / "1" / "last").resolve(), last)
    with pytest.raises(ConfigError, match="is the log of another run than the checkpoint"):
        resume(place, iterations=6)
    assert sorted(place.rglob("*")) == [path for path in before if path.name != "mine"]


def test_a_run_of_an_earlier_version_goes_on(tmp_path):
    carry_out(*start(tmp_path, iterations=3))
    last = (tmp_path / "last").resolve()
    state = json.loads((last / STATE).read_text())
    for name in ("run", "execution"):
        del state[name]
    (last / STATE).write_text(json.dumps(state))
    (last / SUMS).write_bytes(sums(last))
    rows = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    del rows[0]["run"]
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    carry_out(*resume(tmp_path, iterations=4))
    assert [row["step"] for row in log.read(tmp_path)] == [0, 1, 2, 3, 3, 4]


def test_tokens_are_checked_on_resume_too(tmp_path, monkeypatch):
    carry_out(*start(tmp_path))
    monkeypatch.setattr(Data, "matches", lambda data, fingerprint: True)
    other = Data(np.full(2000, 300), np.full(200, 300), MODEL["context"], "other")
    store = RunDirectory(tmp_path)
    with pytest.raises(ConfigError, match="token 300"):
        resumed(read_state(store.verified_last()), other, store, PARALLEL["none"], ALONE)


def test_a_run_that_went_on_meanwhile_is_not_resumed_from_before(tmp_path):
    run, progress = start(tmp_path)
    carry_out(dataclasses.replace(run, observe=stopped_at(5)), progress)
    store = RunDirectory(tmp_path)
    before = read_state(store.verified_last())
    carry_out(*resume(tmp_path))
    with pytest.raises(ConfigError, match="has continued since it was read"):
        resumed(before, from_text(TEXT, MODEL["context"]), store, PARALLEL["none"], ALONE)


@pytest.mark.parametrize("quantity", ["step", "exp_avg", "exp_avg_sq"])
def test_an_optimiser_file_that_lacks_a_tensor_is_refused(quantity, tmp_path):
    run, progress = start(tmp_path / "run", iterations=1)
    carry_out(run, progress)
    held = optimiser_tensors(run.model, run.optimiser)
    del held[next(name for name in held if name.endswith(f":{quantity}"))]
    safetensors.torch.save_file(held, tmp_path / OPTIMISER)
    with pytest.raises(ConfigError, match=f"AdamW needs .*{quantity}"):
        restore(tmp_path, run.model, run.optimiser)


def test_the_growth_from_a_state_of_zero_is_no_error(tmp_path):
    run, progress = start(tmp_path / "run", model={"embedding_std": 1e-320}, iterations=1)
    carry_out(run, progress)
    assert next(iter(log.read(tmp_path / "run")))["growth"] in ("inf", "nan")


def test_a_run_that_was_to_be_overwritten_is_said_to_be_intact_when_the_disk_is_full(
    tmp_path, monkeypatch
):
    carry_out(*start(tmp_path))
    begun = start(tmp_path, overwrite=True)

    def full(*args, **options):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("safetensors.torch.save_file", full)
    monkeypatch.setattr("ctrans.training.run_directory.os.rename", full)
    with pytest.raises(ConfigError, match=r"to be overwritten is intact.*by --resume"):
        carry_out(*begun)


@pytest.mark.parametrize(
    ("name", "parallel"), [("WORLD_SIZE", "none"), ("WORLD_SIZE", "ddp"), ("RANK", "ddp")]
)
def test_numbers_of_torchrun_that_are_none_are_named(name, parallel, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv(name, "y")
    with (
        pytest.raises(ConfigError, match=f"variable {name} is 'y'"),
        processes(parallel, torch.device("cpu")),
    ):
        pass

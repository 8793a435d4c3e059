"""A monitor that cannot do its work says so once, and the training and its own errors go on as
without it.
"""

import copy
import errno
import gc
import io
import logging
import os
import pickle
import shutil
import weakref

import pytest
import torch

from ctrans import GPT, ConfigError, GPTConfig
from ctrans.training.monitor import Monitor, read_log
from ctrans.training.monitor.log import KEPT, LOG, LogWriter
from ctrans.training.monitor.log_lines import Report
from ctrans.training.monitor.monitor import DEFAULTS
from ctrans.training.monitor.monitor_options import check_options
from ctrans.training.monitor.past import STEPS as LOSSES
from ctrans.training.monitor.probes import PROBES
from tests import typecheck
from tests.campaigns.disk import BrokenDisk, raising
from tests.training.monitor.test_callbacks import STEPS, trained
from tests.training.monitor.test_log import HEADER


def small():
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocab_size=32, context=8, depth=1, width=16, heads=2), seed=0)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def train(monitor, model, optimiser, steps, *, between=lambda step: None):
    generator = torch.Generator().manual_seed(1)
    for step in range(1, steps + 1):
        tokens = torch.randint(32, (2, 9), generator=generator)
        loss = model(tokens[:, :-1], tokens[:, 1:])[1]
        between(step)
        loss.backward()
        monitor.step(loss, optimiser)
        optimiser.step()
        optimiser.zero_grad()


@pytest.fixture
def said(caplog):
    words = []
    caplog.set_level(logging.WARNING, "ctrans.training.monitor")
    handler = logging.Handler()
    handler.emit = lambda record: words.append(record.getMessage())
    logging.getLogger("ctrans.training.monitor").addHandler(handler)
    yield words
    logging.getLogger("ctrans.training.monitor").removeHandler(handler)


def test_a_log_whose_directory_goes_leaves_the_training_and_the_users_own_error(tmp_path, said):
    model, optimiser = small()

    def watched():
        with Monitor(model, every=2, out=tmp_path / "log") as monitor:
            train(
                monitor,
                model,
                optimiser,
                8,
                between=lambda step: shutil.rmtree(tmp_path / "log") if step == 3 else None,
            )
            raise KeyError("the user's")

    with pytest.raises(KeyError, match="the user's"):
        watched()
    assert len(said) == 1
    assert "the log stays in memory: cannot write" in said[0]
    assert not (tmp_path / "log").exists()


def test_what_could_not_be_written_is_written_when_it_can_be(tmp_path, said):
    model, optimiser = small()
    monitor = Monitor(model, every=2, out=tmp_path / "log")
    away = {
        3: lambda: (tmp_path / "log").rename(tmp_path / "away"),
        7: lambda: (tmp_path / "away").rename(tmp_path / "log"),
    }
    train(monitor, model, optimiser, 8, between=lambda step: away.get(step, lambda: None)())
    monitor.close()
    log = read_log(tmp_path / "log")
    assert (log.steps, log.ended, len(said)) == ([1, 2, 4, 6, 8], "finished", 1)


@pytest.mark.slow
@pytest.mark.parametrize("lasting", [False, True])
def test_a_disk_that_fails_at_any_operation_changes_no_bit_and_loses_no_line_if_it_recovers(
    lasting, tmp_path, said
):
    def run(out, number=0):
        model, optimiser = small()
        monitor = Monitor(model, every=1, out=out)
        with BrokenDisk(tmp_path, number, raising(errno.ENOSPC), lasting=lasting) as disk:
            train(monitor, model, optimiser, 3)
            monitor.close()
        return model.state_dict(), disk.count

    expected, count = run(tmp_path / "whole")
    assert count > 10
    for number in range(1, count + 1):
        found, _ = run(tmp_path / str(number), number)
        assert all(torch.equal(found[name], expected[name]) for name in expected)
        if not lasting and number < count - 20:  # a failure at the end has no line after it
            assert read_log(tmp_path / str(number)).steps == [1, 2, 3]
    assert said


@pytest.mark.slow
def test_lines_that_wait_grow_no_further_than_a_log_does(tmp_path, said):
    writer = LogWriter(tmp_path / "log", HEADER)
    for step in range(1, 2 * KEPT):
        writer.report(Report(step, {"loss": 1.0}))
    assert len(writer._waiting) <= KEPT
    (tmp_path / "log").mkdir()
    writer.end(2 * KEPT, "finished")
    assert (read_log(tmp_path / "log").steps[-1], len(said)) == (2 * KEPT - 1, 1)


def test_of_two_monitors_in_one_place_the_newer_has_the_log_and_the_older_says_so(tmp_path, said):
    (model, optimiser), (other, its) = small(), small()
    older = Monitor(model, every=2, out=tmp_path)
    train(older, model, optimiser, 4)
    newer = Monitor(other, every=3, out=tmp_path)
    train(newer, other, its, 3)
    train(older, model, optimiser, 4)
    train(newer, other, its, 3)
    older.close("the older")
    newer.close("the newer")
    log = read_log(tmp_path)
    assert (log.header.every, log.steps, log.ended) == (3, [1, 3, 6], "the newer")
    assert len(said) == 2
    assert "is the log of another training, or no log of a monitor: it is kept as" in said[0]
    assert f"another monitor writes {str(tmp_path / LOG)!r}" in said[1]


def test_a_log_stays_where_it_began_when_the_training_changes_its_directory(
    tmp_path, monkeypatch, said
):
    (tmp_path / "elsewhere" / "run").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    model, optimiser = small()
    monitor = Monitor(model, every=1, out="run")
    train(monitor, model, optimiser, 2)
    monkeypatch.chdir(tmp_path / "elsewhere")
    train(monitor, model, optimiser, 2)
    monitor.close()
    assert read_log(tmp_path / "run").steps == [1, 2, 3, 4]
    assert not list((tmp_path / "elsewhere" / "run").iterdir())
    assert not said


def test_a_second_training_keeps_the_log_of_the_first(tmp_path, said):
    for _ in range(3):
        model, optimiser = small()
        with Monitor(model, every=1, out=tmp_path) as monitor:
            train(monitor, model, optimiser, 2)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["monitor-1.jsonl", "monitor-2.jsonl", LOG]
    for name in names[:2]:
        (tmp_path / name).replace(tmp_path / LOG)
        assert (read_log(tmp_path).steps, read_log(tmp_path).ended) == ([1, 2], "finished")
    assert len(said) == 2


def test_a_log_that_is_removed_or_whose_directory_is_replaced_is_said(tmp_path, said):
    model, optimiser = small()
    place = tmp_path / "run"
    monitor = Monitor(model, every=1, out=place)
    train(monitor, model, optimiser, 2)
    (place / LOG).unlink()
    train(monitor, model, optimiser, 1)
    assert read_log(place).steps == [3]
    assert ["was removed or cut while the training" in message for message in said] == [True]
    place.rename(tmp_path / "moved")
    place.mkdir()
    train(monitor, model, optimiser, 1)
    monitor.close()
    assert not list(place.iterdir())
    assert "is no longer the directory" in said[-1]


def test_a_reaction_or_a_logger_that_fails_takes_no_alarm_away(said, reports_may_fail):
    def broken(*of):
        raise OSError("no space")

    model, optimiser = small()
    told = []
    monitor = Monitor(
        model,
        every=2,
        limits={"updates too large": {"limit": 0.0}},
        react=["save", "stop"],
        save=broken,
        told=[broken, lambda *of: told.append(of)],
    )
    train(monitor, model, optimiser, 4)
    assert [alarm.check for alarm in monitor.alarms].count("updates too large") >= 1
    assert len(told) == 3
    assert all("no space" in words for words in said)


@pytest.mark.slow
def test_a_trainer_ends_as_without_a_log_that_goes(tmp_path, said):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    from ctrans.training.monitor import TrainerCallback

    class Removes(transformers.TrainerCallback):
        def on_step_end(self, args, state, control, **others):
            if state.global_step == 5:
                shutil.rmtree(tmp_path / "log")

    trainer = trained(
        tmp_path / "run", [TrainerCallback(every=2, out=tmp_path / "log"), Removes()], told=False
    )
    assert trainer.state.global_step == STEPS
    assert [words for words in said if "the log stays in memory" in words]


def armed(monitor, model, optimiser):
    """The monitor before a step that reports."""
    train(monitor, model, optimiser, 3)
    assert any(part._forward_hooks for part in model.modules())


def test_a_copy_of_a_watched_model_is_a_model_and_its_passes_are_not_the_models():
    def figures(copies):
        model, optimiser = small()
        monitor = Monitor(model, every=2)
        armed(monitor, model, optimiser)
        x = torch.randint(32, (2, 9), generator=torch.Generator().manual_seed(2))
        for make in copies:
            other = make(model)
            with torch.no_grad():
                for weight in other.parameters():
                    weight.mul_(50.0)
            other.train()
            other(x[:, :-1], x[:, 1:])[1].backward()
        train(monitor, model, optimiser, 1)
        step, found = monitor.past.reports[-1]
        return {"step": step, **found, "seconds": None}

    def saved(model):
        file = io.BytesIO()
        torch.save(model, file)
        return torch.load(io.BytesIO(file.getvalue()), weights_only=False)

    through_pickle = lambda model: pickle.loads(pickle.dumps(model))  # noqa: E731
    plain = figures([])
    for make in (
        copy.deepcopy,
        saved,
        through_pickle,
        lambda model: copy.deepcopy(through_pickle(model)),
    ):
        assert repr(figures([make])) == repr(plain)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("clip", value) for value in (0, -1.0, float("nan"), "1")),
        *(("total", value) for value in (-1, 1.5, "10")),
        *(("start", value) for value in (-1, 1.5, True, None)),
        *(("scale", value) for value in (3, "x")),
        *(("told", value) for value in ([3], 3, print)),
        *(("held", value) for value in (3, [1], torch.zeros(3))),
        *(("save", 3), ("out", 3), ("memory", 3)),
    ],
)
def test_an_option_that_cannot_be_is_refused_by_its_name(name, value):
    with pytest.raises(ConfigError, match=rf"^{name} = .*: give "):
        check_options({name: value}, DEFAULTS)


def test_a_place_that_cannot_be_written_is_refused_before_the_training(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot write"):
        Monitor(small()[0], out=tmp_path / "file")


def test_a_clip_of_infinity_clips_nothing():
    def figures(clip):
        model, optimiser = small()
        monitor = Monitor(model, every=2, clip=clip)
        train(monitor, model, optimiser, 4)
        return [figures.get("adam_gradient_ratio") for _, figures in monitor.past.reports]

    assert figures(float("inf")) == figures(None)


@pytest.mark.slow
def test_a_probe_whose_value_json_lacks_costs_its_line_and_no_alarm(
    tmp_path, monkeypatch, said, reports_may_fail
):
    monkeypatch.setitem(PROBES, "mine", lambda at: {"mine": object()})
    model, optimiser = small()
    held = (torch.randint(32, (1, 8)), torch.randint(32, (1, 8)))
    monitor = Monitor(
        model,
        every=2,
        probe_every=2,
        held=held,
        out=tmp_path / "log",
        limits={"updates too large": {"limit": 0.0}},
    )
    train(monitor, model, optimiser, 6)
    monitor.close()
    log = read_log(tmp_path / "log")
    assert [alarm.check for alarm in monitor.alarms].count("updates too large") >= 1
    assert [report.step for report in log.reports] == [1, 2, 4, 6]
    assert "not JSON serializable" in said[0]


def hooks(model):
    return sum(len(part._forward_hooks) + len(part._forward_pre_hooks) for part in model.modules())


def test_what_is_no_number_costs_its_figure_and_no_report(said):
    typecheck.allow(False)
    model, optimiser = small()
    monitor = Monitor(model, every=1, react=["skip"])
    strange = [
        10**400,
        "x",
        [1],
        object(),
        torch.zeros((), device="meta"),
        torch.zeros(2).to_sparse(),
    ]
    for value in strange:
        tokens = torch.randint(32, (2, 9))
        model(tokens[:, :-1], tokens[:, 1:])[1].backward()
        monitor.step(value, optimiser, gradient_norm=value)
        optimiser.step()
    assert [step for step, _ in monitor.past.reports] == list(range(1, len(strange) + 1))
    assert all("loss" not in figures and "rms" in figures for _, figures in monitor.past.reports)
    assert [words.partition(":")[2].split()[1] for words in said] == ["gradient_norm:", "loss:"]


def test_what_is_no_optimiser_ends_no_training(said, reports_may_fail):
    typecheck.allow(False)
    model, optimiser = small()
    monitor = Monitor(model, every=1)
    train(monitor, model, optimiser, 3)
    monitor.step(1.0, 3)
    assert said


@pytest.mark.slow
def test_a_monitor_that_is_forgotten_leaves_no_hook_and_keeps_no_model():
    model, optimiser = small()
    monitor = Monitor(model, every=1)
    train(monitor, model, optimiser, 2)
    assert hooks(model)
    del monitor
    gc.collect()
    assert not hooks(model)
    model.monitor, left = Monitor(model, every=1), weakref.ref(model)
    del model, optimiser
    gc.collect()
    assert left() is None


def test_steps_after_the_end_do_nothing(tmp_path):
    model, optimiser = small()
    monitor = Monitor(model, every=1, out=tmp_path)
    train(monitor, model, optimiser, 3)
    monitor.close()
    written = (tmp_path / LOG).read_bytes()
    train(monitor, model, optimiser, 3)
    monitor.close("again")
    assert (tmp_path / LOG).read_bytes() == written
    assert not hooks(model)


def test_a_copy_of_a_monitor_leaves_its_hooks_and_its_log(tmp_path):
    model, optimiser = small()
    monitor = Monitor(model, every=1, out=tmp_path)
    train(monitor, model, optimiser, 2)
    before = hooks(model)
    copy.deepcopy({"model": model, "monitor": monitor})["monitor"].close("the copy")
    assert hooks(model) == before
    train(monitor, model, optimiser, 2)
    monitor.close()
    assert (read_log(tmp_path).steps, read_log(tmp_path).ended) == ([1, 2, 3, 4], "finished")


def test_a_fork_writes_nothing_into_the_log(tmp_path):
    model, optimiser = small()
    monitor = Monitor(model, every=2, out=tmp_path)
    train(monitor, model, optimiser, 2)
    process = os.fork()
    if process == 0:
        for _ in range(4):
            monitor.step(1.0, optimiser)
        monitor.close("the fork")
        os._exit(0)
    assert os.waitpid(process, 0)[1] == 0
    train(monitor, model, optimiser, 2)
    monitor.close()
    assert (read_log(tmp_path).steps, read_log(tmp_path).ended) == ([1, 2, 4], "finished")


@pytest.mark.parametrize(
    "memory",
    [
        {"step": 0},
        {"step": 0, "waiting_losses": 3},
        {"step": 0, "waiting_losses": "", "waiting_norms": ""},
    ],
)
def test_a_memory_that_is_none_is_refused(memory):
    with pytest.raises(ConfigError, match=r"memory is no result of Monitor\.memory"):
        Monitor(small()[0], memory=memory)


def test_a_memory_with_the_factor_of_the_removed_reaction_lower_is_read():
    model, optimiser = small()
    monitor = Monitor(model, every=1)
    train(monitor, model, optimiser, 2)
    memory = monitor.memory()
    assert Monitor(model, start=2, memory={**memory, "factor": 0.5}).memory() == memory


def test_a_handler_of_the_users_that_raises_ends_no_training(reports_may_fail):
    class Broken(logging.Handler):
        def emit(self, record):
            raise OSError("no space")

    def failing(*of):
        raise KeyError

    model, optimiser = small()
    broken = Broken()
    logging.getLogger("ctrans.training.monitor").addHandler(broken)
    try:
        train(Monitor(model, every=1, told=[failing]), model, optimiser, 3)
    finally:
        logging.getLogger("ctrans.training.monitor").removeHandler(broken)


def test_steps_without_a_report_are_kept_to_a_number_and_their_peak_is_shown():
    model, optimiser = small()
    monitor = Monitor(model, every=10 * LOSSES)
    for step in range(1, 10 * LOSSES + 1):
        monitor.step(
            7.0 if step == 3 * LOSSES else 1.0,
            optimiser,
            gradient_norm=9.0 if step == 5 * LOSSES else None,
        )
        assert len(monitor._waiting._entries) < 2 * LOSSES
    _, figures = monitor.past.reports[-1]
    assert (figures["highest_loss"], figures["highest_gradient_norm"], figures["loss"]) == (
        7.0,
        9.0,
        1.0,
    )
    assert [step for step, _ in monitor.past.losses] == list(range(9 * LOSSES + 1, 10 * LOSSES + 1))


class Plain(torch.nn.Module):
    """A block of softmax attention as a stranger writes it."""

    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = torch.nn.LayerNorm(16), torch.nn.LayerNorm(16)
        self.attn, self.mlp = (
            PlainAttention(),
            torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.GELU(), torch.nn.Linear(32, 16)),
        )

    def forward(self, x):
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class PlainAttention(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.out = (torch.nn.Linear(16, 16) for _ in range(4))

    def forward(self, x):
        q, k, v = (
            part(x).unflatten(-1, (2, 8)).transpose(1, 2) for part in (self.q, self.k, self.v)
        )
        weights = torch.softmax(input=q @ k.mT / 8**0.5, dim=-1)
        return self.out((weights @ v).transpose(1, 2).flatten(2))


class Stack(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList([Plain(), Plain()])

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def test_a_softmax_by_keyword_an_empty_batch_and_a_first_state_that_is_a_leaf_leave_the_training_alone():
    model, queries = Stack(), torch.randn(2, 5, 16, requires_grad=True)
    optimiser = torch.optim.SGD([*model.parameters(), queries], lr=0.01)
    monitor = Monitor(model, every=1, example=queries.detach())
    for rows in (queries, torch.zeros(0, 5, 16), queries, queries):
        model(rows).square().sum().backward()
        monitor.step(1.0, optimiser)
        optimiser.step()
    assert "logit" in monitor.past.reports[-1][1]
    monitor.close()
    assert not queries._backward_hooks


def test_an_optimiser_without_betas_or_a_rate_has_its_reports():
    model, optimiser = small()
    monitor = Monitor(model, every=1)
    train(monitor, model, optimiser, 1)
    for group in optimiser.param_groups:  # as transformers' Adafactor
        group["lr"] = None
        del group["betas"]
    tokens = torch.randint(32, (2, 9))
    model(tokens[:, :-1], tokens[:, 1:])[1].backward()
    monitor.step(1.0, optimiser)
    assert [step for step, _ in monitor.past.reports] == [1, 2]
    assert "learning_rate" not in monitor.past.reports[-1][1]


def test_a_monitor_can_be_pickled_with_its_model():
    model, _ = small()
    model.monitor = [Monitor(model, every=1, react=["stop"])]
    assert pickle.loads(pickle.dumps(model)).monitor[0].every == 1

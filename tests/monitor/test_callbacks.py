"""The monitor in real trainings of Hugging Face's Trainer, offline."""

import logging
import os

import pytest
import torch

from ctrans import ConfigError
from ctrans.monitor import read_log

STEPS = 12


class Windows(torch.utils.data.Dataset):
    def __init__(self):
        self.rows = torch.randint(32, (64, 8), generator=torch.Generator().manual_seed(0))

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return {"input_ids": self.rows[i], "labels": self.rows[i]}


def trained(tmp_path, callbacks, **arguments):
    pytest.importorskip("accelerate")
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(n_layer=2, n_embd=16, n_head=2, vocab_size=32, n_positions=8)
    model = transformers.GPT2LMHeadModel(config)
    plain = {"report_to": "none", "use_cpu": True, "disable_tqdm": True, "save_strategy": "no", "logging_steps": 1, "seed": 1}
    given = transformers.TrainingArguments(
        output_dir=str(tmp_path), max_steps=STEPS, per_device_train_batch_size=2, **{**plain, **arguments}
    )
    trainer = transformers.Trainer(model=model, args=given, train_dataset=Windows(), callbacks=callbacks)
    for callback in callbacks:
        callback.logs_to(trainer)
    trainer.train()
    return trainer


@pytest.mark.core
@pytest.mark.parametrize("arguments", [{}, {"gradient_accumulation_steps": 2, "gradient_checkpointing": True, "bf16": True}])
def test_a_trainer_with_the_callback_has_the_weights_of_one_without(tmp_path, arguments):
    pytest.importorskip("accelerate")
    from ctrans.monitor import TrainerCallback

    callback = TrainerCallback(every=4)
    without = trained(tmp_path / "without", [], **arguments).model.state_dict()
    trainer = trained(tmp_path / "with", [callback], **arguments)
    weights = trainer.model.state_dict()
    assert all(torch.equal(weights[name], without[name]) for name in without)
    log = read_log(tmp_path / "with")
    assert log.steps == [1, 4, 8, 12]
    assert (log.ended, log.header.total) == ("finished", STEPS)
    assert {"rms", "gradient", "update", "logit", "log_z", "learning_rate"} <= log.reports[-1].figures.keys()
    said = {row["step"]: row["loss"] for row in trainer.state.log_history if "loss" in row}
    for report in log.reports:
        assert report.figures["loss"] == pytest.approx(said[report.step], abs=2e-3)
    assert any("monitor/rms/largest" in row for row in trainer.state.log_history)
    norms = [row["grad_norm"] for row in trainer.state.log_history if "grad_norm" in row]
    assert [norm for _, norm in callback.monitor.past.norms] == pytest.approx(norms)


def test_a_trainers_alarms_are_warnings_and_may_stop_it_and_save(tmp_path, caplog):
    pytest.importorskip("accelerate")
    from ctrans.monitor import TrainerCallback

    limits = {"updates too large": {"limit": 0.0}}
    callback = TrainerCallback(every=3, limits=limits, react=["stop", "save"], out=tmp_path / "log")
    with caplog.at_level(logging.WARNING, "ctrans.monitor"):
        trainer = trained(tmp_path, [callback])
    assert "updates too large" in caplog.text
    assert trainer.state.global_step == 3
    assert read_log(tmp_path / "log").ended == "stopped at step 3"
    assert any(name.startswith("checkpoint") for name in os.listdir(tmp_path))


def test_an_option_that_is_none_is_refused_before_the_training_begins():
    pytest.importorskip("transformers")
    from ctrans.monitor import TrainerCallback

    with pytest.raises(ConfigError, match="did you mean 'every'"):
        TrainerCallback(evry=5)
    assert TrainerCallback(react=["save"]).monitor is None


def test_a_trainer_that_is_resumed_has_the_log_of_one_that_did_not_stop(tmp_path):
    pytest.importorskip("accelerate")
    from ctrans.monitor import TrainerCallback

    course = {"save_strategy": "steps", "save_steps": 6}
    trained(tmp_path / "whole", [TrainerCallback(every=4)], **course)
    first = trained(tmp_path / "resumed", [TrainerCallback(every=4)], **course)
    assert (tmp_path / "resumed/checkpoint-6/monitor.json").is_file()
    again = TrainerCallback(every=4)
    first.callback_handler.callbacks = [
        each for each in first.callback_handler.callbacks if not isinstance(each, TrainerCallback)
    ]
    first.add_callback(again)
    first.train(resume_from_checkpoint=str(tmp_path / "resumed/checkpoint-6"))
    logs = [read_log(tmp_path / name) for name in ("whole", "resumed")]
    assert logs[0].steps == logs[1].steps == [1, 4, 8, 12]
    assert logs[0].reports[-1].figures["rms"] == pytest.approx(logs[1].reports[-1].figures["rms"], rel=1e-6)

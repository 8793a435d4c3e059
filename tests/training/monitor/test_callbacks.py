"""The monitor in real trainings of Hugging Face's Trainer, offline."""

import logging
import os
import types

import numpy as np
import pytest
import torch

from ctrans import ConfigError
from ctrans.training.monitor import read_log
from tests.guests import traces_in

STEPS = 12


class Windows(torch.utils.data.Dataset):
    def __init__(self):
        self.rows = torch.randint(32, (64, 8), generator=torch.Generator().manual_seed(0))

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return {"input_ids": self.rows[i], "labels": self.rows[i]}


def trained(tmp_path, callbacks, model=None, data=None, told=True, **arguments):
    pytest.importorskip("accelerate")
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(n_layer=2, n_embd=16, n_head=2, vocab_size=32, n_positions=8)
    model = transformers.GPT2LMHeadModel(config) if model is None else model
    plain = {
        "report_to": "none",
        "use_cpu": True,
        "disable_tqdm": True,
        "save_strategy": "no",
        "logging_steps": 1,
        "seed": 1,
    }
    given = transformers.TrainingArguments(
        output_dir=str(tmp_path),
        max_steps=STEPS,
        per_device_train_batch_size=2,
        **{**plain, **arguments},
    )
    trainer = transformers.Trainer(
        model=model,
        args=given,
        train_dataset=Windows() if data is None else data,
        callbacks=callbacks,
    )
    for callback in callbacks if told else []:
        callback.logs_to(trainer)
    trainer.train()
    return trainer


@pytest.mark.parametrize(
    "out",
    [np.ones(30), 3, 10**5000, "n" * 300],
    ids=["array", "number", "5,001 digits", "long name"],
)
def test_a_place_for_the_log_that_no_system_holds_is_named(out):
    pytest.importorskip("accelerate")
    from ctrans.training.monitor import TrainerCallback

    with pytest.raises(ConfigError, match=r"^out = .*give text or a path"):
        TrainerCallback(out=out)


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    "arguments",
    [{}, {"gradient_accumulation_steps": 2, "gradient_checkpointing": True, "bf16": True}],
)
def test_a_trainer_with_the_callback_has_the_weights_of_one_without(tmp_path, arguments):
    pytest.importorskip("accelerate")
    from ctrans.training.monitor import TrainerCallback

    callback = TrainerCallback(every=4)
    plain = trained(tmp_path / "without", [], **arguments).model
    without, traces = plain.state_dict(), traces_in(plain)
    trainer = trained(tmp_path / "with", [callback], **arguments)
    weights = trainer.model.state_dict()
    assert all(torch.equal(weights[name], without[name]) for name in without)
    assert traces_in(trainer.model) == traces
    log = read_log(tmp_path / "with")
    assert log.steps == [1, 4, 8, 12]
    assert (log.ended, log.header.total) == ("finished", STEPS)
    assert {"rms", "gradient", "update", "logit", "log_z", "learning_rate"} <= log.reports[
        -1
    ].figures.keys()
    said = {row["step"]: row["loss"] for row in trainer.state.log_history if "loss" in row}
    for report in log.reports:
        assert report.figures["loss"] == pytest.approx(said[report.step], abs=2e-3)
    norms = [row["grad_norm"] for row in trainer.state.log_history if "grad_norm" in row]
    assert [norm for _, norm in callback.monitor.past.norms] == pytest.approx(norms)
    assert log.reports[-1].figures["gradient_norm"] == pytest.approx(norms[-1], rel=1e-5)
    assert "clip_grad_norm_" not in vars(trainer.accelerator)  # as it was


@pytest.mark.slow
def test_a_trainers_alarms_are_warnings_and_may_stop_it_and_save(tmp_path, caplog):
    pytest.importorskip("accelerate")
    from ctrans.training.monitor import TrainerCallback

    limits = {"updates too large": {"limit": 0.0}}
    callback = TrainerCallback(every=3, limits=limits, react=["stop", "save"], out=tmp_path / "log")
    with caplog.at_level(logging.WARNING, "ctrans.training.monitor"):
        trainer = trained(tmp_path, [callback])
    assert "updates too large" in caplog.text
    assert trainer.state.global_step == 3
    assert read_log(tmp_path / "log").ended == "stopped at step 3"
    assert any(name.startswith("checkpoint") for name in os.listdir(tmp_path))


class Spoiled(Windows):
    """Rows of embeddings in order, two of them nan."""

    def __getitem__(self, i):
        return {
            "inputs_embeds": torch.full((8, 16), np.nan if i in (20, 21) else 1.0),
            "labels": self.rows[i],
        }


@pytest.mark.slow
@pytest.mark.parametrize("told", [True, False])
def test_a_step_whose_gradient_is_not_finite_is_skipped_though_the_trainer_clips(tmp_path, told):
    pytest.importorskip("accelerate")
    from ctrans.training.monitor import TrainerCallback

    callback = TrainerCallback(every=4, react=["skip"])
    course = {"logging_steps": 500, "train_sampling_strategy": "sequential"}
    trainer = trained(tmp_path, [callback], data=Spoiled(), told=told, **course)
    assert callback.monitor.reactions.skipped == [11]
    assert all(torch.isfinite(weight).all() for weight in trainer.model.parameters())


@pytest.mark.slow
def test_losses_of_micro_batches_are_told_as_the_trainer_adds_them_up(tmp_path):
    """Of models that divide by all tokens and of one that does not; of a loss that is not the
    model's, as late as the trainer tells it.
    """
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    from ctrans.training.monitor import TrainerCallback

    torch.manual_seed(0)
    images = [{"pixel_values": torch.randn(3, 8, 8), "labels": i % 5} for i in range(64)]
    small = {
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 32,
    }
    vit = transformers.ViTForImageClassification(
        transformers.ViTConfig(**small, image_size=8, patch_size=4, num_labels=5)
    )
    llama = transformers.LlamaForCausalLM(transformers.LlamaConfig(**small, vocab_size=32))
    for model, data, more in (
        (vit, images, {}),
        (llama, None, {}),
        (llama, None, {"label_smoothing_factor": 0.1}),
    ):
        callback = TrainerCallback(every=2)
        trainer = trained(
            tmp_path, [callback], model=model, data=data, gradient_accumulation_steps=3, **more
        )
        said = {row["step"]: row["loss"] for row in trainer.state.log_history if "loss" in row}
        told = dict(callback.monitor.past.losses)
        assert told == pytest.approx({step: said[step] for step in told}, abs=2e-3)
        assert len(told) >= STEPS - 1
        assert callback.monitor.gauges.missing == {}


def test_float16s_scale_is_taken_from_the_trainers_scaler(tmp_path):
    """A Trainer has none on a processor: what it calls, in its order, with a scaler that it would
    have.
    """
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    from ctrans.training.monitor import TrainerCallback

    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(n_layer=2, n_embd=16, n_head=2, vocab_size=32, n_positions=8)
    )
    args = transformers.TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to="none")
    state, control = transformers.TrainerState(max_steps=8), transformers.TrainerControl()
    inner = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
    optimizer = types.SimpleNamespace(optimizer=inner, scaler=scaler)
    callback = TrainerCallback(every=1)
    callback.on_train_begin(args, state, control, model=model, optimizer=optimizer)
    for i in range(3):
        rows = Windows().rows[2 * i : 2 * i + 2]
        scaler.scale(model(input_ids=rows, labels=rows).loss).backward()
        scaler.unscale_(inner)
        norm = float(torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]))
        callback.on_pre_optimizer_step(args, state, control, optimizer=optimizer)
        figures = callback.monitor.past.reports[-1][1]
        assert figures["gradient_norm"] == pytest.approx(norm, rel=1e-5)
        assert max(figures["costate"]) < 10
        scaler.step(inner)
        scaler.update()
        inner.zero_grad()


def test_an_option_that_is_none_is_refused_before_the_training_begins():
    pytest.importorskip("transformers")
    from ctrans.training.monitor import TrainerCallback

    with pytest.raises(ConfigError, match="did you mean 'every'"):
        TrainerCallback(evry=5)
    assert TrainerCallback(react=["save"]).monitor is None


@pytest.mark.slow
def test_a_trainer_that_is_resumed_has_the_log_of_one_that_did_not_stop(tmp_path):
    pytest.importorskip("accelerate")
    from ctrans.training.monitor import TrainerCallback

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
    assert logs[0].reports[-1].figures["rms"] == pytest.approx(
        logs[1].reports[-1].figures["rms"], rel=1e-6
    )


@pytest.mark.slow
def test_callbacks_that_share_a_trainer_hear_every_norm_and_leave_its_clipping_as_it_was(tmp_path):
    pytest.importorskip("accelerate")
    from ctrans.training.monitor import TrainerCallback
    from ctrans.training.monitor.trainer import Clip

    accelerator = types.SimpleNamespace(clip_grad_norm_=lambda: 3.0)
    users = accelerator.clip_grad_norm_
    bound = Clip(accelerator)
    accelerator.clip_grad_norm_ = bound
    bound.listeners.append(lambda norm: None)
    bound.leave(bound.listeners[0])
    assert accelerator.clip_grad_norm_ is users
    watching = [TrainerCallback(every=4, out=tmp_path / name) for name in ("first", "second")]
    trainer = trained(tmp_path, watching)
    first, second = (
        [figures.get("gradient_norm") for _, figures in each.monitor.past.reports]
        for each in watching
    )
    assert first == second
    assert None not in first
    assert "clip_grad_norm_" not in vars(trainer.accelerator)


def test_losses_of_replicas_and_of_any_shape_are_one_loss():
    pytest.importorskip("accelerate")
    from ctrans.training.monitor import TrainerCallback

    callback, module = TrainerCallback(), torch.nn.Linear(1, 1)
    for shape in ((), (1,), (1, 1)):
        callback._returned(module, (), {}, {"loss": torch.full(shape, 2.0, requires_grad=True)})
    assert callback._loss(types.SimpleNamespace()) == 2.0

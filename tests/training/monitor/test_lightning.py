"""The monitor in real trainings of Lightning's Trainer, offline: where Lightning is installed."""

import pytest
import torch

pytest.importorskip("lightning", reason="Lightning is not installed: pip install lightning")

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins import MixedPrecision

from ctrans import GPT, ConfigError, GPTConfig
from ctrans.training.monitor import LightningCallback, read_log
from tests.guests import traces_in
from tests.training.monitor.test_bits import hugging_face

STEPS = 12


def half():
    """float16 with a scaler whose first scales overflow."""
    return {
        "plugins": MixedPrecision(
            "16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=2.0**24)
        )
    }


CASES = {
    "plain": dict,
    "accumulated and clipped": lambda: {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5},
    "clipped by value": lambda: {"gradient_clip_val": 1e-3, "gradient_clip_algorithm": "value"},
    "bfloat16": lambda: {"precision": "bf16-mixed", "gradient_clip_val": 0.5},
    "float16": lambda: {**half(), "gradient_clip_val": 0.5, "accumulate_grad_batches": 2},
}


class Language(LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.model = GPT(GPTConfig(vocab_size=32, context=8, depth=2, width=16, heads=2))
        self.losses, self.norms = [], []

    def training_step(self, rows, index):
        loss = self.model(rows[:, :-1], rows[:, 1:])[1]
        self.losses.append(float(loss.detach()))
        return loss

    def on_before_optimizer_step(self, optimizer):
        """Each norm as Lightning's own users would log it: before clipping, without a scale."""
        self.norms.append(float(torch.nn.utils.get_total_norm([p.grad for p in self.parameters()])))

    def configure_optimizers(self):
        return torch.optim.AdamW(self.model.parameters(), lr=1e-3)


class ByStep(Language):
    """What it reads depends on the step alone: a loader of Lightning's that is resumed within an
    epoch begins anew.
    """

    def training_step(self, rows, index):
        made = torch.Generator().manual_seed(self.trainer.global_step)
        return super().training_step(torch.randint(32, (2, 9), generator=made), index)


class Compiled(Language):
    def __init__(self):
        super().__init__()
        self.model = torch.compile(hugging_face(), backend="eager")

    def training_step(self, rows, index):
        return self.model(input_ids=rows, labels=rows).loss


def trained(tmp_path, callbacks, steps=STEPS, resumed=None, logger=False, kind=Language, **options):
    rows = torch.randint(32, (64, 9), generator=torch.Generator().manual_seed(0))
    language = kind()
    trainer = Trainer(
        max_steps=steps,
        accelerator="cpu",
        callbacks=callbacks,
        default_root_dir=tmp_path,
        logger=logger,
        enable_checkpointing=any(isinstance(each, ModelCheckpoint) for each in callbacks),
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )
    trainer.fit(
        language,
        torch.utils.data.DataLoader(rows, batch_size=2),
        ckpt_path=resumed,
        weights_only=False,
    )
    return language


def same(first, second):
    return all(
        torch.equal(value, second.state_dict()[name]) for name, value in first.state_dict().items()
    )


class StopsAtThree(Callback):
    def on_train_batch_end(self, trainer, *_):
        trainer.should_stop = trainer.global_step >= 3


def test_a_training_that_another_callback_stops_early_did_not_finish(tmp_path):
    trained(tmp_path, [LightningCallback(every=1, out=tmp_path / "log"), StopsAtThree()])
    assert read_log(tmp_path / "log").ended == "stopped at step 3"


@pytest.mark.cases(1)
@pytest.mark.parametrize("case", CASES)
def test_a_training_with_the_callback_has_the_bits_of_one_without(tmp_path, case):
    without = trained(tmp_path, [], **CASES[case]())
    traces = traces_in(without)
    callback = LightningCallback(every=4, out=tmp_path / "log")
    watched = trained(tmp_path, [callback], **CASES[case]())
    assert same(watched, without)
    assert traces_in(watched) == traces
    log = read_log(tmp_path / "log")
    assert log.steps == [1, 4, 8, 12]
    assert (log.ended, log.header.total) == ("finished", STEPS)
    assert {"rms", "gradient", "update", "logit", "log_z", "learning_rate"} <= log.reports[
        -1
    ].figures.keys()
    count = CASES[case]().get("accumulate_grad_batches", 1)
    for report in log.reports:
        micro = watched.losses[count * (report.step - 1) : count * report.step]
        assert report.figures["loss"] == pytest.approx(sum(micro) / count, rel=1e-5)
        norm = watched.norms[report.step - 1]
        if norm < float("inf"):  # else the scale is too large, and its scaler makes no step
            assert report.figures["gradient_norm"] == pytest.approx(norm, rel=1e-5)
            assert (
                max(report.figures["costate"][:-1]) < 10
            )  # and not as many times as much as the scale is
    assert not [
        alarm
        for alarm in callback.monitor.alarms
        if "gradient" in alarm.check or alarm.severity != "note"
    ]
    surprise = [
        report.figures["adam_gradient_ratio"][0]
        for report in log.reports
        if "adam_gradient_ratio" in report.figures
    ]
    assert all(0 < each < 12 for each in surprise)


def test_adam_is_surprised_by_gradients_as_they_are_clipped(tmp_path):
    """Clipped to 1e-6, all gradients have that norm: their second moments remember no larger
    ones.
    """
    callback = LightningCallback(every=4)
    trained(tmp_path, [callback], gradient_clip_val=1e-6)
    assert 0.3 < callback.monitor.past.reports[-1][1]["adam_gradient_ratio"][0] < 3


def test_a_training_that_is_resumed_goes_on_as_if_it_had_not_stopped(tmp_path):
    def watching(name):
        limits = {"gradient spike": {"factor": 1.01, "least": 2}}  # told once, and remembered
        return LightningCallback(every=4, out=tmp_path / name, limits=limits)

    whole = trained(tmp_path, [watching("whole")], kind=ByStep)
    keeping = ModelCheckpoint(dirpath=tmp_path / "kept", every_n_train_steps=6, save_top_k=-1)
    trained(tmp_path, [watching("resumed"), keeping], steps=6, kind=ByStep)
    resumed = trained(tmp_path, [watching("resumed")], kind=ByStep, resumed=keeping.best_model_path)
    assert same(whole, resumed)
    logs = [read_log(tmp_path / name) for name in ("whole", "resumed")]
    assert logs[0].steps == logs[1].steps == [1, 4, 8, 12]
    assert logs[0].findings == logs[1].findings
    for name in ("rms", "gradient", "update"):  # the sample of the weights before a step among it
        assert logs[0].reports[2].figures[name] == logs[1].reports[2].figures[name]


def test_a_danger_ends_the_training_and_its_alarm_is_a_warning(tmp_path, caplog):
    callback = LightningCallback(
        every=3, out=tmp_path, limits={"updates too large": {"limit": 0.0}}, react=["stop"]
    )
    with caplog.at_level("WARNING", "ctrans.training.monitor"):
        trained(tmp_path, [callback])
    assert "updates too large" in caplog.text
    assert read_log(tmp_path).ended == "stopped at step 3"


def test_reports_go_to_the_trainers_loggers(tmp_path):
    logger = CSVLogger(tmp_path, flush_logs_every_n_steps=1)
    trained(tmp_path, [LightningCallback(every=4)], logger=logger)
    assert "monitor/rms/largest" in (next(tmp_path.rglob("metrics.csv"))).read_text()


@pytest.mark.slow
def test_a_compiled_model_is_looked_at_by_its_batch(tmp_path):
    callback = LightningCallback(every=4, batch={"input_ids": torch.randint(32, (4, 8))})
    trained(tmp_path, [callback], steps=4, kind=Compiled)
    assert {"rms", "logit", "gradient"} <= callback.monitor.past.reports[-1][1].keys()


def test_what_is_no_option_is_refused_when_the_callback_is_made():
    with pytest.raises(ConfigError, match="did you mean 'every'"):
        LightningCallback(evry=5)


class ByHand(Language):
    """Several losses of one step, with entries of their own."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, rows, index):
        optimiser = self.optimizers()
        for count in (3, 5):
            losses = self.model(rows[:, :-1], rows[:, 1:])[1].expand(count)
            self.manual_backward(losses, gradient=torch.ones(count) / count)
        optimiser.step()
        optimiser.zero_grad()


def test_losses_of_a_manual_backward_pass_may_have_any_shape(tmp_path):
    callback = LightningCallback(every=4)
    assert same(trained(tmp_path, [], kind=ByHand), trained(tmp_path, [callback], kind=ByHand))
    assert len(callback.monitor.past.losses) == STEPS

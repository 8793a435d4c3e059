"""The monitor in loops of other libraries: the code of docs/howto/loops.md. Each test runs where
its library is installed.
"""

import contextlib
import dataclasses
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from ctrans.training.monitor import Monitor
from tests.training.monitor.test_bits import gpt

PAGE = Path(__file__).parents[3] / "docs" / "howto" / "loops.md"
STEPS = 12
OPTIONS = {"every": 3, "limits": {"updates too large": {"limit": 1e-9}}}
"""So low a limit that an alarm comes."""
FIGURES = {"rms", "velocity", "costate", "gradient", "gradient_norm", "loss", "learning_rate"}
NO_MONITOR = SimpleNamespace(step=lambda *_: [])


def shown(library):
    """What the page's code for a library defines."""
    code = re.search(
        rf"^## {library}\n\n```\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL
    )[1]
    names = {"__name__": __name__}
    exec(code, names)
    return SimpleNamespace(**names)


def whole(weight):
    """Of a sharded weight too. Megatron keeps None in places."""
    return (
        torch.zeros(0)
        if weight is None
        else weight.full_tensor()
        if hasattr(weight, "full_tensor")
        else weight
    )


def check(trained):
    """`trained(watched)` gives the model, its monitor and each step's loss. The weights are those
    of a training without.
    """
    without, monitor, _ = trained(False)
    assert monitor is None
    model, monitor, losses = trained(True)
    before, after = without.state_dict(), model.state_dict()
    assert [
        name for name in before if not torch.equal(whole(after[name]), whole(before[name]))
    ] == []
    assert [step for step, _ in monitor.past.reports] == [1, 3, 6, 9, 12]
    assert monitor.gauges.missing == {}
    for step, figures in monitor.past.reports:
        assert figures.keys() >= FIGURES
        assert figures["loss"] == pytest.approx(losses[step - 1])
        assert figures["learning_rate"] == pytest.approx(1e-3)
    checks = [alarm.check for alarm in monitor.alarms]
    assert "updates too large" in checks
    assert "attention logits grow" not in checks


@pytest.fixture
def one_process(monkeypatch):
    """The environment of a launcher that starts one process. Ends the process group."""
    for name in (
        "RANK=0",
        "LOCAL_RANK=0",
        "WORLD_SIZE=1",
        "MASTER_ADDR=127.0.0.1",
        "MASTER_PORT=29571",
    ):
        monkeypatch.setenv(*name.split("="))
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def tokens(steps, rows):
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(32, (rows, 9), generator=generator) for _ in range(steps)]


def test_composer():
    composer = pytest.importorskip("composer")
    watch = shown("Composer").Watch

    class Wrapped(composer.ComposerModel):
        def __init__(self, module):
            super().__init__()
            self.module = module

        def forward(self, batch):
            return self.module(batch[:, :-1], batch[:, 1:])

        def loss(self, outputs, batch):
            return outputs[1]

    class Losses(composer.Callback):
        def batch_end(self, state, logger):
            self.losses.append(state.total_loss_dict["loss/train/total"])

    def trained(watched):
        model, seen = gpt(), Losses()
        seen.losses = []
        callbacks = [watch(model, **OPTIONS)] if watched else []
        trainer = composer.Trainer(
            model=Wrapped(model),
            train_dataloader=torch.utils.data.DataLoader(torch.cat(tokens(STEPS, 4)), batch_size=4),
            optimizers=torch.optim.AdamW(model.parameters(), lr=1e-3),
            max_duration=f"{STEPS}ba",
            device="cpu",
            device_train_microbatch_size=2,
            callbacks=[*callbacks, seen],
            progress_bar=False,
            seed=0,
        )
        trainer.fit()
        trainer.close()
        return model, callbacks[0].monitor if watched else None, seen.losses

    check(trained)


def test_deepspeed(one_process):
    deepspeed = pytest.importorskip("deepspeed")
    train = shown("DeepSpeed").train
    deepspeed.init_distributed(dist_backend="gloo")

    def trained(watched):
        model, losses = gpt(), []
        optimiser = torch.optim.AdamW(model.parameters(), lr=1e-3)
        monitor = Monitor(model, clip=1.0, **OPTIONS) if watched else None
        config = {
            "train_micro_batch_size_per_gpu": 2,
            "gradient_accumulation_steps": 2,
            "gradient_clipping": 1.0,
        }
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimiser, config=config)
        model.register_forward_hook(
            lambda module, given, output: losses.append(float(output[1].detach()))
        )
        train(engine, tokens(2 * STEPS, 2), monitor or NO_MONITOR, optimiser)
        return (
            model,
            monitor,
            [(one + two) / 2 for one, two in zip(losses[::2], losses[1::2], strict=True)],
        )

    check(trained)


def test_olmo_core(tmp_path):
    pytest.importorskip("olmo_core")
    from olmo_core.data import DataLoaderBase
    from olmo_core.nn.transformer import TransformerConfig
    from olmo_core.optim import AdamWConfig
    from olmo_core.train import Duration, TrainerConfig
    from olmo_core.train.callbacks import Callback
    from olmo_core.train.train_module import TransformerTrainModuleConfig

    watch = shown("OLMo-core").Watch

    class Data(DataLoaderBase):
        total_batches = STEPS

        def state_dict(self):
            return {}

        def load_state_dict(self, state_dict):
            pass

        def reshuffle(self, epoch=None, **_):
            pass

        def get_mock_batch(self):
            return {"input_ids": torch.zeros(4, 9, dtype=torch.long)}

        def _iter_batches(self):
            return ({"input_ids": batch} for batch in tokens(STEPS, 4))

    class Losses(Callback):
        def log_metrics(self, step, metrics):
            if step:  # not the dry run
                self.losses.append(metrics["train/CE loss"])

    def trained(watched):
        torch.manual_seed(0)
        model = TransformerConfig.olmo2_1M(vocab_size=32, n_layers=2).build(init_device="cpu")
        config = TransformerTrainModuleConfig(
            rank_microbatch_size=18, max_sequence_length=9, optim=AdamWConfig(lr=1e-3)
        )
        callbacks = {"losses": Losses(), "monitor": watch(OPTIONS)}
        callbacks["losses"].losses = losses = []
        if not watched:
            del callbacks["monitor"]
        trainer = TrainerConfig(
            save_folder=str(tmp_path),
            device="cpu",
            max_duration=Duration.steps(STEPS),
            metrics_collect_interval=1,
            callbacks=callbacks,
            no_checkpoints=True,
        ).build(
            config.build(model, device=torch.device("cpu")),
            Data(work_dir=tmp_path, global_batch_size=36),
        )
        trainer.fit()
        return model, trainer.callbacks["monitor"].monitor if watched else None, losses

    check(trained)


def test_torchtitan(one_process, monkeypatch):
    pytest.importorskip("torchtitan")
    from torch.distributed.fsdp import fully_shard
    from torchtitan.components.loss import CrossEntropyLoss
    from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
    from torchtitan.models.common.attention import ScaledDotProductAttention
    from torchtitan.models.llama3 import model_registry
    from torchtitan.trainer import Trainer

    torch.distributed.init_process_group("gloo")
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1,))

    def sharded(model):
        return [fully_shard(part, mesh=mesh) for part in (*model.layers.values(), model)][-1]

    def without_accelerator(self, config):
        """The parts that train_step uses, as the constructor makes them, on a CPU."""
        self.device = torch.device("cpu")
        torch.manual_seed(0)
        with torch.device("meta"):
            model = config.model_spec.model.build()
        model = config.model_spec.parallelize_fn(model)
        model.to_empty(device="cpu")
        with torch.no_grad():
            model.init_weights(buffer_device=None)
        self.config, self.model_config, self.model_parts = config, config.model_spec.model, [model]
        names = ("dp_enabled", "pp_enabled", "cp_enabled", "ep_enabled", "dp_cp_enabled")
        self.parallel_dims = SimpleNamespace(
            **dict.fromkeys(names, False), get_optional_mesh=lambda name: None
        )
        self.loss_fn = CrossEntropyLoss.Config().build()
        optimisers = default_adamw(lr=1e-3)
        optimisers.implementation = "for-loop"
        self.optimizers = optimisers.build(model_parts=self.model_parts)
        rates = LRSchedulersContainer.Config(warmup_steps=0, decay_ratio=0.0)
        self.lr_schedulers = rates.build(optimizers=self.optimizers, training_steps=STEPS)
        self.metrics_processor = SimpleNamespace(should_log=lambda step: False)
        self.checkpointer = SimpleNamespace(maybe_wait_for_staging=lambda: None)
        self.train_context, self.fwd_bwd_fn = contextlib.nullcontext, self._forward_backward_body
        (
            self.gradient_accumulation_steps,
            self.num_pipeline_parallel_microbatches,
            self.ntokens_seen,
        ) = (2, 1, 0)

    monkeypatch.setattr(Trainer, "__init__", without_accelerator)
    watched_trainer = shown("torchtitan").Watched
    watched_trainer.options = OPTIONS

    def trained(watched):
        spec = model_registry("debugmodel")
        spec.model.layers = spec.model.layers[:2]
        for layer in spec.model.layers:
            layer.attention.inner_attention = ScaledDotProductAttention.Config()
        spec = dataclasses.replace(spec, parallelize_fn=sharded)
        training, parallelism = (
            SimpleNamespace(disable_cuda_graphs=True, max_norm=1.0),
            SimpleNamespace(spmd_backend="partial_dtensor"),
        )
        trainer = (watched_trainer if watched else Trainer)(
            SimpleNamespace(model_spec=spec, training=training, parallelism=parallelism)
        )
        losses, body = [], trainer.fwd_bwd_fn

        def forward_backward(*given):
            loss = body(*given)
            losses.append(float(loss.detach()))
            return loss

        trainer.fwd_bwd_fn = forward_backward
        positions = torch.arange(8).expand(2, -1)
        batches = iter(
            [
                ({"input": batch[:, :-1], "positions": positions}, batch[:, 1:])
                for batch in tokens(2 * STEPS, 2)
            ]
        )
        for trainer.step in range(1, STEPS + 1):
            trainer.train_step(batches)
        summed = [one + two for one, two in zip(losses[::2], losses[1::2], strict=True)]
        return trainer.model_parts[0], trainer.monitor if watched else None, summed

    check(trained)


def test_megatron_core(one_process, monkeypatch):
    pytest.importorskip("megatron.core")
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.transformer_config import TransformerConfig

    page = shown("Megatron-Core")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: torch.device("cpu"))
    monkeypatch.setattr(
        tensor_parallel,
        "get_cuda_rng_tracker",
        lambda: SimpleNamespace(fork=contextlib.nullcontext),
    )
    torch.distributed.init_process_group("gloo")
    parallel_state.initialize_model_parallel()
    config = TransformerConfig(
        num_layers=2, hidden_size=16, num_attention_heads=2, use_cpu_initialization=True
    )
    positions, mask = torch.arange(8).expand(2, -1), torch.ones(1, 1, 8, 8).triu(1).bool()

    def trained(watched):
        torch.manual_seed(0)
        model = GPTModel(config, page.layers(), vocab_size=32, max_sequence_length=8)
        optimiser = torch.optim.AdamW(model.parameters(), lr=1e-3)
        monitor = page.watch(model, positions, mask, **OPTIONS) if watched else None
        losses = []
        for batch in tokens(STEPS, 2):
            loss = model(batch[:, :-1], positions, mask, labels=batch[:, 1:]).mean()
            loss.backward()
            losses.append(float(loss.detach()))
            if watched:
                monitor.step(loss, optimiser)
            optimiser.step()
            optimiser.zero_grad()
        return model, monitor, losses

    check(trained)
    parallel_state.destroy_model_parallel()

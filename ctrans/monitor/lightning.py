"""The monitor as a callback of Lightning's `Trainer`."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ctrans.monitor.memory import Memory
from ctrans.monitor.monitor import Monitor
from ctrans.monitor.settings import settings_and_opening
from solvers import ConfigError

LOGGER = logging.getLogger("ctrans.monitor")


def _callback() -> Any:
    for name in ("lightning.pytorch", "pytorch_lightning"):
        try:
            return importlib.import_module(name).Callback
        except ImportError:
            continue
    raise ConfigError("Lightning is not installed: pip install lightning")


if TYPE_CHECKING:
    Base = object
else:
    Base = _callback()


class LightningCallback(Base):
    """Watches a Lightning training: `Trainer(callbacks=[LightningCallback(every=50,
    out="out/run")])`.

    Options are those of `Monitor`. `model` finds what is watched in the LightningModule: an
    attribute's name, or a function of it; by default its attribute `model`, or the module itself.
    `batch` is what a compiled model is called with. Alarms are warnings of the logger
    "ctrans.monitor", and in `callback.monitor.alarms`; reports also go to the trainer's loggers.

    Gradients are those before clipping and without the scale of "16-mixed". The trainer's
    checkpoints hold what a training that is resumed from one goes on with as if it had not stopped.
    """

    def __init__(
        self,
        *,
        every: int = 50,
        out: str | Path | None = None,
        model: str | Callable[[nn.Module], nn.Module] | None = None,
        batch: Any = None,
        **options: Any,
    ):
        settings_and_opening({**options, "every": every, "out": out})  # what is none is said at once
        self.every, self.out, self.model, self.batch, self.options = every, out, model, batch, options
        self.monitor: Monitor | None = None
        self._loss: Tensor | None = None
        self._memory: Memory | None = None

    @property
    def state_key(self) -> str:
        """Under which a checkpoint has its state: of several such callbacks, each of its own
        `model`, its own.
        """
        return f"{type(self).__qualname__}({getattr(self.model, '__qualname__', self.model)})"

    def state_dict(self) -> dict[str, Any]:
        return {} if self.monitor is None else {"memory": self.monitor.memory()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._memory = state_dict.get("memory")

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        total = trainer.estimated_stepping_batches
        scaler = _scaler(trainer)
        cut = trainer.gradient_clip_val if trainer.gradient_clip_algorithm in (None, "norm") else None
        memory, self._memory = self._memory, None
        self.monitor = Monitor(
            self._found(pl_module),
            every=self.every,
            out=self.out,
            start=trainer.global_step,
            total=int(total) if 0 < total < float("inf") else None,
            **{
                "memory": memory if memory and memory["step"] == trainer.global_step else None,
                "clip": cut or None,
                "scale": None if scaler is None else scaler.get_scale,
                "unscaled": True,  # this trainer takes the scale off before it tells
                **self.options,
                "told": [*self.options.get("told", ()), lambda step, figures: self._log(trainer, step, figures)],
            },
        )

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Tensor) -> None:
        # of accumulated micro-batches each is divided by their number, and multiplied with a scale
        # where there is one
        scaler = _scaler(trainer)
        loss = loss.detach() if scaler is None else loss.detach() / scaler.scale(torch.ones_like(loss))
        self._loss = loss if self._loss is None else self._loss + loss

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        assert self.monitor is not None, "the training has begun"
        loss, self._loss = self._loss, None
        for alarm in self.monitor.step(loss, optimizer, batch=self.batch):
            LOGGER.warning(str(alarm))
        trainer.should_stop = trainer.should_stop or self.monitor.stopped

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        if self.monitor is not None:
            self.monitor.close(f"stopped at step {trainer.global_step}" if self.monitor.stopped else "finished")

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        if self.monitor is not None:
            self.monitor.close(f"{type(exception).__name__}: {' '.join(str(exception).split())[:200]}")

    def _found(self, pl_module: Any) -> nn.Module:
        if self.model is None:
            own = getattr(pl_module, "model", None)
            return own if isinstance(own, nn.Module) else pl_module
        return getattr(pl_module, self.model) if isinstance(self.model, str) else self.model(pl_module)

    def _log(self, trainer: Any, step: int, figures: Mapping[str, float]) -> None:
        for logger in trainer.loggers:
            logger.log_metrics({f"monitor/{name}": value for name, value in figures.items()}, step)


def _scaler(trainer: Any) -> Any:
    """What multiplies the loss in a training of float16, None in others."""
    return getattr(trainer.precision_plugin, "scaler", None)

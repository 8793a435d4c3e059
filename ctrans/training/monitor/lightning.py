"""The monitor as a callback of Lightning's `Trainer`."""

from __future__ import annotations

import functools
import importlib
import logging
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ctrans.training.monitor.hooks import in_a_line
from ctrans.training.monitor.memory import Memory
from ctrans.training.monitor.monitor import DEFAULTS, Monitor
from ctrans.training.monitor.monitor_options import check_options
from solvers import ConfigError

LOGGER = logging.getLogger("ctrans.training.monitor")


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

    - `model`: the part of the LightningModule to watch: the name of an attribute, or a function of
      the module. By default its attribute `model`, or else the module itself
    - `batch`: the input of a compiled model, as for `Monitor.step`
    - all others: the options of `Monitor`

    The logger "ctrans.training.monitor" warns of each alarm, and `callback.monitor.alarms` has them
    all. Reports also go to the trainer's loggers. Gradients are those before clipping and without
    the scale of "16-mixed". A training that resumes from a checkpoint continues with the monitor's
    memory in it.
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
        self.options = {**options, "every": every, "out": out}
        check_options(self.options, DEFAULTS)
        self.model = model
        self.batch = batch
        self.monitor: Monitor | None = None
        self._loss: Tensor | None = None
        self._memory: Memory | None = None

    @property
    def state_key(self) -> str:
        """The key of the state in a checkpoint: several callbacks with different `model`s have
        different ones.
        """
        return f"{type(self).__qualname__}({getattr(self.model, '__qualname__', self.model)})"

    def state_dict(self) -> dict[str, Any]:
        if self.monitor is None:
            return {}
        return {"memory": self.monitor.memory()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._memory = state_dict.get("memory")

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        total = trainer.estimated_stepping_batches
        # the trainer unscales before it calls the callback
        options: dict[str, Any] = {"unscaled": True}
        memory = self._memory
        self._memory = None
        if memory and memory["step"] == trainer.global_step:
            options["memory"] = memory
        if trainer.gradient_clip_algorithm in (None, "norm"):
            options["clip"] = trainer.gradient_clip_val or None
        scaler = _scaler(trainer)
        if scaler is not None:
            options["scale"] = scaler.get_scale
        options |= self.options
        options["told"] = [*options.get("told", ()), functools.partial(self._log, trainer)]
        options["start"] = trainer.global_step
        options["total"] = None
        if 0 < total < math.inf:
            options["total"] = int(total)
        self.monitor = Monitor(self._watched(pl_module), **options)

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Tensor) -> None:
        # the trainer divides the loss of each micro-batch by their number, and multiplies it by the
        # scale
        scaler = _scaler(trainer)
        if scaler is None:
            loss = loss.detach()
        else:
            loss = loss.detach() / scaler.scale(torch.ones_like(loss))
        # a manual backward pass may have several losses, each with a device of its own
        loss = loss.mean()
        if self._loss is None:
            self._loss = loss
        else:
            self._loss = self._loss + loss.to(self._loss.device)

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        assert self.monitor is not None, "the training has begun"
        loss = self._loss
        self._loss = None
        for alarm in self.monitor.step(loss, optimizer, batch=self.batch):
            LOGGER.warning(str(alarm))
        trainer.should_stop = trainer.should_stop or self.monitor.stopped

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        if self.monitor is None:
            return
        total = trainer.estimated_stepping_batches
        if self.monitor.stopped or not total <= trainer.global_step:
            self.monitor.close(f"stopped at step {trainer.global_step}")
        else:
            self.monitor.close("finished")

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        if self.monitor is not None:
            self.monitor.close(in_a_line(exception))

    def _watched(self, pl_module: Any) -> Any:
        if isinstance(self.model, str):
            return getattr(pl_module, self.model)
        if self.model is not None:
            return self.model(pl_module)
        model = getattr(pl_module, "model", None)
        if isinstance(model, nn.Module):
            return model
        return pl_module

    def _log(self, trainer: Any, step: int, figures: Mapping[str, float]) -> None:
        for logger in trainer.loggers:
            logger.log_metrics({f"monitor/{name}": value for name, value in figures.items()}, step)


def _scaler(trainer: Any) -> Any:
    """The gradient scaler of a training in float16, None in others."""
    return getattr(trainer.precision_plugin, "scaler", None)

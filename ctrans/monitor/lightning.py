"""The monitor as a callback of Lightning's `Trainer`."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from ctrans.monitor.monitor import Monitor
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
    """Watches a Lightning training: `Trainer(callbacks=[LightningCallback(every=50, out="out/run")])`.

    Options are those of `Monitor`. `model` finds what is watched in the LightningModule: an attribute's name, or a function of it; by
    default its attribute `model`, or the module itself. Gradients are those before clipping. Reports also go to the trainer's loggers.
    """

    def __init__(
        self,
        *,
        every: int = 50,
        out: str | Path | None = None,
        model: str | Callable[[nn.Module], nn.Module] | None = None,
        **options: Any,
    ):
        self.every, self.out, self.model, self.options = every, out, model, options
        self.monitor: Monitor | None = None
        self._loss: Tensor | None = None

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        total = trainer.estimated_stepping_batches
        self.monitor = Monitor(
            self._found(pl_module),
            every=self.every,
            out=self.out,
            start=trainer.global_step,
            total=int(total) if 0 < total < float("inf") else None,
            **{**self.options, "told": [*self.options.get("told", ()), lambda step, figures: self._log(trainer, step, figures)]},
        )

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Tensor) -> None:
        # of accumulated micro-batches each is divided by their number
        self._loss = loss.detach() if self._loss is None else self._loss + loss.detach()

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        assert self.monitor is not None, "the training has begun"
        loss, self._loss = self._loss, None
        for alarm in self.monitor.step(loss, optimizer):
            LOGGER.warning(str(alarm))
        trainer.should_stop = trainer.should_stop or self.monitor.stopped

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        if self.monitor is not None:
            self.monitor.close()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        if self.monitor is not None:
            self.monitor.close(f"{type(exception).__name__}: {' '.join(str(exception).split())[:200]}")

    def _found(self, pl_module: Any) -> nn.Module:
        if self.model is None:
            own: nn.Module = getattr(pl_module, "model", pl_module)
            return own
        return getattr(pl_module, self.model) if isinstance(self.model, str) else self.model(pl_module)

    def _log(self, trainer: Any, step: int, figures: Mapping[str, float]) -> None:
        for logger in trainer.loggers:
            logger.log_metrics({f"monitor/{name}": value for name, value in figures.items()}, step)

"""The monitor as a callback of Hugging Face's `Trainer`."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import transformers
from torch import Tensor, nn

from ctrans.monitor.alarms import Alarm
from ctrans.monitor.memory import memory_in, save_memory
from ctrans.monitor.monitor import Monitor
from ctrans.monitor.settings import settings_and_opening
from ctrans.monitor.sites import unwrapped

LOGGER = logging.getLogger("ctrans.monitor")


class TrainerCallback(transformers.TrainerCallback):
    """Watches a `Trainer`'s training: `Trainer(..., callbacks=[TrainerCallback(every=50)])`.

    Options are those of `Monitor`; `out` is by default the trainer's output directory. Alarms are warnings of the logger
    "ctrans.monitor", and in `callback.monitor.alarms`. After `callback.logs_to(trainer)` reports are logged as the trainer's own are,
    to W&B and the others. `batch`, the model's arguments by name, is looked at where the trainer compiles.

    The trainer clips before it tells anybody, so that gradients by depth are those that the optimiser gets; the norm before clipping
    is taken from its log, at every `logging_steps`. Of reactions, "save" asks the trainer for a checkpoint, "stop" for the end. Beside
    every checkpoint lies `monitor.json`, with which a training that is resumed from it goes on as if it had not stopped.
    """

    def __init__(self, *, every: int = 50, out: str | Path | None = None, batch: Mapping[str, Any] | None = None, **options: Any):
        settings_and_opening({"save": self._ask_to_save, **options, "every": every, "out": out})  # what is none is said at once
        self.every, self.out, self.batch, self.options = every, out, batch, options
        self.monitor: Monitor | None = None
        self._losses: list[Tensor] = []
        self._adds_up, self._save = False, False
        self._trainer: Any = None
        self._handle: Any = None

    def logs_to(self, trainer: Any) -> TrainerCallback:
        """Reports go to the trainer's log too."""
        self._trainer = trainer
        return self

    def on_train_begin(self, args: Any, state: Any, control: Any, model: nn.Module | None = None, **others: Any) -> None:
        assert model is not None, "a trainer has a model"
        root = unwrapped(model)
        told = [*self.options.get("told", ()), *([] if self._trainer is None else [self._log])]
        options = {**self.options, "told": told, "save": self.options.get("save", self._ask_to_save)}
        self.monitor = Monitor(
            root,
            every=self.every,
            out=args.output_dir if self.out is None else self.out,
            start=state.global_step,
            memory=memory_in(_checkpoint(args, state), state.global_step),
            total=state.max_steps,
            **{"compiled": bool(getattr(args, "torch_compile", False)) or None, **options},
        )
        # where the model divides by the tokens of all micro-batches, as the trainer tells it to, its losses add up
        kinds = {parameter.kind for parameter in inspect.signature(root.forward).parameters.values()}
        self._adds_up = inspect.Parameter.VAR_KEYWORD in kinds
        self._handle = root.register_forward_hook(self._returned)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, optimizer: Any = None, **others: Any) -> None:
        if self.monitor is None:
            return
        losses, self._losses = self._losses, []
        loss = sum(losses[1:], losses[0]) / (1 if self._adds_up else len(losses)) if losses else None
        for alarm in self.monitor.step(loss, getattr(optimizer, "optimizer", optimizer), batch=self.batch):
            LOGGER.warning(str(alarm))
        control.should_training_stop = control.should_training_stop or self.monitor.stopped

    def on_save(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        place = _checkpoint(args, state)
        if self.monitor is not None and state.is_world_process_zero and place.is_dir():
            save_memory(self.monitor, place)

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        control.should_save, self._save = control.should_save or self._save, False

    def on_log(self, args: Any, state: Any, control: Any, logs: Mapping[str, Any] | None = None, **others: Any) -> None:
        if self.monitor is not None and logs and isinstance(logs.get("grad_norm"), (int, float)):
            self.monitor.note_gradient_norm(state.global_step, float(logs["grad_norm"]))

    def on_train_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        if self._handle is not None:
            self._handle.remove()
        if self.monitor is not None:
            self.monitor.close("finished" if state.global_step >= state.max_steps else f"stopped at step {state.global_step}")

    def _returned(self, module: nn.Module, args: Any, output: Any) -> None:
        loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
        if module.training and isinstance(loss, Tensor) and loss.requires_grad:
            self._losses.append(loss.detach())

    def _ask_to_save(self, alarm: Alarm) -> None:
        self._save = True

    def _log(self, step: int, figures: Mapping[str, float]) -> None:
        self._trainer.log({f"monitor/{name}": value for name, value in figures.items()})


def _checkpoint(args: Any, state: Any) -> Path:
    """Where the trainer has its checkpoint of the step that it is at."""
    return Path(args.output_dir) / f"checkpoint-{state.global_step}"

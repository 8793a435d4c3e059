"""The monitor as a callback of Hugging Face's `Trainer`."""

from __future__ import annotations

import contextlib
import copy
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from ctrans.findings import Finding
from ctrans.interop.open_model import unwrap_model
from ctrans.monitor.memory import memory_in, save_memory
from ctrans.monitor.monitor import Monitor
from ctrans.monitor.settings import settings_and_opening
from solvers import ConfigError

LOGGER = logging.getLogger("ctrans.monitor")
PRINTERS = (transformers.PrinterCallback, transformers.ProgressCallback)


class TrainerCallback(transformers.TrainerCallback):
    """Watches a `Trainer`'s training: `Trainer(..., callbacks=[TrainerCallback(every=50)])`.

    Options are those of `Monitor`; `out` is by default the trainer's output directory. Alarms are
    warnings of the logger "ctrans.monitor", and in `callback.monitor.alarms`. `batch`, the model's
    arguments by name, is looked at where the trainer compiles.

    The trainer clips before it tells anybody, so that gradients by depth are those that the
    optimiser gets. After `callback.logs_to(trainer)` the norm before clipping is known at every
    step, and reports go to the trainer's loggers, W&B and others, though not to the terminal;
    without, that norm is known as often as the trainer logs it (`logging_steps`).

    Of reactions, "save" asks the trainer for a checkpoint, "stop" for the end. Beside every
    checkpoint lies `monitor.json`, with which a training that is resumed from it goes on as if it
    had not stopped. float16's scale is taken from the trainer's own scaler.
    """

    def __init__(self, *, every: int = 50, out: str | Path | None = None, batch: Mapping[str, Any] | None = None, **options: Any):
        settings_and_opening({"save": self._ask_to_save, **options, "every": every, "out": out})  # what is none is said at once
        self.every, self.out, self.batch, self.options = every, out, batch, options
        self.monitor: Monitor | None = None
        self._losses: list[Tensor] = []
        self._norm: Tensor | float | None = None
        self._adds_up, self._save, self._told_loss = False, False, False
        self._trainer: Any = None
        self._undo = contextlib.ExitStack()

    def logs_to(self, trainer: Any) -> TrainerCallback:
        """Reports go to the trainer's log too, and the norms that it clips come to the monitor."""
        self._trainer = trainer
        return self

    def on_train_begin(
        self, args: Any, state: Any, control: Any, model: nn.Module | None = None, optimizer: Any = None, **others: Any
    ) -> None:
        assert model is not None, "a trainer has a model"
        self._undo.close()
        root = unwrap_model(model)
        told = [*self.options.get("told", ()), *([] if self._trainer is None else [self._log])]
        options = {**self.options, "told": told, "save": self.options.get("save", self._ask_to_save)}
        if "skip" in options.get("react", ()) and args.max_grad_norm and self._trainer is None:
            raise ConfigError(
                f"react = 'skip' would see gradients that are cut to max_grad_norm = {args.max_grad_norm}: call "
                "callback.logs_to(trainer) before trainer.train(), or set max_grad_norm to 0"
            )
        scaler = getattr(optimizer, "scaler", None)
        self.monitor = Monitor(
            root,
            every=self.every,
            out=args.output_dir if self.out is None else self.out,
            start=state.global_step,
            memory=memory_in(_checkpoint(args, state), state.global_step),
            total=state.max_steps,
            **{
                "compiled": bool(getattr(args, "torch_compile", False)) or None,
                "scale": None if scaler is None else scaler.get_scale,
                "unscaled": True,  # the trainer asks for the norm before it tells, which takes the scale off
                **options,
            },
        )
        self._undo.callback(root.register_forward_hook(self._returned, with_kwargs=True).remove)
        if self._trainer is not None:
            self._note_norms(self._trainer.accelerator)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, optimizer: Any = None, **others: Any) -> None:
        if self.monitor is None:
            return
        norm, self._norm = self._norm, None
        loss = self._loss(args)
        inner = getattr(optimizer, "optimizer", optimizer)
        for alarm in self.monitor.step(loss, inner, gradient_norm=norm, batch=self.batch):
            LOGGER.warning(str(alarm))
        control.should_training_stop = control.should_training_stop or self.monitor.stopped

    def on_save(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        place = _checkpoint(args, state)
        if self.monitor is not None and state.is_world_process_zero and place.is_dir():
            save_memory(self.monitor, place)

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        control.should_save, self._save = control.should_save or self._save, False

    def on_log(self, args: Any, state: Any, control: Any, logs: Mapping[str, Any] | None = None, **others: Any) -> None:
        """What a step did not know, where the trainer tells it later."""
        missing = {"loss": "loss"} if not self._told_loss else {}
        missing |= {"grad_norm": "gradient_norm"} if self._trainer is None else {}
        late = {
            ours: float((logs or {})[name]) for name, ours in missing.items() if isinstance((logs or {}).get(name), (int, float))
        }
        if late and self.monitor is not None:
            self.monitor.note(state.global_step, **late)

    def on_train_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        self._undo.close()
        if self.monitor is not None:
            self.monitor.close("finished" if state.global_step >= state.max_steps else f"stopped at step {state.global_step}")

    def _returned(self, module: nn.Module, args: Any, kwargs: Mapping[str, Any], output: Any) -> None:
        loss = output.get("loss") if isinstance(output, Mapping) else output[0] if isinstance(output, tuple) and output else None
        if module.training and isinstance(loss, Tensor) and loss.requires_grad and loss.numel() == 1:
            self._losses.append(loss.detach())
            self._adds_up = kwargs.get("num_items_in_batch") is not None

    def _loss(self, args: Any) -> Tensor | None:
        """Of all micro-batches: the mean of their losses, or the sum where the model divides by the
        items of all, as it was told to.
        """
        losses, self._losses = self._losses, []
        if not losses:
            return None
        self._told_loss = True
        total = torch.stack(losses).sum()
        if not self._adds_up:
            return total / len(losses)
        return total * (args.world_size if args.average_tokens_across_devices else 1)

    def _note_norms(self, accelerator: Any) -> None:
        """From here on what the accelerator's `clip_grad_norm_` returns, the norm before clipping,
        is known to the next step.
        """
        clip = accelerator.clip_grad_norm_

        def noted(*args: Any, **kwargs: Any) -> Any:
            self._norm = clip(*args, **kwargs)
            return self._norm

        accelerator.clip_grad_norm_ = noted
        self._undo.callback(vars(accelerator).pop, "clip_grad_norm_")

    def _ask_to_save(self, alarm: Finding) -> None:
        self._save = True

    def _log(self, step: int, figures: Mapping[str, float]) -> None:
        """To the trainer's loggers, but for those that print: sixty figures a report are not for a
        terminal.
        """
        trainer, state = self._trainer, copy.copy(self._trainer.state)
        state.global_step = step  # the trainer counts a step when it is over
        rows = {f"monitor/{name}": value for name, value in figures.items()}
        for callback in trainer.callback_handler.callbacks:
            if callback is not self and not isinstance(callback, PRINTERS):
                callback.on_log(trainer.args, state, trainer.control, logs=rows, model=trainer.model)


def _checkpoint(args: Any, state: Any) -> Path:
    """Where the trainer has its checkpoint of the step that it is at."""
    return Path(args.output_dir) / f"checkpoint-{state.global_step}"

"""The monitor as a callback of Hugging Face's `Trainer`."""

from __future__ import annotations

import contextlib
import copy
import json
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from ctrans.base.durable_files import write_durably
from ctrans.interop.open_model import unwrap_model
from ctrans.measure.findings import Finding
from ctrans.training.monitor.hooks import Hook, in_a_line
from ctrans.training.monitor.memory import MEMORY, memory_in
from ctrans.training.monitor.monitor import DEFAULTS, Monitor
from ctrans.training.monitor.monitor_options import check_options
from solvers import checked

LOGGER = logging.getLogger("ctrans.training.monitor")
PRINTERS = (transformers.PrinterCallback, transformers.ProgressCallback)


@checked
class TrainerCallback(transformers.TrainerCallback):
    """Watches a `Trainer`'s training: `Trainer(..., callbacks=[TrainerCallback(every=50)])`.

    - `out`: as for `Monitor`; by default the trainer's output directory
    - `batch`: the model's arguments by name, needed if the trainer compiles the model
    - all others: the options of `Monitor`

    The logger "ctrans.training.monitor" warns of each alarm, and `callback.monitor.alarms` has them
    all. Call `callback.logs_to(trainer)` to send reports to the trainer's loggers (W&B and others,
    but not the terminal), and to give the monitor every gradient norm before clipping. Without it,
    the monitor knows that norm as often as the trainer logs it (`logging_steps`). Gradients by
    depth are those after clipping.

    The reaction "save" asks the trainer for a checkpoint, "stop" for the end. Each checkpoint has a
    file `monitor.json`, with which a resumed training continues as if it had not stopped. The scale
    of float16 is that of the trainer's scaler.
    """

    def __init__(
        self,
        *,
        every: int = 50,
        out: str | Path | None = None,
        batch: Mapping[str, Any] | None = None,
        **options: Any,
    ):
        self.options = {"save": self._ask_to_save, **options, "every": every, "out": out}
        check_options(self.options, DEFAULTS)
        self.batch = batch
        self.monitor: Monitor | None = None
        self._losses: list[Tensor] = []
        self._norm: Tensor | float | None = None
        self._adds_up = False
        self._save = False
        self._knows_loss = False
        self._trainer: Any = None
        self._undo = contextlib.ExitStack()

    def logs_to(self, trainer: Any) -> TrainerCallback:
        """Sends reports to the trainer's loggers, and its gradient norms before clipping to the
        monitor.
        """
        self._trainer = trainer
        return self

    def on_train_begin(
        self,
        args: Any,
        state: Any,
        control: Any,
        model: nn.Module | None = None,
        optimizer: Any = None,
        **_: Any,
    ) -> None:
        assert model is not None, "a trainer has a model"
        self._undo.close()
        root = unwrap_model(model)
        # the trainer unscales for its norm before it calls the callback
        options: dict[str, Any] = {"unscaled": True}
        if getattr(args, "torch_compile", None):
            options["compiled"] = True
        scaler = getattr(optimizer, "scaler", None)
        if scaler is not None:
            options["scale"] = scaler.get_scale
        options |= self.options
        if options["out"] is None:
            options["out"] = args.output_dir
        if self._trainer is not None:
            options["told"] = [*options.get("told", ()), self._log]
        options |= {"start": state.global_step, "total": state.max_steps}
        options["memory"] = memory_in(_checkpoint(args, state), state.global_step)
        self.monitor = Monitor(root, **options)
        self._undo.callback(
            root.register_forward_hook(Hook(self._returned), with_kwargs=True).remove
        )
        if self._trainer is not None:
            self._note_norms(self._trainer.accelerator)

    def on_pre_optimizer_step(
        self, args: Any, state: Any, control: Any, optimizer: Any = None, **_: Any
    ) -> None:
        if self.monitor is None:
            return
        norm = self._norm
        self._norm = None
        loss = self._loss(args)
        inner = getattr(optimizer, "optimizer", optimizer)
        for alarm in self.monitor.step(loss, inner, gradient_norm=norm, batch=self.batch):
            LOGGER.warning(str(alarm))
        control.should_training_stop = control.should_training_stop or self.monitor.stopped

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        checkpoint = _checkpoint(args, state)
        path = checkpoint / MEMORY
        if self.monitor is not None and state.is_world_process_zero and checkpoint.is_dir():
            try:
                text = json.dumps(self.monitor.memory(), allow_nan=False)
                write_durably(path, text.encode())
            except Exception as error:  # a training must not stop for the monitor's file
                LOGGER.warning("cannot write %s: %s", path, in_a_line(error))

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_save = control.should_save or self._save
        self._save = False

    def on_log(
        self,
        args: Any,
        state: Any,
        control: Any,
        logs: Mapping[str, Any] | None = None,
        **_: Any,
    ) -> None:
        """Notes the loss and the gradient norm if the step did not know them."""
        logs = logs or {}
        late = {}
        if not self._knows_loss and isinstance(logs.get("loss"), (int, float)):
            late["loss"] = float(logs["loss"])
        if self._trainer is None and isinstance(logs.get("grad_norm"), (int, float)):
            late["gradient_norm"] = float(logs["grad_norm"])
        if late and self.monitor is not None:
            self.monitor.note(state.global_step, **late)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._undo.close()
        if self.monitor is None:
            return
        if state.global_step >= state.max_steps:
            self.monitor.close("finished")
        else:
            self.monitor.close(f"stopped at step {state.global_step}")

    def _returned(
        self, module: nn.Module, args: Any, kwargs: Mapping[str, Any], output: Any
    ) -> None:
        if isinstance(output, Mapping):
            loss = output.get("loss")
        elif isinstance(output, tuple) and output:
            loss = output[0]
        else:
            loss = None
        if not module.training or not isinstance(loss, Tensor):
            return
        if loss.requires_grad and loss.numel() == 1:
            self._losses.append(loss.detach().reshape(()))
            self._adds_up = kwargs.get("num_items_in_batch") is not None

    def _loss(self, args: Any) -> Tensor | None:
        """The loss of all micro-batches: the mean of theirs, or their sum if the model divides each
        by the items of all (`num_items_in_batch`).
        """
        losses = self._losses
        self._losses = []
        if not losses:
            return None
        self._knows_loss = True
        # replicas have devices of their own
        total = torch.stack([loss.to(losses[0].device) for loss in losses]).sum()
        if not self._adds_up:
            return total / len(losses)
        if args.average_tokens_across_devices:
            total = total * args.world_size
        return total

    def _note_norms(self, accelerator: Any) -> None:
        """Keeps what the accelerator's `clip_grad_norm_` returns, the norm before clipping, for the
        next step.
        """
        if not isinstance(accelerator.clip_grad_norm_, Clip):
            accelerator.clip_grad_norm_ = Clip(accelerator)
        clip = accelerator.clip_grad_norm_
        clip.listeners.append(self._note_norm)
        self._undo.callback(clip.leave, self._note_norm)

    def _note_norm(self, norm: Any) -> None:
        self._norm = norm

    def _ask_to_save(self, alarm: Finding) -> None:
        self._save = True

    def _log(self, step: int, figures: Mapping[str, float]) -> None:
        """Sends a report to the trainer's loggers, except those that print: it has some sixty
        figures.
        """
        trainer = self._trainer
        state = copy.copy(self._trainer.state)
        state.global_step = step  # the trainer counts a step at its end
        rows = {f"monitor/{name}": value for name, value in figures.items()}
        for callback in trainer.callback_handler.callbacks:
            if callback is not self and not isinstance(callback, PRINTERS):
                callback.on_log(
                    trainer.args, state, trainer.control, logs=rows, model=trainer.model
                )


class Clip:
    """An accelerator's `clip_grad_norm_` that tells callbacks what it returns. When the last one
    leaves, the accelerator has again what it had.
    """

    def __init__(self, accelerator: Any):
        self.accelerator = accelerator
        self.clip = accelerator.clip_grad_norm_
        self.previous = vars(accelerator).get("clip_grad_norm_")
        """The attribute of the accelerator itself, if it had one besides its class's."""
        self.listeners: list[Callable[[Any], None]] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        norm = self.clip(*args, **kwargs)
        for listener in self.listeners:
            listener(norm)
        return norm

    def leave(self, listener: Callable[[Any], None]) -> None:
        self.listeners.remove(listener)
        if self.listeners or vars(self.accelerator).get("clip_grad_norm_") is not self:
            return
        del self.accelerator.clip_grad_norm_
        if self.previous is not None:
            self.accelerator.clip_grad_norm_ = self.previous


def _checkpoint(args: Any, state: Any) -> Path:
    """The directory of the trainer's checkpoint of the present step."""
    return Path(args.output_dir) / f"checkpoint-{state.global_step}"

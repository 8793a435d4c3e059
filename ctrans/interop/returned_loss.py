"""Whether the loss that a model returns is the cross-entropy, which ctrans takes for its loss."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ctrans.base.as_found import as_found
from ctrans.interop.block_calls import tensors_in
from ctrans.interop.foreign_errors import FOREIGN_ERRORS
from ctrans.interop.model_adapter import ModelAdapter
from ctrans.interop.module_adapter import ModuleAdapter

LABELS = ("labels", "targets", "target", "label", "y")
"""The argument for targets, of `transformers` and of nanoGPT's kin."""
IGNORED = (-100, -1)
"""Targets that losses leave out."""
CLOSE = {torch.float64: 1e-5}
CLOSE_ELSE = 1e-4
"""How closely, in nats and as a share, by dtype: a model may compute its loss in float32."""


def why_other_loss(adapter: ModelAdapter) -> str:
    """Why the loss that the model returns for its example is not the cross-entropy of its logits;
    "" if it is, or if the model returns none for inputs that are known.
    """
    try:
        with as_found(adapter.model), torch.no_grad():
            return _why_other_loss(adapter)
    except FOREIGN_ERRORS:
        return ""


def _why_other_loss(adapter: ModelAdapter) -> str:
    for call in _with_targets(adapter):
        output = adapter.model(**call.arguments)
        losses = _losses_in(output, call.targets)
        if not losses:
            continue
        logits = _logits(adapter, call, output)
        if logits is None or max(losses) != min(losses):
            return (
                "what the model returns for targets, a loss without logits or several numbers,"
                " cannot be compared with the cross-entropy: give its loss as loss="
            )
        loss = losses[0]
        close = CLOSE.get(logits.dtype, CLOSE_ELSE)
        logits = logits.double().reshape(*call.targets.shape, -1)
        expected = list(_cross_entropies(logits, call.targets, shifts=call.are_inputs))
        nearest = min(expected, key=lambda each: abs(each - loss), default=loss)
        if not abs(nearest - loss) <= close * max(1.0, abs(loss)):
            return (
                f"the loss that the model returns for its example is {loss:.4g}, and the"
                f" cross-entropy of its logits {nearest:.4g}: give its loss as loss="
            )
    return ""


@dataclasses.dataclass(frozen=True)
class _CallWithTargets:
    """Arguments of a forward pass with what may be the targets under that name, and whether these
    are the inputs, as a model takes them that shifts them itself.
    """

    arguments: dict[str, Any]
    name: str
    are_inputs: bool

    @property
    def targets(self) -> Tensor:
        targets: Tensor = self.arguments[self.name]
        return targets


def _logits(adapter: ModelAdapter, call: _CallWithTargets, output: Any) -> Tensor | None:
    """The logits in an output, or else those without the targets; None if there are none, one for
    each target.
    """
    without = {name: value for name, value in call.arguments.items() if name != call.name}
    for arguments in (None, without):
        try:
            made = output if arguments is None else adapter.model(**arguments)
            logits = adapter.tensor(made)
        except FOREIGN_ERRORS:
            continue
        rows = 0 if logits is None or logits.dim() < 2 else logits.shape[:-1].numel()
        if rows == call.targets.numel():
            return logits
    return None


def _with_targets(adapter: ModelAdapter) -> Iterator[_CallWithTargets]:
    labels = _labels(adapter)
    if isinstance(adapter, ModuleAdapter):
        named: Mapping[str, Any] = adapter.named or {}
        first = next(iter(named), "")
        for name, value in named.items():
            if name != first and _are_targets(value, adapter.example):
                yield _CallWithTargets(dict(named), name, torch.equal(value, named[first]))
        ids = adapter.example
        if not named and labels is not None and ids.dtype == torch.int64:
            yield _CallWithTargets(
                {_arguments(adapter)[0]: ids, labels: ids}, labels, are_inputs=True
            )
    elif labels is not None:
        name = getattr(adapter.model, "main_input_name", "input_ids")
        width = adapter.like().shape[0]
        ids = torch.arange(2 * width).remainder(max(2, adapter.vocabulary)).reshape(2, width)
        ids = ids.to(adapter.like().device)
        yield _CallWithTargets({name: ids, labels: ids}, labels, are_inputs=True)


def _labels(adapter: ModelAdapter) -> str | None:
    """The name of the argument for targets, if there is one."""
    return next((name for name in LABELS if name in _arguments(adapter)), None)


def _arguments(adapter: ModelAdapter) -> list[str]:
    """The names of the arguments of the model's forward."""
    return list(inspect.signature(adapter.model.forward).parameters)


def _are_targets(value: object, inputs: Tensor) -> bool:
    return isinstance(value, Tensor) and value.dtype == torch.int64 and value.shape == inputs.shape


def _losses_in(output: Any, targets: Tensor) -> list[float]:
    """The real numbers in the output that may be losses: the one of that name, or else all. A loss
    for each target has the least and the largest of them, and is none that can be compared.
    """
    if dataclasses.is_dataclass(output) and not isinstance(output, Mapping):
        output = vars(output)
    if isinstance(output, Mapping):
        output = dict(output)
        if isinstance(output.get("loss"), Tensor):
            output = output["loss"]
    losses: list[float] = []
    for each in tensors_in(output):
        if each.is_floating_point() and each.numel() in (1, targets.numel()):
            losses += [float(each.min()), float(each.max())]
    return losses


def _cross_entropies(logits: Tensor, targets: Tensor, *, shifts: bool) -> Iterator[float]:
    """The mean cross-entropy of targets beside the logits, and with `shifts` of those one token
    later.
    """
    pairs = [(logits, targets)]
    if shifts:
        pairs.append((logits[:, :-1], targets[:, 1:]))
    for some, ones in pairs:
        for ignored in IGNORED:
            if ones.numel() and int(ones.max()) < some.shape[-1]:
                flat = some.flatten(0, -2)
                yield float(F.cross_entropy(flat, ones.flatten(), ignore_index=ignored))

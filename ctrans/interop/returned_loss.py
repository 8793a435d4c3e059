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

LABELS = ("labels", "targets", "target")
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
    for arguments, targets in _with_targets(adapter):
        output = adapter.model(**arguments)
        loss = _loss_in(output)
        logits = adapter.tensor(output)
        if loss is None or logits is None or logits.shape[:-1].numel() != targets.numel():
            continue
        close = CLOSE.get(logits.dtype, CLOSE_ELSE)
        logits = logits.double().reshape(*targets.shape, -1)
        expected = list(_cross_entropies(logits, targets))
        nearest = min(expected, key=lambda each: abs(each - loss), default=loss)
        if not abs(nearest - loss) <= close * max(1.0, abs(loss)):
            return (
                f"the loss that the model returns for its example is {loss:.4g}, and the"
                f" cross-entropy of its logits {nearest:.4g}: give its loss as loss="
            )
    return ""


def _with_targets(adapter: ModelAdapter) -> Iterator[tuple[dict[str, Any], Tensor]]:
    """Arguments of a forward pass with what may be the targets among them."""
    if isinstance(adapter, ModuleAdapter):
        named: Mapping[str, Any] = adapter.named or {}
        first = next(iter(named), "")
        for name, value in named.items():
            if name != first and _are_targets(value, adapter.example):
                yield dict(named), value
        ids = adapter.example
        labels = _labels(adapter)
        if not named and labels is not None and ids.dtype == torch.int64:
            yield {_arguments(adapter)[0]: ids, labels: ids}, ids
    elif (labels := _labels(adapter)) is not None:
        name = getattr(adapter.model, "main_input_name", "input_ids")
        width = adapter.like().shape[0]
        ids = torch.arange(2 * width).remainder(max(2, adapter.vocabulary)).reshape(2, width)
        ids = ids.to(adapter.like().device)
        yield {name: ids, labels: ids}, ids


def _labels(adapter: ModelAdapter) -> str | None:
    """The name of the argument for targets, if there is one."""
    return next((name for name in LABELS if name in _arguments(adapter)), None)


def _arguments(adapter: ModelAdapter) -> list[str]:
    """The names of the arguments of the model's forward."""
    return list(inspect.signature(adapter.model.forward).parameters)


def _are_targets(value: object, inputs: Tensor) -> bool:
    return isinstance(value, Tensor) and value.dtype == torch.int64 and value.shape == inputs.shape


def _loss_in(output: Any) -> float | None:
    """The one real number in the output that may be a loss; one of that name first."""
    if dataclasses.is_dataclass(output) and not isinstance(output, Mapping):
        output = vars(output)
    named = output.get("loss") if isinstance(output, Mapping) else None
    candidates = [named, *tensors_in(dict(output) if isinstance(output, Mapping) else output)]
    for each in candidates:
        if isinstance(each, Tensor) and each.numel() == 1 and each.is_floating_point():
            return float(each)
    return None


def _cross_entropies(logits: Tensor, targets: Tensor) -> Iterator[float]:
    """The mean cross-entropy of targets beside the logits, and of those one token later."""
    pairs = [(logits, targets), (logits[:, :-1], targets[:, 1:])]
    for some, ones in pairs:
        for ignored in IGNORED:
            if ones.numel() and int(ones.max()) < some.shape[-1]:
                flat = some.flatten(0, -2)
                yield float(F.cross_entropy(flat, ones.flatten(), ignore_index=ignored))

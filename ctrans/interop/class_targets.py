"""Targets of a model whose head gives no logits of tokens: a tagger, a classifier of sequences or
images. Nobody named its loss. Class ids that fit one axis of its output say which it is.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ctrans.interop.imported import Imported
from ctrans.interop.losses import ModelWithLoss, Tensors, of_last_state
from ctrans.interop.opened import Opened
from ctrans.model.gpt import counted

PROBABILITIES = (
    "the output's rows are not negative and sum to 1, so they are probabilities, and a"
    " cross-entropy of logits takes a softmax once more"
)
STANDS_IN = "a stand-in takes the place of the loss: give loss="


def with_class_targets(opened: Any, tokens: Any, targets: Any) -> tuple[Any, str]:
    """The model with the mean cross-entropy of these targets, where its loss is not known and they
    are classes along one axis of its output; any other model itself. Then why a stand-in does not
    use the targets; "" if it is none, or was chosen.

    Targets of -1 and -100 are left out.
    """
    if targets is None or not isinstance(opened, Opened):
        return opened, ""
    around = opened.model
    if not isinstance(around, ModelWithLoss) or around.is_chosen:
        return opened, ""
    inner = around.model
    if not isinstance(inner, Imported):
        return opened, ""
    tensor = inner.adapter.tensor
    with torch.no_grad():
        x = opened.embed(tokens)
        output = tensor(inner.outputs(x))
    axis, why = _class_axis(output, targets, states=tuple(x.shape))
    if axis is None:
        return opened, f"the given targets are not used: {why}; {STANDS_IN}"
    loss = of_last_state(_cross_entropy(tensor, axis), inner.adapter.apart)
    chosen = copy.copy(opened)
    chosen._modules = dict(opened._modules)
    chosen.model = ModelWithLoss(inner, loss)
    chosen.loss = "given"
    described, _, _ = opened.described.partition("; loss: ")
    chosen.called = f"the cross-entropy of the targets, as classes along axis {axis} of the output,"
    chosen.described = f"{described}; loss: {chosen.called.rstrip(',')}"
    return chosen, ""


def are_probabilities(output: Tensor, axis: int = -1) -> bool:
    """Whether the entries along that axis are not negative and sum to 1, to rounding, everywhere.
    Logits hardly do.
    """
    if not output.numel() or output.shape[axis] < 2 or not output.is_floating_point():
        return False
    # each entry is rounded, by at most itself times eps
    tolerance = max(4 * torch.finfo(output.dtype).eps, 1e-6)
    values = output.detach().double()
    errors = (values.sum(axis) - 1).abs()
    return bool((values >= 0).all()) and bool((errors <= tolerance).all())


def _class_axis(
    output: Tensor | None, targets: Any, *, states: tuple[int, ...]
) -> tuple[int | None, str]:
    """The axis of the output along which the targets are classes, or None and why there is none."""
    if output is None:
        return None, "the output has no known tensor"
    if not isinstance(targets, Tensor) or targets.is_floating_point() or targets.is_complex():
        return None, "they are no class ids"
    shape = tuple(output.shape)
    if shape == states:
        return None, f"the output {shape} has the shape of the states, so it may be no logits"
    ids = counted(targets)
    ids = ids[ids != -1]
    if not ids.numel():
        return None, "none of them counts"
    axes = [
        axis
        for axis in range(1, len(shape))
        if shape[:axis] + shape[axis + 1 :] == tuple(targets.shape)
        and int(ids.min()) >= 0
        and int(ids.max()) < shape[axis]
    ]
    if len(axes) == 1 and are_probabilities(output, axes[0]):
        return None, PROBABILITIES
    if len(axes) == 1:
        return axes[0], ""
    ranges = f"of shape {tuple(targets.shape)}, from {int(ids.min())} to {int(ids.max())}"
    if axes:
        return None, f"{ranges}, they may be classes along axes {axes} of the output {shape}"
    return None, f"{ranges}, they are classes along no axis of the output {shape}"


def _cross_entropy(tensor: Tensors, axis: int) -> Any:
    """The mean cross-entropy, in nats, of logits along that axis; 0 without a target."""

    def cross_entropy(outputs: Any, targets: Tensor) -> Tensor:
        y = tensor(outputs)
        assert y is not None, "the model returned one before"
        ids = counted(targets).long()
        losses = F.cross_entropy(y.movedim(axis, 1), ids, ignore_index=-1, reduction="sum")
        return losses / (ids != -1).sum().clamp(min=1)

    return cross_entropy

"""Whether the costate is what the model's own loss shows, by differences of the model's own passes.

A costate follows the way that ctrans read: the sublayers one after the other, and the head. A
penalty is about the weights of the model itself. Where the model's code passes that way by, or
where its gradients are not its derivatives, the costate says nothing about them. Examples are a
tensor that a block keeps for the head, a hook of the model, `detach`, and a matrix of a block that
is also the embedding.

Let D be a direction of a sublayer's matrices W. To first order the loss of the model's own pass at
W + s D must change as <P, step(X; W + s D)> does, at the state X before the step and the costate P
after it. Both changes are central differences, without autograd.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize

from ctrans.control.costate import Costate, costate
from ctrans.control.in_double import in_double
from ctrans.dynamics.depth import Depth
from ctrans.dynamics.weights.on_demand import has_weights_on_demand
from ctrans.measure.walk import Model
from ctrans.model.gpt import counted
from solvers import ConfigError

STEPS = {torch.float64: (1e-5, 1e-7), torch.float32: (3e-3, 3e-4)}
"""Sizes of a difference, as shares of the matrices. The smaller one counts where the larger one
crosses a kink, as of ReLU.
"""
CLOSE = {torch.float64: 1e-4, torch.float32: 2e-2}
"""How closely the two derivatives must agree, as a share, besides the error of the differences."""
TELLS = 0.1
"""The error of two derivatives from which their agreement says nothing, as a share."""
ROUNDING = 32.0
"""Rounding of a loss or of logits, as a multiple of that of one number."""
SAFETY = 4.0
"""The error of a difference, as a multiple of its change with the size of the step."""
GROUPS = 8
"""The most differences of one model: the sublayers are tested in so many groups."""
RANDOM = 0.3
"""The random part of a direction; the rest is that of the largest change."""


@runtime_checkable
class RunsItself(Protocol):
    """A model around one of another library, whose own forward pass is not that of its depth."""

    def own_pass(self, tokens: Tensor, targets: Any) -> tuple[Tensor | None, Tensor | None]:
        """The logits and the loss of the model's own forward pass; None for what it does not
        have.
        """


@dataclass(frozen=True, eq=False)
class Difference:
    """A derivative by central differences, by how much it may be wrong, the dtype of what was
    changed, and the size of what the number adds up.
    """

    value: float
    error: float
    dtype: torch.dtype
    size: float


Summed = tuple[float, float]
"""A number, and the size of what it adds up."""


@torch.no_grad()
def why_not_own_loss(model: Model, tokens: Tensor, targets: Any, found: Costate) -> str:
    """Why the discrete costate is not that of the model's own loss; "" if it is, or if the model
    has no pass of its own.

    It is tested in up to GROUPS groups of sublayers, and once more in float64 if rounding in the
    model's own dtype leaves a test open. What is still open then is a reason too, but for a model
    of ctrans' own classes alone: its pass is its sublayers and its head. The weights are put back
    to the bit.
    """
    if has_weights_on_demand(model.depth):
        return ""
    try:
        result = _tested(model, tokens, targets, found)
    except ConfigError as error:
        return f"its own forward pass does not run on this text: {error}"
    if result.untested and isinstance(model, nn.Module) and not _is_own_code(model):
        result = _tested_in_double(model, tokens, targets) or result
        return result.otherwise or result.untested
    return result.otherwise


def _is_own_code(model: nn.Module) -> bool:
    """Whether a model is of classes of ctrans and torch alone, without hooks, and its sublayers
    share no weight with its other parts.
    """
    if isinstance(model, RunsItself):
        return False
    for part in model.modules():
        module = type(part).__module__
        hooks = (
            part._forward_hooks
            or part._forward_pre_hooks
            or part._backward_hooks
            or part._backward_pre_hooks
        )
        if hooks or "forward" in vars(part) or parametrize.is_parametrized(part):
            return False
        if not module.startswith(("ctrans.", "torch.nn.modules.")):
            return False
    places = Counter(
        parameter.untyped_storage().data_ptr()
        for part in model.modules()
        for parameter in part.parameters(recurse=False)
    )
    depth: Any = model.depth
    return all(
        places[parameter.untyped_storage().data_ptr()] == 1 for parameter in depth.parameters()
    )


@dataclass(frozen=True)
class Tested:
    """Why the costate is not that of the own loss, and why that is not known; "" if neither."""

    otherwise: str = ""
    untested: str = ""


def _tested(model: Model, tokens: Tensor, targets: Any, found: Costate) -> Tested:
    depth = model.depth
    logits, loss = _own_pass(model, tokens, targets)
    numbers: dict[str, Callable[[], Summed]] = {}
    if logits is not None and logits.shape[:-1].numel() == targets.numel():
        slopes = _slopes(logits, targets)
        numbers["output"] = partial(_along_slopes, model, tokens, targets, slopes)
    if loss is not None:
        numbers["loss"] = partial(_loss, model, tokens, targets)
    count = len(depth.sublayers)
    untested = ""
    for first in range(min(GROUPS, count)):
        tried = {k: _directions(depth, k, found) for k in range(first, count, GROUPS)}
        directions = {k: pairs for k, pairs in tried.items() if pairs}
        if not directions:
            continue
        which = ", ".join(map(str, directions))
        along = partial(_along, depth, tuple(directions), found)
        for name, number in numbers.items():
            agree = _agree_at_a_step(directions, along, number)
            if agree is None and name == "loss" and "output" in numbers:
                # the derivatives of the output were told from others
                agree = _is_cross_entropy(
                    directions, partial(_loss_of_logits, model, tokens, targets)
                )
            if agree is None:
                untested = untested or (
                    f"whether its own {name} changes with the weights of segment {which} as the"
                    " costate shows is not tested: rounding hides these changes"
                )
            elif not agree:
                otherwise = (
                    f"its own {name} changes otherwise with the weights of"
                    f" segment {which} than the costate shows. Other code reads these weights or"
                    " what the segment adds, as tied weights, hooks or a kept tensor do, or its"
                    " gradients are not its derivatives, or have lost their digits"
                )
                return Tested(otherwise=otherwise)
    return Tested(untested=untested)


def _tested_in_double(model: Any, tokens: Tensor, targets: Any) -> Tested | None:
    """The test with the model in float64; None if its code does not compute in float64."""

    def wide(numbers: Any) -> Any:
        is_float = isinstance(numbers, Tensor) and numbers.is_floating_point()
        return numbers.double() if is_float else numbers

    forget = getattr(model, "forget", None)
    tokens, targets = wide(tokens), wide(targets)
    try:
        with in_double([model]):
            if forget is not None:
                forget()
            return _tested(model, tokens, targets, costate(model, tokens, targets))
    except Exception:  # code of others raises what it likes in another dtype
        return None
    finally:
        if forget is not None:
            forget()


def _agree_at_a_step(
    directions: dict[int, WeightDirections],
    along: Callable[[], Summed],
    number: Callable[[], Summed],
) -> bool | None:
    """Whether the derivatives agree at a size of the step where they can be told from others; None
    if they cannot be told from others, and do not differ at every size.
    """
    dtype = next(iter(directions.values()))[0][0].dtype
    differ = True
    for step in STEPS.get(dtype, STEPS[torch.float32]):
        expected = _central(directions, along, step)
        own = _central(directions, number, step)
        if _differ(expected, own):
            continue
        differ = False
        if _tells(expected, own):
            return True
    return False if differ else None


def _loss_of_logits(model: Model, tokens: Tensor, targets: Any) -> tuple[float, float, float]:
    """The own loss, the cross-entropy of the own logits, and their rounding."""
    logits, loss = _own_pass(model, tokens, targets)
    assert logits is not None, "it had logits before"
    assert loss is not None, "it had a loss before"
    kept = counted(targets).flatten()
    expected = float(
        F.cross_entropy(logits.double().flatten(0, -2), kept.clamp_min(-1), ignore_index=-1)
    )
    size = 1.0 + abs(expected) + float(logits.abs().amax())
    return float(loss), expected, ROUNDING * torch.finfo(logits.dtype).eps * size


def _is_cross_entropy(
    directions: dict[int, WeightDirections], losses: Callable[[], tuple[float, float, float]]
) -> bool | None:
    """Whether the own loss is the cross-entropy of the own logits, at weights as far away as they
    are large; None if that loss is rounding there. It shows so where the loss is too near to 0 for
    differences.
    """
    pairs = [pair for of_segment in directions.values() for pair in of_segment]
    kept = [matrix.clone() for matrix, _ in pairs]
    try:
        for sign in (1.0, -1.0):
            for (matrix, direction), before in zip(pairs, kept, strict=True):
                matrix.copy_(before + sign * direction)
            loss, expected, rounding = losses()
            if not expected * TELLS > rounding:
                return None
            if not abs(loss - expected) <= rounding:
                return False
    finally:
        for (matrix, _), before in zip(pairs, kept, strict=True):
            matrix.copy_(before)
    return True


def _own_pass(model: Model, tokens: Tensor, targets: Any) -> tuple[Tensor | None, Tensor | None]:
    if isinstance(model, RunsItself):
        return model.own_pass(tokens, targets)
    if not isinstance(model, nn.Module) or type(model).forward is nn.Module.forward:
        return None, None
    logits, loss = model(tokens, targets)
    return logits, loss


def _slopes(logits: Tensor, targets: Tensor) -> Tensor:
    """dL/dlogits of the mean cross-entropy, at unit size: a loss near 0 loses its digits, and its
    slopes at these logits do not.
    """
    flat = logits.double().flatten(0, -2)
    counted_targets = counted(targets).flatten()
    kept = counted_targets >= 0
    chosen = F.one_hot(counted_targets.clamp_min(0), flat.shape[-1]).bool()
    others = flat.softmax(-1).masked_fill(chosen, 0.0)
    slopes = torch.where(chosen, -others.sum(-1, keepdim=True), others)
    slopes = slopes * kept.unsqueeze(-1) / kept.sum()
    return slopes.reshape(logits.shape)


def _loss(model: Model, tokens: Tensor, targets: Any) -> Summed:
    """The loss of the model's own pass."""
    logits, loss = _own_pass(model, tokens, targets)
    assert loss is not None, "it had a loss before"
    size = 1.0
    if logits is not None:
        size = float(logits.abs().amax())
    return float(loss), abs(float(loss)) + size


def _along_slopes(model: Model, tokens: Tensor, targets: Any, slopes: Tensor) -> Summed:
    """<dL/dlogits, logits> for the logits of the model's own pass, at fixed slopes."""
    logits, _ = _own_pass(model, tokens, targets)
    assert logits is not None, "it had logits before"
    products = logits.double() * slopes
    return float(products.sum()), float(products.abs().sum())


WeightDirections = list[tuple[Tensor, Tensor]]
"""Matrices, each with a direction of its own size."""


def _directions(depth: Depth, k: int, found: Costate) -> WeightDirections:
    """For each matrix of a sublayer's map the direction in which <P, step> grows fastest, and a
    random part.
    """
    sublayer = depth.sublayers[k]
    matrices = [
        weight
        for weight in sublayer.field.parameters()
        if weight.dim() > 1 and weight.is_floating_point()
    ]
    gradients: Sequence[Tensor | None]
    with _tracked(matrices):
        y = sublayer.step(found.states[k], depth.lengths[k])
        product = (y * found.costates[k + 1]).sum()
        gradients = [None] * len(matrices)
        if product.requires_grad:
            gradients = torch.autograd.grad(product, matrices, allow_unused=True)
    generator = torch.Generator().manual_seed(k)
    directions = []
    for weight, gradient in zip(matrices, gradients, strict=True):
        drawn = torch.randn(weight.shape, generator=generator, dtype=torch.float64).to(weight)
        direction = RANDOM * drawn / drawn.norm()
        if gradient is not None and gradient.norm() > 0:
            direction = direction + gradient / gradient.norm()
        size = weight.norm()
        if size == 0:
            size = torch.ones_like(size)
        directions.append((weight.data, size * direction))
    return directions


@contextlib.contextmanager
def _tracked(weights: Sequence[Tensor]) -> Iterator[None]:
    before = [weight.requires_grad for weight in weights]
    try:
        for weight in weights:
            weight.requires_grad = True
        with torch.enable_grad():
            yield
    finally:
        for weight, required in zip(weights, before, strict=True):
            weight.requires_grad = required


def _along(depth: Depth, segments: Sequence[int], found: Costate) -> Summed:
    """The sum of <P, step> over segments."""
    total = 0.0
    size = 0.0
    for k in segments:
        y = depth.sublayers[k].step(found.states[k], depth.lengths[k])
        products = y.double() * found.costates[k + 1].double()
        total += float(products.sum())
        size += float(products.abs().sum())
    return total, size


def _central(
    directions: dict[int, WeightDirections], number: Callable[[], Summed], step: float
) -> Difference:
    """d number/ds at the weights W + s D, s = 0."""
    pairs = [pair for of_segment in directions.values() for pair in of_segment]
    kept = [(matrix, matrix.clone()) for matrix, _ in pairs]
    dtype = pairs[0][0].dtype
    slopes = []
    sizes = []
    try:
        for times in (1.0, 2.0):
            values = []
            for sign in (1.0, -1.0):
                for (matrix, before), (_, direction) in zip(kept, pairs, strict=True):
                    matrix.copy_(before + sign * times * step * direction)
                value, size = number()
                values.append(value)
                sizes.append(size)
            slopes.append((values[0] - values[1]) / (2 * times * step))
    finally:
        for matrix, before in kept:
            matrix.copy_(before)
    rounding = ROUNDING * torch.finfo(dtype).eps * max(sizes) / step
    error = SAFETY * abs(slopes[0] - slopes[1]) + rounding
    return Difference(slopes[0], error, dtype, max(sizes))


def _allowed(expected: Difference, own: Difference) -> float:
    close = CLOSE.get(own.dtype, CLOSE[torch.float32])
    return close * max(abs(expected.value), abs(own.value)) + expected.error + own.error


def _differ(expected: Difference, own: Difference) -> bool:
    """Whether two derivatives differ by more than their errors."""
    return abs(expected.value - own.value) > _allowed(expected, own)


def _tells(expected: Difference, own: Difference) -> bool:
    """Whether the errors are small next to the derivatives, so that their agreement says
    something. That of numbers that are not finite does not. No change at all of a costate that is 0
    does.
    """
    if expected.value == 0 and expected.size == 0 and own.value == 0:
        return True
    return _allowed(expected, own) <= TELLS * abs(expected.value)

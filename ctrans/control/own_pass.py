"""Whether the costate is what the model's own loss shows, by differences of the model's own passes.

A costate follows the way that ctrans read: the sublayers one after the other, and the head. A
penalty is about the weights of the model itself. Where the model's code passes that way by, or
where its gradients are not its derivatives, the costate says nothing about them. Examples are a
tensor that a block keeps for the head, a hook of the model, `detach`, and a matrix of a block that
is also the embedding.

Let D be a direction of a sublayer's matrices W. To first order the loss of the model's own pass at
W + s D must change as <P, step(X; W + s D)> does, at the state X before the step and the costate P
after it. Both changes are central differences, without autograd.

Several sublayers are tested at once, by the sum of their changes. A wrong change can hide beside a
much larger one. So sublayers are tested with others of like change, an agreement is a share of the
smallest one, and where that does not tell, the sublayers are tested in halves.

Along the direction of the largest change an error of the costate at right angles to it does not
show. So a model of other code is tested along a random direction too.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize

from ctrans.control.costate import Costate, costate
from ctrans.control.derivatives_agree import (
    ROUNDING,
    TELLS,
    SegmentChange,
    Summed,
    agree_at_a_step,
)
from ctrans.control.in_double import in_double, widened
from ctrans.control.shared_entries import shared_inside
from ctrans.dynamics.depth import Depth
from ctrans.dynamics.sublayer import Sublayer
from ctrans.dynamics.weights.on_demand import has_weights_on_demand
from ctrans.measure.backward.parameter_gradients import requiring_gradients
from ctrans.measure.walk import Model
from ctrans.model.gpt import counted
from solvers import ConfigError

ALIKE = 4.0
"""By what factor the changes of sublayers that are tested at once differ at most."""
RANDOM = 0.3
"""The random part of a direction; the rest is that of the largest change."""
OTHER_IN_DOUBLE = (
    "its gradients in float64 are others than in its own dtype, so that the costate's test in"
    " float64 says nothing about it"
)
SAME_TWICE = 1e-5
"""The largest difference of two calls of one loss, as a share: the order of sums may change."""


@runtime_checkable
class RunsItself(Protocol):
    """A model around one of another library, whose own forward pass is not that of its depth."""

    def own_pass(self, tokens: Tensor, targets: Any) -> tuple[Tensor | None, Tensor | None]:
        """The logits and the loss of the model's own forward pass; None for what it lacks."""

    def why_other_loss(self) -> str:
        """Why the loss that the model returns is not that of the costate; "" if it may be."""


@runtime_checkable
class OpenedModel(Protocol):
    """A model around another one, whose loss may depend on which targets are given."""

    def for_targets(self, tokens: Any, targets: Any) -> tuple[Model, str]:
        """The model inside, with the loss of these targets; and why it does not use them, or ""."""


@dataclass(frozen=True)
class OwnLoss:
    """What the test of a costate found.

    - `otherwise`: why it is not that of the own loss; "" if it is
    - `untested`: why that is not known; "" if it is
    - `share`: how closely the two agree at most, as a share of the change of each sublayer
    """

    otherwise: str = ""
    untested: str = ""
    share: float = 0.0


@torch.no_grad()
def own_loss(model: Model, tokens: Tensor, targets: Any, found: Costate) -> OwnLoss:
    """Whether the discrete costate is that of the model's own loss. It is for a model that has no
    pass of its own.

    A model of other classes than those of ctrans is tested in float64 too, if its code computes in
    float64: rounding hides less there. Rounding leaves nothing open for a model of ctrans' own
    classes: its pass is its sublayers and its head. The weights are put back to the bit.
    """
    if has_weights_on_demand(model.depth):
        return OwnLoss()
    if isinstance(model, OpenedModel):
        model, _ = model.for_targets(tokens, targets)
    another = model.why_other_loss() if isinstance(model, RunsItself) else ""
    another = another or shared_inside(model.depth)
    if another:
        return OwnLoss(otherwise=another)
    is_own = not isinstance(model, nn.Module) or _is_own_code(model)
    try:
        result = _tested(model, tokens, targets, found)
        if is_own or result.otherwise:
            return OwnLoss(otherwise=result.otherwise)
        if found.states[0].dtype != torch.float64:
            in_float64 = _tested_in_double(model, tokens, targets, found)
            if in_float64 is not None:
                return in_float64
        along_random = _tested(model, tokens, targets, found, is_random=True)
    except ConfigError as error:
        return OwnLoss(otherwise=f"its own forward pass does not run on this text: {error}")
    return _both(result, along_random)


def _both(first: OwnLoss, second: OwnLoss) -> OwnLoss:
    return OwnLoss(
        otherwise=first.otherwise or second.otherwise,
        untested=first.untested or second.untested,
        share=max(first.share, second.share),
    )


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


def _tested(
    model: Model, tokens: Tensor, targets: Any, found: Costate, *, is_random: bool = False
) -> OwnLoss:
    """The test along the directions of the largest change, or along random ones."""
    depth = model.depth
    logits, loss = _own_pass(model, tokens, targets)
    numbers: dict[str, Callable[[], Summed]] = {}
    if logits is not None and logits.shape[:-1].numel() == targets.numel():
        slopes = _slopes(logits, targets)
        numbers["output"] = partial(_along_slopes, model, tokens, targets, slopes)
    if loss is not None:
        numbers["loss"] = partial(_loss, model, tokens, targets)
    for name, number in numbers.items():
        (first, size), (second, _) = number(), number()
        if abs(first - second) > SAME_TWICE * size:
            return OwnLoss(otherwise=f"its own {name} is not the same from call to call")
    untested = ""
    share = 0.0
    groups = _alike(_changes(depth, found, is_random=is_random))
    while groups:
        group = groups.pop()
        along = partial(_along, depth, tuple(change.segment for change in group), found)
        for name, number in numbers.items():
            agreement = agree_at_a_step(group, along, number)
            if agreement is None and len(group) > 1:
                groups += [group[: len(group) // 2], group[len(group) // 2 :]]
                break
            which = ", ".join(str(change.segment) for change in group)
            if agreement is None and name == "loss" and "output" in numbers:
                # the derivatives of the output were told from others
                agreement = _is_cross_entropy(
                    group, partial(_loss_of_logits, model, tokens, targets)
                )
            if agreement is None:
                untested = untested or (
                    f"whether its own {name} changes with the weights of segment {which} as the"
                    " costate shows is not tested: rounding hides these changes"
                )
            elif math.isinf(agreement):
                otherwise = (
                    f"its own {name} changes otherwise with the weights of"
                    f" segment {which} than the costate shows. Other code reads these weights or"
                    " what the segment adds, as tied weights, hooks or a kept tensor do, or its"
                    " gradients are not its derivatives, or have lost their digits"
                )
                return OwnLoss(otherwise=otherwise)
            else:
                share = max(share, agreement)
    return OwnLoss(untested=untested, share=share)


def _alike(changes: list[SegmentChange]) -> list[list[SegmentChange]]:
    """The sublayers in groups whose changes differ by up to a factor of ALIKE."""
    groups: list[list[SegmentChange]] = []
    for change in sorted(changes, key=lambda change: change.size):
        if groups and change.size <= ALIKE * groups[-1][0].size:
            groups[-1].append(change)
        else:
            groups.append([change])
    return groups


def _tested_in_double(model: Any, tokens: Tensor, targets: Any, found: Costate) -> OwnLoss | None:
    """The tests with the model in float64; None if its code does not compute in float64. The
    costate in float64 must be that in the model's own dtype.
    """

    tokens, targets = widened(tokens), widened(targets)
    try:
        with in_double([model]):
            exact = costate(model, tokens, targets)
            difference = _difference(found, exact)
            if not difference <= TELLS:
                return OwnLoss(otherwise=OTHER_IN_DOUBLE)
            result = _tested(model, tokens, targets, exact)
            along_random = _tested(model, tokens, targets, exact, is_random=True)
            return _both(_both(result, along_random), OwnLoss(share=difference))
    except Exception:  # code of others raises what it likes in another dtype
        return None


def _difference(found: Costate, exact: Costate) -> float:
    """The largest difference of two costates of one model, as a share of the state's costate."""
    shares = [
        float((p.double() - q).norm() / q.norm())
        for p, q in zip(found.costates, exact.costates, strict=True)
        if q.norm() > 0
    ]
    if any(map(math.isnan, shares)):
        return math.nan
    return max(shares, default=0.0)


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
    group: Sequence[SegmentChange], losses: Callable[[], tuple[float, float, float]]
) -> float | None:
    """0 if the own loss is the cross-entropy of the own logits, at weights as far away as they are
    large, inf if it is not; None if that loss is rounding there. It shows so where the loss is too
    near to 0 for differences.
    """
    pairs = [pair for change in group for pair in change.pairs]
    kept = [matrix.clone() for matrix, _ in pairs]
    try:
        for sign in (1.0, -1.0):
            for (matrix, direction), before in zip(pairs, kept, strict=True):
                matrix.copy_(before + sign * direction)
            loss, expected, rounding = losses()
            if not expected * TELLS > rounding:
                return None
            if not abs(loss - expected) <= rounding:
                return math.inf
    finally:
        for (matrix, _), before in zip(pairs, kept, strict=True):
            matrix.copy_(before)
    return 0.0


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


def _changes(depth: Depth, found: Costate, *, is_random: bool) -> list[SegmentChange]:
    """The directions of each sublayer with matrices in which <P, step> grows fastest, and a random
    part; or random ones in which it grows.
    """
    changes = []
    for k, sublayer in enumerate(depth.sublayers):
        matrices = [
            weight
            for weight in sublayer.field.parameters()
            if weight.dim() > 1 and weight.is_floating_point()
        ]
        if matrices:
            gradients = _gradients(sublayer, k, matrices, depth.lengths[k], found)
            changes.append(_change_of(k, matrices, gradients, is_random=is_random))
    return changes


def _gradients(
    sublayer: Sublayer, k: int, matrices: Sequence[Tensor], h: float, found: Costate
) -> Sequence[Tensor | None]:
    """Those of <P, step> by the matrices."""
    with requiring_gradients(matrices), torch.enable_grad():
        product = (sublayer.step(found.states[k], h) * found.costates[k + 1]).sum()
        if not product.requires_grad:
            return [None] * len(matrices)
        return torch.autograd.grad(product, matrices, allow_unused=True)


def _change_of(
    k: int, matrices: Sequence[Tensor], gradients: Sequence[Tensor | None], *, is_random: bool
) -> SegmentChange:
    generator = torch.Generator().manual_seed(k)
    directions = []
    size = 0.0
    for weight, gradient in zip(matrices, gradients, strict=True):
        drawn = torch.randn(weight.shape, generator=generator, dtype=torch.float64).to(weight)
        direction = drawn / drawn.norm()
        if gradient is not None and gradient.norm() > 0 and not is_random:
            direction = RANDOM * direction + gradient / gradient.norm()
        norm = weight.norm()
        if norm == 0:
            norm = torch.ones_like(norm)
        direction = norm * direction
        directions.append(direction)
        if gradient is not None:
            size += float((gradient * direction).sum())
    # several sublayers are added up: none of them may cancel another
    sign = math.copysign(1.0, size)
    pairs = [
        (weight.data, sign * direction)
        for weight, direction in zip(matrices, directions, strict=True)
    ]
    return SegmentChange(k, pairs, abs(size))


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

"""How many digits the numbers of a Transformer's penalty have, by how they change with the last
digits of the model's weights.

Rounding acts like a change of the weights by some units in their last place. If states and costates
change by a large share then, they are made of rounding, as where an exact costate is 0.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ctrans.control.costate import Costate, costate
from ctrans.control.decay_threshold import DecayThreshold
from ctrans.control.in_double import in_double, widened
from ctrans.control.scales import total_length
from ctrans.control.segment_check import SegmentCheck
from ctrans.dynamics.weights.on_demand import has_weights_on_demand
from ctrans.measure.walk import Model, own_loss
from solvers import ConfigError, SolveError

UNITS = 4
"""By how many units in their last place the weights change."""
DRAWS = 2
"""Random changes of the weights."""
SAFETY = 4.0
"""The error of a number, as a multiple of the largest change."""
LOST = 0.25
"""The error from which nothing is known, as a share."""
TAKE_DOUBLE = "numbers overflow or underflow, so take float64, or smaller states"
OF_LOSS = 8.0
"""The error of the gradient of another's loss, as a multiple of the rounding of 1 over the loss."""


@torch.no_grad()
def errors_of(model: Model, tokens: Tensor, targets: Any, found: Costate) -> dict[int, float]:
    """By how much states and costates of each segment may be wrong by rounding, as a share.
    `found` is the discrete costate. The weights are put back to the bit.
    """
    depth = model.depth
    sublayers = list(depth.sublayers)
    errors = dict.fromkeys(range(len(sublayers)), 0.0)
    if not isinstance(model, nn.Module) or has_weights_on_demand(model):
        return errors
    weights = {
        weight.data_ptr(): weight.data
        for weight in model.parameters()
        if weight.is_floating_point() and not weight.is_meta
    }
    given = [sublayer.given(sublayer.enter(x)) for sublayer, x in _states(model, found)]
    for seed in range(DRAWS):
        kept = [(weight, weight.clone()) for weight in weights.values()]
        try:
            for number, weight in enumerate(weights.values()):
                _change_last_digits(weight, len(weights) * seed + number)
            other = costate(model, tokens, targets)
            for k, (sublayer, x) in enumerate(_states(model, other)):
                change = _share(found.costates[k + 1], other.costates[k + 1])
                change += _share(given[k], sublayer.given(sublayer.enter(x)))
                errors[k] = max(errors[k], SAFETY * change)
        except (ConfigError, SolveError):
            return dict.fromkeys(errors, math.inf)
        finally:
            for weight, before in kept:
                weight.copy_(before)
    exact = _shares_of_double(model, tokens, targets, found, given)
    errors = {k: max(errors[k], SAFETY * exact.get(k, 0.0)) for k in errors}
    if own_loss(model) is not None:
        # ctrans does not know how another's loss rounds: 1 - p has lost what a loss near 0 needs
        of_loss = math.inf
        if found.loss != 0:
            eps = torch.finfo(found.costates[-1].dtype).eps
            of_loss = OF_LOSS * eps / min(1.0, abs(found.loss))
        errors = {k: error + of_loss for k, error in errors.items()}
    return errors


def _shares_of_double(
    model: Any, tokens: Any, targets: Any, found: Costate, given: list[Tensor]
) -> dict[int, float]:
    """By how much states and costates of each segment differ from those in float64, as a share.
    Empty for a model that is in float64, or whose code does not compute in it: a change of the last
    digits does not show what is lost where numbers underflow.
    """
    if found.states[0].dtype == torch.float64:
        return {}
    try:
        with in_double([model]):
            exact = costate(model, widened(tokens), widened(targets))
            return {
                k: _share(found.costates[k + 1], exact.costates[k + 1])
                + _share(given[k], sublayer.given(sublayer.enter(x)))
                for k, (sublayer, x) in enumerate(_states(model, exact))
            }
    except Exception:  # code of others raises what it likes in another dtype
        return {}


@torch.no_grad()
def lost_segments(model: Any, tokens: Any, targets: Any, found: Costate) -> dict[int, str]:
    """The segments whose discrete costate is exactly 0 in the model's dtype and not in float64, as
    where squares overflow in a norm; and those where that is not known. Each with a reason.
    """
    dtype = found.states[0].dtype
    zeros = [k for k, p in enumerate(found.costates[1:]) if not p.any()]
    if not zeros or dtype == torch.float64:
        return {}
    name = str(dtype).removeprefix("torch.")
    if not isinstance(model, nn.Module) or has_weights_on_demand(model):
        reason = f"dL/dX is 0 in {name}, which may be rounding: take float64"
        return dict.fromkeys(zeros, reason)
    try:
        running: Any = model
        with in_double([model]):
            exact = costate(running, widened(tokens), widened(targets))
    except Exception:  # code of others raises what it likes in another dtype
        return dict.fromkeys(
            zeros, f"dL/dX is 0 in {name}, and its code does not compute in float64"
        )
    reason = f"dL/dX is 0 in {name} and not in float64: {TAKE_DOUBLE}"
    return {k: reason for k in zeros if exact.costates[k + 1].any()}


def _states(model: Model, found: Costate) -> list[tuple[Any, Tensor]]:
    return list(zip(model.depth.sublayers, found.states[:-1], strict=True))


def _change_last_digits(weight: Tensor, seed: int) -> None:
    """Moves each entry but zeros up or down by UNITS units in its last place."""
    generator = torch.Generator().manual_seed(seed)
    signs = torch.randint(0, 2, weight.shape, generator=generator).to(weight) * 2 - 1
    sizes = weight.abs()
    unit = torch.nextafter(sizes, torch.full_like(sizes, math.inf)) - sizes
    moved = weight + UNITS * signs * unit
    weight.copy_(torch.where(weight == 0, weight, moved))


def _share(found: Tensor, other: Tensor) -> float:
    """|other - found|/|found|; 0 if nothing changed."""
    change = total_length(other.double() - found.double())
    if change == 0:
        return 0.0
    size = total_length(found.double())
    if size == 0:
        return math.inf
    return change / size


def with_error(
    segment: SegmentCheck, error: float, tolerance: float, dtype: torch.dtype
) -> SegmentCheck:
    """The segment, whose states and costates have this error by rounding, and whose model is read
    to this tolerance. Both are shares. The dtype is that of its states.

    What was found is lowered by the root of the dtype's rounding, as what is proven was raised by
    it.
    """
    threshold = segment.step_threshold
    if threshold is None:
        return segment
    rounding = math.sqrt(torch.finfo(dtype).eps)
    widened = _with_margin(threshold, error, tolerance, rounding)
    return replace(segment, step_threshold=widened)


def _with_margin(
    threshold: DecayThreshold, error: float, tolerance: float, rounding: float
) -> DecayThreshold:
    if not error + tolerance < LOST:
        return replace(threshold, lower=0.0, upper=math.inf, below=None, above=None)
    widened = threshold.wider(tolerance, 0.0)
    lower = widened.lower
    if not math.isinf(lower):
        lower = lower * (1 - rounding)
    widened = replace(widened, lower=lower)
    # terms of sums have these errors, and may cancel
    largest = max(widened.upper, widened.uncancelled)
    return replace(widened, uncancelled=largest).wider(0.0, error)

"""The largest stable learning rate of a model on its data, from a ladder of trainings."""

from __future__ import annotations

import inspect
import itertools
import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ctrans.base.as_found import random_numbers_kept
from ctrans.base.option import WEIGHT, Count
from ctrans.study.outcomes import Floor, rate_by_floor
from ctrans.training.monitor.monitor import Monitor
from ctrans.training.schedule import learning_rate
from ctrans.training.settings import TrainConfig
from solvers import AnyFloat, ConfigError, shown

RATES = tuple(10 ** (k / 2) for k in range(-5, 0))
"""Half a decade apart, from 3.2e-3 to 0.32."""
AVERAGED = 0.1
"""The loss of a rung is the mean over this share of its last steps."""
WARM_UP = 0.1
"""The share of a rung's steps in which its rate grows."""


@dataclass(frozen=True)
class Rung:
    """A training of the ladder: its peak learning rate, and its loss at the end, which is inf after
    a loss or a gradient that is not finite.
    """

    rate: float
    loss: float


@dataclass(frozen=True)
class RateSweep:
    """What a ladder of trainings says about the largest stable learning rate.

    - `rate`: by `rate_by_floor` of the rungs; None with the `reason`
    - `at_least`: whether `rate` is the highest that was tried
    - `first`: the loss before the first step
    - `rungs`: ascending by rate
    - `gives_way`: the first alarm of a monitor at the lowest rate above `rate`; "" if there is no
      such rate, or no alarm
    - `steps`: all steps that were made
    """

    rate: float | None
    at_least: bool
    reason: str
    first: float
    rungs: list[Rung]
    gives_way: str
    steps: int


LossOf = Callable[[nn.Module, Any], Tensor]


def loss_of(model: nn.Module, batch: Any) -> Tensor:
    """The loss of model(*batch), model(**batch) or model(batch): the attribute `loss` of what it
    returns, or its last entry, or the number itself.

    Raises ConfigError if this is no number.
    """
    if isinstance(batch, (tuple, list)):
        arguments = batch
    else:
        arguments = (batch,)
    if isinstance(batch, Mapping):
        made = model(**batch)
    else:
        made = model(*arguments)
    loss = getattr(made, "loss", made)
    if isinstance(loss, tuple) and loss:
        loss = loss[-1]
    else:
        loss = loss
    if not _is_loss(loss):
        raise ConfigError(
            f"the model returned {shown(made)}: give loss, a function of the model and a batch that"
            " returns a number"
        )
    found: Tensor = loss
    return found


def _is_loss(value: Any) -> bool:
    """Whether it is a number with a gradient."""
    return (
        isinstance(value, Tensor)
        and value.numel() == 1
        and value.requires_grad
        and value.is_floating_point()
    )


def largest_rate(
    model: nn.Module,
    batches: Iterable[Any],
    optimizer: torch.optim.Optimizer,
    *,
    loss: LossOf = loss_of,
    rates: Sequence[float] = RATES,
    steps: Count,
    floor: Floor | None = None,
    clip: AnyFloat | None = 1.0,
    progress: Callable[[str], None] | None = None,
) -> RateSweep:
    """The largest stable learning rate by one training for each of `rates`: going up from the best
    one, the rate at which the loss crosses the middle between the best loss and the floor.

    Each training has `steps` steps on the same batches, with a warm-up and a cosine, from the
    weights and the optimiser's state as they are. Model, optimiser, batches and random numbers (of
    torch, numpy and Python) are afterwards as they were.

    - `batches`: of which the first `steps` are used, again from the first if there are fewer. Each
      step gets a copy
    - `optimizer`: of the model's weights, whose step needs no closure. Groups keep the ratios of
      their learning rates, and `rates` are those of the first group
    - `loss(model, batch)`: the loss to minimise; see `loss_of`
    - `steps`: those of a whole training. With fewer the answer was no better than a constant on
      tasks that need depth (docs/why/prediction.md)
    - `floor`: the loss of what has learned nothing, as of a model without depth; None takes the
      worst rung's, at most `first`: then the answer depends on the highest of `rates`
    - `clip`: the largest norm of the gradient, or None
    - `progress(line)`: called after each rung

    Raises ConfigError without batches, for rates and a clip that are not positive, and for a loss
    that depends on no weight of the optimiser.
    """
    ladder = sorted({float(rate) for rate in rates})
    _check(model, batches, optimizer, ladder, clip)
    with random_numbers_kept():  # a loader that shuffles draws some
        if isinstance(batches, Sequence):
            chosen = batches
        else:
            chosen = list(itertools.islice(batches, steps))
    if not chosen:
        raise ConfigError("batches = an empty collection: give at least one batch")
    train = partial(_training, model, chosen, optimizer, loss, steps, clip)
    rungs = list[Rung]()
    losses = list[float]()
    for rate in ladder:
        losses = train(rate)
        rungs.append(Rung(rate, _end(losses, steps)))
        if progress is not None:
            progress(f"rate {rate:.2g}: loss {rungs[-1].loss:.4g}")
    first = losses[0]
    made = steps * len(ladder)
    finite = [rung.loss for rung in rungs if math.isfinite(rung.loss)]
    worst = min(max(finite, default=first), first)
    found = rate_by_floor({rung.rate: [rung.loss] for rung in rungs}, floor or Floor(worst, worst))
    if floor is not None or not found.reason:
        reason = found.reason
    else:
        reason = "no rate ended clearly below the others"
    above = [
        rung.rate
        for rung in rungs
        if found.rate is not None and not found.at_least and rung.rate > found.rate
    ]
    words = ""
    if above:
        words = _first_alarm(model, optimizer, partial(train, above[0]))
        made += steps
    return RateSweep(found.rate, found.at_least, reason, first, rungs, words, made)


def _check(
    model: nn.Module,
    batches: Iterable[Any],
    optimizer: torch.optim.Optimizer,
    ladder: Sequence[float],
    clip: float | None,
) -> None:
    if isinstance(batches, Mapping):
        raise ConfigError(
            f"batches = {shown(batches)}: give a list of batches, [batch] for a single one"
        )
    if not ladder:
        raise ConfigError("rates = []: give learning rates above 0")
    for rate in ladder:
        WEIGHT.check("rates", rate)
    if clip is not None and not clip > 0:
        raise ConfigError(f"clip = {clip}: give a number above 0, or None")
    for name, weight in model.named_parameters():
        without = is_lazy(weight) or weight.is_meta
        if without or weight.is_inference():
            if without:
                kept = "has no values yet"
            else:
                kept = "is of inference mode"
            raise ConfigError(
                f"model = {type(model).__name__}, whose {name} {kept}: give a model that can be"
                " trained"
            )
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ConfigError(
            f"optimizer = {type(optimizer).__name__}, whose step needs a closure: give one that"
            " steps without"
        )
    rates = [float(group["lr"]) for group in optimizer.param_groups]
    if not rates[0] and any(rates):
        raise ConfigError(
            f"optimizer has groups with learning rates {rates}: give its first group a rate above 0"
        )


def _end(losses: Sequence[float], steps: int) -> float:
    last = losses[-max(1, round(AVERAGED * steps)) :]
    if len(losses) == steps and all(map(math.isfinite, last)):
        return statistics.fmean(last)
    return math.inf


def _training(
    model: nn.Module,
    batches: Sequence[Any],
    optimizer: torch.optim.Optimizer,
    loss: LossOf,
    steps: int,
    clip: float | None,
    rate: float,
    watch: Callable[[Tensor], bool] = lambda value: False,
) -> list[float]:
    """The losses of each step until one, or the gradient, is not finite, or `watch` is true."""
    schedule = TrainConfig(iterations=steps, learning_rate=rate, warmup=round(WARM_UP * steps))
    losses = list[float]()
    with _restored(model, optimizer):
        weights = [weight for group in optimizer.param_groups for weight in group["params"]]
        base = [float(group["lr"]) for group in optimizer.param_groups]
        if not base[0]:  # before a warm-up from 0
            base = [float(group.get("initial_lr", 0.0)) for group in optimizer.param_groups]
        for step in range(steps):
            for group, its in zip(optimizer.param_groups, base, strict=True):
                group["lr"] = learning_rate(schedule, step) * (its / base[0] if base[0] else 1.0)
            optimizer.zero_grad(set_to_none=True)
            value = loss(model, _copy(batches[step % min(steps, len(batches))]))
            if not _is_loss(value):
                raise ConfigError(
                    f"loss returned {shown(value)}: give a function that returns a number with a"
                    " gradient"
                )
            losses.append(float(value.detach()))
            value.backward()
            if all(weight.grad is None for weight in weights):
                raise ConfigError(
                    "optimizer has no weight on which the loss depends: give one of this model's"
                    " weights"
                )
            if not math.isfinite(losses[-1]) or not _clipped(weights, clip):
                return [*losses[:-1], math.inf]
            if watch(value):
                break
            optimizer.step()
    return losses


def _first_alarm(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    train: Callable[[Callable[[Tensor], bool]], list[float]],
) -> str:
    """The first alarm of a monitor that looks at each step."""
    alarms = list[str]()
    try:
        monitor = Monitor(model, every=1)
    except ConfigError:  # not a model that can be watched
        return ""

    def watch(value: Tensor) -> bool:
        alarms.extend(
            f"{alarm.check} at {alarm.place}: {alarm.figure}"
            for alarm in monitor.step(value, optimizer)
        )
        return bool(alarms)

    with closing(monitor):
        train(watch)
    if alarms:
        return alarms[0]
    return ""


def _clipped(weights: Sequence[Tensor], clip: float | None) -> bool:
    """Clips the gradient, and returns whether it is finite."""
    gradients = [weight.grad for weight in weights if weight.grad is not None]
    sparse = [gradient.coalesce().values() for gradient in gradients if gradient.is_sparse]
    if sparse and clip is not None:
        raise ConfigError(
            f"clip = {clip} with sparse gradients, which torch does not clip: give None"
        )
    dense = [weight for weight in weights if weight.grad is not None and not weight.grad.is_sparse]
    norm = nn.utils.clip_grad_norm_(dense, math.inf if clip is None else clip)
    return math.isfinite(float(norm)) and all(bool(values.isfinite().all()) for values in sparse)


def _copy(batch: Any) -> Any:
    """A copy, as losses take entries out of a batch and change its tensors; the batch itself if it
    has none.
    """
    try:
        return deepcopy(batch)
    except Exception:  # what a stranger's class raises
        return batch


@contextmanager
def _restored(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """At the end weights, buffers, gradients, modes, the optimiser's state and random numbers are
    as they were, and the same objects. Inside, gradients are on and None, and the model is in
    training mode.
    """
    held: list[dict[str, Any]] = [
        table for part in model.modules() for table in (part._parameters, part._buffers)
    ]
    tables = [(table, {**table}) for table in held]
    all_of = [tensor for _, table in tables for tensor in table.values() if tensor is not None]
    all_of += [weight for group in optimizer.param_groups for weight in group["params"]]
    tensors = {id(tensor): tensor for tensor in all_of}.values()
    kept = [(tensor, tensor.detach().clone(), tensor.grad) for tensor in tensors]
    modes = [(part, part.training) for part in model.modules()]
    with (
        torch.inference_mode(False),
        torch.enable_grad(),
        random_numbers_kept(),
        _optimizer_restored(optimizer),
    ):
        try:
            for tensor in tensors:
                tensor.grad = None  # or it would be added to
            model.train()
            yield
        finally:
            for table, entries in tables:  # a forward may replace a buffer
                table.clear()
                table.update(entries)
            with torch.no_grad():
                for tensor, value, gradient in kept:
                    if not _expanded(tensor):
                        tensor.copy_(value)
                    tensor.grad = gradient
            for part, mode in modes:
                part.training = mode


def _expanded(tensor: Tensor) -> bool:
    """Whether several entries are one number in memory, so that none can be written."""
    return tensor.layout == torch.strided and any(
        size > 1 and not stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )


@contextmanager
def _optimizer_restored(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Inside, the optimiser has copies. One with its own `load_state_dict`, such as one around
    another, is restored by that.
    """
    own = type(optimizer)
    torchs = torch.optim.Optimizer
    if own.load_state_dict is not torchs.load_state_dict or own.state_dict is not torchs.state_dict:
        whole = deepcopy(optimizer.state_dict())
        try:
            yield
        finally:
            optimizer.load_state_dict(whole)
        return
    groups = [(group, {**group}) for group in optimizer.param_groups]
    state = optimizer.state
    try:
        for group, entries in groups:
            group.update(
                deepcopy({name: value for name, value in entries.items() if name != "params"})
            )
        optimizer.state = defaultdict(
            dict, {weight: deepcopy(its) for weight, its in state.items()}
        )
        yield
    finally:
        for group, entries in groups:
            group.clear()
            group.update(entries)
        optimizer.state = state

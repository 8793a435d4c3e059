"""The largest stable learning rate of a model on its data, from a ladder of trainings."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import itertools
import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ctrans.monitor.monitor import Monitor
from ctrans.option import Count
from ctrans.study.outcomes import Floor, rate_by_floor
from ctrans.training.schedule import learning_rate
from ctrans.training.settings import TrainConfig
from solvers import ConfigError
from solvers.checked import AnyFloat, checked
from solvers.errors import shown

RATES = tuple(10 ** (k / 2) for k in range(-5, 0))
"""Half a decade apart, from 3.2e-3 to 0.32."""
AVERAGED = 0.1
"""The loss of a rung is the mean over this share of its last steps."""
WARM_UP = 0.1
"""The share of a rung's steps in which its rate grows."""


@dataclasses.dataclass(frozen=True)
class Rung:
    """A training of the ladder: its peak learning rate, and its loss at the end, which is inf after a loss
    or a gradient that is not finite.
    """

    rate: float
    loss: float


@dataclasses.dataclass(frozen=True)
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
    arguments = batch if isinstance(batch, (tuple, list)) else (batch,)
    made = model(**batch) if isinstance(batch, Mapping) else model(*arguments)
    loss = getattr(made, "loss", made)
    loss = loss[-1] if isinstance(loss, tuple) and loss else loss
    if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
        raise ConfigError(
            f"the model returned {shown(made)}: give loss, a function of the model and a batch that returns a number"
        )
    return loss


@checked
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
    weights and the optimiser's state as they are. Model, optimiser and random numbers are
    afterwards as they were.

    - `batches`: of which the first `steps` are used, again from the first if there are fewer
    - `optimizer`: of the model's weights. Groups keep the ratios of their learning rates, and
      `rates` are those of the first group
    - `loss(model, batch)`: the loss to minimise; see `loss_of`
    - `steps`: those of a whole training. With fewer the answer was no better than a constant on
      tasks that need depth (docs/why/prediction.md)
    - `floor`: the loss of what has learned nothing, as of a model without depth; None takes the
      worst rung's, at most `first`
    - `clip`: the largest norm of the gradient, or None
    - `progress(line)`: called after each rung

    Raises ConfigError without batches, and for rates that are not positive.
    """
    chosen = list(itertools.islice(batches, steps))
    ladder = sorted({float(rate) for rate in rates})
    if not chosen:
        raise ConfigError("batches = an empty collection: give at least one batch")
    if not ladder or ladder[0] <= 0:
        raise ConfigError(f"rates = {shown(list(rates))}: give learning rates above 0")
    train = functools.partial(_training, model, chosen, optimizer, loss, steps, clip)
    rungs, losses = list[Rung](), list[float]()
    for rate in ladder:
        losses = train(rate)
        rungs.append(Rung(rate, _end(losses, steps)))
        if progress is not None:
            progress(f"rate {rate:.2g}: loss {rungs[-1].loss:.4g}")
    first, made = losses[0], steps * len(ladder)
    finite = [rung.loss for rung in rungs if math.isfinite(rung.loss)]
    worst = min(max(finite, default=first), first)
    found = rate_by_floor({rung.rate: [rung.loss] for rung in rungs}, floor or Floor(worst, worst))
    reason = found.reason if floor is not None or not found.reason else "no rate ended clearly below the others"
    above = [rung.rate for rung in rungs if found.rate is not None and not found.at_least and rung.rate > found.rate]
    words = ""
    if above:
        words = _first_alarm(model, optimizer, functools.partial(train, above[0]))
        made += steps
    return RateSweep(found.rate, found.at_least, reason, first, rungs, words, made)


def _end(losses: Sequence[float], steps: int) -> float:
    last = losses[-max(1, round(AVERAGED * steps)) :]
    return statistics.fmean(last) if len(losses) == steps and all(map(math.isfinite, last)) else math.inf


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
        for step in range(steps):
            for group, its in zip(optimizer.param_groups, base, strict=True):
                group["lr"] = learning_rate(schedule, step) * (its / base[0] if base[0] else 1.0)
            optimizer.zero_grad(set_to_none=True)
            value = loss(model, batches[step % len(batches)])
            losses.append(float(value.detach()))
            value.backward()
            norm = nn.utils.clip_grad_norm_(weights, math.inf if clip is None else clip)
            if not math.isfinite(losses[-1]) or not math.isfinite(float(norm)):
                return [*losses[:-1], math.inf]
            if watch(value):
                break
            optimizer.step()
    return losses


def _first_alarm(
    model: nn.Module, optimizer: torch.optim.Optimizer, train: Callable[[Callable[[Tensor], bool]], list[float]]
) -> str:
    """The first alarm of a monitor that looks at each step."""
    alarms = list[str]()
    try:
        monitor = Monitor(model, every=1)
    except ConfigError:  # not a model that can be watched
        return ""

    def watch(value: Tensor) -> bool:
        alarms.extend(f"{alarm.check} at {alarm.place}: {alarm.figure}" for alarm in monitor.step(value, optimizer))
        return bool(alarms)

    with contextlib.closing(monitor):
        train(watch)
    return alarms[0] if alarms else ""


@contextlib.contextmanager
def _restored(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """At the end weights, buffers, gradients, modes, the optimiser's state and random numbers are as
    they were. Inside, the model is in training mode.
    """
    tensors = [*model.parameters(), *model.buffers()]
    held = {id(weight): weight for group in optimizer.param_groups for weight in group["params"]}
    tensors += [weight for key, weight in held.items() if all(key != id(tensor) for tensor in tensors)]
    kept = [(tensor, tensor.detach().clone(), tensor.grad) for tensor in tensors]
    state, modes = copy.deepcopy(optimizer.state_dict()), [(part, part.training) for part in model.modules()]
    try:
        with torch.random.fork_rng(range(torch.cuda.device_count()) if torch.cuda.is_initialized() else []):
            model.train()
            yield
    finally:
        with torch.no_grad():
            for tensor, value, gradient in kept:
                tensor.copy_(value)
                tensor.grad = gradient
        for part, mode in modes:
            part.training = mode
        optimizer.load_state_dict(state)

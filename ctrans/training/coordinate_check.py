"""Will a learning rate transfer? How activations, attention logits and decay change with width and
depth after a few updates (the coordinate check of mup, over width and depth).
"""

from __future__ import annotations

import contextlib
import math
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import fmean
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from ctrans.base.as_found import as_found
from ctrans.measure.attention.attention_calls import (
    AttentionCalls,
    KernelCall,
    looks,
    softmax_input,
)
from ctrans.measure.forward.weight_scaling import log_slope
from ctrans.model.config import GPTConfig
from ctrans.model.gpt import GPT, next_token_loss
from ctrans.model.parametrisation import STANDARD
from ctrans.training.data import Data
from ctrans.training.settings import TrainConfig
from solvers import ConfigError

FLAT = 1 / 3
"""The largest |k| of a place that stands still. Powers of theory are multiples of 1/2. In small
models those of 0 were measured as 0.23 at most, those of 1/2 as 0.21 (depth_mup) to 0.52, and those
of 1 as 0.70 to 0.87 (`benchmarks/transfer.py`).
"""
SURE = 2.0
"""An exponent's interval is so many standard errors to each side."""
SMALL_HEAD = 0.03
"""The factor of a GPT's own head in the check. Larger first logits hide how updates change them."""
LOSS = "loss"
LOGITS = "attention logits"
MASKED = -1e9
"""Attention logits below it are masks."""

TransferVerdict = Literal["transfers", "undecided", "does not transfer"]
ORDER: tuple[TransferVerdict, ...] = get_args(TransferVerdict)
"""From the best to the worst."""
Build = Callable[[int, int], nn.Module]
Run = Mapping[str, tuple[float, float]]
"""The mean |change| of a run and the mean size before it, by place."""


@dataclass(frozen=True)
class PlaceGrowth:
    """k of mean |change| ~ size^k for one place, over widths or over depths.

    - `place`: a module by name, with * for numbers, or `LOGITS`, `LOSS`, or the decay of a group
    - `changes`: the geometric mean over seeds and rates of mean |x_t - x_0|, for each size
    - `exponent`, `error`: k, and its standard error over seeds and rates. nan if a change is 0 or
      not finite
    - `at_start`: the exponent of mean |x_0|
    """

    axis: str
    place: str
    changes: list[float]
    exponent: float
    error: float
    at_start: float

    @property
    def verdict(self) -> TransferVerdict:
        """Whether the interval of k lies within `FLAT`, or outside of it."""
        if abs(self.exponent) + SURE * self.error < FLAT:
            return "transfers"
        if abs(self.exponent) - SURE * self.error > FLAT:
            return "does not transfer"
        return "undecided"

    @property
    def holds_no_rate_back(self) -> bool:
        """Whether these are attention logits whose changes shrink."""
        return self.place == LOGITS and self.exponent + SURE * self.error < 0

    def __str__(self) -> str:
        return f"{self.axis}^{self.exponent:+.2f} +- {self.error:.2f}"


@dataclass(frozen=True)
class Transfer:
    """What a check over widths and depths found. `growths` has the places in the order of the
    pass.
    """

    sizes: dict[str, list[int]]
    rates: list[float]
    seeds: int
    updates: int
    growths: list[PlaceGrowth]

    def worst(self, axis: str) -> PlaceGrowth:
        """The place that decides the axis: one that moves, else one that is undecided, else the
        largest |k|. The loss is reported, and decides nothing. Nor do attention logits whose
        changes shrink: rows near equal weights hold no rate back, and the other places set it.
        """
        places = [growth for growth in self.growths if growth.axis == axis and growth.place != LOSS]
        judged = [growth for growth in places if not growth.holds_no_rate_back]
        return max(
            judged or places, key=lambda growth: (ORDER.index(growth.verdict), abs(growth.exponent))
        )

    @property
    def verdict(self) -> TransferVerdict:
        """The rate transfers if no place moves with the width or the depth."""
        return max((self.worst(axis).verdict for axis in self.sizes), key=ORDER.index)


def _attention_logits(keep: Callable[[str, Any], None]) -> AttentionCalls:
    """Inside, `keep` gets what torch's attention kernel and softmaxes over squares are given."""

    def of_kernel(*args: Any, **kwargs: Any) -> None:
        call = KernelCall(*args, **kwargs)
        q = call.query
        k = call.key
        if call.enable_gqa:
            k = k.repeat_interleave(q.shape[-3] // k.shape[-3], -3)
        scale = call.scale or q.shape[-1] ** -0.5
        keep(LOGITS, (q @ k.mT) * scale)

    def of_softmax(*args: Any, **kwargs: Any) -> None:
        scores = softmax_input(*args, **kwargs)
        if scores.dim() > 2 and scores.shape[-1] == scores.shape[-2]:
            keep(LOGITS, scores.where(scores > MASKED, 0.0))

    return AttentionCalls(before=looks(of_kernel, of_softmax))


def _without_numbers(name: str) -> str:
    """The name with * for numbers."""
    return re.sub(r"\d+", "*", name)


@torch.no_grad()
def _outputs(module: nn.Module, loss: Callable[[nn.Module], Tensor]) -> dict[str, list[Tensor]]:
    """The outputs of each module within, attention logits, and the loss, by place. In evaluation
    mode and with the same random numbers at each call, so that dropout is no change.
    """
    outputs: dict[str, list[Tensor]] = {}

    def keep(name: str, output: Any) -> None:
        tensor = _first_tensor(output)
        if tensor is not None:
            outputs.setdefault(name, []).append(tensor.detach().double())

    def hook(name: str) -> Callable[..., None]:
        return lambda _, args, output: keep(_without_numbers(name) or "output", output)

    with as_found(module), contextlib.ExitStack() as stack:
        torch.manual_seed(0)
        for name, part in module.named_modules():
            stack.callback(part.register_forward_hook(hook(name)).remove)
        stack.enter_context(_attention_logits(keep))
        value = loss(module)
    rescaled = {
        name for name, after in pairwise(outputs) if _proportional(outputs[name], outputs[after])
    }
    places = {name: tensors for name, tensors in outputs.items() if name not in rescaled}
    return places | {LOSS: [value.detach().double()]}


def _first_tensor(output: Any) -> Tensor | None:
    """The first tensor of real numbers in a module's output, None without one."""
    if isinstance(output, Mapping):
        parts = list(output.values())
    elif isinstance(output, (tuple, list)):
        parts = list(output)
    else:
        parts = [output]
    for part in parts:
        if isinstance(part, Tensor) and part.is_floating_point() and part.dim():
            return part
    return None


def _proportional(first: Sequence[Tensor], second: Sequence[Tensor]) -> bool:
    """Whether the second outputs are the first ones times a number: their place alone counts then,
    as behind a multiplier of logits.
    """
    if [tensor.shape for tensor in first] != [tensor.shape for tensor in second]:
        return False
    a = torch.cat([tensor.flatten() for tensor in first])
    b = torch.cat([tensor.flatten() for tensor in second])
    least = (1 - 1e-9) * float(a.norm() * b.norm())
    return least > 0 and float(a @ b) > least


def _mean_size(tensors: Sequence[Tensor]) -> float:
    return fmean(float(tensor.abs().mean()) for tensor in tensors)


def _measure(
    module: nn.Module,
    optimiser: torch.optim.Optimizer,
    loss: Callable[[nn.Module], Tensor],
    updates: int,
) -> Run:
    """The mean |change| after the updates, and the mean size before, by place."""
    names = {id(weight): _without_numbers(name) for name, weight in module.named_parameters()}
    before = _outputs(module, loss)
    for _ in range(updates):
        optimiser.zero_grad(set_to_none=True)
        loss(module).backward()
        optimiser.step()
        if isinstance(module, GPT):
            module.after_step()
    after = _outputs(module, loss)
    sizes = {
        f"decay of {names[id(weight)]}": (group["lr"] * group["weight_decay"], 1.0)
        for group in optimiser.param_groups
        for weight in group["params"]
        if group.get("weight_decay")
    }
    for place, tensors in before.items():
        if place in after:
            changes = [b - a for a, b in zip(tensors, after[place], strict=True)]
            sizes[place] = (_mean_size(changes), _mean_size(tensors))
    return sizes


def transfer_check(
    build: Build,
    optimiser: Callable[[nn.Module, float], torch.optim.Optimizer],
    loss: Callable[[nn.Module], Tensor],
    *,
    widths: Sequence[int],
    depths: Sequence[int],
    rates: Sequence[float],
    seeds: int = 3,
    updates: int = 3,
    progress: Callable[[str], None] | None = None,
) -> Transfer:
    """Whether one learning rate suits all widths and depths, from a few updates on one batch. What
    they change is measured in evaluation mode.

    - `build(width, depth)`: a new module, drawn from torch's global generator, which is seeded for
      it and restored after
    - `optimiser(module, rate)`: its optimiser, with the scalings of its parametrisation
    - `loss(module)`: the loss on one batch, always the same
    - `widths`, `depths`: widths at the first depth, and depths at the first width. One size alone
      is not an axis

    Raises ConfigError for fewer than two sizes of both, and for no rate or seed.

    >>> sizes = {"widths": (32, 64, 128), "depths": (2, 4, 8)}
    >>> transfer_check(build, optimiser, loss, **sizes, rates=(1e-3,)).verdict
    """
    widths = list(dict.fromkeys(widths))
    depths = list(dict.fromkeys(depths))
    has_axis = bool(widths) and bool(depths) and max(len(widths), len(depths)) > 1
    if not has_axis or not rates or seeds < 1 or updates < 1:
        raise ConfigError(
            f"widths = {widths}, depths = {depths}, rates = {list(rates)}, seeds = {seeds}, updates"
            f" = {updates}: give at least two widths or two depths, and at least one of the others"
        )
    axes = {
        "width": [(width, depths[0]) for width in widths],
        "depth": [(widths[0], depth) for depth in depths],
    }
    axes = {axis: models for axis, models in axes.items() if len(models) > 1}
    runs: dict[tuple[int, int], list[Run]] = {}
    for width, depth in dict.fromkeys(model for models in axes.values() for model in models):
        runs[width, depth] = []
        for seed in range(seeds):
            for rate in rates:
                with torch.random.fork_rng(devices=[]):
                    torch.manual_seed(seed)
                    module = build(width, depth)
                    run = _measure(module, optimiser(module, rate), loss, updates)
                    runs[width, depth].append(run)
        if progress is not None:
            progress(f"width {width}, {depth} blocks")
    sizes = {"width": widths, "depth": depths}
    growths = []
    for axis, models in axes.items():
        by_size = [runs[model] for model in models]
        for place in by_size[0][0]:
            if not all(place in run for of_size in by_size for run in of_size):
                continue
            if any(run[place][0] for of_size in by_size for run in of_size):
                growths.append(_growth(axis, place, sizes[axis], by_size))
    sizes = {axis: sizes[axis] for axis in axes}
    return Transfer(sizes, list(rates), seeds, updates, growths)


def _growth(
    axis: str, place: str, sizes: Sequence[int], by_size: Sequence[Sequence[Run]]
) -> PlaceGrowth:
    """The growth at a place, from the runs of each size."""
    changes = [[run[place][0] for run in runs] for runs in by_size]
    starts = [[run[place][1] for run in runs] for runs in by_size]
    slopes = [log_slope(sizes, of_run) for of_run in zip(*changes, strict=True)]
    error = math.nan
    means = [math.nan for _ in changes]
    if not any(map(math.isnan, slopes)):
        error = 0.0
        if len(slopes) > 1:
            error = statistics.stdev(slopes) / len(slopes) ** 0.5
        means = [statistics.geometric_mean(of_size) for of_size in changes]
    at_start = log_slope(sizes, [fmean(of_size) for of_size in starts])
    return PlaceGrowth(axis, place, means, fmean(slopes), error, at_start)


def coordinate_check(
    config: GPTConfig,
    data: Data,
    settings: TrainConfig,
    *,
    widths: Sequence[int],
    **options: Any,
) -> Transfer:
    """`transfer_check` of a GPT on one batch of the data. Takes its options.

    - `config`: the model, with its width and depth replaced. Its heads keep their width, and it is
      the base of its parametrisation unless it names another. A head that is not tied starts small
    - `settings`: the optimiser's

    Raises ConfigError for widths that are no multiples of a head's width.
    """
    head = config.width // config.heads
    if any(width < 1 or width % head for width in widths):
        raise ConfigError(f"widths = {list(widths)}: give multiples of a head's width {head}")
    base: dict[str, Any] = {}
    if config.parametrisation != STANDARD:
        base["base_width"] = config.base_width or config.width
        base["base_depth"] = config.base_depth or config.depth
    tokens, targets = data.batch(0, 0, batch=settings.batch, seed=settings.seed)

    def build(width: int, depth: int) -> nn.Module:
        sized = replace(config, width=width, heads=width // head, depth=depth, **base)
        model = GPT(sized, seed=settings.seed + torch.initial_seed())
        if model.unembedding is not None:
            model.unembedding.weight.data.mul_(SMALL_HEAD)
        return model

    def optimiser(module: nn.Module, rate: float) -> torch.optim.Optimizer:
        assert isinstance(module, GPT)
        return replace(settings, learning_rate=rate).make_optimiser(
            module.parameters(), model=module
        )

    return transfer_check(
        build,
        optimiser,
        lambda module: next_token_loss(module(tokens)[0], targets),
        widths=widths,
        **options,
    )

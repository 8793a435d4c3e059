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
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

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
LOSS, LOGITS = "loss", "attention logits"
MASKED = -1e9
"""Attention logits below it are masks."""

TransferVerdict = Literal["transfers", "undecided", "does not transfer"]
ORDER: tuple[TransferVerdict, ...] = get_args(TransferVerdict)
"""From the best to the worst."""
Build = Callable[[int, int], nn.Module]


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
        largest |k|. The loss is reported, and decides nothing.
        """
        judged = (each for each in self.growths if each.axis == axis and each.place != LOSS)
        return max(judged, key=lambda each: (ORDER.index(each.verdict), abs(each.exponent)))

    @property
    def verdict(self) -> TransferVerdict:
        """The rate transfers if no place moves with the width or the depth."""
        return max((self.worst(axis).verdict for axis in self.sizes), key=ORDER.index)


class _AttentionLogits(TorchFunctionMode):
    """Keeps what torch's attention kernel and softmaxes over squares are given."""

    def __init__(self, keep: Callable[[str, Any], None]):
        self.keep = keep

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = dict(kwargs or {})
        if func is F.scaled_dot_product_attention:
            q, k = args[:2]
            if given.get("enable_gqa"):
                k = k.repeat_interleave(q.shape[-3] // k.shape[-3], -3)
            else:
                k = k
            self.keep(LOGITS, (q @ k.mT) * (given.get("scale") or q.shape[-1] ** -0.5))
        elif (
            func in (F.softmax, torch.softmax, Tensor.softmax)
            and args[0].dim() > 2
            and args[0].shape[-1] == args[0].shape[-2]
        ):
            self.keep(LOGITS, args[0].where(args[0] > MASKED, 0.0))
        return func(*args, **given)


def _alike(name: str) -> str:
    """The name with * for numbers."""
    return re.sub(r"\d+", "*", name)


@torch.no_grad()
def _outputs(module: nn.Module, loss: Callable[[nn.Module], Tensor]) -> dict[str, list[Tensor]]:
    """The outputs of each module within, attention logits, and the loss, by place."""
    found: dict[str, list[Tensor]] = {}

    def keep(name: str, output: Any) -> None:
        parts = (
            output.values()
            if isinstance(output, Mapping)
            else output
            if isinstance(output, (tuple, list))
            else (output,)
        )
        first = next(
            (
                each
                for each in parts
                if isinstance(each, Tensor) and each.is_floating_point() and each.dim()
            ),
            None,
        )
        if first is not None:
            found.setdefault(name, []).append(first.detach().double())

    def hook(name: str) -> Callable[..., None]:
        return lambda part, given, output: keep(_alike(name) or "output", output)

    with contextlib.ExitStack() as stack:
        for name, part in module.named_modules():
            stack.callback(part.register_forward_hook(hook(name)).remove)
        stack.enter_context(_AttentionLogits(keep))
        value = loss(module)
    rescaled = {name for name, after in pairwise(found) if _proportional(found[name], found[after])}
    return {name: each for name, each in found.items() if name not in rescaled} | {
        LOSS: [value.detach().double()]
    }


def _proportional(first: Sequence[Tensor], second: Sequence[Tensor]) -> bool:
    """Whether the second outputs are the first ones times a number: their place alone counts then,
    as behind a multiplier of logits.
    """
    if [each.shape for each in first] != [each.shape for each in second]:
        return False
    a, b = (torch.cat([each.flatten() for each in parts]) for parts in (first, second))
    return float(a @ b) > (1 - 1e-9) * float(a.norm() * b.norm()) > 0


def _mean(parts: Sequence[Tensor]) -> float:
    return fmean(float(each.abs().mean()) for each in parts)


def _measure(
    module: nn.Module,
    optimiser: torch.optim.Optimizer,
    loss: Callable[[nn.Module], Tensor],
    updates: int,
) -> dict[str, tuple[float, float]]:
    """The mean |change| after the updates, and the mean size before, by place."""
    names = {id(parameter): _alike(name) for name, parameter in module.named_parameters()}
    before = _outputs(module, loss)
    for _ in range(updates):
        optimiser.zero_grad(set_to_none=True)
        loss(module).backward()
        optimiser.step()
        if isinstance(module, GPT):
            module.after_step()
    after = _outputs(module, loss)
    decay = {
        f"decay of {names[id(weight)]}": (group["lr"] * group["weight_decay"], 1.0)
        for group in optimiser.param_groups
        for weight in group["params"]
        if group.get("weight_decay")
    }
    return decay | {
        place: (
            _mean([b - a for a, b in zip(before[place], after[place], strict=True)]),
            _mean(before[place]),
        )
        for place in before
        if place in after
    }


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
    """Whether one learning rate suits all widths and depths, from a few updates on one batch.

    - `build(width, depth)`: a new module, drawn from torch's global generator, which is seeded for
      it and restored after
    - `optimiser(module, rate)`: its optimiser, with the scalings of its parametrisation
    - `loss(module)`: the loss on one batch, always the same
    - `widths`, `depths`: widths at the first depth, and depths at the first width. One size alone
      is not an axis

    Raises ConfigError for fewer than two sizes of both, and for no rate or seed.

    >>> transfer_check(build, optimiser, loss, widths=(32, 64, 128), depths=(2, 4, 8), rates=(1e-3,)).verdict
    """
    widths = list(dict.fromkeys(widths))
    depths = list(dict.fromkeys(depths))
    if (
        not widths
        or not depths
        or len(widths) == len(depths) == 1
        or not rates
        or seeds < 1
        or updates < 1
    ):
        raise ConfigError(
            f"widths = {widths}, depths = {depths}, rates = {list(rates)}, seeds = {seeds}, updates"
            f" = {updates}: give at least two widths or two depths, and at least one of the others"
        )
    axes = {
        "width": [(width, depths[0]) for width in widths],
        "depth": [(widths[0], depth) for depth in depths],
    }
    axes = {axis: sizes for axis, sizes in axes.items() if len(sizes) > 1}
    found: dict[tuple[int, int], list[dict[str, tuple[float, float]]]] = {}
    for size in dict.fromkeys(each for sizes in axes.values() for each in sizes):
        found[size] = []
        for seed in range(seeds):
            for rate in rates:
                with torch.random.fork_rng(devices=[]):
                    torch.manual_seed(seed)
                    module = build(*size)
                    found[size].append(_measure(module, optimiser(module, rate), loss, updates))
        if progress is not None:
            progress(f"width {size[0]}, {size[1]} blocks")
    sizes = {axis: [size[axis == "depth"] for size in each] for axis, each in axes.items()}
    growths = [
        _growth(axis, place, sizes[axis], [[run[place] for run in found[size]] for size in each])
        for axis, each in axes.items()
        for place in found[each[0]][0]
        if all(place in run for size in each for run in found[size])
        and any(run[place][0] for size in each for run in found[size])
    ]
    return Transfer(sizes, list(rates), seeds, updates, growths)


def _growth(
    axis: str, place: str, sizes: Sequence[int], runs: Sequence[Sequence[tuple[float, float]]]
) -> PlaceGrowth:
    changes, starts = ([[run[k] for run in each] for each in runs] for k in range(2))
    slopes = [log_slope(sizes, each) for each in zip(*changes, strict=True)]
    finite = not any(map(math.isnan, slopes))
    if finite and len(slopes) > 1:
        error = statistics.stdev(slopes) / len(slopes) ** 0.5
    elif finite:
        error = 0.0
    else:
        error = math.nan
    means = [statistics.geometric_mean(each) if finite else math.nan for each in changes]
    return PlaceGrowth(
        axis, place, means, fmean(slopes), error, log_slope(sizes, [fmean(each) for each in starts])
    )


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
    base: dict[str, Any] = (
        {}
        if config.parametrisation == STANDARD
        else {"base_width": config.width, "base_depth": config.depth}
    )
    base = {name: getattr(config, name) or value for name, value in base.items()}
    tokens, targets = data.batch(0, 0, batch=settings.batch, seed=settings.seed)

    def build(width: int, depth: int) -> nn.Module:
        sized = replace(config, width=width, heads=width // head, depth=depth, **base)
        made = GPT(sized, seed=settings.seed + torch.initial_seed())
        if made.unembedding is not None:
            made.unembedding.weight.data.mul_(SMALL_HEAD)
        return made

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

"""The size of activations against width after t updates (mup's coordinate check). If it grows with
the width, settings of a narrow model do not transfer to a wide one.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from ctrans.model.config import GPTConfig
from ctrans.model.gpt import GPT, next_token_loss
from ctrans.stability.forward.weight_scaling import log_slope
from ctrans.training.data import Data
from ctrans.training.settings import TrainConfig
from solvers import ConfigError


@dataclasses.dataclass(frozen=True)
class Coordinates:
    """Activations after `t` updates, by width and place: X at the end of each segment, and the
    logits last.

    - `sizes[width][k]`: the mean |entry| at place k
    - `changes[width][k]`: the mean |change| since t = 0
    """

    t: int
    sizes: dict[int, list[float]]
    changes: dict[int, list[float]]

    def slopes(self) -> list[float]:
        """k of mean |change| ~ width^k for each place, nan at t = 0. At k = 0 updates change wide
        and narrow models alike. Source: Yang et al. 2022, appendix D.1.
        """
        return [power.exponent for power in powers(self.changes)]


@dataclasses.dataclass(frozen=True)
class Power:
    """k of y ~ width^k by least squares of logarithms, and its standard error, (sum of squared
    residuals/((n - 2) sum (a - mean a)^2))^(1/2) with a = log width. The error is nan for two
    widths, and if k is nan.
    """

    exponent: float
    error: float

    def __str__(self) -> str:
        return f"{self.exponent:+.2f}" + ("" if math.isnan(self.error) else f" +- {self.error:.2f}")


def powers(values: Mapping[int, Sequence[float]]) -> list[Power]:
    """The `Power` of each place, from values by width."""
    widths = list(values)
    return [power_of(widths, [values[width][k] for width in widths]) for k in range(len(values[widths[0]]))]


def power_of(widths: Sequence[int], values: Sequence[float]) -> Power:
    """The `Power` of values at these widths."""
    k = log_slope(widths, values)
    if math.isnan(k) or len(widths) < 3:
        return Power(k, math.nan)
    a, b = ([math.log(value) for value in each] for each in (widths, values))
    middle, height = sum(a) / len(a), sum(b) / len(b)
    missed = sum((y - height - k * (x - middle)) ** 2 for x, y in zip(a, b, strict=True))
    return Power(k, math.sqrt(missed / (len(a) - 2) / sum((x - middle) ** 2 for x in a)))


def place_names(model: GPTConfig) -> list[str]:
    """The names of the places of `Coordinates`: the states behind each segment, then the logits."""
    kinds = ("attention and FFN",) if model.parallel_blocks else ("attention", "FFN")
    if model.is_stack:
        return [*(f"step {k + 1}" for k in range(model.segments)), "logits"]
    return [*(f"block {block + 1}, {kind}" for block in range(model.depth) for kind in kinds), "logits"]


def coordinate_check(
    config: GPTConfig,
    widths: Sequence[int],
    data: Data,
    settings: TrainConfig,
    *,
    updates: int = 5,
    progress: Callable[[str], None] | None = None,
) -> list[Coordinates]:
    """Trains a model of each width on one batch, and returns `Coordinates` at t = 0 .. `updates`.

    - `config`: the model, with its width replaced. Its heads keep their width
    - `widths`: at least two multiples of a head's width
    - `data`, `settings`: where the batch comes from, and the learning rate
    - `progress(line)`: called after each width

    Raises ConfigError for other widths.
    """
    head = config.width // config.heads
    if len(set(widths)) < 2 or any(width < 1 or width % head for width in widths):
        raise ConfigError(f"widths = {list(widths)}: give at least two, multiples of a head's width {head}")
    first: dict[int, list[Tensor]] = {}
    found = [Coordinates(t, {}, {}) for t in range(updates + 1)]
    tokens, targets = data.batch(0, 0, batch=settings.batch, seed=settings.seed)
    for width in sorted(set(widths)):
        model = GPT(dataclasses.replace(config, width=width, heads=width // head), seed=settings.seed)
        optimiser = settings.make_optimiser(model.parameters(), tokens.device)
        for at in found:
            places = _places(model, tokens)
            start = first.setdefault(width, places)
            at.sizes[width] = [float(x.abs().mean()) for x in places]
            at.changes[width] = [float((x - x0).abs().mean()) for x, x0 in zip(places, start, strict=True)]
            if at.t == updates:
                break
            optimiser.zero_grad(set_to_none=True)
            next_token_loss(model(tokens)[0], targets).backward()
            optimiser.step()
        if progress is not None:
            progress(f"width {width}")
    return found


@torch.no_grad()
def _places(model: GPT, tokens: Tensor) -> list[Tensor]:
    states = list(model.trajectory(tokens).states[1:])
    return [*states, model.head(states[-1])]

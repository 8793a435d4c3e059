"""Measurements over seeds of freshly drawn weights, as confidence intervals, with the theoretical
ranges (theory, section 10).

Growth of the hidden state (Xiong, lemma 2) and the gradient of the last layer by depth (Xiong,
theorem 1).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float
from scipy import stats
from torch import Tensor

from ctrans.base.draw import Draw
from ctrans.dynamics.depth import Depth
from ctrans.measure.forward.weight_scaling import log_slope
from ctrans.measure.initialisation.theory import gains
from ctrans.measure.walk import states_of
from ctrans.model.config import GPTConfig
from ctrans.model.gpt import GPT
from solvers import ConfigError

CONFIDENCE = 0.95
VOCABULARY = 64

STREAM = 2**24
"""Offset between the seeds of weights, inputs and targets, so that they are independent. It is
below 2^32, because torch's generator on a CPU takes a seed modulo 2^32.
"""


@dataclass(frozen=True)
class Interval:
    """A mean over seeds and its two-sided `CONFIDENCE` interval by Student's t; infinite for a
    single seed.
    """

    mean: float
    low: float
    high: float

    def outside(self, low: float, high: float) -> float:
        """Distance of the interval from [low, high], relative to `high`; at most 0 if they
        intersect.
        """
        return max(low - self.high, self.low - high) / high


def interval(samples: Sequence[float], together: int = 1) -> Interval:
    """mean +- t s/sqrt(n) of independent samples, widened so that `together` such intervals all
    hold with that confidence (Bonferroni).
    """
    mean = float(np.mean(samples))
    if len(samples) < 2:
        return Interval(mean, -math.inf, math.inf)
    quantile = stats.t.ppf(1 - (1 - CONFIDENCE) / (2 * together), len(samples) - 1)
    half = float(quantile * np.std(samples, ddof=1) / math.sqrt(len(samples)))
    return Interval(mean, mean - half, mean + half)


@dataclass(frozen=True)
class Setting:
    """Xiong's section 3.3: one head, FFN as wide as the model, ReLU, no biases, norms without eps,
    inputs N(0, I), dt = 1.
    """

    width: int = 128
    tokens: int = 16
    initialisation: str = "xiong"
    heads: int = 1
    ffn_width: int | None = None
    """The model's width if None."""

    @property
    def hidden(self) -> int:
        """d_ff."""
        return self.ffn_width or self.width

    def model(self, placement: str, depth: int, seed: int) -> GPT:
        """A float64 GPT without a causal mask. The head's rows have length about 1, so logits do
        not grow with the width.
        """
        config = GPTConfig(
            vocab_size=VOCABULARY,
            context=self.tokens,
            depth=depth,
            width=self.width,
            heads=self.heads,
            placement=placement,
            ffn_width=self.hidden,
            activation="relu",
            bias=False,
            causal=False,
            eps=0.0,
            initialisation=self.initialisation,
            embedding_std=self.width**-0.5,
        )
        return GPT(config, seed=seed).double()

    def inputs(self, seed: int) -> Float[Tensor, "1 tokens width"]:
        """X_0 with entries N(0, 1)."""
        return Draw(seed + STREAM).normal(1, self.tokens, self.width)


XIONG = Setting()


@dataclass(frozen=True)
class HiddenGrowth:
    """E|x|^2/d by block 1 .. depth, and its theoretical range. `where` names the place of x."""

    where: str
    measured: list[Interval]
    low: list[float]
    high: list[float]


@torch.no_grad()
def hidden_growth(placement: str, depth: int, seeds: int, setting: Setting) -> list[HiddenGrowth]:
    """E|x|^2/d by block, with the range of Xiong's lemma 2 in a generalised form, for `pre` and
    `post`.

    `pre`: E|x_l|^2/d in [1 + l f, 1 + l (a + f)] with a and f of `gains`, which for Xavier is [1 +
    l/2, 1 + 3l/2]; it holds for every initialisation with independent matrices of mean zero.
    `post`: 1 + f before the FFN's norm (3/2 for Xavier), and between 1 and 1 + a before the
    attention's norm, which is in the paper's proof but not in its statement. The inputs of the
    first block have |x|^2 = d in the mean only. Raises ConfigError for other placements.
    """
    attention, ffn = gains(setting.initialisation, depth, setting.width, setting.hidden)
    models = [
        (setting.model(placement, depth, seed), setting.inputs(seed)) for seed in range(seeds)
    ]
    if placement == "pre":
        squares = [
            [float(x.square().mean()) for x in states_of(model.depth, x)[2::2]]
            for model, x in models
        ]
        blocks = range(1, depth + 1)
        low = [1 + k * ffn for k in blocks]
        high = [1 + k * (attention + ffn) for k in blocks]
        return [HiddenGrowth("after the block", _over_seeds(squares), low, high)]
    if placement != "post":
        raise ConfigError(f"lemma 2 has no statement about {placement!r}: choose pre or post")
    sums = [_before_norms(model.depth, x) for model, x in models]
    ranges = {
        "before the attention's norm": (1.0, 1 + attention),
        "before the FFN's norm": (1 + ffn, 1 + ffn),
    }
    return [
        HiddenGrowth(
            where,
            _over_seeds([of_seed[first::2] for of_seed in sums]),
            [low] * depth,
            [high] * depth,
        )
        for first, (where, (low, high)) in enumerate(ranges.items())
    ]


def _before_norms(depth: Depth, x0: Tensor) -> list[float]:
    """mean((X + h r(X))^2) of each segment, at the input of the norm around the state."""
    steps = zip(depth.sublayers, depth.lengths, states_of(depth, x0), strict=False)
    return [float((x + h * sublayer(x)).square().mean()) for sublayer, h, x in steps]


def gradient_slope(
    placement: str, depths: Sequence[int] = (16, 32, 64), seeds: int = 16, setting: Setting = XIONG
) -> Interval:
    """The slope of log |dL/dW_2| of the last FFN against log depth, fitted for each seed.

    Xiong, theorem 1: 0 under `post` and -1/2 under `pre`. Raises ConfigError for fewer than two
    different depths.
    """
    if len(set(depths)) < 2:
        raise ConfigError(f"depths = {list(depths)}: a slope needs at least two different depths")
    slopes = []
    for seed in range(seeds):
        norms = [last_gradient(placement, depth, seed, setting) for depth in depths]
        slopes.append(log_slope(depths, norms))
    return interval(slopes)


def last_gradient(placement: str, depth: int, seed: int, setting: Setting) -> float:
    """|dL/dW_2|_F of the last FFN, L the mean cross-entropy of random targets."""
    model = setting.model(placement, depth, seed)
    x = setting.inputs(seed)
    targets = torch.randint(
        VOCABULARY, (setting.tokens,), generator=Draw(seed + 2 * STREAM).generator
    )
    loss = F.cross_entropy(model.head(model.depth(x)).flatten(0, -2), targets)
    (gradient,) = torch.autograd.grad(
        loss, model.depth.sublayers[-1].field.output_projection.weight
    )
    return float(torch.linalg.vector_norm(gradient))


def _over_seeds(samples: Sequence[Sequence[float]]) -> list[Interval]:
    """For each place, the interval over the seeds' samples. All hold jointly with probability
    `CONFIDENCE` (Bonferroni).
    """
    by_place = list(zip(*samples, strict=True))
    return [interval(of_place, len(by_place)) for of_place in by_place]

"""What changes with the iteration: the learning rate and the attention's temperature."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ctrans.training.settings import TrainConfig

SCHEDULES: dict[str, Callable[[float, int, int], float]] = {
    "cosine": lambda peak, s, warmup: peak * (s + 1) / warmup,
    "nanogpt": lambda peak, s, warmup: peak * (s + 1) / (warmup + 1),
    "nanogpt-0": lambda peak, s, warmup: peak * s / warmup,
}
"""The warm-up before the cosine, of peak, step and its length: ours, which has the peak at its last
step; nanoGPT's, which has it one step later; and that of its first versions (and of the
OT-Transformer's fork), whose first step is 0.
"""


def learning_rate(config: TrainConfig, step: int) -> float:
    """eta(s) by `SCHEDULES` while s < warmup, then low + (peak - low)/2 (1 + cos(pi (s - warmup)/(S
    - warmup))).

    `step` counts from 0, S is `iterations`; from S on it stays at the lowest.
    """
    if step < config.warmup:
        return SCHEDULES[config.schedule](config.learning_rate, step, config.warmup)
    if step >= config.iterations:
        return config.lowest
    share = (step - config.warmup) / (config.iterations - config.warmup)
    return config.lowest + (config.learning_rate - config.lowest) * 0.5 * (1 + math.cos(math.pi * share))


def temperature(config: TrainConfig, step: int, final: float) -> float:
    """tau(s) = tau_0^(1 - s/k) tau^(s/k) for s < k, then the model's own tau (theory, section 9;
    Emadi, section 6.3).

    The attention path's sensitivity is theta/tau times norms: its logarithm moves evenly from one
    value to the other.
    """
    start, steps = config.temperature_start, config.temperature_steps
    if start is None or step >= steps:
        return final
    return float(start * (final / start) ** (step / steps))

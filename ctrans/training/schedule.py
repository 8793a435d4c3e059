"""What changes with the iteration: the learning rate and the attention's temperature."""

from __future__ import annotations

import math

from ctrans.training.settings import TrainConfig


def learning_rate(config: TrainConfig, step: int) -> float:
    """eta(s) = peak (s + 1)/warmup while s < warmup, then low + (peak - low)/2 (1 + cos(pi (s - warmup)/(S - warmup))).

    `step` counts from 0, S is `iterations`; from S on it stays at the lowest.
    """
    if step < config.warmup:
        return config.learning_rate * (step + 1) / config.warmup
    if step >= config.iterations:
        return config.lowest
    share = (step - config.warmup) / (config.iterations - config.warmup)
    return config.lowest + (config.learning_rate - config.lowest) * 0.5 * (1 + math.cos(math.pi * share))


def temperature(config: TrainConfig, step: int, final: float) -> float:
    """tau(s) = tau_0^(1 - s/k) tau^(s/k) for s < k, then the model's own tau (theory, section 9; Emadi, section 6.3).

    The attention path's sensitivity is theta/tau times norms: its logarithm moves evenly from one value to the other.
    """
    start, steps = config.temperature_start, config.temperature_steps
    if start is None or step >= steps:
        return final
    return float(start * (final / start) ** (step / steps))

"""Schedules over iterations: of the learning rate, and of the attention's temperature."""

from __future__ import annotations

import math

from ctrans.training.settings import SCHEDULES, TrainConfig


def learning_rate(config: TrainConfig, step: int) -> float:
    """The learning rate at step s, counted from 0: by `SCHEDULES` for s < warmup, then low + (peak
    - low)/2 (1 + cos(pi (s - warmup)/(S - warmup))) with S = `iterations`, and low from S on.
    """
    if step < config.warmup:
        return SCHEDULES[config.schedule](config.learning_rate, step, config.warmup)
    if step >= config.iterations:
        return config.lowest
    share = (step - config.warmup) / (config.iterations - config.warmup)
    return config.lowest + (config.learning_rate - config.lowest) * 0.5 * (
        1 + math.cos(math.pi * share)
    )


def temperature(config: TrainConfig, step: int, final: float) -> float:
    """tau(s) = tau_0^(1 - s/k) tau^(s/k) for s < k, then the model's own tau, `final`.

    The sensitivity of the attention path is theta/tau times norms, so its logarithm changes
    linearly. Source: theory, section 9; Emadi, section 6.3.
    """
    start = config.temperature_start
    steps = config.temperature_steps
    if start is None or step >= steps:
        return final
    return float(start * (final / start) ** (step / steps))

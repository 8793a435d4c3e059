"""The architectures of the study, by family, and its grid of rates and seeds."""

from __future__ import annotations

from typing import Any

from ctrans.model.config import GPTConfig
from ctrans.study.description import PlannedRun
from ctrans.training.settings import TrainConfig
from ctrans.training.tasks import TASKS

BASE: dict[str, Any] = {"depth": 4, "width": 32, "heads": 2, "embedding_std": 0.1}
SETTINGS: dict[str, Any] = {
    "iterations": 600,
    "warmup": 60,
    "batch": 16,
    "eval_every": 600,
    "eval_windows": 512,
}
RATES = [10 ** (k / 4) for k in (-10, -8, -6, -4, -2, -9, -7, -5, -3)]
"""A quarter decade apart, from 3.2e-3 to 0.32; every second one comes first."""
SEEDS = (10, 11, 12, 13)
"""Seeds 0 and 1 were used in the exploration."""
STUDIED = ("recall", "counting", "sorting")
PLACEMENTS = ("pre", "peri", "output")
SHAPES = ((4, 1.0), (4, 0.3), (4, 0.1), (4, 3.0), (2, 1.0), (8, 1.0))
OPTIONS: dict[str, dict[str, Any]] = {
    "rmsnorm": {"norm": "rmsnorm"},
    "swiglu": {"ffn": "swiglu"},
    "qk_norm": {"qk_norm": "rms"},
    "linear": {"attention": "linear"},
    "layerscale": {"residual": "layerscale"},
    "he": {"initialisation": "he"},
    "large": {"initialisation": "large"},
    "small": {"initialisation": "small"},
    "embedding": {"embedding_std": 1.0},
    "parallel": {"parallel_blocks": True},
}
AROUND = (("pre", 1.0), ("peri", 0.3))


def architectures() -> dict[str, dict[str, Any]]:
    """Fields of `GPTConfig` by name. The part of a name before the first space is its family."""
    made = {
        f"{placement} D={depth} dt={dt:g}": {"placement": placement, "depth": depth, "dt": dt}
        for placement in PLACEMENTS
        for depth, dt in SHAPES
    }
    made |= {
        f"{placement} D=4 dt=1": {"placement": placement} for placement in ("post", "pre_post")
    }
    made |= {
        f"{name} {placement} dt={dt:g}": {"placement": placement, "dt": dt, **option}
        for name, option in OPTIONS.items()
        for placement, dt in AROUND
    }
    return {name: {**BASE, **fields} for name, fields in made.items()}


def planned() -> list[tuple[str, str, PlannedRun]]:
    """Task, name and training of each run, in the order in which they are done: a whole grid of
    half decades comes first.
    """
    return [
        (
            task,
            name,
            PlannedRun(
                GPTConfig(**TASKS[task].architecture, **fields),
                TrainConfig(**SETTINGS, learning_rate=rate, seed=seed),
                {},
            ),
        )
        for some in (RATES[:5], RATES[5:])
        for seeds in (SEEDS[:2], SEEDS[2:])
        for task in STUDIED
        for name, fields in architectures().items()
        for rate in some
        for seed in seeds
    ]

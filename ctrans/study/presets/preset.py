"""A preset: a claim of a paper, the effects that must be positive, and its study in two sizes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ctrans.study.description import Study
from ctrans.study.presets.claim import Contrast
from ctrans.training.data_sources import Source
from solvers import ConfigError

SIZES = ("small", "paper")
SEEDS = (0, 1, 2, 3, 4)
TASK = "recall"
"""The usual task of `small`. On a text this small, a model without depth is as good as one with it.
"""


@dataclass(frozen=True)
class Preset:
    """An experiment of a paper.

    - `claim`, `source`: what the paper says, and where
    - `contrasts`: the effects, which are positive if the claim holds
    - `small`, `paper`: base configurations
    - `vary`, `cases`, `rates`, `seeds`, `measure`: as of a `Study`
    - `notes`: what a small model cannot show, and differences from the paper
    - `paper_vary`: fields that vary differently in `paper`
    - `tasks`: of `small` and `paper`, each of `ctrans.training.tasks.TASKS`, or "" for text
    - `text`: nanoGPT's files for `small`, unless others are given; "" for the usual text
    """

    claim: str
    source: str
    contrasts: Sequence[Contrast]
    small: Mapping[str, Any]
    paper: Mapping[str, Any]
    vary: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    cases: Sequence[Mapping[str, Any]] = ()
    rates: Sequence[float] = ()
    seeds: Sequence[int] = SEEDS
    measure: Sequence[str] = ()
    notes: str = ""
    paper_vary: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    tasks: tuple[str, str] = (TASK, "")
    text: str = ""

    def study(self, name: str, scale: str) -> Study:
        """The study at that scale. Raises ConfigError for an unknown one."""
        if scale not in SIZES:
            raise ConfigError(f"scale {scale!r}: choose {' or '.join(SIZES)}")
        if scale == "small":
            base = self.small
            vary = self.vary
        else:
            base = self.paper
            vary = {**self.vary, **self.paper_vary}
        task = self.tasks[SIZES.index(scale)]
        source: Source = {"file": None, "bin": None}
        if task:
            source = {"task": task}
        elif scale == "small" and self.text:
            source = {"file": None, "bin": self.text}
        return Study(
            f"{name}-{scale}",
            base,
            vary,
            self.cases,
            self.rates,
            self.seeds,
            self.measure,
            source=source,
        )

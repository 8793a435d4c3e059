"""Runs that share shapes, trained as one batched model."""

from __future__ import annotations

from collections.abc import Sequence

from ctrans.study.description import Run
from ctrans.study.training import Result
from ctrans.training.data import Data


def grouped(runs: Sequence[Run]) -> list[list[Run]]:
    return [[run] for run in runs]


def train_population(runs: Sequence[Run], data: Data) -> list[Result]:
    raise NotImplementedError

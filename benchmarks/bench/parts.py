"""The parts of `make bench`, each a process of its own."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable
from typing import Any


@dataclasses.dataclass(frozen=True)
class Part:
    """A title, the function that measures it, and the seconds that it takes on two quiet processors."""

    title: str
    module: str
    function: str
    seconds: float

    def measure(self, quick: bool) -> list[dict[str, Any]]:
        """Its rows, as JSON has them. The module is imported here, because some import much."""
        found: Callable[[bool], list[Any]] = getattr(importlib.import_module(f"benchmarks.bench.{self.module}"), self.function)
        return [dataclasses.asdict(row) for row in found(quick)]


PARTS = {
    "peaks": Part("What this machine can do", "peaks", "peaks", 10),
    "start": Part("Start", "start", "start", 60),
    "euler": Part("Euler over a loop", "depth", "euler", 10),
    "gradients": Part("Gradients through 48 blocks", "depth", "gradients", 80),
    "train": Part("Training steps", "trainings", "train", 180),
    "populations": Part("Populations", "trainings", "populations", 60),
    "solvers": Part("Solvers on three shapes", "solving", "solving", 120),
    "hjb": Part("HJB on a grid", "grids", "grids", 40),
    "screening": Part("Screening a large shape", "screenings", "screenings", 120),
    "growth": Part("Growth of processor time", "growth", "growth", 150),
}
QUICK = ("peaks", "start", "euler", "gradients", "train", "hjb")
"""What `--quick` runs, in about two minutes."""

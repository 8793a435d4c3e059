"""The parts of `make bench`, each a process of its own."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable
from typing import Any


@dataclasses.dataclass(frozen=True)
class Part:
    """A title, the function that measures it, the seconds that it takes on two quiet processors,
    and the threads of all libraries in it; None: their own choice.
    """

    title: str
    module: str
    function: str
    seconds: float
    threads: int | None = None

    def measure(self, *, quick: bool) -> list[dict[str, Any]]:
        """Its rows, as JSON has them. The module is imported here, because some import much."""
        found: Callable[..., list[Any]] = getattr(
            importlib.import_module(f"benchmarks.bench.{self.module}"), self.function
        )
        return [dataclasses.asdict(row) for row in found(quick=quick)]


PARTS = {
    "peaks": Part("What this machine can do", "peaks", "peaks", 6),
    "start": Part("Start", "start", "start", 190),
    "euler": Part("Euler over a loop", "depth", "euler", 17),
    "gradients": Part("Gradients through 48 blocks", "depth", "gradients", 240),
    "train": Part("Training steps", "trainings", "train", 220),
    "populations": Part("Populations", "trainings", "populations", 46),
    "solvers": Part(
        "Solvers on three shapes", "solving", "solving", 300, threads=1
    ),  # shapes for which `choose_threads` takes one
    "hjb": Part("HJB on a grid", "grids", "grids", 150),
    "screening": Part("Screening a large shape", "screenings", "screenings", 320),
    "growth": Part("Growth of processor time", "growth", "growth", 520),
}
QUICK = ("peaks", "start", "euler", "gradients", "train", "hjb")
"""What `--quick` runs, in a few minutes."""

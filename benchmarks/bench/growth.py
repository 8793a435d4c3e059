"""How processor time grows with depth, width, tokens and heads, next to what the algorithm's
products do.
"""

from __future__ import annotations

import dataclasses
import math
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks.bench.measure import Products, timed
from benchmarks.training import Case, our_iteration, ours
from ctrans import GPT, GPTConfig
from ctrans.examine.diagnosis.diagnose import diagnose
from ctrans.examine.screening.screen import screen
from ctrans.measure.forward.simulation import simulate
from ctrans.model.text import default_text
from ctrans.training.data import from_text
from ctrans.training.monitor import Monitor
from ctrans.training.settings import TrainConfig

BASE = {"depth": 2, "width": 64, "tokens": 64, "heads": 4}
AXES = {
    "depth": (2, 4, 8, 16),
    "width": (64, 128, 256, 512),
    "tokens": (64, 128, 256, 512),
    "heads": (1, 2, 4, 8),
}
HIGHEST = {"depth": 1.0, "width": 2.0, "tokens": 2.0, "heads": 0.0}
"""The exponents that the algorithms should have at most for large sizes: width 3 where matrices are
factored.
"""
FACTORING = ("screen, quick", "diagnose")
SLACK = 0.15
BATCH = 2


@dataclasses.dataclass(frozen=True)
class Growth:
    """Seconds at each size of an axis; the exponents fitted to them, to the counted products, and
    the algorithm's highest.
    """

    command: str
    axis: str
    sizes: tuple[int, ...]
    seconds: tuple[float, ...]
    exponent: float
    products: float
    highest: float

    @property
    def steeper(self) -> bool:
        """Whether the time grows faster than the algorithm should."""
        return self.exponent > self.highest + SLACK


def growth(*, quick: bool) -> list[Growth]:
    """Sizes double; in short fewer rounds, and training and simulate alone."""
    names = ("simulate", "train") if quick else tuple(COMMANDS)
    return [
        _of(name, axis, sizes[:3] if quick else sizes, 1 if quick else 2)
        for name in names
        for axis, sizes in AXES.items()
    ]


def _of(name: str, axis: str, sizes: tuple[int, ...], rounds: int) -> Growth:
    seconds, flops = [], []
    for size in sizes:
        shape = {**BASE, axis: size}
        with tempfile.TemporaryDirectory() as place:
            work = COMMANDS[name](shape, Path(place))
            work()
            seconds.append(min(timed(work).processor for _ in range(rounds)))
            with Products() as seen:
                work()
            flops.append(max(seen.flops, 1))
    highest = 3.0 if axis == "width" and name in FACTORING else HIGHEST[axis]
    return Growth(
        name, axis, sizes, tuple(seconds), slope(sizes, seconds), slope(sizes, flops), highest
    )


def slope(sizes: tuple[int, ...], values: list[float]) -> float:
    """The exponent by least squares of logarithms."""
    x, y = [math.log(size) for size in sizes], [math.log(value) for value in values]
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    return sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True)) / sum(
        (a - mean_x) ** 2 for a in x
    )


def _config(shape: dict[str, int]) -> GPTConfig:
    sizes = {
        "context": shape["tokens"],
        "depth": shape["depth"],
        "width": shape["width"],
        "heads": shape["heads"],
    }
    return GPTConfig(vocab_size=256, **sizes, placement="peri", dt=0.1)


def _ids(shape: dict[str, int]) -> torch.Tensor:
    return torch.randint(
        256, (BATCH, shape["tokens"] + 1), generator=torch.Generator().manual_seed(0)
    )


def _simulate(shape: dict[str, int], place: Path) -> Callable[[], object]:
    model, ids = GPT(_config(shape)), _ids(shape)
    return lambda: simulate(model, ids[:, :-1], reference=False)


def _diagnose(shape: dict[str, int], place: Path) -> Callable[[], object]:
    model, ids = GPT(_config(shape)), _ids(shape)
    return lambda: diagnose(model, ids[:, :-1], ids[:, 1:])


def _screen(shape: dict[str, int], place: Path) -> Callable[[], object]:
    model, ids = GPT(_config(shape)), _ids(shape)
    return lambda: screen(model, ids[:, :-1], ids[:, 1:], "quick")


def _train(shape: dict[str, int], place: Path) -> Callable[[], object]:
    case = Case("", torch.device("cpu"), _config(shape), TrainConfig(batch=BATCH))
    iterate = our_iteration(ours(case, from_text(default_text(), shape["tokens"]), place))
    return lambda: iterate(0)


def _monitor(shape: dict[str, int], place: Path) -> Callable[[], object]:
    """A step with a report."""
    model, ids = GPT(_config(shape)), _ids(shape)
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-4)
    monitor = Monitor(model, every=1, out=place)

    def step() -> None:
        loss = model(ids[:, :-1], ids[:, 1:])[1]
        loss.backward()
        monitor.step(loss, optimiser)
        optimiser.step()
        optimiser.zero_grad()

    return step


COMMANDS: dict[str, Callable[[dict[str, int], Path], Callable[[], object]]] = {
    "simulate": _simulate,
    "diagnose": _diagnose,
    "screen, quick": _screen,
    "monitor, a report a step": _monitor,
    "train": _train,
}

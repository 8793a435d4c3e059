"""The random numbers of one case of a check."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

import torch

from ctrans.base.shapes import AnyShape

Candidate = TypeVar("Candidate")


class Draw:
    """The random numbers of one case, all from one generator. Tensors are float64."""

    def __init__(self, seed: int):
        self.generator = torch.Generator().manual_seed(seed)

    def normal(self, *shape: int) -> AnyShape:
        """Entries N(0, 1)."""
        return torch.randn(shape, dtype=torch.float64, generator=self.generator)

    def rows(self, width: int, most: int = 4) -> AnyShape:
        """From one to `most` rows of entries N(0, 1)."""
        return self.normal(1 + self.integer(most), width)

    def of_any_size(self, *shape: int) -> AnyShape:
        """Entries N(0, 1) times one number from 1/10 to 10."""
        return self.log_uniform(-1, 1) * self.normal(*shape)

    def unit(self, *shape: int) -> AnyShape:
        """Entries uniform in [0, 1)."""
        return torch.rand(shape, dtype=torch.float64, generator=self.generator)

    def signs(self, *shape: int) -> AnyShape:
        """Entries -1 with probability 1/4, else 1."""
        return torch.where(torch.rand(shape, generator=self.generator) < 0.25, -1.0, 1.0)

    def integer(self, end: int) -> int:
        """A whole number from 0 to end - 1."""
        return int(torch.randint(end, (), generator=self.generator))

    def seed(self) -> int:
        """The seed of another generator."""
        return self.integer(2**31)

    def flag(self) -> bool:
        """True or False, equally likely."""
        return bool(self.integer(2))

    def uniform(self, low: float, high: float) -> float:
        """Uniform in [low, high]."""
        return low + (high - low) * float(self.unit())

    def log_uniform(self, low: float, high: float) -> float:
        """10 to the power of a number uniform in [low, high]."""
        return 10 ** self.uniform(low, high)

    def choice(self, candidates: Iterable[Candidate]) -> Candidate:
        """One of the candidates (of a table: of its names), equally likely."""
        sequence = list(candidates)
        return sequence[self.integer(len(sequence))]

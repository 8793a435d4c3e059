"""Data of independent rows, with a target at some of their tokens only."""

from __future__ import annotations

import dataclasses

import numpy as np
import torch
from jaxtyping import Float, Int, Integer
from torch import Tensor

from ctrans.base.option import Count
from ctrans.training.data import COUNTED, Data, Tokens


@dataclasses.dataclass(frozen=True)
class Labelled(Data):
    """Rows, one after the other: `context` tokens, and then the targets of those at `positions`, by
    default of the last one. All other tokens have target -1.
    """

    positions: tuple[int, ...] = ()

    @property
    def _positions(self) -> list[int]:
        return list(self.positions or (self.context - 1,))

    @property
    def _row(self) -> int:
        """The number of tokens and targets of a row."""
        return self.context + len(self._positions)

    def _starts(self, u: Float[np.ndarray, " batch"]) -> Integer[np.ndarray, " batch"]:
        return (u * (len(self.train) // self._row)).astype(np.int64) * self._row

    def _sample(self, tokens: Tokens) -> Tokens:
        """The first rows: all are of one kind."""
        return tokens[:COUNTED]

    def _pairs(self, tokens: Tokens) -> tuple[Tokens, Tokens]:
        """A model without depth knows a token and its place."""
        rows = tokens[: len(tokens) // self._row * self._row].reshape(-1, self._row)
        token_and_place = rows[:, self._positions] * self.context + self._positions
        return token_and_place.reshape(-1), rows[:, self.context :].reshape(-1)

    def validation_windows(
        self, count: Count
    ) -> tuple[Int[Tensor, "rows context"], Int[Tensor, "rows context"]]:
        """At most `count` rows of the validation split and their targets, evenly spaced and
        fixed.
        """
        rows = len(self.validation) // self._row
        chosen = np.unique(np.linspace(0, rows - 1, min(count, rows)).astype(np.int64))
        return self._windows(self.validation, chosen * self._row)

    def _windows(
        self, tokens: Tokens, starts: Integer[np.ndarray, " windows"]
    ) -> tuple[Tensor, Tensor]:
        rows = torch.from_numpy(
            np.stack([tokens[start : start + self._row] for start in starts]).astype(np.int64)
        )
        inputs = rows[:, : self.context]
        targets = torch.full_like(inputs, -1)
        targets[:, self._positions] = rows[:, self.context :]
        return inputs, targets

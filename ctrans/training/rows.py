"""Data of independent rows, with a target at some of their tokens only."""

from __future__ import annotations

import dataclasses

import numpy as np
from jaxtyping import Bool, Float, Int, Integer
from torch import Tensor, from_numpy

from ctrans.option import Count
from ctrans.training.data import Data, Tokens
from solvers.checked import checked


@dataclasses.dataclass(frozen=True)
class Labelled(Data):
    """Rows of `context` + 1 tokens, one after the other, each the target of the one before it.

    Only the tokens in the places `asked` of a row have a target, by default the last but one. The
    others have target -1.
    """

    asked: tuple[int, ...] = ()

    @property
    def _asked(self) -> Bool[np.ndarray, " context"]:
        return np.isin(np.arange(self.context), self.asked or (self.context - 1,))

    def _starts(self, u: Float[np.ndarray, " batch"]) -> Integer[np.ndarray, " batch"]:
        rows = len(self.train) // (self.context + 1)
        return (u * rows).astype(np.int64) * (self.context + 1)

    def _pairs(self, tokens: Tokens) -> tuple[Tokens, Tokens]:
        rows = tokens[: len(tokens) // (self.context + 1) * (self.context + 1)].reshape(-1, self.context + 1)
        return rows[:, :-1][:, self._asked].reshape(-1), rows[:, 1:][:, self._asked].reshape(-1)

    @checked
    def validation_windows(self, count: Count) -> tuple[Int[Tensor, "rows context"], Int[Tensor, "rows context"]]:
        """At most `count` rows of the validation split and their targets, evenly spaced and fixed."""
        rows = len(self.validation) // (self.context + 1)
        chosen = np.unique(np.linspace(0, rows - 1, min(count, rows)).astype(np.int64))
        return self._windows(self.validation, chosen * (self.context + 1))

    def _windows(self, tokens: Tokens, starts: Integer[np.ndarray, " windows"]) -> tuple[Tensor, Tensor]:
        read, following = super()._windows(tokens, starts)
        return read, following.where(from_numpy(self._asked), -1)

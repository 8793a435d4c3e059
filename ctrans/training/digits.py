"""Handwritten digits as sequences with one answer each: 1,797 images of 8 x 8 pixels, 17 grey
levels, ten classes (scikit-learn's, UCI's).

A vision Transformer with patches of one pixel: the linear map of a patch of 17 levels is a table of
17 rows, the tokens are the pixels and behind them a class token, and every token reads all others.
The class is told at the class token, by the tied head.
"""

from __future__ import annotations

import dataclasses

import numpy as np
from jaxtyping import Float, Int, Integer
from torch import Tensor

from ctrans.training.data import Data, Tokens
from solvers import ConfigError

LEVELS, PIXELS, CLASSES = 17, 64, 10
CLASS_TOKEN = LEVELS
"""What is read where the class is told; classes follow it in the vocabulary."""
VOCABULARY = LEVELS + 1 + CLASSES
CONTEXT = PIXELS + 1
HELD_OUT = 5
"""One image in so many is for validation."""


@dataclasses.dataclass(frozen=True)
class Labelled(Data):
    """Rows of `context` tokens and an answer, one behind the other; the answer is told at the last
    token, the others have target -1.
    """

    def _starts(self, u: Float[np.ndarray, " batch"]) -> Integer[np.ndarray, " batch"]:
        rows = len(self.train) // (self.context + 1)
        return (u * rows).astype(np.int64) * (self.context + 1)

    def validation_windows(self, count: int) -> tuple[Int[Tensor, "rows context"], Int[Tensor, "rows context"]]:
        """At most `count` rows of the validation split and their targets, evenly spaced, always the
        same.
        """
        rows = len(self.validation) // (self.context + 1)
        chosen = np.unique(np.linspace(0, rows - 1, min(count, rows)).astype(np.int64))
        return self._windows(self.validation, chosen * (self.context + 1))

    def _windows(self, tokens: Tokens, starts: Integer[np.ndarray, " windows"]) -> tuple[Tensor, Tensor]:
        read, following = super()._windows(tokens, starts)
        targets = following.clone()
        targets[:, :-1] = -1
        return read, targets


def digits() -> Labelled:
    """The images in an order of chance that is always the same; the last fifth is for validation.
    ConfigError without scikit-learn.
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise ConfigError("the task digits needs scikit-learn, which holds the images: pip install 'ctrans[digits]'") from None
    found = load_digits()
    pixels, classes = found.data.astype(np.int64), found.target.astype(np.int64)
    ends = np.stack([np.full(len(pixels), CLASS_TOKEN), LEVELS + 1 + classes], axis=1)
    order = np.random.Philox(key=0).random_raw(len(pixels)).argsort(kind="stable")
    rows = np.concatenate([pixels, ends], axis=1)[order]
    cut = len(rows) - len(rows) // HELD_OUT
    return Labelled(rows[:cut].reshape(-1), rows[cut:].reshape(-1), CONTEXT, "the digits")

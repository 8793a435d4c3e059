"""Handwritten digits as sequences with one answer each: 1,797 images of 8 x 8 pixels, 17 grey
levels, ten classes (scikit-learn's, UCI's).

The model is a vision Transformer with patches of one pixel. The linear map of a patch of 17 levels
is a table of 17 rows. The tokens are the pixels and then a class token, and each token attends to
all others. The tied head predicts the class at the class token.
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
"""The last token of an image. The classes follow it in the vocabulary."""
VOCABULARY = LEVELS + 1 + CLASSES
CONTEXT = PIXELS + 1
HELD_OUT = 5
"""One image in this number is for validation."""


@dataclasses.dataclass(frozen=True)
class Labelled(Data):
    """Rows of `context` tokens and an answer, one after the other. The answer is the target of the
    last token; the others have target -1.
    """

    def _starts(self, u: Float[np.ndarray, " batch"]) -> Integer[np.ndarray, " batch"]:
        rows = len(self.train) // (self.context + 1)
        return (u * rows).astype(np.int64) * (self.context + 1)

    def validation_windows(self, count: int) -> tuple[Int[Tensor, "rows context"], Int[Tensor, "rows context"]]:
        """At most `count` rows of the validation split and their targets, evenly spaced and fixed."""
        rows = len(self.validation) // (self.context + 1)
        chosen = np.unique(np.linspace(0, rows - 1, min(count, rows)).astype(np.int64))
        return self._windows(self.validation, chosen * (self.context + 1))

    def _windows(self, tokens: Tokens, starts: Integer[np.ndarray, " windows"]) -> tuple[Tensor, Tensor]:
        read, following = super()._windows(tokens, starts)
        targets = following.clone()
        targets[:, :-1] = -1
        return read, targets


def digits() -> Labelled:
    """The images in a fixed random order. The last fifth is for validation. Raises ConfigError
    without scikit-learn.
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise ConfigError("the task digits needs scikit-learn, which has the images: pip install 'ctrans[digits]'") from None
    found = load_digits()
    pixels, classes = found.data.astype(np.int64), found.target.astype(np.int64)
    ends = np.stack([np.full(len(pixels), CLASS_TOKEN), LEVELS + 1 + classes], axis=1)
    order = np.random.Philox(key=0).random_raw(len(pixels)).argsort(kind="stable")
    rows = np.concatenate([pixels, ends], axis=1)[order]
    cut = len(rows) - len(rows) // HELD_OUT
    return Labelled(rows[:cut].reshape(-1), rows[cut:].reshape(-1), CONTEXT, "the digits")

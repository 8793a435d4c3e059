"""Handwritten digits as sequences with one answer each: 1,797 images of 8 x 8 pixels, 17 grey
levels, ten classes (scikit-learn's, UCI's).

The model is a vision Transformer with patches of one pixel. The linear map of a patch of 17 levels
is a table of 17 rows. The tokens are the pixels and then a class token, and each token attends to
all others. The tied head predicts the class at the class token.
"""

from __future__ import annotations

import numpy as np

from ctrans.training.rows import Labelled
from solvers import ConfigError

LEVELS = 17
PIXELS = 64
CLASSES = 10
CLASS_TOKEN = LEVELS
"""The last token of an image. The classes follow it in the vocabulary."""
VOCABULARY = LEVELS + 1 + CLASSES
CONTEXT = PIXELS + 1
HELD_OUT = 5
"""One image in this number is for validation."""


def digits() -> Labelled:
    """The images in a fixed random order. The last fifth is for validation. Raises ConfigError
    without scikit-learn.
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise ConfigError(
            "the task digits needs scikit-learn, which has the images: pip install 'ctrans[digits]'"
        ) from None
    images = load_digits()
    pixels = images.data.astype(np.int64)
    classes = images.target.astype(np.int64)
    ends = np.stack([np.full(len(pixels), CLASS_TOKEN), LEVELS + 1 + classes], axis=1)
    order = np.random.Philox(key=0).random_raw(len(pixels)).argsort(kind="stable")
    rows = np.concatenate([pixels, ends], axis=1)[order]
    cut = len(rows) - len(rows) // HELD_OUT
    return Labelled(rows[:cut].reshape(-1), rows[cut:].reshape(-1), CONTEXT, "the digits")

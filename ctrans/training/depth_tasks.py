"""Tasks whose answers lie in the other tokens of a row. A model without depth knows a token and its
place, and can only guess the rest.

The rows are drawn once from a counter-based generator, the same on every machine. A validation row
is independent of the training rows.
"""

from __future__ import annotations

import math

import numpy as np
from jaxtyping import Float, Integer

from ctrans.training.rows import Labelled

PAIRS = 4
KEYS = 8
VALUES = 8
"""Associative recall: pairs of a row, and how many keys and values there are."""
MODULUS = 23
SUMS = 8
"""Modular addition: the modulus, and how many sums a row has."""
SYMBOLS = 6
COUNTED_TO = 4
SYMBOLS_OF_ROW = 16
"""Counting: how many symbols there are, the modulus of the count, and the symbols of a row."""
ORDERED = 8
OF_SYMBOLS = 16
"""Sorting: symbols of a row, and how many symbols there are."""
ROWS = 40_000
HELD_OUT = 1_000
"""Rows of the training and of the validation split."""


def recall() -> Labelled:
    """Associative recall: `PAIRS` keys with values, then the same keys in another order, each
    followed by its value.

    Row: k_1 v_1 ... k_n v_n q_1 a_1 ... q_n a_n. The keys of a row differ, its values are
    independent and uniform. The targets are the answers. Given the current token, the answer is
    uniform over `VALUES` values, so no function of the token and its position has less than
    ln(VALUES) nats. (Zoology, arXiv 2312.04927, has the task with other sizes.)
    """
    draws = np.random.Philox(key=1)
    count = ROWS + HELD_OUT
    keys = _uniform(draws, count, KEYS).argsort(1, kind="stable")[:, :PAIRS]
    values = KEYS + (_uniform(draws, count, PAIRS) * VALUES).astype(np.int64)
    order = _uniform(draws, count, PAIRS).argsort(1, kind="stable")
    pairs = np.stack([keys, values], axis=2)
    queries = np.take_along_axis(pairs, order[:, :, None], axis=1)
    rows = np.concatenate([pairs, queries], axis=1).reshape(count, -1)
    return _next(rows, tuple(range(2 * PAIRS, 4 * PAIRS, 2)), "the recall task")


def modular() -> Labelled:
    """Modular addition: `SUMS` times a b = c with c = a + b mod `MODULUS`.

    a and b are independent and uniform. The targets are the c. At "=" the current token says
    nothing, and c is uniform, so no function of the token and its position has less than
    ln(MODULUS) nats.
    """
    a, b = (_uniform(np.random.Philox(key=2), 2, ROWS + HELD_OUT, SUMS) * MODULUS).astype(np.int64)
    rows = np.stack([a, b, np.full_like(a, MODULUS), (a + b) % MODULUS], axis=2).reshape(len(a), -1)
    return _next(rows, tuple(range(2, 4 * SUMS, 4)), "the modular task")


def counting() -> Labelled:
    """Counting: `SYMBOLS_OF_ROW` symbols, and for each how often it came before, modulo
    `COUNTED_TO`.

    The symbols are independent and uniform. The answers are no tokens of the row. At place i the
    count is binomial (i, 1/SYMBOLS), whatever the symbol. So no function of the token and its
    position has less than the mean over places of the entropy of that count, modulo `COUNTED_TO`.
    """
    u = _uniform(np.random.Philox(key=3), ROWS + HELD_OUT, SYMBOLS_OF_ROW)
    symbols = (u * SYMBOLS).astype(np.int64)
    # with the symbol itself
    counts = np.cumsum(symbols[:, :, None] == np.arange(SYMBOLS), axis=1)
    before = np.take_along_axis(counts, symbols[:, :, None], axis=2)[:, :, 0] - 1
    return _split(
        symbols, SYMBOLS + before % COUNTED_TO, tuple(range(SYMBOLS_OF_ROW)), "the counting task"
    )


def sorting() -> Labelled:
    """Sorting: `ORDERED` independent uniform symbols, then the same in ascending order.

    The targets are the sorted symbols. The first answer is the smallest symbol of the row; each
    later one follows a known smaller one, so a table of tokens and places knows a part of it.
    """
    u = _uniform(np.random.Philox(key=4), ROWS + HELD_OUT, ORDERED)
    symbols = (u * OF_SYMBOLS).astype(np.int64)
    rows = np.concatenate([symbols, np.sort(symbols, axis=1)], axis=1)
    return _next(rows, tuple(range(ORDERED - 1, 2 * ORDERED - 1)), "the sorting task")


def _uniform(draws: np.random.Philox, *shape: int) -> Float[np.ndarray, "..."]:
    """Uniform in [0, 1). numpy keeps raw words the same in all versions, but not random()."""
    return (draws.random_raw(math.prod(shape)) >> 11).reshape(shape) * 2.0**-53


def _next(
    rows: Integer[np.ndarray, "rows tokens"], positions: tuple[int, ...], name: str
) -> Labelled:
    """The tokens at these positions have the next ones as their targets. The last token of a row is
    a target only.
    """
    targets = rows[:, [position + 1 for position in positions]]
    return _split(rows[:, :-1], targets, positions, name)


def _split(
    tokens: Integer[np.ndarray, "rows context"],
    targets: Integer[np.ndarray, "rows targets"],
    positions: tuple[int, ...],
    name: str,
) -> Labelled:
    rows = np.concatenate([tokens, targets], axis=1).astype(np.uint8)
    return Labelled(
        rows[:ROWS].reshape(-1), rows[ROWS:].reshape(-1), tokens.shape[1], name, positions
    )

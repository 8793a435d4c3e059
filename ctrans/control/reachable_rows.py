"""How much a product (A X)'P can become by attention rows A, which queries and keys make.

A penalty on all matrices charges queries and keys once, but rows come near any choice of tokens at
a finite charge. So the penalty that bounds values and outputs has to exceed what the best rows
make, not what the present ones do.

**Above.** For rows of weights a_ij >= 0 that sum to 1 over the tokens j that token i reads, and
unit u and v,

    u'P'A X v = sum_i <p_i, u> sum_j a_ij <x_j, v> <= S_+ max_j <x_j, v> + S_- max_k <-x_k, v>
              <= max over j, k of |S_+ x_j - S_- x_k|

with S_+ the sum of the positive <p_i, u>, and -S_- that of the negative ones. Their sum q is at
most N = max over |u| = 1 of sum_i |<p_i, u>|, and their difference D = <sum_i p_i, u> is at most M
= |sum_i p_i| <= N. The length is convex in (q, D), so it is largest at a corner of the region: at q
= N, D = +-M, or at q = M, D = +-M, where it is M |x_j|, which is the first one at j = k. Hence

    |(A X)'P|_2 <= max over j, k of |(N + M)/2 x_j - (N - M)/2 x_k|.

Of m heads that share their values the product is at most sqrt(m) times that.

**Below.** For one direction v and signs of <p_i, u> the best row of token i puts all its weight on
the token with the largest, or least, <x_j, v>. Scores c <x_i, w><x_j, v> with large c make these
rows if <x_i, w> has the sign of <p_i, u>. Such a w exists if the tokens are linearly independent. Q
and K then have rank 1. A norm of queries and keys, rotations or a cap of scores may keep rows from
them. `best_rows` looks for u and v, writes such Q and K into the attention itself, and reads the
rows that it makes.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from ctrans.base.shapes import SequenceRows, UnbatchedRows
from ctrans.control.admissible import length, ratio
from ctrans.control.ascent import noise
from ctrans.control.scales import at_unit_size, product
from ctrans.dynamics.fields import ExposesHeads
from ctrans.dynamics.fields.protocols import HeadMatrices

ROUNDS = 300
"""The most steps of the search for the weights of the bound N."""
SHORTEST = 1e-30
"""The shortest rows of that search, relative to the longest."""
SETTLED = 1e-4
"""The search ends where the weights change by a smaller share."""
EPSILON = torch.finfo(torch.float64).eps
ROUNDING = 1e-9
"""What the bounds are raised by, as a share, for rounding."""
STARTS = 16
"""Directions v from which the best rows are sought, in addition to those of X'P."""
TURNS = 60
"""Alternations between u and v."""
TRIED = 3
"""The number of the best pairs u, v whose rows are made."""
SHARPNESS = (10.0, 100.0, 1000.0)
"""Sizes of the scores that are tried."""
FlatRows = Float[Tensor, "batch*tokens width"]
"""Rows of all sequences, one after the other."""
PAIRS_AT_ONCE = 1024
"""Tokens whose distances to all others are computed at once."""
ENTRIES_AT_ONCE = 4_000_000
"""Payoffs of tokens by tokens that are compared at once."""


def sum_of_sizes(P: UnbatchedRows) -> float:
    """An upper bound of N = max over |u| = 1 of sum_i |<p_i, u>|.

    N^2 is the maximum over signs s of s'Gs, G = PP'. Each diagonal W > 0 bounds it by the largest
    eigenvalue of W^-1/2 G W^-1/2 times the trace of W. The least such bound is that of the
    semidefinite relaxation, at most pi/2 times N^2 (Nesterov 1998). Its W is |sum_j G_ij y_j| at
    the unit vectors y_i that maximise sum_ij G_ij <y_i, y_j>. Unit vectors of sqrt(2 tokens)
    entries are enough (Burer and Monteiro 2003), and y_i <- sum_j G_ij y_j, at unit length, never
    lowers the sum.
    """
    P = P.double()
    sizes = length(P)
    largest = float(sizes.amax())
    if not largest:
        return 0.0
    sizes = sizes / largest
    # squares of shorter rows would be 0: they count by their lengths
    is_long = sizes > SHORTEST
    of_short_rows = float(sizes[~is_long].sum())
    sizes = sizes[is_long]
    P = P[is_long] / largest
    y = torch.randn(
        len(P),
        2 + math.isqrt(2 * len(P)),
        generator=torch.Generator().manual_seed(0),
        dtype=torch.float64,
    ).to(P.device)
    weights = sizes
    for _ in range(ROUNDS):
        previous = weights
        y = P @ (P.mT @ nn.functional.normalize(y, dim=-1))
        weights = torch.linalg.vector_norm(y, dim=-1)
        if not (weights - previous).abs().sum() > SETTLED * weights.sum():
            break
    weights = torch.maximum(weights, sizes.square())  # as at the maximum
    relaxed = _largest_of_gram(P / weights.sqrt().unsqueeze(-1)) * float(weights.sum())
    of_long_rows = float(sizes.sum())
    if math.isfinite(relaxed):
        of_long_rows = min(of_long_rows, math.sqrt(relaxed))
    return largest * (of_long_rows + of_short_rows) * (1 + ROUNDING)


def _largest_of_gram(rows: UnbatchedRows) -> float:
    """The largest eigenvalue of rows rows'."""
    if len(rows) > rows.shape[-1]:
        rows = rows.mT
    return float(torch.linalg.eigvalsh(rows @ rows.mT)[-1])


def bound_over_rows(x: Float[Tensor, "tokens width_or_more"], P: UnbatchedRows) -> float:
    """An upper bound of |(A X)'P|_2 over all rows A of weights that sum to 1 (see above)."""
    x, x_size = at_unit_size(x.double())
    P, p_size = at_unit_size(P.double())
    return product(_bound_at_unit_size(x, P), x_size, p_size)


def _bound_at_unit_size(x: Float[Tensor, "tokens width_or_more"], P: UnbatchedRows) -> float:
    """The same where no row is longer than 1, so that squares neither overflow nor vanish."""
    largest = sum_of_sizes(P)
    together = min(float(P.sum(0).norm()), largest)
    more = (largest + together) / 2
    less = (largest - together) / 2
    squares = x.square().sum(-1)
    best = 0.0
    for begin in range(0, len(x), PAIRS_AT_ONCE):
        some = slice(begin, begin + PAIRS_AT_ONCE)
        products = x[some] @ x.mT
        lengths = more**2 * squares[some].unsqueeze(-1) + less**2 * squares
        best = max(best, float((lengths - 2 * more * less * products).amax()))
    # what the difference of nearly equal numbers may have lost
    lost = 8 * x.shape[-1] * EPSILON * (more**2 + less**2) * float(squares.amax())
    return math.sqrt(max(best, 0.0) + lost) * (1 + ROUNDING)


@torch.no_grad()
def best_rows(
    attention: ExposesHeads, x: SequenceRows, P: FlatRows
) -> Iterator[Float[Tensor, "heads tokens width"]]:
    """A_h X for rows that large Q and K of the attention make, one choice after the other; the
    weights are put back after each. There are none for scores that are not a multiple of <q, k>.
    """
    if not math.isfinite(attention.temperature):
        return
    flat = x.flatten(0, -2)
    reads = attention.probabilities(x).amax(-3) > 0
    u, v = _pairs(x, P, reads)
    for k in range(len(u)):
        slopes = P @ u[k]
        weights = slopes.abs().unsqueeze(-1)
        signs = weights * slopes.sign().unsqueeze(-1)
        w = (torch.linalg.pinv(weights * flat) @ signs).squeeze(-1)
        w_scale = float((flat @ w).abs().median())
        v_scale = float((flat @ v[k]).abs().amax())
        if not (0 < w_scale < math.inf and 0 < v_scale < math.inf):
            continue
        for rows in _made(attention, x, w / w_scale, v[k] / v_scale):
            yield (rows @ x.unsqueeze(-3)).transpose(0, -3).flatten(1, -2)


def _made(attention: ExposesHeads, x: SequenceRows, w: Tensor, v: Tensor) -> Iterator[Tensor]:
    """The rows with scores along v, of the sign of <x_i, w>."""
    heads = list(attention.head_matrices())
    size, _ = heads[0].query.shape
    divisor = attention.temperature * math.sqrt(size)
    # rotations by position turn the rows of Q and K by different angles
    for row in sorted({0, size // 2 - 1, size - 1} - {-1}):
        for sharpness in SHARPNESS:
            with _scores_along(heads, row, sharpness * divisor * w, v):
                rows = attention.probabilities(x)
            if rows.isfinite().all():
                yield rows


@contextlib.contextmanager
def _scores_along(heads: list[HeadMatrices], row: int, w: Tensor, v: Tensor) -> Iterator[None]:
    """Inside, every head has Q = e w' and K = e v', e the unit vector of a row. The weights are put
    back to the bit, and by `data`, so that autograd takes them for unchanged.
    """
    queries = [head.query.data for head in heads]
    keys = [head.key.data for head in heads]
    before = [(part, part.clone()) for part in (*queries, *keys)]
    try:
        for parts, direction in ((queries, w), (keys, v)):
            for part in parts:
                part.zero_()
                part[row] = direction
        yield
    finally:
        for part, values in before:
            part.copy_(values)


def _pairs(
    x: SequenceRows, P: FlatRows, reads: Bool[Tensor, "batch tokens tokens"]
) -> tuple[Float[Tensor, "pairs width"], Float[Tensor, "pairs width"]]:
    """The best unit u and v found of sum_i max_j <p_i, u><x_j, v>, over the tokens j that token i
    reads. It is convex in u and in v, so that alternating steps never lower it.
    """
    width = x.shape[-1]
    flat = x.flatten(0, -2)
    rank = min(STARTS, *P.shape)
    generator = torch.Generator().manual_seed(0)
    u = torch.linalg.svd(P, full_matrices=False).Vh[:rank]
    u = torch.cat([u, noise(P, generator, STARTS, P.shape[-1])])
    v = noise(P, generator, len(u), width)
    values = torch.zeros(len(u)).to(P)
    for _ in range(TURNS):
        v = ratio(v, length(v).unsqueeze(-1))
        u = ratio(u, length(u).unsqueeze(-1))
        slopes = (u @ P.mT).unflatten(-1, reads.shape[:2])
        along = (v @ flat.mT).unflatten(-1, reads.shape[:2])
        chosen = _chosen(along, slopes, reads)
        read = along.gather(-1, chosen)
        values = (slopes * read).sum((-2, -1))
        u = read.flatten(1) @ P
        weights = torch.zeros_like(along).scatter_add_(-1, chosen, slopes)
        v = weights.flatten(1) @ flat
    best = values.topk(min(TRIED, len(values))).indices
    return ratio(u, length(u).unsqueeze(-1))[best], ratio(v, length(v).unsqueeze(-1))[best]


def _chosen(along: Tensor, slopes: Tensor, reads: Tensor) -> Tensor:
    """The token with the largest slope_i <x_j, v> among those that token i reads."""
    at_once = max(1, ENTRIES_AT_ONCE // reads.numel())
    chosen = [
        (slope.unsqueeze(-1) * one.unsqueeze(-2)).masked_fill(~reads, -math.inf).argmax(-1)
        for one, slope in zip(along.split(at_once), slopes.split(at_once), strict=True)
    ]
    return torch.cat(chosen)

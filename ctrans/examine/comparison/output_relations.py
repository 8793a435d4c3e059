"""How what one model computes follows from what another one computes, in words."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

SMALL = 1e-2
"""A relation holds if it leaves at most this share of the difference."""
ATTENDED = 1e-12
"""From this weight on a token is read."""


class OutputRelation(NamedTuple):
    """The kind of a relation, and the relation in words."""

    kind: str
    words: str


BROKEN_IN_BOTH = "not finite in both"
"""The kind of relation of two outputs that are not finite."""


def not_finite(first: Tensor, second: Tensor) -> OutputRelation | None:
    """Which of two outputs has a nan or an infinite entry; None if neither has."""
    of_first, of_second = (not bool(output.isfinite().all()) for output in (first, second))
    if of_first and of_second:
        return OutputRelation(BROKEN_IN_BOTH, "not finite in both")
    if of_second:
        return OutputRelation("not finite", "not finite in the second")
    if of_first:
        return OutputRelation("not finite", "not finite in the first")
    return None


@torch.no_grad()
def output_relation(first: Tensor, second: Tensor, rounding: float) -> OutputRelation | None:
    """How the second output (.., tokens, channels) follows from the first; None for no simple way.
    `rounding` is what rounding makes of the first, root mean square.
    """
    if first.shape != second.shape or first.dim() < 2:
        return None
    x = first.double().flatten(0, -2)
    y = second.double().flatten(0, -2)
    broken = not_finite(x, y)
    if broken is not None:
        return broken
    gap = _rms(y - x)
    allowed = max(SMALL * gap, 4 * rounding)
    if not bool(y.any()):
        return OutputRelation("zero", "it is 0")
    for kind, words, made in _candidates(x, y):
        if _rms(y - made) <= allowed:
            return OutputRelation(kind, words)
    rows = (y - x).square().mean(-1).sqrt() > max(8 * rounding, 1e-6 * gap)
    tokens = rows.reshape(-1, first.shape[-2]).any(0)
    if not bool(tokens.all()) and bool(tokens.any()):
        named = tokens.nonzero().flatten().tolist()
        if len(named) == 1:
            return OutputRelation("some tokens", f"only token {named[0]} differs")
        return OutputRelation(
            "some tokens", f"{len(named)} of {len(tokens)} tokens differ, the first is {named[0]}"
        )
    return None


def _candidates(x: Tensor, y: Tensor) -> Iterator[tuple[str, str, Tensor]]:
    """Relations from the simplest on, with what the second output would be."""
    factor = float((x * y).sum() / x.square().sum().clamp(min=1e-300))
    yield "scaled", f"times {factor:.4g}", factor * x
    offset = (y - x).mean(0)
    yield "shifted", "plus the same vector at each token", x + offset
    by_channel = (x * y).sum(0) / x.square().sum(0).clamp(min=1e-300)
    spread = f"{float(by_channel.min()):.3g} to {float(by_channel.max()):.3g}"
    yield "scaled by channel", f"times a factor of each channel, {spread}", by_channel * x
    by_token = (x * y).sum(-1, keepdim=True) / x.square().sum(-1, keepdim=True).clamp(min=1e-300)
    spread = f"{float(by_token.min()):.3g} to {float(by_token.max()):.3g}"
    yield "scaled by token", f"times a factor of each token, {spread}", by_token * x
    centred = x - x.mean(-1, keepdim=True)
    again = (centred * y).sum(-1, keepdim=True) / centred.square().sum(-1, keepdim=True).clamp(
        min=1e-300
    )
    yield "centred", "less its mean over channels", again * centred
    of_centred = y - y.mean(-1, keepdim=True)
    factors = (of_centred * x).sum(-1, keepdim=True) / of_centred.square().sum(
        -1, keepdim=True
    ).clamp(min=1e-300)
    if float(_rms(x - factors * of_centred)) <= SMALL * _rms(y - x):
        yield "not centred", "without the removal of its mean over channels", y
    order = _channels(x, y)
    if order is not None:
        yield "channels in another order", "with its channels in another order", x[:, order]


def _channels(x: Tensor, y: Tensor) -> Tensor | None:
    """Which channel of x each one of y is; None if some has none or two have the same."""
    x = x / x.norm(dim=0).clamp(min=1e-300)
    y = y / y.norm(dim=0).clamp(min=1e-300)
    order = (x.t() @ y).argmax(0)
    if len(order.unique()) < len(order):
        return None
    return order


@torch.no_grad()
def relation_of_rows(first: Tensor, second: Tensor) -> OutputRelation | None:
    """How the second model's rows of attention (batch, heads, tokens, tokens) follow from the
    first's; None for no simple way.
    """
    if first.shape != second.shape or first.dim() < 3:
        return None
    x = first.double()
    y = second.double()
    broken = not_finite(x, y)
    if broken is not None:
        return broken
    reads_x = x > ATTENDED
    reads_y = y > ATTENDED
    if bool((reads_x != reads_y).any()):
        return _of_mask(reads_x, reads_y)
    if y.shape[-3] > 1 and _is_permuted(x, y):
        return OutputRelation("heads in another order", "with its heads in another order")
    return _of_scores(x, y, reads_x)


def _of_mask(reads_x: Tensor, reads_y: Tensor) -> OutputRelation:
    """Which tokens are read by one model alone."""
    several = [reads.flatten(0, -3).any(0) for reads in (reads_y & ~reads_x, reads_x & ~reads_y)]
    parts = []
    for pairs, words in zip(several, ("read in addition", "not read"), strict=True):
        if bool(pairs.any()):
            i, j = pairs.nonzero()[0].tolist()
            parts.append(f"{int(pairs.sum())} pairs {words}, as token {j} by token {i}")
    return OutputRelation("mask", "; ".join(parts))


def _is_permuted(x: Tensor, y: Tensor) -> bool:
    heads_x = x.transpose(0, -3).flatten(1)
    heads_y = y.transpose(0, -3).flatten(1)
    distances = torch.cdist(heads_x, heads_y)
    nearest = distances.min(0)
    if len(nearest.indices.unique()) < len(heads_x):
        return False
    gap = (heads_x - heads_y).norm(dim=1).max()
    return bool(nearest.values.max() <= SMALL * gap)


def _of_scores(x: Tensor, y: Tensor, reads: Tensor) -> OutputRelation | None:
    """Whether the scores are a multiple: log y = c log x + a number for each row, by least squares
    over what is read.
    """
    log_x = x.clamp(min=ATTENDED).log() * reads
    log_y = y.clamp(min=ATTENDED).log() * reads
    count = reads.sum(-1, keepdim=True).clamp(min=1)
    log_x = (log_x - log_x.sum(-1, keepdim=True) / count) * reads
    log_y = (log_y - log_y.sum(-1, keepdim=True) / count) * reads
    square = float(log_x.square().sum())
    if square == 0:
        return None
    factor = float((log_x * log_y).sum()) / square
    left = _rms(log_y - factor * log_x)
    if left <= SMALL * _rms(log_y - log_x):
        return OutputRelation("scores scaled", f"its scores times {factor:.4g}")
    return None


def _rms(x: Tensor) -> float:
    return float(x.square().mean().sqrt())

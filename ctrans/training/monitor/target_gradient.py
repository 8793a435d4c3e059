"""The targets of a loop, read from the gradient at its logits: no labels are needed.

A loss of row i with the weight w, smoothing s and z-loss factor lam,

    L_i = w [(1 - s) CE(z_i, y_i) + s/V sum_j CE(z_i, j) + lam (log Z_i)^2]

has with p = softmax(z_i) the gradient

    g_j = a p_j - w (1 - s) [j = y_i] + c,    a = w (1 + 2 lam log Z_i),  c = -w s/V

so all entries but one lie on a line over p_j. The other one is the target's. The line's slope is a,
and sum_j g_j = a - w gives the row's weight. A row that is not counted has the gradient 0.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

ENTRIES = 4_000_000
"""The number of logits that are read at once."""
SAMPLE = 256
"""The number of rows by which the sign of the loss is found, and targets are exchanged."""
FEWEST_CLASSES = 4
"""Of two or three entries some always lie on a line, whatever the loss is."""
FEWEST_TARGETS = 8
"""Fewer targets show nothing. A perfect classifier of n balanced ones is sqrt(n - 1) deviations
from exchanged ones, so that checks add up several reports.
"""
SAME = 0.01
"""How far a row's weight may lie from that of other rows, over that one."""
EVEN = 1e-3
"""The variance of probabilities over their mean's square, below which they count as even."""
TINY = 1e-30


@dataclass(frozen=True, eq=False)
class TargetRows:
    """What the gradient says of each row of logits.

    - `weight`: dL/dCE of this row; 0 if it is not counted, nan if the loss is no cross-entropy.
      Below 0 the loss is maximised
    - `target`: the class that it is pulled to; of no meaning where the weight is 0 or nan
    - `loss`: its cross-entropy in nats
    - `smoothing`: the share s of the weight that all classes have alike
    """

    weight: Tensor
    target: Tensor
    loss: Tensor
    smoothing: Tensor

    @property
    def is_counted(self) -> Tensor:
        return self.weight.isfinite() & (self.weight != 0)


@torch.no_grad()
def target_rows(logits: Tensor, gradient: Tensor) -> TargetRows:
    """Reads the targets of `logits` (rows, classes) from dL/dlogits of the same shape, of at least
    `FEWEST_CLASSES` classes.
    """
    sign = _sign(logits[:SAMPLE], gradient[:SAMPLE])
    lowered = gradient * sign
    found = _in_parts(logits, lowered, None)
    is_read = found.weight.isfinite()
    if is_read.any() and not is_read.all():
        # with much smoothing, a class of small p has a lower gradient than the target
        again = _in_parts(logits, lowered, found.weight[found.weight != 0].nanmedian())
        columns = zip(vars(found).values(), vars(again).values(), strict=True)
        found = TargetRows(*(torch.where(is_read, one, other) for one, other in columns))
    return replace(found, weight=found.weight * sign)


def _in_parts(logits: Tensor, gradient: Tensor, weight: Tensor | None) -> TargetRows:
    """The rows of a loss that is lowered, `ENTRIES` logits at once."""
    count = max(1, ENTRIES // logits.shape[-1])
    parts = [
        vars(_fitted(z, g, weight)).values()
        for z, g in zip(logits.split(count), gradient.split(count), strict=True)
    ]
    return TargetRows(*(torch.cat(column) for column in zip(*parts, strict=True)))


def _sign(logits: Tensor, gradient: Tensor) -> Tensor:
    """1 for a loss that is lowered, -1 for one that is raised: what fits more rows."""
    lowered = _fitted(logits, gradient).weight
    raised = _fitted(logits, -gradient).weight
    is_raised = raised.isfinite().sum() > lowered.isfinite().sum()
    return torch.where(is_raised, -1.0, 1.0).to(gradient)


def _fitted(logits: Tensor, gradient: Tensor, weight_of_rows: Tensor | None = None) -> TargetRows:
    """The rows of a loss that is lowered. With the `weight_of_rows` w, the target is the least
    g - w p, else the least g.
    """
    z = _wide(logits)
    g = _wide(gradient)
    log_p = z.log_softmax(-1)
    p = log_p.exp()
    if weight_of_rows is None:
        target = g.argmin(-1, keepdim=True)
    else:
        target = (g - weight_of_rows.to(p) * p).argmin(-1, keepdim=True)
    loss = -log_p.gather(-1, target)[:, 0]
    others = torch.ones_like(p).scatter_(-1, target, 0.0)
    count = p.shape[-1] - 1
    at_target = g.gather(-1, target)[:, 0]
    largest = g.abs().amax(-1)
    # a line through 0, which most losses have, and one that need not pass through it
    slope = ((others * g).sum(-1) / (others * p).sum(-1).clamp(min=TINY))[:, None]
    plain = others * (g - slope * p)
    mean_g = (others * g).sum(-1, keepdim=True) / count
    mean_p = (others * p).sum(-1, keepdim=True) / count
    off_p = others * (p - mean_p)
    slope_by_line = (off_p * g).sum(-1, keepdim=True) / off_p.square().sum(-1, keepdim=True).clamp(
        min=TINY
    )
    by_line = others * (g - mean_g - slope_by_line * (p - mean_p))
    tolerance = _tolerance(gradient.dtype) * largest
    is_plain = plain.abs().amax(-1) <= tolerance
    a = torch.where(is_plain, slope[:, 0], slope_by_line[:, 0])
    # the sum of the others, and the target's own: their difference loses no digits
    weight = a - g.sum(-1)
    fits = is_plain | (by_line.abs().amax(-1) <= tolerance)
    if weight_of_rows is None:
        # |g_y| is at most the weight; a margin loss has the same sign and hardly any weight
        fits &= (at_target < 0) & (weight > -0.9 * at_target) & largest.isfinite()
    else:
        fits &= (weight - weight_of_rows).abs() <= SAME * weight_of_rows.abs()
    weight = torch.where(fits, weight, torch.nan)
    # of even probabilities no line is known, and c may as well be a part of a p
    spread = off_p.square().sum(-1) / (count * mean_p[:, 0].square()).clamp(min=TINY)
    intercept = torch.where(spread > EVEN, (mean_g - slope_by_line * mean_p)[:, 0], torch.nan)
    smoothing = -intercept * p.shape[-1] / (slope_by_line[:, 0] - g.sum(-1))
    weight = torch.where(largest == 0, 0.0, weight)
    return TargetRows(weight, target[:, 0], loss, smoothing)


def _wide(x: Tensor) -> Tensor:
    if x.dtype == torch.float64:
        return x
    return x.float()


def _tolerance(dtype: torch.dtype) -> float:
    """How far entries may lie from the line, over the largest entry: a few roundings."""
    return max(1e-4, 4 * torch.finfo(dtype).eps)


@torch.no_grad()
def exchanged_targets(logits: Tensor, rows: TargetRows) -> tuple[Tensor, Tensor]:
    """The loss of the sampled rows, and how many standard deviations it lies from that of the same
    targets in another order; nan with fewer than `FEWEST_TARGETS`.

    With A_ij = CE(z_i, y_j) the mean of (1/n) sum_i A_{i pi(i)} over all permutations pi is that of
    A, and its variance sum_ij (A_ij - A_i. - A_.j + A..)^2/(n^2 (n - 1)), where dots are means.
    Source: Hoeffding 1951, "A combinatorial central limit theorem".
    """
    # counted rows first, in their order: no random number is drawn in the user's loop
    chosen = rows.is_counted.float().argsort(descending=True, stable=True)[:SAMPLE]
    counted = rows.is_counted[chosen].double()
    n = counted.sum()
    log_p = _wide(logits[chosen]).log_softmax(-1)
    a = -log_p[:, rows.target[chosen]].double()
    both = counted[:, None] * counted
    a = torch.where(both > 0, a, 0.0)
    by_row = a.sum(1, keepdim=True) / n
    by_column = a.sum(0, keepdim=True) / n
    mean = a.sum() / n.square()
    variance = (both * (a - by_row - by_column + mean)).square().sum() / (n.square() * (n - 1))
    loss = a.diagonal().sum() / n
    deviations = (loss - mean) / variance.clamp(min=TINY).sqrt()
    return loss, torch.where((n >= FEWEST_TARGETS) & (variance > TINY), deviations, torch.nan)

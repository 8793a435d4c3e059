"""The balanced-mass factor theta(p) = 4 max_S p(S) (1 - p(S)) of attention rows, as number
partitioning.

With delta(p) = min over signs s of abs(sum_i s_i p_i), p(S) = (1 +- delta)/2 at the best S, so
theta = 1 - delta^2 (Emadi, definition 4.1). Rows with few entries are solved exactly. A longer row
gets a bracket: any choice of signs bounds delta from above, and three theorems bound it from below.

Heads: for any set H of entries, delta(p) >= delta(p_H) - p(not H), since the other entries
contribute at most their mass. With H the heaviest entry, of mass p_1 > 1/2, all others on the other
side attain it: delta = 2 p_1 - 1 and theta = 4 p_1 (1 - p_1) exactly.

Merging: an entry other than the heaviest that exceeds 1 - 2 p_1 lies opposite p_1 in a best
partition. On the side of p_1 it leaves a difference above abs(1 - 2 p_1), which p_1 against all
others leaves. So it can merge with p_1 into one entry of their difference.

Parity: p_i = k_i q + r_i with whole k_i puts every signed sum within sum_i abs(r_i) of a multiple
of q that is odd if sum k_i is, so then delta(p) >= q - sum_i abs(r_i). With q the median of an odd
number of nearly equal entries it is attained.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from ctrans.base.option import POSITIVE
from solvers import ConfigError

PerRow = Float[Tensor, "*rows"]
"""A number for each row."""

EXACT = 30
"""Rows with up to this many nonzero entries are solved exactly."""

LEVELS = (12, 20, 28, 34)
"""Entries of a longer row that are combined exactly. The next level runs only for rows whose
bracket is still too wide.
"""

BUDGET = 2**22
"""Largest number of entries of a work array."""


@dataclasses.dataclass(frozen=True)
class BalancedMass:
    """lower <= theta <= upper for each row, equal if the row is solved exactly. A masked row, which
    reads nothing, has 0, and so has one that reads a single token.
    """

    lower: PerRow
    upper: PerRow
    masked: Bool[Tensor, "*rows"]
    single: Bool[Tensor, "*rows"]

    @property
    def width(self) -> PerRow:
        """upper - lower."""
        return self.upper - self.lower

    @property
    def fixed(self) -> Bool[Tensor, "*rows"]:
        """Of rows (*batch, heads, tokens), those that read nothing, or in every head a single
        token, as the first one of causal attention: theta is 0 there whatever the weights are.
        Where all rows are so, as of heads that are one-hot, the weights did it, and only rows that
        read nothing are left out.
        """
        fixed = self.masked | self.single.all(-2, keepdim=True).expand_as(self.single)
        if fixed.all():
            return self.masked
        return fixed


@torch.no_grad()
def balanced_mass(p: Float[Tensor, "*rows entries"], *, tolerance: float = 1e-9) -> BalancedMass:
    """theta(p) = 1 - delta(p)^2 of each row, in float64: exact up to `EXACT` nonzero entries, else
    a bracket.

    The search in a long row ends when its bracket is at most `tolerance` wide. Rows of zeros are
    masked, others are scaled to sum to 1. Raises ConfigError if a row is not finite, has a negative
    entry, or does not sum to 1 up to its precision.
    """
    POSITIVE.check("tolerance", float(tolerance), hint=", such as 1e-9")
    rows = p.detach().reshape(math.prod(p.shape[:-1]), p.shape[-1])
    masked = _check_rows(rows)
    counts = (rows != 0).sum(-1)
    lower = torch.zeros(rows.shape[0], dtype=torch.float64, device=p.device)
    upper = torch.zeros_like(lower)
    for chosen, count in _chunks(counts):
        heaviest = rows[chosen].double().topk(count, dim=-1).values
        heaviest = heaviest / heaviest.sum(-1, keepdim=True)
        if count <= EXACT:
            above = smallest_difference(heaviest)
            below = above
        else:
            above, below = _bracket(heaviest, tolerance)
        top = heaviest[:, 0]
        # for a peaked row 1 - delta^2 loses the digits of a small theta
        is_peaked = top > 0.5
        of_peaked = 4 * top * heaviest[:, 1:].sum(-1)
        lower[chosen] = torch.where(is_peaked, of_peaked, 1 - above.square())
        upper[chosen] = torch.where(is_peaked, of_peaked, 1 - below.square())
    shape = p.shape[:-1]
    return BalancedMass(
        lower.reshape(shape),
        upper.reshape(shape),
        masked.reshape(shape),
        (counts == 1).reshape(shape),
    )


def smallest_difference(x: Float[Tensor, "rows entries"]) -> Float[Tensor, " rows"]:
    """delta = min over signs of abs(sum_i s_i x_i), exact up to rounding, by meeting in the middle:
    2^(entries/2) work per row.

    Each signed sum is +-a +-b with a, b >= 0 sums of the two halves of the row. A search finds the
    nearest b of each a.
    """
    half = (x.shape[-1] + 1) // 2
    per_row = 2 ** max(half - 1, 0)
    parts = x.split(max(BUDGET // per_row, 1))
    return torch.cat([_meet(part[:, 0::2], part[:, 1::2]) for part in parts])


def _bracket(x: Tensor, tolerance: float) -> tuple[Tensor, Tensor]:
    """Upper and lower bounds on delta, for rows (rows, entries) in descending order that sum to
    1.
    """
    above = (2 * x.cumsum(-1) - 1).abs().amin(-1)
    below = torch.maximum(2 * x[:, 0] - 1, _parity(x)).clamp(min=0)
    index = torch.arange(x.shape[0], device=x.device)
    for step, level in enumerate(LEVELS):
        index, x = _wide(index, x, above, below, tolerance)
        # merging sorts again, which does not pay while most rows are wide
        if step > 0:
            x = _merge(x)
        size = min(level, x.shape[-1])
        head = smallest_difference(x[:, :size])
        above[index] = torch.minimum(above[index], _lighter(x[:, size:], head))
        below[index] = torch.maximum(below[index], head - x[:, size:].sum(-1))
        index, x = _wide(index, x, above, below, tolerance)
        above[index] = torch.minimum(above[index], _search(x, size))
    return above, torch.minimum(below, above)


def _wide(
    index: Tensor, x: Tensor, above: Tensor, below: Tensor, tolerance: float
) -> tuple[Tensor, Tensor]:
    """The rows x, and their indices, whose bracket is still too wide."""
    wide = above[index].square() - below[index].square() > tolerance
    return index[wide], x[wide]


def _merge(x: Tensor) -> Tensor:
    """Rows with the same delta and fewer entries: entries that must lie opposite the largest merge
    with it.
    """
    sums = x.sum(-1, keepdim=True)
    top = x[:, :1]
    forced = (x > sums - 2 * top) & (torch.arange(x.shape[-1], device=x.device) > 0)
    merged = (top - torch.where(forced, x, 0.0).sum(-1, keepdim=True)).abs()
    unsorted = torch.cat([merged, torch.where(forced, 0.0, x)[:, 1:]], dim=-1)
    entries = unsorted.sort(-1, descending=True).values
    if entries.numel():
        return entries[:, : int(_count(entries).amax())]
    return entries


def _parity(x: Tensor) -> Tensor:
    """q - sum abs(r) if sum k is odd, else -1, with q the median."""
    q = x.gather(-1, _count(x) // 2)
    k = (x / q).round()
    bound = q.squeeze(-1) - (x - k * q).abs().sum(-1)
    return torch.where(k.sum(-1) % 2 == 1, bound, -torch.ones_like(bound))


def _search(x: Tensor, size: int) -> Tensor:
    """A difference found from the best simple partition by choosing the best signs of `size`
    entries again: entries of all magnitudes, or those around the median, where nearly equal entries
    change sides.
    """
    signed = torch.stack([partition(x) for partition in PARTITIONS])
    sums = signed.sum(-1)
    best = sums.abs().argmin(0, keepdim=True)
    entries = _count(x).clamp(min=size)
    index = torch.arange(size, device=x.device)
    differences = []
    for chosen in (index * entries // size, (entries - size) // 2 + index):
        sums_of_chosen = signed.gather(-1, chosen.expand(len(PARTITIONS), -1, -1)).sum(-1)
        remainder = (sums - sums_of_chosen).gather(0, best)
        terms = torch.cat([x.gather(-1, chosen), remainder.T], dim=-1)
        differences.append(smallest_difference(terms))
    return torch.stack(differences).amin(0)


def _count(x: Tensor) -> Tensor:
    """The number of nonzero entries of each row, as a column."""
    return (x != 0).sum(-1, keepdim=True)


def _lighter(x: Tensor, difference: Tensor) -> Tensor:
    """The remaining difference after each entry in turn goes to the lighter side."""
    remaining = difference.clone()
    for column in x.T.contiguous():
        remaining.sub_(column).abs_()
    return remaining


def _balance(x: Tensor) -> Tensor:
    """The entries with signs, each in turn on the lighter side."""
    columns = x.T.contiguous()
    turns = torch.empty_like(columns)
    remaining = torch.zeros_like(columns[0])
    for column, turn in zip(columns, turns, strict=True):
        torch.sign(remaining.sub_(column), out=turn)
        remaining.abs_()
    turns[turns == 0] = 1.0
    # remaining_k = turn_k (remaining_{k-1} - x_k), so in the end the sign of x_k is
    # -turn_k turn_{k+1} ... turn_n
    return (columns * turns.flip(0).cumprod(0).flip(0)).neg_().T


def _window(x: Tensor) -> Tensor:
    """The sorted entries with one sign on a run of half of them and the other elsewhere, for nearly
    equal entries.
    """
    sums = torch.nn.functional.pad(x.cumsum(-1), (1, 0))
    index = torch.arange(x.shape[-1], device=x.device)
    half = _count(x) // 2
    runs = sums.gather(-1, (index + half).clamp(max=x.shape[-1])) - sums[:, :-1]
    first = (2 * runs - sums[:, -1:]).abs().argmin(-1, keepdim=True)
    return torch.where((index >= first) & (index < first + half), x, -x)


PARTITIONS: tuple[Callable[[Tensor], Tensor], ...] = (_balance, _window)


def _meet(first_half: Tensor, second_half: Tensor) -> Tensor:
    a = _absolute_sums(first_half)
    b = _absolute_sums(second_half).sort(-1).values
    nearest = torch.searchsorted(b, a)
    above = b.gather(-1, nearest.clamp(max=b.shape[-1] - 1)) - a
    below = a - b.gather(-1, (nearest - 1).clamp(min=0))
    return torch.minimum(above.abs().amin(-1), below.abs().amin(-1))


def _absolute_sums(x: Tensor) -> Tensor:
    """The absolute values of all signed sums of each row's entries, one per pair +-s."""
    if not x.shape[-1]:
        return x.new_zeros(x.shape[0], 1)
    sums = x[:, :1]
    for entry in x[:, 1:].unbind(-1):
        sums = torch.cat([sums - entry.unsqueeze(-1), sums + entry.unsqueeze(-1)], dim=-1)
    return sums.abs()


def _chunks(counts: Tensor) -> Iterator[tuple[Tensor, int]]:
    """Groups of rows to solve together: their indices and the largest number of nonzero entries.
    Rows without any are left out.

    Short rows are grouped by that number, because the work doubles with every second entry; long
    rows fill the budget.
    """
    sizes, order = counts.sort()
    first = int((sizes == 0).sum())
    ends = torch.searchsorted(
        sizes, torch.arange(1, EXACT + 1, device=sizes.device), right=True
    ).tolist()
    while first < len(order):
        later_ends = [end for end in ends if end > first]
        if later_ends:
            end = later_ends[0]
        else:
            end = min(first + max(BUDGET // int(sizes[-1]), 1), len(order))
        yield order[first:end], int(sizes[end - 1])
        first = end


def _check_rows(rows: Tensor) -> Tensor:
    """A mask of the rows that are all zero. Raises ConfigError unless the others are
    distributions.
    """
    wide = rows.double()
    sums = wide.sum(-1)
    masked = (wide == 0).all(-1)
    slack = torch.finfo(rows.dtype).eps * (4 + rows.shape[-1] ** 0.5)
    complaints = {
        "is not finite": ~torch.isfinite(wide).all(-1),
        "has a negative entry": (wide < 0).any(-1),
        "does not sum to 1": ~masked & ~((sums - 1).abs() <= slack),
    }
    for complaint, at in complaints.items():
        if at.any():
            row = int(at.nonzero()[0])
            raise ConfigError(
                f"row {row} {complaint} (sum {float(sums[row]):g}): give attention rows after the"
                " softmax, each a distribution"
            )
    return masked

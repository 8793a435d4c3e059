"""How the weights of two models differ: not at all, by rounding, or by a change with a name."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

RelationKind = Literal[
    "equal",
    "rounded",
    "transposed",
    "opposite sign",
    "scaled",
    "rows in another order",
    "columns in another order",
    "some rows differ",
    "slightly different",
    "unrelated",
    "other shape",
    "not finite",
]
FORMATS = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2)
FEWEST_VALUES = 16
"""A weight with fewer different sizes of entries does not show to what it was rounded."""
OFF_CENTRE = 6.0
"""So many standard deviations the mean of what rounding takes may be from 0."""
LEVELS = 256
"""The most levels of a row of integers of 8 bits."""
GROUPS = (128, 64, 32)
"""Sizes of the groups of entries of a row that have a scale of their own."""
HALF_STEP = 0.51
"""How far a rounded entry may be from the entry, in steps of its grid."""
CUT_OFF = 0.01
"""The largest share of a row's entries that lie beyond its grid."""
ROUNDED = 0.05
"""Up to this relative difference a weight of 8 bits counts as rounded. Fewer bits lose more."""
CHUNK = 1 << 20
"""So many entries of a weight are converted to float64 at once."""
SAME = 1e-5
"""How far two weights are apart at most that are the same up to the arithmetic of a change."""
SAFE = (1e-150, 1e150)
"""Entries between these have squares that neither overflow nor underflow."""
PRECISE = (torch.float32, torch.float64)
"""Dtypes of which a few roundings are far below what a training changes."""
ROUNDINGS = 4
"""So many roundings of their dtype entries are apart at most after other arithmetic."""
SLIGHT = 0.2
"""Up to this relative difference weights are those of one training, or of one model rounded."""


@dataclass(frozen=True)
class Relation:
    """How a weight of the second model follows from that of the first, in words.

    `adds` says that rounding added something to each of the first one's entries, and `evident` that
    the two weights show so by themselves. Weights of few different entries do not: gains of 1 are
    what gains near 1 are rounded to, and what they were before a training.
    """

    kind: RelationKind
    words: str
    distance: float
    adds: bool = False
    evident: bool = True


@torch.no_grad()
def relation_of(
    first: Tensor, second: Tensor, formats: Sequence[torch.dtype] = FORMATS
) -> Relation:
    """How the second weight follows from the first, perhaps as rounded to one of these formats."""
    if first.is_complex() or second.is_complex():
        relation = relation_of(_in_two_parts(first), _in_two_parts(second), formats)
        return replace(relation, adds=False)
    is_equal = first.shape == second.shape and torch.equal(first, second.to(first.dtype))
    if is_equal and torch.equal(second, first.to(second.dtype)):
        return Relation("equal", "equal", 0.0)
    known_format = _known_format(first.detach(), second.detach(), formats)
    if known_format is not None:
        return known_format
    a = first.detach().double()
    b = second.detach().double()
    if a.shape == b.shape and not bool((a.isfinite() & b.isfinite()).all()):
        return _relation_of_broken(first, second, formats)
    if a.shape != b.shape:
        if a.dim() == 2 and a.t().shape == b.shape and _same(a.t(), b):
            return Relation("transposed", "transposed", 0.0)
        shapes = f"{tuple(a.shape)} and {tuple(b.shape)}"
        return Relation("other shape", f"shapes {shapes}", float("inf"))
    largest = max(float(x.abs().amax()) for x in (a, b)) if a.numel() else 0.0
    if largest and not SAFE[0] < largest < SAFE[1]:
        a = a / largest
        b = b / largest
    size = float(a.square().mean().sqrt())
    distance = float((b - a).square().mean().sqrt()) / size if size else float("inf")
    if first.is_floating_point() or second.is_floating_point():
        rounded = _rounded_to(first, second, distance, formats)
        if rounded is not None:
            return rounded
        if _is_other_arithmetic(first, second):
            return Relation("rounded", "a few roundings apart", distance)
    for kind, words, holds in _simple_relations(a, b):
        if holds():
            return Relation(kind, words, distance)
    for test in (_order_of_rows, _some_rows):
        found = test(a, b)
        if found is not None:
            return Relation(*found, distance)
    if distance < SLIGHT:
        share = f"{distance:.1%}" if distance > 1e-3 else f"{distance:.2g} of its size"
        return Relation("slightly different", f"{share} apart", distance)
    return Relation("unrelated", f"{distance:.3g} of its size apart", distance)


def _known_format(first: Tensor, second: Tensor, formats: Sequence[torch.dtype]) -> Relation | None:
    """The relation of two weights of which one is the other rounded to one of the formats. It makes
    no copies of large weights in float64.
    """
    if first.shape != second.shape or not first.numel():
        return None
    if not (first.is_floating_point() or second.is_floating_point()):
        return None
    squares = 0.0
    squares_of_change = 0.0
    largest = 0.0
    chunks = (x.reshape(-1).split(CHUNK) for x in (first, second))
    for of_first, of_second in zip(*chunks, strict=True):
        a = of_first.double()
        b = of_second.double()
        largest = max(largest, float(a.abs().amax()), float(b.abs().amax()))
        squares += float(a.square().sum())
        squares_of_change += float((b - a).square().sum())
    if not SAFE[0] < largest < SAFE[1] or not squares:
        return None
    distance = math.sqrt(squares_of_change / squares)
    return _rounded_to_format(first, second, distance, formats)


def _relation_of_broken(first: Tensor, second: Tensor, formats: Sequence[torch.dtype]) -> Relation:
    """The relation of weights of which some have entries that are nan or inf. Where both have the
    same, it is that of the other entries.
    """
    a, b = first.detach(), second.detach()
    same = (a == b) | (a.isnan() & b.isnan())
    broken = ~(a.isfinite() & b.isfinite())
    apart = int((broken & ~same).sum())
    if apart:
        words = f"{apart} of {a.numel()} entries are nan or infinite in one of the two"
        return Relation("not finite", words, float("inf"))
    others = relation_of(a.masked_fill(broken, 0), b.masked_fill(broken, 0), formats)
    return replace(others, adds=False)


def _in_two_parts(x: Tensor) -> Tensor:
    """The real and the imaginary parts along a last axis."""
    x = x.detach()
    if not x.is_complex():
        x = torch.complex(x.double(), torch.zeros_like(x, dtype=torch.float64))
    return torch.view_as_real(x.resolve_conj())


Named = tuple[RelationKind, str]


def _simple_relations(
    a: Tensor, b: Tensor
) -> Iterator[tuple[RelationKind, str, Callable[[], bool]]]:
    yield "opposite sign", "the opposite sign", lambda: _same(a, -b)
    if a.dim() == 2 and a.shape[0] == a.shape[1]:
        yield "transposed", "transposed", lambda: _same(a.t(), b)
    square = float((a * a).sum())
    factor = float((a * b).sum()) / square if square else 0.0
    if factor and abs(factor - 1) > SAME:
        times = f"{factor:.4g}"
        if abs(factor - 1) < 1e-3:
            times = f"1 {'+' if factor > 1 else '-'} {abs(factor - 1):.2g}"
        yield "scaled", f"times {times}", lambda: _same(factor * a, b)


def _is_other_arithmetic(first: Tensor, second: Tensor) -> bool:
    """Whether each entry is the other one up to a few roundings, as after a factor was multiplied
    in and divided out again. A few roundings of 16 bits or fewer are 3% and may be a training.
    """
    if first.dtype != second.dtype or first.dtype not in PRECISE or not first.numel():
        return False
    allowed = ROUNDINGS * torch.finfo(first.dtype).eps * first.abs()
    return bool(((first - second).abs() <= allowed).all())


def _same(a: Tensor, b: Tensor) -> bool:
    """Whether the largest entries are the same, and the median ones too: beside a single huge entry
    all others are small.
    """
    if not b.numel():
        return False
    apart = (a - b).abs()
    sizes = b.abs()
    if not sizes.amax() > 0 or apart.amax() > SAME * sizes.amax():
        return False
    return bool(apart.median() <= SAME * sizes.median())


def _rounded_to_format(
    first: Tensor, second: Tensor, distance: float, formats: Sequence[torch.dtype]
) -> Relation | None:
    """The relation of two weights of which one is the other rounded to one of these formats.
    Entries that are too small for a format, or too large, differ by more than it rounds.
    """
    for number_format in formats:
        if distance > torch.finfo(number_format).eps:
            continue
        for whole, rounded in ((first, second), (second, first)):
            if torch.equal(whole.to(number_format).to(rounded.dtype), rounded):
                name = str(number_format).removeprefix("torch.")
                evident = _shows_rounding(whole, rounded, number_format)
                return Relation(
                    "rounded", f"rounded to {name}", distance, adds=True, evident=evident
                )
    return None


def _shows_rounding(whole: Tensor, rounded: Tensor, number_format: torch.dtype) -> bool:
    """Whether there are many different entries, with what rounding takes from them: differences
    that spread evenly from -1/2 to 1/2 of the distance between neighbours of the format. A factor
    gives them one sign, and a small change leaves them small.
    """
    step = max(1, rounded.numel() // CHUNK)
    values = rounded.flatten()[::step].double()
    sizes = values.abs()
    counts = sizes > torch.finfo(number_format).tiny
    if len(sizes[counts].unique()) < FEWEST_VALUES:
        return False
    exponents = torch.frexp(sizes[counts]).exponent - 1
    apart = torch.finfo(number_format).eps * exponents.double().exp2()
    taken = (whole.flatten()[::step].double() - values)[counts] * values[counts].sign() / apart
    spread = math.sqrt(1 / 12)
    is_centred = abs(float(taken.mean())) * math.sqrt(len(taken)) < OFF_CENTRE * spread
    return is_centred and float(taken.std()) > spread / 2


def _rounded_to(
    first: Tensor, second: Tensor, distance: float, formats: Sequence[torch.dtype]
) -> Relation | None:
    """The same, or as rounded to a grid of whole numbers."""
    of_format = _rounded_to_format(first, second, distance, formats)
    if of_format is not None or distance > ROUNDED:
        return of_format
    for whole, rounded in ((first, second), (second, first)):
        words = _grid_of(whole.double(), rounded.double())
        if words:
            return Relation("rounded", f"rounded to {words}", distance, adds=True)
    return None


def _grid_of(whole: Tensor, rounded: Tensor) -> str:
    """In words the grid of at most 256 levels to which the weight is rounded; "" for none."""
    if rounded.dim() != 2:
        return ""
    by_row = [("8 bits or fewer, by row", rounded.shape[1])]
    by_row += [(f"8 bits or fewer, by {n} entries", n) for n in GROUPS]
    for words, length in by_row:
        if rounded.shape[1] % length == 0 and _is_on_grids(
            whole.reshape(-1, length), rounded.reshape(-1, length)
        ):
            return words
    if _is_on_grids(whole.t(), rounded.t()):
        return "8 bits or fewer, by column"
    if _is_on_grids(whole.reshape(1, -1), rounded.reshape(1, -1)):
        return "8 bits or fewer"
    return ""


def _is_on_grids(whole: Tensor, rounded: Tensor, most: int = 64) -> bool:
    """Whether each row has at most 256 values, in equal steps, each within half a step of its
    entry. Few entries may lie beyond the grid, and are cut off. Rows of few entries say little.
    """
    if rounded.shape[1] < GROUPS[-1]:
        return False
    rows = torch.linspace(0, len(rounded) - 1, min(most, len(rounded))).long()
    for n in rows.tolist():
        if torch.equal(whole[n], rounded[n]):
            continue  # such as the zeros of padding
        levels = rounded[n].unique()
        if not 1 < len(levels) <= LEVELS:
            return False
        gaps = levels.diff()
        step = float(gaps.min())
        counts = gaps / step
        off_grid = (counts - counts.round()).abs() > 1e-3 * counts.clamp(min=1)
        far = (whole[n] - rounded[n]).abs() > HALF_STEP * step
        beyond = (whole[n] > levels[-1]) | (whole[n] < levels[0])
        if bool(off_grid.any()) or bool((far & ~beyond).any()):
            return False
        if float((far & beyond).double().mean()) > CUT_OFF:
            return False
    return True


def _order_of_rows(a: Tensor, b: Tensor) -> Named | None:
    """Whether b has the rows, or the columns, of a in another order."""
    if a.dim() < 2:
        permuted = a.dim() == 1 and len(a) > 2 and _same(a.sort().values, b.sort().values)
        permuted = permuted and not _same(a, b)
        return ("rows in another order", "its entries in another order") if permuted else None
    a = a.flatten(1)
    b = b.flatten(1)
    order = _order(a, b)
    if order is not None:
        return "rows in another order", _in_words(order, "rows")
    order = _order(a.t(), b.t())
    if order is not None:
        return "columns in another order", _in_words(order, "columns")
    return None


def _order(a: Tensor, b: Tensor) -> Tensor | None:
    """The rows of a in the order in which b has them; None if b has others, or the same order."""
    if _same(a, b):
        return None
    generator = torch.Generator().manual_seed(0)
    direction = torch.randn(a.shape[1], generator=generator, dtype=a.dtype).to(a.device)
    keys_a = a @ direction
    keys_b = b @ direction
    of_a = keys_a.argsort()
    of_b = keys_b.argsort()
    if not _same(keys_a[of_a], keys_b[of_b]):
        return None
    order = torch.empty_like(of_a)
    order[of_b] = of_a
    if _same(a[order], b):
        return order
    return None


def _in_words(order: Tensor, kind: str) -> str:
    """The order, as one of whole groups where it is one, or of halves and pairs of rotary maps."""
    n = len(order)
    if torch.equal(order, torch.arange(n - 1, -1, -1, device=order.device)):
        return f"its {kind} reversed"
    size = n
    while size > 1:
        size = next((d for d in range(size - 1, 0, -1) if n % d == 0), 1)
        blocks = order.reshape(-1, size)
        starts = blocks[:, :1]
        offsets = torch.arange(size, device=order.device)
        whole = bool((starts % size == 0).all()) and bool((blocks - starts == offsets).all())
        if size > 1 and whole:
            return f"its groups of {size} {kind} in another order"
    for size in (d for d in range(4, n + 1, 2) if n % d == 0):
        offsets = torch.arange(size, device=order.device)
        pairs = offsets.reshape(2, -1).t().flatten()
        starts = torch.arange(0, n, size, device=order.device).unsqueeze(1)
        for pattern, said in ((pairs, "halves as pairs"), (pairs.argsort(), "pairs as halves")):
            if torch.equal(order, (starts + pattern).flatten()):
                return f"the {said} of each {size} {kind}, as for rotary positions"
    return f"its {kind} in another order"


def _some_rows(a: Tensor, b: Tensor) -> Named | None:
    """Whether only some rows differ."""
    if a.dim() < 2:
        return None
    differs = (a != b).flatten(1).any(1)
    count = int(differs.sum())
    if 0 < count <= len(a) // 2:
        rows = differs.nonzero().flatten().tolist()
        where = f"row {rows[0]}" if count == 1 else f"{count} rows from {rows[0]} to {rows[-1]}"
        return "some rows differ", f"{where} of {len(a)} differ"
    return None

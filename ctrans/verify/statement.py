"""A statement of theory as an executable check: what is drawn, how far a case is from the statement, and what was found."""

from __future__ import annotations

import dataclasses
import math
import time
import zlib
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ctrans.depth import check_count
from solvers import ConfigError, SolveError

BOUND = 1e-9
"""By how much a measurement may exceed its bound, relatively: the rounding of float64 in what is compared."""


class Trial(NamedTuple):
    """How far one case is from the statement, and the case in words and numbers.

    `excess` is measured/bound - 1 for a bound, a relative difference for an equality: at most the check's tolerance where the
    statement holds, and negative by the slack where a bound is not attained.
    """

    excess: float
    words: str


Draw = Callable[[torch.Generator], Trial]


@dataclasses.dataclass(frozen=True)
class Check:
    """One form of a statement: a case drawn from a generator must not exceed it by more than the tolerance.

    `share` is the part of the cases asked for that is drawn, at least one: less for costly ones, 0 for a single demonstration.
    """

    draw: Draw
    tolerance: float = BOUND
    share: float = 1.0

    def count(self, cases: int) -> int:
        """How many cases are drawn when `cases` are asked for."""
        return max(1, round(self.share * cases))


@dataclasses.dataclass(frozen=True)
class Statement:
    """A lemma, theorem, proposition, corollary or line of theory with its source and section.

    `says` is the form that holds, checked by `corrected`; `printed` is what the source says where that differs, checked by `seed`.
    A statement that is right as printed has the same check twice; one that no source has, no seed.
    """

    name: str
    section: int
    source: str
    says: str
    corrected: Check
    seed: Check | None = None
    printed: str = ""


def as_printed(name: str, section: int, source: str, says: str, check: Check) -> Statement:
    """A statement that is right as its source has it."""
    return Statement(name, section, source, says, check, check)


@dataclasses.dataclass(frozen=True)
class CheckResult:
    """What the cases of one check showed: whether it holds, its worst case with its number, and the distance reached there."""

    holds: bool
    excess: float
    tolerance: float
    cases: int
    case: int
    words: str


@dataclasses.dataclass(frozen=True)
class Result:
    """A statement with what was found: `seed` None where no source states it, `seconds` for both forms together."""

    name: str
    section: int
    source: str
    says: str
    printed: str
    seed: CheckResult | None
    corrected: CheckResult
    seconds: float

    @property
    def verdict(self) -> str:
        """new, as printed, corrected (the printed form fails), sharpened (it holds too), or violated."""
        if not self.corrected.holds:
            return "violated"
        if self.seed is None:
            return "new"
        if not self.printed:
            return "as printed"
        return "sharpened" if self.seed.holds else "corrected"


def verify(statement: Statement, cases: int = 200, seed: int = 0) -> Result:
    """Both forms of the statement on `cases` cases each, less by their shares. Raises ConfigError for a number below 1."""
    check_count("cases", cases)
    start = time.perf_counter()
    corrected = find(statement.corrected, statement.name, cases, seed)
    printed = corrected if statement.seed is statement.corrected else None
    if printed is None and statement.seed is not None:
        printed = find(statement.seed, statement.name, cases, seed)
    seconds = time.perf_counter() - start
    return Result(
        statement.name, statement.section, statement.source, statement.says, statement.printed, printed, corrected, seconds
    )


@torch.no_grad()
def find(check: Check, name: str, cases: int, seed: int) -> CheckResult:
    """The worst of the check's cases; one that cannot be computed, or whose distance is not a number, counts as worst."""
    count = check.count(cases)
    drawn = [_drawn(check, generator_of(name, seed, k)) for k in range(count)]
    worst = max(range(count), key=lambda k: math.inf if math.isnan(drawn[k].excess) else drawn[k].excess)
    excess, words = drawn[worst]
    return CheckResult(excess <= check.tolerance, excess, check.tolerance, count, worst, words)


def _drawn(check: Check, generator: torch.Generator) -> Trial:
    try:
        return check.draw(generator)
    except (ConfigError, SolveError) as error:
        return Trial(math.nan, f"cannot be computed: {error}")


def generator_of(name: str, seed: int, case: int) -> torch.Generator:
    """The generator of one case of one statement: cases can be repeated alone and do not depend on each other."""
    return torch.Generator().manual_seed(zlib.crc32(f"{name}/{seed}/{case}".encode()))


def at_most(measured: float | Tensor, bound: float | Tensor, words: str) -> Trial:
    """The case of measured <= bound: excess measured/bound - 1, or the measured value where the bound is 0."""
    value, limit = float(measured), float(bound)
    if math.isinf(limit):
        return Trial(math.nan if math.isnan(value) else -1.0, words)
    return Trial(value / limit - 1 if limit else value, f"{words}: {value:.6g} against {limit:.6g}")


def equal(found: float | Tensor, expected: float | Tensor, words: str, scale: float | Tensor | None = None) -> Trial:
    """The case of found = expected: the largest difference over `scale`, by default the largest entry expected (1 if that is 0)."""
    a, b = (torch.as_tensor(value, dtype=torch.float64) for value in (found, expected))
    size = float(b.abs().max() if scale is None else scale) or 1.0
    gap = float((a - b).abs().max()) / size
    numbers = f": {float(a):.6g} against {float(b):.6g}" if a.numel() == 1 else f": differ by {gap:.2g}"
    return Trial(gap, words + numbers)


def holds_if(condition: bool, words: str) -> Trial:
    """The case of a yes-or-no statement: excess 0 or 1."""
    return Trial(0.0 if condition else 1.0, words)


def worst(*cases: Trial) -> Trial:
    """The case furthest from its statement: a form that says several things holds where all of them do."""
    return max(cases, key=lambda case: math.inf if math.isnan(case.excess) else case.excess)

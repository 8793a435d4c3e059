"""Runs the test of a statement on its cases."""

from __future__ import annotations

import math
import time
import zlib
from dataclasses import dataclass

import torch

from ctrans.base.draw import Draw
from ctrans.dynamics.depth import check_count
from ctrans.theory.statement import CaseTest, Statement, Trial, worst
from solvers import ConfigError, SolveError


@dataclass(frozen=True)
class CheckResult:
    """The result of one test: whether the form holds, and the excess, the number and the words of
    its worst case.
    """

    holds: bool
    excess: float
    tolerance: float
    cases: int
    case: int
    words: str


@dataclass(frozen=True)
class Result:
    """A statement with the results of its tests: `seed` is None if no source states it, `seconds`
    is the time of both forms.
    """

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
        """new, as printed, corrected (the printed form fails), sharpened (the printed form holds
        too), or violated.
        """
        if not self.corrected.holds:
            return "violated"
        if self.seed is None:
            return "new"
        if not self.printed:
            return "as printed"
        if self.seed.holds:
            return "sharpened"
        return "corrected"


def verify(statement: Statement, cases: int = 200, seed: int = 0) -> Result:
    """Tests both forms of the statement on `cases` cases each, or on their shares. Raises
    ConfigError for a number below 1.
    """
    check_count("cases", cases)
    start = time.perf_counter()
    corrected = find(statement.corrected, statement.name, cases, seed)
    if statement.seed is None:
        printed = None
    elif statement.seed is statement.corrected:
        printed = corrected
    else:
        printed = find(statement.seed, statement.name, cases, seed)
    return Result(
        statement.name,
        statement.section,
        statement.source,
        statement.says,
        statement.printed,
        seed=printed,
        corrected=corrected,
        seconds=time.perf_counter() - start,
    )


@torch.no_grad()
def find(test: CaseTest, name: str, cases: int, seed: int) -> CheckResult:
    """The worst of the test's cases. A case that cannot be computed, or whose excess is nan, counts
    as the worst.
    """
    trials = [_trial(test, draw_of(name, seed, k)) for k in range(test.count(cases))]
    trial = worst(*trials)
    return CheckResult(
        holds=trial.excess <= test.tolerance,
        excess=trial.excess,
        tolerance=test.tolerance,
        cases=len(trials),
        case=trials.index(trial),
        words=trial.words,
    )


def _trial(test: CaseTest, draw: Draw) -> Trial:
    try:
        trials = test.draw(draw)
        if isinstance(trials, Trial):
            return trials
        return worst(*trials)
    except (ConfigError, SolveError) as error:
        return Trial(math.nan, f"cannot be computed: {error}")


def draw_of(name: str, seed: int, case: int) -> Draw:
    """The random numbers of one case of one statement: each case can be repeated alone."""
    return Draw(zlib.crc32(f"{name}/{seed}/{case}".encode()))

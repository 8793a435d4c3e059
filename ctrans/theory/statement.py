"""A statement of theory as a test on random cases.

Each module `section_NN_...` registers the statements of one topic. `ctrans verify` runs them.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor

from ctrans.base.draw import Draw
from solvers import ConfigError

Item = TypeVar("Item")
BOUND = 1e-9
"""The relative rounding by which a measurement in float64 may exceed its bound."""


class Trial(NamedTuple):
    """How far one case is from the statement, and the case in words and numbers.

    `excess` is measured/bound - 1 for a bound and a relative difference for an equality. If the
    statement holds, it is at most the test's tolerance. It is negative for a case below its bound.
    """

    excess: float
    words: str


Trials = Trial | Sequence[Trial]
"""The parts of one case. The case holds if all parts hold, so the worst counts."""


@dataclass(frozen=True)
class CaseTest:
    """The test of one form of a statement: no case may exceed it by more than the tolerance.

    `share` is the part of the requested cases that the test draws, at least one case: less for slow
    tests, 0 for a demonstration.
    """

    draw: Callable[[Draw], Trials]
    tolerance: float = BOUND
    share: float = 1.0

    def count(self, cases: int) -> int:
        """How many cases the test draws when `cases` are requested."""
        return max(1, round(self.share * cases))


@dataclass(frozen=True)
class Statement:
    """A lemma, theorem, proposition, corollary or line of theory with its source and section.

    `says` is the form that holds, which `corrected` tests. `printed` is the source's form if it
    differs, which `seed` tests. A statement that holds as printed has the same test twice. A
    statement without a source has no `seed`.
    """

    name: str
    section: int
    source: str
    says: str
    corrected: CaseTest
    seed: CaseTest | None = None
    printed: str = ""
    module: str = ""


class Printed(NamedTuple):
    """The form that a source prints, if it is not the form that holds. Its test has the tolerance
    and the share of the corrected form, or its own.
    """

    words: str
    tolerance: float | None = None
    share: float | None = None


STATEMENTS: dict[str, Statement] = {}
"""All statements of the modules imported so far, by name."""

Form = TypeVar("Form", bound=Callable[..., Trials])


def statement(
    name: str,
    source: str,
    says: str,
    tolerance: float = BOUND,
    share: float = 1.0,
    *,
    as_printed: bool = False,
    printed: Printed | str | None = None,
) -> Callable[[Form], Form]:
    """Registers the decorated function, which maps a Draw to a Trial or several, as the test of a
    statement. SECTION, as it is then in the function's module, is its section of the theory.

    `as_printed`: the source states the same. `printed`: the source states something else; the
    function then also takes `printed` by name, and tests the source's form if that is True.
    Raises ConfigError for a name that another statement has, and for no SECTION.
    """

    def register(function: Form) -> Form:
        if name in STATEMENTS:
            raise ConfigError(
                f"a statement called {name!r} is registered by {STATEMENTS[name].module}: choose"
                " another name"
            )
        section = getattr(sys.modules.get(function.__module__), "SECTION", None)
        if not isinstance(section, int):
            raise ConfigError(
                f"the statement {name!r} has no section: set SECTION in its module before, such as"
                " SECTION = 3"
            )
        corrected, seed, printed_words = _forms(function, printed, tolerance, share)
        if as_printed and seed is None:
            seed = corrected
        STATEMENTS[name] = Statement(
            name,
            section,
            source,
            says,
            corrected=corrected,
            seed=seed,
            printed=printed_words,
            module=function.__module__,
        )
        return function

    return register


def _forms(
    function: Callable[..., Trials], printed: Printed | str | None, tolerance: float, share: float
) -> tuple[CaseTest, CaseTest | None, str]:
    """The tests of the form that holds and of the printed one, and the latter in words."""
    if printed is None:
        return CaseTest(function, tolerance, share), None, ""
    if isinstance(printed, str):
        printed = Printed(printed)
    corrected = CaseTest(partial(function, printed=False), tolerance, share)
    seed = replace(corrected, draw=partial(function, printed=True))
    if printed.tolerance is not None:
        seed = replace(seed, tolerance=printed.tolerance)
    if printed.share is not None:
        seed = replace(seed, share=printed.share)
    return corrected, seed, printed.words


def at_most(measured: float | Tensor, bound: float | Tensor, words: str) -> Trial:
    """The case of measured <= bound: excess measured/bound - 1, or the measured value if the bound
    is 0.
    """
    value = float(measured)
    limit = float(bound)
    if math.isinf(limit) and math.isnan(value):
        return Trial(math.nan, words)
    if math.isinf(limit):
        return Trial(-1.0, words)
    excess = value
    if limit:
        excess = value / limit - 1
    return Trial(excess, f"{words}: {value:.6g} against {limit:.6g}")


def equal(
    found: float | Tensor, expected: float | Tensor, words: str, scale: float | Tensor | None = None
) -> Trial:
    """The case of found = expected: the largest difference over `scale`, by default the largest
    entry expected (1 if that is 0).
    """
    a = torch.as_tensor(found, dtype=torch.float64)
    b = torch.as_tensor(expected, dtype=torch.float64)
    if scale is None:
        scale = b.abs().max()
    size = float(scale) or 1.0
    gap = float((a - b).abs().max()) / size
    if a.numel() == 1:
        numbers = f": {float(a):.6g} against {float(b):.6g}"
    else:
        numbers = f": differ by {gap:.2g}"
    return Trial(gap, words + numbers)


def holds_if(words: str, *, condition: bool) -> Trial:
    """The case of a yes-or-no statement: excess 0 or 1."""
    if condition:
        return Trial(0.0, words)
    return Trial(1.0, words)


def worst(*cases: Trial) -> Trial:
    """The case furthest from its statement."""

    def distance(case: Trial) -> float:
        if math.isnan(case.excess):
            return math.inf
        return case.excess

    return max(cases, key=distance)


def not_none(value: Item | None) -> Item:
    """The value of an optional attribute that the statement's objects always have."""
    assert value is not None
    return value


def dense_jacobian(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """The function's Jacobian at x by autograd, (*shape of the result, *shape of x)."""
    dense: Tensor = torch.autograd.functional.jacobian(function, x)  # type: ignore[no-untyped-call, unused-ignore]  # torch gives it no types
    return dense


def dense_matrix(
    function: Callable[[Tensor], Tensor], x: Tensor
) -> Float[Tensor, "outputs inputs"]:
    """`dense_jacobian` as a matrix, over all entries of the result and of x."""
    return dense_jacobian(function, x).reshape(-1, x.numel())

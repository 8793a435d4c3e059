"""Runge-Kutta methods as validated data.

A method is its coefficients (a, b, c). They are checked when the object is made: shape, row sums
c_i = sum_j a_ij, nodes inside the step, and *every* order condition up to the stated order (one for
each rooted tree: 17 up to order 5). This holds for the weights and for the embedded weights. So a
mistyped coefficient cannot become a method.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
from collections.abc import Sequence
from fractions import Fraction
from itertools import zip_longest
from typing import TypeVar

from torch import Tensor

from solvers.checked import checked, item
from solvers.errors import ConfigError, shown
from solvers.rooted_trees import RootedTree, density, trees

TOLERANCE = 1e-13
"""The largest error of a condition: coefficients are published to 16 digits."""
DENSE_TOLERANCE = 1e-12
DENSE_SIZE = 100.0
"""The same for dense output, times the sum of its coefficients' sizes over DENSE_SIZE if above 1.
"""

Coefficient = int | float | str | Fraction
Number = TypeVar("Number", float, Tensor)
BranchSums = dict[RootedTree, list[float]]
"""By a branch: for each stage, the sum that the branch contributes to an order condition."""
Row = tuple[float, ...]
Rows = tuple[Row, ...]


@checked
@dataclasses.dataclass(frozen=True)
class Tableau:
    """Coefficients of a Runge-Kutta method: k_i = f(t + c_i h, x + h sum_(j<i) a_ij k_j), x1 = x +
    h sum_i b_i k_i.

    - `a`: the rows below the diagonal. Row i has i entries; the first is empty
    - `embedded`: the weights of a solution of the lower order `embedded_order`. Its difference from
      x1 estimates the error
    - `coarse`: the weights of a second embedded solution of still lower order. The error is then
      err_e^2/sqrt(err_e^2 + 0.01 err_c^2), whose order is higher than that of both
    - `dense`: a polynomial without constant term for each stage, lowest power first: x(t + theta h)
      = x + h sum_i dense_i(theta) k_i. They must have order - 1 for every theta, and equal b at
      theta = 1. Then states inside the step have the method's order
    - `inner`: rows of stages that only `dense` uses, at the nodes `inner_c`. Row i has an entry for
      each stage before it. They are evaluated only in steps that contain a requested time
    - `gamma`: a_ii of every stage but the first. If it is above zero, these stages are implicit

    Raises ConfigError with the coefficient or order condition that fails (Butcher; Hairer, Norsett,
    Wanner, II.2).
    """

    order: int
    a: Rows
    b: Row
    c: Row
    embedded: Row | None = None
    embedded_order: int = 0
    dense: Rows = ()
    coarse: Row | None = None
    coarse_order: int = 0
    gamma: float = 0.0
    inner: Rows = ()
    inner_c: Row = ()

    def __post_init__(self) -> None:
        stages = len(self.b)
        is_triangular = all(len(row) == i for i, row in enumerate(self.a))
        if len(self.a) != stages or len(self.c) != stages or not is_triangular:
            raise ConfigError(
                f"a tableau of {stages} weights needs {stages} nodes and rows of 0, 1, ...,"
                f" {stages - 1} coefficients"
            )
        inner_fits = len(self.inner_c) == len(self.inner) and all(
            len(row) == stages + i for i, row in enumerate(self.inner)
        )
        # by their lengths: a tensor has no truth
        has_dense = len(self.dense) > 0
        if not inner_fits or (len(self.inner) > 0 and (self.gamma or not has_dense)):
            raise ConfigError(
                f"inner stages go with dense output of an explicit method: give rows of {stages},"
                f" {stages + 1}, .. and their nodes"
            )
        for i, (row, node) in enumerate(zip(self.rows, (*self.c, *self.inner_c), strict=True)):
            total = sum(row)
            if abs(total - node) > TOLERANCE:
                raise ConfigError(
                    f"row {i} of a sums to {total:.17g}, not to its node c[{i}] = {node:.17g}"
                )
            if not 0 <= node <= 1:
                raise ConfigError(
                    f"node c[{i}] = {node:.17g} lies outside [0, 1]: it would evaluate a field"
                    " outside its segment"
                )
        if self.coarse is not None and self.embedded is None:
            raise ConfigError("coarse weights go with embedded ones: give both, or embedded alone")
        branch_sums: BranchSums = {}
        for what, weights, order in (
            ("b", self.b, self.order),
            ("embedded", self.embedded, self.embedded_order),
            ("coarse", self.coarse, self.coarse_order),
        ):
            if weights is None:
                continue
            if len(weights) != stages:
                raise ConfigError(f"{what} has {len(weights)} weights for {stages} stages")
            self._check_order(what, weights, order, branch_sums)
        if has_dense:
            self._check_dense(branch_sums)

    @functools.cached_property
    def rows(self) -> Rows:
        """The rows of all stages with the diagonal, then the inner ones."""
        first = [(*row, 0.0) for row in self.a[:1]]
        later = [(*row, self.gamma) for row in self.a[1:]]
        return (*first, *later, *self.inner)

    @functools.cached_property
    def error_weights(self) -> Rows:
        """b - embedded, and b - coarse if there is one. h times the stages, summed with such
        weights, estimates the error.
        """
        differences = []
        for weights in (self.embedded, self.coarse):
            if weights is not None:
                differences.append(tuple(b - e for b, e in zip(self.b, weights, strict=True)))
        return tuple(differences)

    def error(self, norms: Sequence[float]) -> float:
        """The error from the norms of its estimates, the finer first: err_e, or
        err_e^2/sqrt(err_e^2 + 0.01 err_c^2) of two.
        """
        fine, *coarse = norms
        if coarse and fine:
            return fine * fine / math.hypot(fine, 0.1 * coarse[0])
        return fine

    @property
    def error_order(self) -> int:
        """q of the error estimate O(h^q)."""
        fine = self.embedded_order + 1
        if self.coarse is None:
            return fine
        return 2 * fine - (self.coarse_order + 1)

    @functools.cached_property
    def stability_interval(self) -> float:
        """The largest z with |R| <= 1 on [-z, 0], R(w) = 1 + sum_k w^k b'A^(k-1)1. Steps for x' =
        -a x are stable for h a <= z.
        """
        powers = [1.0]
        values = [1.0] * len(self.b)
        for _ in self.b:
            powers.append(sum(b * value for b, value in zip(self.b, values, strict=True)))
            values = [
                sum(a * value for a, value in zip(row, values, strict=False)) for row in self.a
            ]
        points_per_unit = 1000
        for k in range(1, 100 * points_per_unit):
            value = 0.0
            for power in reversed(powers):
                value = power - k / points_per_unit * value
            if abs(value) > 1 + 1e-9:
                return (k - 1) / points_per_unit
        raise AssertionError("the polynomial of an explicit method leaves the unit disc")

    @functools.cached_property
    def last_difference(self) -> Row:
        """x_s - x_(s-1) of the last two stages, over h, as weights of the stages."""
        last = self.a[-1]
        last_but_one = (*self.a[-2], 0.0)
        return tuple(a - b for a, b in zip(last, last_but_one, strict=True))

    @property
    def reuses_last_stage(self) -> bool:
        """Whether the last stage is the field at the step's result, to the last bit ("first same as
        last").
        """
        return (
            not self.gamma
            and len(self.b) > 1
            and self.c[-1] == 1
            and self.b[-1] == 0
            and self.a[-1] == self.b[:-1]
        )

    def _check_order(
        self, what: str, weights: Sequence[float], order: int, branch_sums: BranchSums
    ) -> None:
        if order < 1:
            raise ConfigError(f"the order of {what} is {order}; it must be at least 1")
        for size in range(1, order + 1):
            for tree in trees(size):
                phi = self._stage_weights(tree, branch_sums)
                # inner stages come last and have no weight here
                total = sum(w * value for w, value in zip(weights, phi, strict=False))
                if abs(total - 1 / density(tree)) > TOLERANCE:
                    raise ConfigError(
                        f"{what} is not of order {order}: the condition of order {size} for the"
                        f" tree {tree} gives {total:.17g}, not 1/{density(tree)}"
                    )

    def dense_weights(self, theta: Number) -> tuple[Number, ...]:
        """The weights of x(t + theta h), 0 <= theta <= 1."""
        return tuple(
            sum((c * theta**power for power, c in enumerate(row, 1)), 0 * theta)
            for row in self.dense
        )

    def _check_dense(self, branch_sums: BranchSums) -> None:
        ends = (*self.b, *(0.0 for _ in self.inner))
        if len(self.dense) != len(ends):
            raise ConfigError(f"dense has {len(self.dense)} polynomials for {len(ends)} stages")
        for i, (b, row) in enumerate(zip(ends, self.dense, strict=True)):
            if abs(sum(row) - b) > TOLERANCE:
                raise ConfigError(
                    f"dense[{i}] is {sum(row):.17g} at the step's end, not b[{i}] = {b:.17g}"
                )
        for size in range(1, max(2, self.order)):
            for tree in trees(size):
                phi = self._stage_weights(tree, branch_sums)
                # theta^size/density, power by power
                for i, weights in enumerate(zip_longest(*self.dense, fillvalue=0.0)):
                    power = i + 1
                    required = 0.0
                    if power == size:
                        required = 1 / density(tree)
                    total = sum(w * value for w, value in zip(weights, phi, strict=True))
                    allowed = DENSE_TOLERANCE * max(1.0, sum(map(abs, weights)) / DENSE_SIZE)
                    if abs(total - required) > allowed:
                        raise ConfigError(
                            f"dense is not of order {max(1, self.order - 1)}: in the condition of"
                            f" order {size} for the tree {tree}, theta^{power} has {total:.17g}"
                        )

    def _stage_weights(self, tree: RootedTree, branch_sums: BranchSums) -> list[float]:
        """phi of the tree for each stage: the product of the sums over its branches. It adds those
        that it computes to `branch_sums`.
        """
        phi = [1.0] * len(self.rows)
        for branch in tree:
            if branch not in branch_sums:
                below = self._stage_weights(branch, branch_sums)
                branch_sums[branch] = [sum(map(operator.mul, row, below)) for row in self.rows]
            phi = list(map(operator.mul, phi, branch_sums[branch]))
        return phi


def tableau(
    order: int,
    a: Sequence[Sequence[Coefficient]],
    b: Sequence[Coefficient],
    embedded: Sequence[Coefficient] | None = None,
    embedded_order: int = 0,
    dense: Sequence[Sequence[Coefficient]] = (),
    coarse: Sequence[Coefficient] | None = None,
    coarse_order: int = 0,
    gamma: Coefficient = 0,
    inner: Sequence[Sequence[Coefficient]] = (),
) -> Tableau:
    """A `Tableau` from numbers, or from fractions as text ("9017/3168"). The nodes c are the row
    sums of a.

    - `order`: the order of the weights b
    - `a`: for each stage the coefficients below the diagonal: 0, 1, 2, .. of them
    - `b`: the step's weights
    - the others: as in `Tableau`

    Raises ConfigError if an order or a coefficient is wrong.
    """

    def floats(values: Sequence[Coefficient]) -> Row:
        return tuple(float(_exact(value)) for value in values)

    def floats_or_none(values: Sequence[Coefficient] | None) -> Row | None:
        if values is None:
            return None
        return floats(values)

    def node(row: Sequence[Coefficient]) -> float:
        # 15 digits: decimals whose sum misses 1 in the last place give 1
        return round(float(sum(map(_exact, row), Fraction(0))), 15)

    with_diagonal = [*a[:1], *([*row, gamma] for row in a[1:])]
    return Tableau(
        order,
        a=tuple(map(floats, a)),
        b=floats(b),
        c=tuple(map(node, with_diagonal)),
        embedded=floats_or_none(embedded),
        embedded_order=embedded_order,
        dense=tuple(map(floats, dense)),
        coarse=floats_or_none(coarse),
        coarse_order=coarse_order,
        gamma=float(_exact(gamma)),
        inner=tuple(map(floats, inner)),
        inner_c=tuple(map(node, inner)),
    )


def _exact(coefficient: Coefficient) -> Fraction:
    try:
        exact = Fraction(item(coefficient))
        float(exact)  # raises OverflowError if it is too large
        return exact
    except (ValueError, OverflowError, ZeroDivisionError):
        raise ConfigError(
            f"the coefficient {shown(coefficient)} is no finite number: give one, or a fraction as"
            " '1/3'"
        ) from None


def rows(text: str) -> list[list[str]]:
    """Coefficients from text: semicolons separate rows, spaces the numbers of a row."""
    return [row.split() for row in text.split(";")]


def numbers(text: str) -> list[str]:
    """One row of coefficients."""
    return text.split()

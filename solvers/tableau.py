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
from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import Any, TypeVar

from torch import Tensor

from solvers.checked import checked, item
from solvers.errors import ConfigError, shown

TOLERANCE = 1e-13
"""The largest error of a condition: coefficients are published to 16 digits."""
DENSE_TOLERANCE, DENSE_SIZE = 1e-12, 100.0
"""The same for dense output, times the sum of its coefficients' sizes over DENSE_SIZE if above 1.
"""

Coefficient = int | float | str | Fraction
Number = TypeVar("Number", float, Tensor)
RootedTree = tuple[Any, ...]  # a rooted tree: the sorted tuple of the trees at its root
Known = dict[RootedTree, list[float]]
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
        if (
            len(self.a) != stages
            or len(self.c) != stages
            or any(len(row) != i for i, row in enumerate(self.a))
        ):
            raise ConfigError(
                f"a tableau of {stages} weights needs {stages} nodes and rows of 0, 1, ...,"
                f" {stages - 1} coefficients"
            )
        if (
            any(len(row) != stages + i for i, row in enumerate(self.inner))
            or len(self.inner_c) != len(self.inner)
            or (self.inner and (self.gamma or not self.dense))
        ):
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
        known: Known = {}
        for what, weights, order in (
            ("b", self.b, self.order),
            ("embedded", self.embedded, self.embedded_order),
            ("coarse", self.coarse, self.coarse_order),
        ):
            if weights is not None:
                if len(weights) != stages:
                    raise ConfigError(f"{what} has {len(weights)} weights for {stages} stages")
                self._check_order(what, weights, order, known)
        if self.dense:
            self._check_dense(known)

    @functools.cached_property
    def rows(self) -> Rows:
        """The rows of all stages with the diagonal, then the inner ones."""
        return (*((*row, self.gamma if i else 0.0) for i, row in enumerate(self.a)), *self.inner)

    @functools.cached_property
    def error_weights(self) -> Rows:
        """b - embedded, and b - coarse if there is one. h times the stages, summed with such
        weights, estimates the error.
        """
        lower = [weights for weights in (self.embedded, self.coarse) if weights is not None]
        return tuple(
            tuple(b - e for b, e in zip(self.b, weights, strict=True)) for weights in lower
        )

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
        fine = 1000
        for k in range(1, 100 * fine):
            value = 0.0
            for power in reversed(powers):
                value = power - k / fine * value
            if abs(value) > 1 + 1e-9:
                return (k - 1) / fine
        raise AssertionError("the polynomial of an explicit method leaves the unit disc")

    @functools.cached_property
    def last_difference(self) -> Row:
        """x_s - x_(s-1) of the last two stages, over h, as weights of the stages."""
        last = self.a[-1]
        before = (*self.a[-2], 0.0)
        return tuple(a - b for a, b in zip(last, before, strict=True))

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

    def _check_order(self, what: str, weights: Sequence[float], order: int, known: Known) -> None:
        if order < 1:
            raise ConfigError(f"the order of {what} is {order}; it must be at least 1")
        for size in range(1, order + 1):
            for tree in trees(size):
                # inner stages come last and have no weight here
                have = sum(
                    w * value
                    for w, value in zip(weights, self._stage_weights(tree, known), strict=False)
                )
                if abs(have - 1 / density(tree)) > TOLERANCE:
                    raise ConfigError(
                        f"{what} is not of order {order}: the condition of order {size} for the"
                        f" tree {tree} gives {have:.17g}, not 1/{density(tree)}"
                    )

    def dense_weights(self, theta: Number) -> tuple[Number, ...]:
        """The weights of x(t + theta h), 0 <= theta <= 1."""
        return tuple(
            sum((c * theta**power for power, c in enumerate(row, 1)), 0 * theta)
            for row in self.dense
        )

    def _check_dense(self, known: Known) -> None:
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
                values = self._stage_weights(tree, known)
                # theta^size/density, power by power
                for power in range(1, max(map(len, self.dense)) + 1):
                    weights = [row[power - 1] if len(row) >= power else 0.0 for row in self.dense]
                    have = sum(w * v for w, v in zip(weights, values, strict=True))
                    allowed = DENSE_TOLERANCE * max(1.0, sum(map(abs, weights)) / DENSE_SIZE)
                    if abs(have - (power == size) / density(tree)) > allowed:
                        raise ConfigError(
                            f"dense is not of order {max(1, self.order - 1)}: in the condition of"
                            f" order {size} for the tree {tree}, theta^{power} has {have:.17g}"
                        )

    def _stage_weights(self, tree: RootedTree, known: Known) -> list[float]:
        """The products of the row sums of the branches (`known` has those that were computed)."""
        values = [1.0] * len(self.rows)
        for branch in tree:
            if branch not in known:
                below = self._stage_weights(branch, known)
                known[branch] = [sum(map(operator.mul, row, below)) for row in self.rows]
            values = list(map(operator.mul, values, known[branch]))
        return values


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

    def node(
        row: Sequence[Coefficient],
    ) -> float:  # 15 digits: decimals whose sum misses 1 in the last place give 1
        return round(float(sum(map(_exact, row), Fraction(0))), 15)

    return Tableau(
        order,
        tuple(map(floats, a)),
        floats(b),
        tuple(node([*row, gamma] if i else row) for i, row in enumerate(a)),
        None if embedded is None else floats(embedded),
        embedded_order,
        tuple(map(floats, dense)),
        None if coarse is None else floats(coarse),
        coarse_order,
        float(_exact(gamma)),
        tuple(map(floats, inner)),
        tuple(map(node, inner)),
    )


def _exact(coefficient: Coefficient) -> Fraction:
    try:
        exact = Fraction(item(coefficient))
        float(exact)
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


@functools.cache
def trees(size: int) -> tuple[RootedTree, ...]:
    """All rooted trees with that many nodes (1, 1, 2, 4, 9, ...), each as the sorted tuple of the
    subtrees at its root.
    """
    return tuple(sorted(set(_forests(size - 1, size - 1))))


def _forests(nodes: int, largest: int) -> Iterator[RootedTree]:
    if nodes == 0:
        yield ()
    for size in range(1, min(nodes, largest) + 1):
        for tree in trees(size):
            for rest in _forests(nodes - size, size):
                yield tuple(sorted((tree, *rest)))


@functools.cache
def density(tree: RootedTree) -> int:
    """gamma(tree) = (number of nodes) * product of the densities of its branches. The order
    condition is sum b phi = 1/gamma.
    """
    return _nodes(tree) * math.prod(map(density, tree))


def _nodes(tree: RootedTree) -> int:
    return 1 + sum(_nodes(branch) for branch in tree)


EULER = tableau(1, [[]], [1], dense=[[1]])
MIDPOINT = tableau(2, [[], ["1/2"]], [0, 1], dense=[[1, -1], [0, 1]])
# With Euler's method as the embedded one, the pair 2(1).
HEUN = tableau(2, [[], [1]], ["1/2", "1/2"], [1, 0], 1, dense=[[1, "-1/2"], [0, "1/2"]])
RK4 = tableau(
    4,
    [[], *rows("1/2; 0 1/2; 0 0 1")],
    numbers("1/6 1/3 1/3 1/6"),
    dense=rows("1 -3/2 2/3; 0 1 -2/3; 0 1 -2/3; 0 -1/2 2/3"),
)
# Kutta (1901), the 3/8 rule.
RK4_38 = tableau(
    4,
    [[], *rows("1/3; -1/3 1; 1 -1 1")],
    numbers("1/8 3/8 3/8 1/8"),
    dense=rows("1 -15/8 1; 0 15/8 -3/2; 0 3/8 0; 0 -3/8 1/2"),
)
HEUN3 = tableau(
    3, [[], ["1/3"], [0, "2/3"]], numbers("1/4 0 3/4"), dense=rows("1 -3/4; 0 0; 0 3/4")
)
# Bogacki and Shampine (1989), the 3(2) pair; inside a step the cubic through both ends and their
# slopes.
BOSH3 = tableau(
    3,
    [[], *rows("1/2; 0 3/4; 2/9 1/3 4/9")],
    numbers("2/9 1/3 4/9 0"),
    numbers("7/24 1/4 1/3 1/8"),
    2,
    rows("1 -4/3 5/9; 0 1 -2/3; 0 4/3 -8/9; 0 -1 1"),
)
# Dormand and Prince (1980), the 5(4) pair.
DOPRI5 = tableau(
    5,
    [
        [],
        *rows("""
        1/5;
        3/40 9/40;
        44/45 -56/15 32/9;
        19372/6561 -25360/2187 64448/6561 -212/729;
        9017/3168 -355/33 46732/5247 49/176 -5103/18656;
        35/384 0 500/1113 125/192 -2187/6784 11/84
    """),
    ],
    numbers("35/384 0 500/1113 125/192 -2187/6784 11/84 0"),
    numbers("5179/57600 0 7571/16695 393/640 -92097/339200 187/2100 1/40"),
    4,
    # Shampine (1986)
    rows("""
        1 -8048581381/2820520608 8663915743/2820520608 -12715105075/11282082432;
        0;
        0 131558114200/32700410799 -68118460800/10900136933 87487479700/32700410799;
        0 -1754552775/470086768 14199869525/1410260304 -10690763975/1880347072;
        0 127303824393/49829197408 -318862633887/49829197408 701980252875/199316789632;
        0 -282668133/205662961 2019193451/616988883 -1453857185/822651844;
        0 40617522/29380423 -110615467/29380423 69997945/29380423
    """),
)
# Tsitouras (2011), the 5(4) pair; coefficients as published, to 16 digits.
_TSIT5_B = numbers("""
    0.09646076681806523 0.01 0.4798896504144996 1.379008574103742 -3.290069515436081
    2.324710524099774 0
""")
_TSIT5_ERROR = numbers("""
    -0.00178001105222577714 -0.0008164344596567469 0.007880878010261995 -0.1447110071732629
    0.5823571654525552 -0.45808210592918697 1/66
""")
TSIT5 = tableau(
    5,
    [
        [],
        *rows("""
            0.161;
            -0.008480655492356989 0.335480655492357;
            2.8971530571054935 -6.359448489975075 4.3622954328695815;
            5.325864828439257 -11.748883564062828 7.4955393428898365 -0.09249506636175525;
            5.86145544294642 -12.92096931784711 8.159367898576159 -0.071584973281401
                -0.028269050394068383
        """),
        _TSIT5_B[:-1],
    ],
    _TSIT5_B,
    [float(b) - float(Fraction(error)) for b, error in zip(_TSIT5_B, _TSIT5_ERROR, strict=True)],
    4,
    # Tsitouras' interpolant, multiplied out
    rows("""
        1.0 -2.763706197274826 2.9132554618219126 -1.0530884977290216;
        0.0 0.1317 -0.2234 0.1017;
        0.0 3.9302962368947516 -5.941033872131505 2.490627285651253;
        0.0 -12.411077166933676 30.33818863028232 -16.548102889244902;
        0.0 37.50931341651104 -88.1789048947664 47.37952196281928;
        0.0 -27.896526289197286 65.09189467479366 -34.87065786149661;
        0.0 1.5 -4.0 2.5
    """),
)

"""Implicit pairs for stiff problems: the first stage explicit, one coefficient on the diagonal, the last stage at the step's end.

Both are L-stable and stiffly accurate: a step's result is its last stage, and what decays fast is gone after one step however long.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

from solvers.tableau import Coefficient, Tableau, tableau


def cubic(b: Sequence[Fraction]) -> list[list[Coefficient]]:
    """Weights of the cubic through both ends of a step and the slopes there, which are the first and the last stage."""
    slopes = {0: (1, -2, 1), len(b) - 1: (0, -1, 1)}
    rows = []
    for i, weight in enumerate(b):
        p, q, r = slopes.get(i, (0, 0, 0))
        rows.append([Fraction(p), 3 * weight + q, r - 2 * weight])
    return [list(row) for row in rows]


def _kvaerno3() -> Tableau:
    """Kvaerno (2004), the 3(2) pair, from the root g of g^3 - 3 g^2 + 3 g/2 - 1/6 that makes it L-stable.

    Nodes 0, 2g, 1, 1; the third row solves sum b c = 1/2, the last one sum b c = 1/2 and sum b c^2 = 1/3 too.
    """
    g = Fraction("0.435866521508458999416019451193556843")
    a = (1 - 2 * g) / (4 * g)
    b = 1 / (12 * g * (1 - 2 * g))
    e = Fraction(1, 2) - g - 2 * g * b
    lower, upper = [1 - g - a, a, g], [1 - g - b - e, b, e, g]
    return tableau(3, [[], [g], lower[:2], upper[:3]], upper, [*lower, 0], 2, cubic(upper), gamma=g)


KVAERNO3 = _kvaerno3()

# Kennedy and Carpenter (2003), the implicit half of ARK4(3)6L[2]SA.
_B: list[Coefficient] = ["82889/524892", 0, "15625/83664", "69875/102672", "-2260/8211", "1/4"]
ESDIRK4 = tableau(
    4,
    [
        [],
        ["1/4"],
        ["8611/62500", "-1743/31250"],
        ["5012029/34652500", "-654441/2922500", "174375/388108"],
        ["15267082809/155376265600", "-71443401/120774400", "730878875/902184768", "2285395/8070912"],
        _B[:5],
    ],
    _B,
    ["4586570599/29645900160", 0, "178811875/945068544", "814220225/1159782912", "-3700637/11593932", "61727/225920"],
    3,
    cubic([Fraction(weight) for weight in _B]),
    gamma="1/4",
)

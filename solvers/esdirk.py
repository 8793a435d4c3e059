"""An implicit pair for stiff problems: an explicit first stage, one coefficient on the diagonal,
and the last stage at the step's end.

It is L-stable and stiffly accurate: a step's result is its last stage. So fast decaying components
vanish after one step of any size.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

from solvers.tableau import numbers, rows, tableau


def cubic(b: Sequence[str]) -> list[list[Fraction]]:
    """Weights of the cubic through both ends of a step with their slopes, which are the first and
    the last stage.
    """
    slopes = {0: (1, -2, 1), len(b) - 1: (0, -1, 1)}
    polynomials = []
    for i, weight in enumerate(map(Fraction, b)):
        p, q, r = slopes.get(i, (0, 0, 0))
        polynomials.append([Fraction(p), 3 * weight + q, r - 2 * weight])
    return polynomials


# Kennedy and Carpenter (2003), the implicit half of ARK4(3)6L[2]SA; coefficients as published.
B = numbers("82889/524892 0 15625/83664 69875/102672 -2260/8211 1/4")
ESDIRK4 = tableau(
    4,
    [
        [],
        *rows("""
            1/4;
            8611/62500 -1743/31250;
            5012029/34652500 -654441/2922500 174375/388108;
            15267082809/155376265600 -71443401/120774400 730878875/902184768 2285395/8070912
        """),
        B[:-1],
    ],
    B,
    numbers("""
        4586570599/29645900160 0 178811875/945068544 814220225/1159782912 -3700637/11593932
        61727/225920
    """),
    3,
    cubic(B),
    gamma="1/4",
)

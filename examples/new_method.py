"""A new Runge-Kutta method is one entry of a table: Ralston's third-order method, which ctrans does
not have.

ctrans checks its coefficients when you make it. Change one and read the message. Then every command
and test knows the method by name.

python examples/new_method.py
"""

from ctrans.model.orders import substep_convergence
from solvers import METHODS, ConfigError, RungeKutta, tableau

METHODS["ralston3"] = RungeKutta(
    tableau(order=3, a=[[], ["1/2"], [0, "3/4"]], b=["2/9", "1/3", "4/9"])
)

for placement in ("pre", "peri", "post"):
    result = substep_convergence("ralston3", placement)
    print(
        f"ralston3 on {placement:5} has order {result.order:.2f}; errors"
        f" {', '.join(f'{e:.1e}' for e in result.errors)}"
    )

try:
    tableau(order=3, a=[[], ["1/2"], [0, "3/4"]], b=["2/9", "4/9", "1/3"])
except ConfigError as error:
    print(f"with two weights exchanged: {error}")

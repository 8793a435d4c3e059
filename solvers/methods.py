"""The table of integration methods. A new method is one entry; the order, gradient, dtype and
device tests include it.
"""

from __future__ import annotations

from solvers import explicit_tableaus as tableaus
from solvers.controller import PI
from solvers.dop853 import DOP853
from solvers.errors import ConfigError, look_up
from solvers.esdirk import ESDIRK4
from solvers.method import HasFixedSteps, Method
from solvers.runge_kutta import RungeKutta
from solvers.torchdiffeq_methods import NAMES, TorchDiffEq

TUNED = PI(safety=0.92, alpha=0.8, beta=0.1)
"""Chosen for tsit5 on one half of DETEST. On the other half and on switched models it needs the
least work at equal error, at 1e-3, 1e-6 and 1e-9 (`benchmarks/controllers.py`). At equal tolerances
it needs as many evaluations as `cautious`, up to 15% more on short segments.
"""
STIFF = PI(safety=0.8, grow=5.0)
"""Chosen for esdirk4 on one half of eight stiff problems. On the other half it needs the least work
at equal error, too: 0.84 to 0.91 of that of `cautious` at 1e-3 to 1e-5, with errors of 0.05 to 0.1
tolerances in place of 1.2 to 1.9 (`benchmarks/stiff_controllers.py`).
"""

METHODS: dict[str, Method] = {
    "euler": RungeKutta(tableaus.EULER),
    "midpoint": RungeKutta(tableaus.MIDPOINT),
    "heun": RungeKutta(tableaus.HEUN),
    "heun3": RungeKutta(tableaus.HEUN3),
    "rk4": RungeKutta(tableaus.RK4),
    "heun_euler": RungeKutta(tableaus.HEUN, adaptive=True),
    "bosh3": RungeKutta(tableaus.BOSH3, adaptive=True),
    "dopri5": RungeKutta(tableaus.DOPRI5, adaptive=True),
    "tsit5": RungeKutta(tableaus.TSIT5, adaptive=True, controller=TUNED),
    "dop853": RungeKutta(DOP853, adaptive=True),
    "esdirk4": RungeKutta(ESDIRK4, adaptive=True, controller=STIFF),
    **{f"torchdiffeq:{name}": TorchDiffEq(name) for name in NAMES},
}


def get_method(method: str | Method) -> Method:
    """The method of that name, or the method itself. Raises ConfigError with the nearest name
    otherwise.
    """
    # names first: an isinstance check of a protocol takes longer than an Euler step without its
    # field
    if isinstance(method, str) or not isinstance(method, Method):
        return look_up("method", method, METHODS)
    return method


def fixed_step(method: str | Method) -> Method:
    """The method with steps of equal size. Raises ConfigError if it has none (torchdiffeq's
    adaptive methods).
    """
    chosen = get_method(method)
    if not chosen.adaptive:
        return chosen
    if not isinstance(chosen, HasFixedSteps):
        raise ConfigError(
            f"{method!r} only runs with adaptive steps: choose an own or a fixed-step method, as"
            " tsit5 or rk4"
        )
    return chosen.fixed()

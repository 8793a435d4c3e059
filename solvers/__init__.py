"""Integrates switched ODEs on tensors: smooth fields on segments of time, one after the other.

>>> solution = solve([Segment(0, 1, lambda t, x: -x), Segment(1, 2, lambda t, x: x)], torch.ones(3), method="tsit5")
"""

from solvers.adjoint import Adjoint, AdjointError
from solvers.checkpoint import Checkpoint
from solvers.errors import ConfigError, SolveError
from solvers.gradients import GRADIENTS, Gradient
from solvers.methods import METHODS, Method
from solvers.reversible import Reversible
from solvers.runge_kutta import RungeKutta
from solvers.segment import Segment
from solvers.solution import Solution, Stats, Status
from solvers.solve import solve
from solvers.tableau import Tableau, tableau

__all__ = [
    "GRADIENTS",
    "METHODS",
    "Adjoint",
    "AdjointError",
    "Checkpoint",
    "ConfigError",
    "Gradient",
    "Method",
    "Reversible",
    "RungeKutta",
    "Segment",
    "Solution",
    "SolveError",
    "Stats",
    "Status",
    "Tableau",
    "solve",
    "tableau",
]

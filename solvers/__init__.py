"""Integrates switched ODEs on tensors: smooth fields on segments of time, one after the other.

>>> decay = Segment(0, 1, lambda t, x: -x)
>>> growth = Segment(1, 2, lambda t, x: x)
>>> solution = solve([decay, growth], torch.ones(3), method="tsit5")
"""

from solvers.adjoint import Adjoint, AdjointError
from solvers.changes import version_of
from solvers.checked import AnyFloat, Finite, checked, is_dense
from solvers.checkpoint import Checkpoint
from solvers.controller import CONTROLLERS, PI, PID, Cautious, Controller
from solvers.each import EachSolution, solve_each
from solvers.error_norm import ERROR_NORMS, Norm, get_norm
from solvers.errors import ConfigError, SolveError, is_class, look_up, shown, unknown
from solvers.event import Event
from solvers.explicit_tableaus import EULER
from solvers.gradients import GRADIENTS, get_gradient
from solvers.march import Gradient
from solvers.method import HasFixedSteps, HasReversibleForm, Method, Replayable, ReversibleForm
from solvers.methods import METHODS, fixed_step, get_method
from solvers.odeint import odeint
from solvers.odeint_calls import odeint_adjoint, odeint_dense, odeint_event
from solvers.request import check_solver
from solvers.reversible import Reversible
from solvers.reversible_scheme import ReversibleScheme
from solvers.run import Run, Save, finite
from solvers.runge_kutta import RungeKutta
from solvers.segment import Field, Map, Segment, Time
from solvers.solution import ADVICE, Solution, Stats, Status
from solvers.solve import solve
from solvers.step_control import StepControl, check_unused_options
from solvers.tableau import Tableau, tableau

__all__ = [
    "ADVICE",
    "CONTROLLERS",
    "ERROR_NORMS",
    "EULER",
    "GRADIENTS",
    "METHODS",
    "PI",
    "PID",
    "Adjoint",
    "AdjointError",
    "AnyFloat",
    "Cautious",
    "Checkpoint",
    "ConfigError",
    "Controller",
    "EachSolution",
    "Event",
    "Field",
    "Finite",
    "Gradient",
    "HasFixedSteps",
    "HasReversibleForm",
    "Map",
    "Method",
    "Norm",
    "Replayable",
    "Reversible",
    "ReversibleForm",
    "ReversibleScheme",
    "Run",
    "RungeKutta",
    "Save",
    "Segment",
    "Solution",
    "SolveError",
    "Stats",
    "Status",
    "StepControl",
    "Tableau",
    "Time",
    "check_solver",
    "check_unused_options",
    "checked",
    "finite",
    "fixed_step",
    "get_gradient",
    "get_method",
    "get_norm",
    "is_class",
    "is_dense",
    "look_up",
    "odeint",
    "odeint_adjoint",
    "odeint_dense",
    "odeint_event",
    "shown",
    "solve",
    "solve_each",
    "tableau",
    "unknown",
    "version_of",
]

_CHECKED: dict[str, tuple[str, ...]] = {
    "check_solver": ("method", "steps"),
    "check_unused_options": (),
    "finite": (),
    "odeint": ("t", "gradient"),
    "odeint_adjoint": ("t", "adjoint_method", "adjoint_params"),
    "odeint_dense": (),
    "odeint_event": ("odeint_interface",),
    "solve": (
        "segments",
        "method",
        "steps",
        "rtol",
        "atol",
        "gradient",
        "save",
        "times",
        "events",
        "steady",
        "on_step",
        "progress",
    ),
    "solve_each": ("segments", "x0", "method", "rtol", "atol"),
    "tableau": (),
}
"""Functions whose arguments are checked here, where a user calls, and nowhere inside: each with the
arguments that it checks itself, by messages that say more. What is not listed checks them all.
"""
for _name, _by_itself in _CHECKED.items():
    globals()[_name] = checked(globals()[_name], face=__name__, by_itself=_by_itself)

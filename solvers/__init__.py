"""Integrates switched ODEs on tensors: smooth fields on segments of time, one after the other.

>>> solution = solve([Segment(0, 1, lambda t, x: -x), Segment(1, 2, lambda t, x: x)], torch.ones(3), method="tsit5")
"""

from solvers.adjoint import Adjoint, AdjointError
from solvers.checkpoint import Checkpoint
from solvers.controller import CONTROLLERS, PI, PID, Cautious, Controller
from solvers.deprecated import old_names
from solvers.each import EachSolution, solve_each
from solvers.error_norm import ERROR_NORMS, Norm, get_norm
from solvers.errors import ConfigError, SolveError, look_up, unknown
from solvers.event import Event
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
from solvers.tableau import EULER, Tableau, tableau

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
    "Cautious",
    "Checkpoint",
    "ConfigError",
    "Controller",
    "EachSolution",
    "Event",
    "Field",
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
    "finite",
    "fixed_step",
    "get_gradient",
    "get_method",
    "get_norm",
    "look_up",
    "odeint",
    "odeint_adjoint",
    "odeint_dense",
    "odeint_event",
    "solve",
    "solve_each",
    "tableau",
    "unknown",
]

__getattr__ = old_names(__name__)

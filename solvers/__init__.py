"""Integrates switched ODEs on tensors: smooth fields on segments of time, one after the other.

>>> decay = Segment(0, 1, lambda t, x: -x)
>>> growth = Segment(1, 2, lambda t, x: x)
>>> solution = solve([decay, growth], torch.ones(3), method="tsit5")
"""

from solvers import error_norm, gradients, methods, request, run, step_control
from solvers.adjoint import Adjoint, AdjointError
from solvers.checked import AnyFloat, Finite, checked, is_dense
from solvers.checkpoint import Checkpoint
from solvers.controller import CONTROLLERS, PI, PID, Cautious, Controller
from solvers.each import EachSolution, solve_each
from solvers.error_norm import ERROR_NORMS, Norm
from solvers.errors import ConfigError, SolveError, look_up, shown, unknown
from solvers.event import Event
from solvers.explicit_tableaus import EULER
from solvers.gradients import GRADIENTS
from solvers.march import Gradient
from solvers.method import HasFixedSteps, HasReversibleForm, Method, Replayable, ReversibleForm
from solvers.methods import METHODS
from solvers.odeint import odeint
from solvers.odeint_calls import odeint_adjoint, odeint_dense, odeint_event
from solvers.reversible import Reversible
from solvers.reversible_scheme import ReversibleScheme
from solvers.run import Run, Save
from solvers.runge_kutta import RungeKutta
from solvers.segment import Field, Map, Segment, Time
from solvers.solution import ADVICE, Solution, Stats, Status
from solvers.solve import solve
from solvers.step_control import StepControl
from solvers.tableau import Tableau, tableau

# checked here and not where they are defined, because a solve calls them, some of them at each step
check_solver, check_unused_options = (
    checked(request.check_solver),
    checked(step_control.check_unused_options),
)
get_gradient, get_method, get_norm = (
    checked(gradients.get_gradient),
    checked(methods.get_method),
    checked(error_norm.get_norm),
)
finite, fixed_step = checked(run.finite), checked(methods.fixed_step)

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
]

"""`odeint` with torchdiffeq's arguments, names and results, by this package's methods."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from solvers.checked import has_numbers
from solvers.declared_switches import check_no_learned_switch
from solvers.errors import ConfigError, SolveError, shown, unknown
from solvers.explicit_tableaus import RK4_38
from solvers.learned_time import learned_tensor
from solvers.march import Gradient
from solvers.method import Method
from solvers.methods import METHODS
from solvers.odeint_problem import Func, Problem
from solvers.run import real_type
from solvers.runge_kutta import RungeKutta
from solvers.step_control import Tolerance
from solvers.torchdiffeq_methods import NAMES
from solvers.transforms import check_not_batched
from solvers.tree import Tree, leaves, mapped

ITS_METHODS: dict[str, Method] = {
    **{name: METHODS[name] for name in ("euler", "midpoint", "heun3", "bosh3", "dopri5", "tsit5")},
    "heun2": METHODS["heun"],
    "adaptive_heun": METHODS["heun_euler"],
    "rk4": RungeKutta(RK4_38),  # what it calls so
}
"""torchdiffeq's names of methods that this package has too. torchdiffeq runs the rest of `NAMES` as
a whole: a multistep method would lose its past with every call.
"""
ALL_METHODS = {name: METHODS[f"torchdiffeq:{name}"] for name in NAMES} | ITS_METHODS


def odeint(
    func: Func,
    y0: Any,
    t: Tensor,
    *,
    rtol: Tolerance = 1e-7,
    atol: Tolerance = 1e-9,
    method: str | None = None,
    options: Mapping[str, Any] | None = None,
    event_fn: Any = None,
    gradient: str | Gradient = "backprop",
) -> Any:
    """y at each time of t, stacked along a new first axis: y(t[0]) = y0, dy/dt = func(t, y). t may
    ascend or descend.

    It replaces `torchdiffeq.odeint` (0.2.5). Gradients reach y0, t and all that func depends on.
    torchdiffeq itself runs the methods that only it has (dopri8, fehlberg2, the Adams ones, and
    scipy_solver, which has gradients by `adjoint` only), with its own checks and warnings. With
    fixed steps its Adams values may blow up on simple equations: `explicit_adams` with steps of
    0.01 is wrong by 9e4 for y' = -0.8 y + cos(0.8 t) on [0, 2]. The following holds for this
    package's methods, `ITS_METHODS`.

    - `func(t, y)`: dy/dt, like y
    - `y0`: a tensor or a tuple of tensors; func's value and the result have its structure. Lists,
      named tuples and dictionaries work too, also nested
    - `t`: the times. Adaptive methods choose their steps and interpolate. Fixed-step methods step
      from time to time, or by `step_size`. Derivatives by them are the solution's up to the second
    - `rtol`, `atol`: of an adaptive method; numbers, or tensors for tolerances by entry. A relative
      one below the resolution of y0's type is raised to it
    - `method`: a name, dopri5 if None
    - `options`: norm, first_step, min_step, max_step, max_num_steps, step_t, jump_t, safety,
      ifactor, dfactor; step_size, grid_constructor, interp ("linear" or "cubic"). `dtype` and
      `perturb` have no effect: time is always float64, and a field is never evaluated at a switch.
      Other options give a warning, as in torchdiffeq. A time of `jump_t` or `step_t` that requires
      a gradient gets it, which torchdiffeq lacks
    - `event_fn(t, y)`: the result is then (event_t, states at t[0] and at event_t): the first time
      at which an entry of event_fn's value has another sign than at t[0]. Both have gradients, also
      by tensors that event_fn depends on, which torchdiffeq lacks. t has two times; the second sets
      the direction and a scale. The solve runs for up to 1e9 of these intervals, or a million steps
      of a fixed-step method
    - `gradient`: a name of `GRADIENTS` (`adjoint` for `odeint_adjoint`); torchdiffeq has no such
      argument

    Unlike torchdiffeq, errors raise ConfigError, a ValueError, or SolveError with the time and
    advice, and no assertion. It warns if steps have too large an error because `min_step` allows no
    shorter ones, and if func has callbacks, which are not called.
    """
    _check_times(t)
    if event_fn is not None and (len(t) != 2 or not callable(event_fn)):
        raise ConfigError(
            f"event_fn = {shown(event_fn)} with {len(t)} times: give a function of t and y, and two"
            " times"
        )
    if method in NAMES and method not in ITS_METHODS:
        calls = {"backprop": "odeint", "adjoint": "odeint_adjoint"}
        call = None
        if isinstance(gradient, str):
            call = calls.get(gradient)
        if call is None:
            raise ConfigError(
                f"method {method!r} is torchdiffeq's and has the gradients {', '.join(calls)} only,"
                f" not {shown(gradient)}"
            )
        request = {
            "rtol": rtol,
            "atol": atol,
            "method": method,
            "options": options,
            "event_fn": event_fn,
        }
        # the adjoint has the derivative by the times, and scipy's states have no graph
        lacks_times = call == "odeint" and event_fn is None and method != "scipy_solver"
        if lacks_times and learned_tensor(t) is not None:
            return _their_states_by_times(func, y0, t, request)
        return their_result(call, func, y0, t, **request)
    if method is None:
        method = "dopri5"
    chosen = ITS_METHODS.get(method)
    if chosen is None:
        raise unknown("method", method, ALL_METHODS)
    problem = Problem(func, y0, chosen, rtol, atol, options, gradient)
    first = problem.start
    times_are_learned = learned_tensor(t) is not None
    if times_are_learned:
        problem.start = _start_by_time(problem.field, first, t)
    if event_fn is not None:
        event_t, states = problem.until(event_fn, t)
        return event_t, problem.parts(torch.stack([first, states]))
    if len(t) == 1:
        states = torch.stack([problem.start])
    elif chosen.adaptive:
        states = problem.adaptive(t)
    else:
        states = problem.fixed(t)
    if times_are_learned:
        states = _states_by_times(problem.field, first, states, t)
    return problem.parts(states)


def _start_by_time(field: Func, y0: Tensor, t: Tensor) -> Tensor:
    """y0 with the derivative of the solution by t[0]."""
    # in the type in which the field gets the time
    start = t[0].to(real_type(y0.dtype))
    # start.detach() - start is an exact zero that carries the derivative
    return _moved(field, start, y0, start.detach() - start)


def _states_by_times(field: Func, y0: Tensor, states: Iterable[Tensor], t: Tensor) -> Tensor:
    """The states at t with the derivatives of the solution by t[1:]; the first one is y0."""
    with_times = [y0]
    for time, y in list(zip(t.to(real_type(y0.dtype)), states, strict=True))[1:]:
        with_times.append(_moved(field, time.detach(), y, time - time.detach()))
    return torch.stack(with_times)


def _their_states_by_times(func: Func, y0: Any, t: Tensor, request: dict[str, Any]) -> Any:
    """torchdiffeq's states at t, with the derivatives of the solution by t. Its Adams methods have
    none, or wrong ones, with a step_size.
    """
    tree = Tree(y0, "y0")
    field = tree.flat_map("func", func)
    first = tree.flat("y0", y0)
    start = tree.parts(_start_by_time(field, first, t))
    found = their_result("odeint", func, start, t.detach(), **request)
    states = []
    for i in range(len(t)):
        state = mapped(partial(_entry, i), found)
        states.append(tree.flat("torchdiffeq", state))
    return tree.parts(_states_by_times(field, first, states, t))


def _entry(i: int, y: Tensor) -> Tensor:
    return y[i]


def _moved(field: Func, t: Tensor, y: Tensor, h: Tensor) -> Tensor:
    """A step of length h by the midpoint method. h is an exact zero that carries a derivative: the
    step leaves y's value unchanged, and has the solution's first and second derivatives.
    """
    half_way = y + 0.5 * h * field(t, y)
    moved: Tensor = y + h * field(t + 0.5 * h, half_way)
    return moved


def their_result(call: str, func: Func, y0: Any, t: Tensor, **request: Any) -> Any:
    """The result of torchdiffeq's function of that name, for states of any structure. Its bare
    assertions become errors.
    """
    import torchdiffeq

    if call == "odeint_adjoint":
        _with_parameters(func, request)
    check_no_learned_switch(request["options"], f"torchdiffeq's {request['method']}")
    # torchdiffeq supports no other structure
    if not isinstance(y0, Tensor) and type(y0) is not tuple:
        tree = Tree(y0, "y0")
        flat_func = tree.flat_map("func", func)
        flat_y0 = tree.flat("y0", y0)
        if request["event_fn"] is None:
            return tree.parts(their_result(call, flat_func, flat_y0, t, **request))
        request["event_fn"] = tree.on_parts(request["event_fn"])
        event_t, states = their_result(call, flat_func, flat_y0, t, **request)
        return event_t, tree.parts(states)
    if request["options"] is not None:
        request["options"] = dict(request["options"])
    sources: list[Tensor] = []
    if call == "odeint" and request["method"] == "scipy_solver" and torch.is_grad_enabled():
        func = _with_first_value(func, sources)
        sources.extend([*leaves(y0), t])
    try:
        result = getattr(torchdiffeq, call)(func, y0, t, **request)
    except AssertionError as error:
        raise SolveError(
            f"torchdiffeq's {request['method']}: {error or 'it stopped without a message'}"
        ) from None
    if not sources:
        return result
    of_states: Callable[..., Tensor] = _WithoutGradient.apply
    return mapped(lambda states: of_states(states, *sources), result)


def _with_first_value(func: Func, values: list[Tensor]) -> Func:
    """The function, which adds its first value, with its graph, to `values`."""
    is_first = True

    def watched(t: Tensor, y: Any) -> Any:
        nonlocal is_first
        if not is_first:
            return func(t, y)
        is_first = False
        with torch.enable_grad():
            value = func(t, y)
        values.extend(leaves(value))
        return mapped(Tensor.detach, value)

    return watched


def _with_parameters(func: Func, request: dict[str, Any]) -> None:
    """Gives torchdiffeq's adjoint the parameters of func, which it finds in modules alone. Raises
    ConfigError for a function without them.
    """
    if request.get("adjoint_params") is not None:
        return
    if not isinstance(func, nn.Module):
        raise ConfigError(
            f"the method {request['method']!r} is torchdiffeq's, and its adjoint has gradients of a"
            " module's parameters only: give func as an nn.Module, or call odeint_adjoint with"
            " adjoint_params=, a list of the tensors that func depends on, () for none"
        )
    request["adjoint_params"] = tuple(p for p in func.parameters() if p.requires_grad)


class _WithoutGradient(torch.autograd.Function):
    """The states of a solver that leaves torch, and what they depend on. A backward pass to that
    raises ConfigError.
    """

    @staticmethod
    def forward(ctx: Any, states: Tensor, *sources: Tensor) -> Tensor:
        return states.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise ConfigError(
            "scipy_solver leaves torch, so odeint has no gradient with it: call odeint_adjoint in"
            " place of odeint"
        )


def _check_times(t: object) -> None:
    if isinstance(t, Tensor) and not has_numbers(t):
        raise ConfigError(f"t is {shown(t)}: give a floating tensor of one axis")
    if not isinstance(t, Tensor) or t.dim() != 1 or not t.dtype.is_floating_point or len(t) == 0:
        if isinstance(t, Tensor):
            what = f"a tensor of shape {tuple(t.shape)} of {t.dtype}"
        else:
            what = type(t).__name__
        raise ConfigError(f"t is {what}: give a floating tensor of one axis")
    check_not_batched("t", t)
    steps = t.detach().diff()
    if not (bool((steps > 0).all()) or bool((steps < 0).all())):
        raise ConfigError("t must be strictly increasing or strictly decreasing")

"""torchdiffeq's other functions, `odeint_adjoint`, `odeint_event` and `odeint_dense`, by this
package's `odeint`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from jaxtyping import Shaped
from torch import Tensor

from solvers.adjoint import Adjoint
from solvers.checked import binds
from solvers.errors import ConfigError, look_up, shown
from solvers.learned_time import learned_tensor
from solvers.method import Method
from solvers.methods import METHODS
from solvers.odeint import ALL_METHODS, ITS_METHODS, odeint, their_result
from solvers.odeint_problem import Func, Problem
from solvers.step_control import Tolerance
from solvers.torchdiffeq_methods import NAMES


def odeint_adjoint(
    func: Func,
    y0: Any,
    t: Tensor,
    *,
    rtol: Tolerance = 1e-7,
    atol: Tolerance = 1e-9,
    method: str | None = None,
    options: Mapping[str, Any] | None = None,
    event_fn: Any = None,
    adjoint_rtol: float | None = None,
    adjoint_atol: float | None = None,
    adjoint_method: str | None = None,
    adjoint_options: Mapping[str, Any] | None = None,
    adjoint_params: Iterable[Tensor] | None = None,
) -> Any:
    """`odeint` with the gradient of the adjoint ODE. The backward solve may have its own tolerances
    and method.

    It replaces `torchdiffeq.odeint_adjoint` (0.2.5).

    - `func` to `event_fn`: as for `odeint`
    - `adjoint_rtol`, `adjoint_atol`, `adjoint_method`: of the backward solve; None takes those of
      the forward solve
    - `adjoint_options`: the same as `options`, and the norm "seminorm" or None: the error of the
      parameters' integral is never controlled here. Anything else raises ConfigError
    - `adjoint_params`: accepted but not needed, since all tensors that func depends on get
      gradients. So func may be any function
    """
    if adjoint_params is not None:
        if isinstance(adjoint_params, Tensor) or not isinstance(adjoint_params, Iterable):
            raise ConfigError(
                f"adjoint_params = {shown(adjoint_params)}: give a list of the parameters that func"
                " depends on, or None"
            )
        adjoint_params = tuple(adjoint_params)  # an iterator's, too
    if method in NAMES and method not in ITS_METHODS:
        return their_result(
            "odeint_adjoint",
            func,
            y0,
            t,
            rtol=rtol,
            atol=atol,
            method=method,
            options=options,
            event_fn=event_fn,
            adjoint_rtol=adjoint_rtol,
            adjoint_atol=adjoint_atol,
            adjoint_method=adjoint_method,
            adjoint_options=adjoint_options,
            adjoint_params=adjoint_params,
        )
    _check_adjoint_options(adjoint_options or {}, options or {})
    if not all(isinstance(parameter, Tensor) for parameter in adjoint_params or ()):
        raise ConfigError(
            "adjoint_params holds something else than tensors: give the parameters that func"
            " depends on, or None"
        )
    back_method = None
    if adjoint_method is not None:
        back_method = look_up("adjoint_method", adjoint_method, ALL_METHODS)
    gradient = Adjoint(rtol=adjoint_rtol, atol=adjoint_atol, method=back_method)
    return odeint(
        func,
        y0,
        t,
        rtol=rtol,
        atol=atol,
        method=method,
        options=options,
        event_fn=event_fn,
        gradient=gradient,
    )


def _check_adjoint_options(adjoint_options: Mapping[str, Any], options: Mapping[str, Any]) -> None:
    """Raises ConfigError for an option of the backward solve that the forward solve does not have,
    except its norm.
    """
    for name, value in adjoint_options.items():
        if name == "norm":
            is_allowed = _is_equal(value, None) or _is_equal(value, "seminorm")
        else:
            is_allowed = _is_equal(value, options.get(name))
        if not is_allowed:
            raise ConfigError(
                f"adjoint_options has {name} = {shown(value)}: the backward solve uses those of the"
                " forward solve, and norm 'seminorm': leave it out"
            )


def _is_equal(value: object, option: object) -> bool:
    """Whether both are the same object, number or text. Tensors are equal entry by entry only."""
    return value is option or (isinstance(value, (str, int, float)) and value == option)


def odeint_event(
    func: Func,
    y0: Any,
    t0: Tensor,
    *,
    event_fn: Callable[[Tensor, Any], Tensor],
    reverse_time: bool = False,
    odeint_interface: Callable[..., Any] = odeint,
    **kwargs: Any,
) -> Any:
    """(event_t, states at t0 and there), as `torchdiffeq.odeint_event`. `odeint_interface` may be
    `odeint_adjoint`. See `odeint`.
    """
    if t0.dim() != 0:
        raise ConfigError(f"t0 is {shown(t0)}: give a tensor without axes")
    function = getattr(odeint_interface, "forward", odeint_interface)
    if not binds(function, func, y0, t0, event_fn=event_fn):
        raise ConfigError(
            f"odeint_interface = {shown(odeint_interface)} does not take the arguments of odeint:"
            " give odeint or odeint_adjoint"
        )
    direction = 1
    if reverse_time:
        direction = -1
    t = torch.stack([t0, t0.detach() + direction])
    return odeint_interface(func, y0, t, event_fn=event_fn, **kwargs)


def odeint_dense(
    func: Func,
    y0: Any,
    t0: float | Shaped[Tensor, ""],
    t1: float | Shaped[Tensor, ""],
    *,
    rtol: Tolerance = 1e-7,
    atol: Tolerance = 1e-9,
    method: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Callable[[Tensor], Any]:
    """t -> y(t) between t0 and t1, as `torchdiffeq.odeint_dense` (0.2.5): one solve, done at once;
    y(t) interpolates its steps.

    t is a tensor of any shape; the axes of y(t) start with those of t. A time outside raises
    ConfigError.

    - `func`, `y0`, `rtol`, `atol`, `options`: as for `odeint`
    - `t0`, `t1`: the ends, in any order, without gradients (ConfigError). y(t) has gradients by y0,
      t and all that func depends on
    - `method`: any adaptive one of this package, dopri5 if None
    """
    chosen: Method | None = METHODS["dopri5"]
    if method is not None:
        chosen = ITS_METHODS.get(method)
    if chosen is None or not chosen.adaptive:
        adaptive = ", ".join(name for name, entry in ITS_METHODS.items() if entry.adaptive)
        raise ConfigError(
            f"method {method!r} has no states inside steps of its own choice: use one of {adaptive}"
        )
    for name, end in (("t0", t0), ("t1", t1)):
        if learned_tensor(end) is not None:
            raise ConfigError(
                f"{name} requires a gradient, which y(t) does not have: give {name}.detach(), or"
                " use odeint"
            )
    return Problem(func, y0, chosen, rtol, atol, options).curve(float(t0), float(t1))

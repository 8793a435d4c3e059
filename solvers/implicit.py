"""The stage of an implicit method: k = f(t, b + c k), solved by Newton's method with matrix-free
GMRES.

With y = b + c k a step of Newton's method solves (1 - c J) d = b + c f(t, y) - y, J = df/dx, and
GMRES (Saad and Schultz 1986) asks for products J v only: no matrix is made. They come from the
graph of one evaluation, so that fields must be differentiable twice.

**Derivatives** are those of the equation, by the implicit function theorem: dk = (1 - c J)^-1 (J db
+ df) for a change df of the field. What k is computed from gets w = (1 - c J')^-1 dL/dk through one
evaluation of the field, w by GMRES on the graph of another; memory and cost do not depend on how
many iterations found k. They are exact as far as k is: second derivatives and forward mode raise
ConfigError.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.attention import SDPBackend, sdpa_kernel

from solvers.errors import ConfigError, SolveError
from solvers.run import Run, dtype_name, finite
from solvers.segment import Segment
from solvers.solution import Status
from solvers.transforms import batched, in_forward_mode

Linear = Callable[[Tensor], Tensor]

ITERATIONS = 12
"""Newton's method that needs more is taken to fail: a shorter step starts nearer."""
ACCURACY = 1e-3
"""What part of the tolerances the last correction may be; what is left is the square of it, or
`FORCED` times it.
"""
FORCED = 1e-5
"""What part of the residual GMRES may leave in an iteration."""
KRYLOV, RESTARTS = 40, 3


class NotSolved(Exception):  # noqa: N818 - a signal inside the package
    """Newton's method did not find a stage; the status says whether that is all, or the field's
    values were no numbers.
    """

    def __init__(self, status: Status):
        super().__init__(status.value)
        self.status = status


def implicit_stage(run: Run, segment: Segment, t: float, base: Tensor, c: float, near: Tensor) -> Tensor:
    """k = f(t, base + c k), where base + c k is looked for from a state that is near. Raises
    NotSolved where Newton's method fails.
    """
    if batched() or in_forward_mode():
        raise ConfigError(
            "an implicit method looks at numbers, which is not possible under vmap, and is differentiated backward only: use an explicit "
            "method, as rk4, there"
        )
    if base.dtype.itemsize < 4:
        raise ConfigError(
            f"Newton's method cannot find a stage in {dtype_name(base.dtype)}: keep the state in float32 (autocast does)"
        )
    with torch.no_grad():
        y = _newton(run, segment, t, base.detach(), c, near.detach())
        k = (y - base) / c
    return _differentiable(run, segment, t, base, c, y, k) if torch.is_grad_enabled() else k


def _newton(run: Run, segment: Segment, t: float, base: Tensor, c: float, y: Tensor) -> Tensor:
    """y = base + c f(t, y)."""
    around = y.abs()
    for _ in range(ITERATIONS):
        velocity, jacobian = _linearised(run, segment, t, y)
        residual = base + c * velocity - y
        if not finite(residual):
            raise NotSolved(Status.NON_FINITE)
        # in units of the tolerances entries of all sizes count alike
        scale = run.atol + run.rtol * torch.maximum(y.abs(), around)
        size = float(torch.linalg.vector_norm(residual / scale)) / math.sqrt(y.numel())
        step, left = gmres(partial(_newtons, jacobian, c, scale), residual / scale, FORCED)
        step = scale * step
        y = y + step
        # (1 - c J)^-1 makes nothing much larger where the field is stiff: what is left of the
        # residual bounds what is left to go
        if left * size <= ACCURACY and run.size(step, y) <= ACCURACY:
            return y
        # at rounding it gets no smaller
        if bool((step.abs() <= 8 * torch.finfo(y.dtype).eps * torch.maximum(y.abs(), around)).all()):
            return y
    raise NotSolved(Status.NOT_SOLVED)


def _newtons(jacobian: Linear, c: float, scale: Tensor, v: Tensor) -> Tensor:
    """(1 - c J) v, both in units of the scale."""
    v = scale * v
    return (v - c * jacobian(v)) / scale


def _linearised(run: Run, segment: Segment, t: float, y: Tensor) -> tuple[Tensor, Linear]:
    """f(t, y) and v -> J v, which is the derivative of J' u by u along v: the field itself is
    evaluated once, however many products.
    """
    # a fused attention is differentiated once only; nothing here is kept for a gradient, or thrown
    # away to be computed again
    with torch.enable_grad(), sdpa_kernel(SDPBackend.MATH), saved_tensors_hooks(_as_it_is, _as_it_is):
        inner, u = y.detach().requires_grad_(), torch.zeros_like(y).requires_grad_()
        values = run.velocity(segment, t, inner).to(y.dtype)
        back = None
        if values.requires_grad:
            (back,) = torch.autograd.grad(values, inner, u, create_graph=True, allow_unused=True)

    def product(v: Tensor) -> Tensor:
        along = None
        if back is not None and back.requires_grad:
            (along,) = torch.autograd.grad(back, u, v, retain_graph=True, allow_unused=True)
        return torch.zeros_like(v) if along is None else along

    return values.detach(), product


def _as_it_is(x: Tensor) -> Tensor:
    return x


def _differentiable(run: Run, segment: Segment, t: float, base: Tensor, c: float, y: Tensor, k: Tensor) -> Tensor:
    """k, with the derivatives of the equation that it solves."""
    through = run.velocity(segment, t, y + (base - base.detach())).to(k.dtype)
    if not through.requires_grad:
        return k
    inner = y.detach().requires_grad_()
    values = run.velocity(segment, t, inner).to(k.dtype)

    def implicit(cotangent: Tensor | None) -> Tensor | None:
        if cotangent is None:
            return None
        if torch.is_grad_enabled():
            raise ConfigError(
                "second derivatives are not defined for implicit methods, whose stages are differentiated by the implicit function "
                "theorem: use an explicit method, as tsit5"
            )
        if not values.requires_grad:
            return cotangent
        rounding = torch.finfo(cotangent.dtype).eps
        solved, left = gmres(transposed, cotangent, 100 * rounding)
        if not left <= 10 * math.sqrt(rounding):
            raise SolveError(
                f"the gradient of an implicit stage at t = {t:.6g} is found to {left:.1g} only by GMRES: bound the step by max_step, or "
                "use an explicit method"
            )
        return solved

    def transposed(v: Tensor) -> Tensor:
        """(1 - c J') v."""
        (along,) = torch.autograd.grad(values, inner, v, retain_graph=True, allow_unused=True)
        return v if along is None else v - c * along

    found = k + (through - through.detach())
    found.register_hook(implicit)
    return found


@torch.no_grad()
def gmres(matrix: Linear, b: Tensor, accuracy: float) -> tuple[Tensor, float]:
    """x with |A x - b| <= accuracy |b|, by the smallest residual in growing Krylov spaces, or the
    best found; and |A x - b|/|b|.
    """
    if b.is_complex():  # a derivative is linear over the reals: conj(x) has one, too
        x, left = gmres(
            lambda v: torch.view_as_real(matrix(torch.view_as_complex(v)).resolve_conj()), torch.view_as_real(b), accuracy
        )
        return torch.view_as_complex(x), left
    x, residual = torch.zeros_like(b), b
    size = left = float(torch.linalg.vector_norm(b))
    for _ in range(RESTARTS):
        if left <= accuracy * size or not math.isfinite(left):
            break
        more, left = _cycle(matrix, residual, left, accuracy * size)
        x = x + more
        if left > accuracy * size or accuracy < 1e-6:  # rounding parts the rotations' residual from the true one
            residual = b - matrix(x)
            left = float(torch.linalg.vector_norm(residual))
    return x, left / size if size else 0.0


def _cycle(matrix: Linear, b: Tensor, size: float, allowed: float) -> tuple[Tensor, float]:
    """The best correction by up to `KRYLOV` products and the norm of its residual, which rotations
    to a triangle tell on the way.
    """
    basis = [b.reshape(-1) / size]
    columns: list[list[float]] = []
    rotations: list[tuple[float, float]] = []
    right = [size]
    for j in range(min(KRYLOV, b.numel())):
        w = matrix(basis[j].view_as(b)).reshape(-1)
        stacked = torch.stack(basis)
        # twice, since once leaves what rounding makes of a nearly dependent vector
        h = stacked @ w
        w = w - h @ stacked
        again = stacked @ w
        w = w - again @ stacked
        column = [*(h + again).tolist(), float(torch.linalg.vector_norm(w))]
        length = column[-1]
        for i, (cosine, sine) in enumerate(rotations):
            column[i], column[i + 1] = cosine * column[i] + sine * column[i + 1], cosine * column[i + 1] - sine * column[i]
        radius = math.hypot(column[-2], column[-1])
        if radius == 0 or not math.isfinite(radius):
            break
        cosine, sine = column[-2] / radius, column[-1] / radius
        rotations.append((cosine, sine))
        columns.append([*column[:-2], radius])
        right[j:] = [cosine * right[j], -sine * right[j]]
        if abs(right[-1]) <= allowed or length <= torch.finfo(b.dtype).eps * radius:
            break
        basis.append(w / length)
    weights = [0.0] * len(columns)
    for i in reversed(range(len(columns))):
        known = sum(columns[j][i] * weights[j] for j in range(i + 1, len(columns)))
        weights[i] = (right[i] - known) / columns[i][i]
    total = torch.zeros_like(basis[0])
    for weight, vector in zip(weights, basis, strict=False):
        total = total.add(vector, alpha=weight)
    return total.view_as(b), abs(right[-1])

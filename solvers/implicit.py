"""The stage of an implicit method: k = f(t, b + c k), solved by Newton's method with matrix-free
GMRES.

With y = b + c k, a step of Newton's method solves (1 - c J) d = b + c f(t, y) - y, J = df/dx. GMRES
(Saad and Schultz 1986) needs only products J v, so no matrix is formed. The products come from the
graph of one evaluation, so fields must be twice differentiable.

**Derivatives** are those of the equation, by the implicit function theorem: dk = (1 - c J)^-1 (J db
+ df) for a change df of the field. The backward pass solves w = (1 - c J')^-1 dL/dk by GMRES on the
graph of one evaluation of the field, and passes w through the graph of another. Memory and cost do
not depend on the number of Newton iterations. The derivatives are as accurate as k. Second
derivatives and forward mode raise ConfigError.
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
"""Newton's method fails after this many: a shorter step starts closer to the solution."""
ACCURACY = 1e-3
"""The largest last correction, relative to the tolerances. The remaining error is its square, or
`FORCED` times it.
"""
FORCED = 1e-5
"""The part of the residual that GMRES may leave in an iteration."""
KRYLOV = 40
"""The most products of a cycle of GMRES."""
RESTARTS = 3
"""The most cycles of GMRES."""


class NotSolved(Exception):  # noqa: N818 - a signal inside the package
    """Newton's method did not find a stage. The status says whether the field's values were
    non-finite.
    """

    def __init__(self, status: Status):
        super().__init__(status.value)
        self.status = status


def implicit_stage(
    run: Run, segment: Segment, t: float, base: Tensor, c: float, near: Tensor
) -> Tensor:
    """k = f(t, base + c k); the search for base + c k starts at `near`. Raises NotSolved if
    Newton's method fails.
    """
    if batched() or in_forward_mode():
        raise ConfigError(
            "an implicit method looks at numbers, which is not possible under vmap, and is"
            " differentiated backward only: use an explicit method, as rk4, there"
        )
    if base.dtype.itemsize < 4:
        raise ConfigError(
            f"Newton's method cannot find a stage in {dtype_name(base.dtype)}: keep the state in"
            " float32 (autocast does)"
        )
    if abs(c) < torch.finfo(base.dtype).tiny:
        # c k vanishes against any state, and (y - base)/c would be 0/0
        return run.velocity(segment, t, base).to(base.dtype)
    with torch.no_grad():
        y = _newton(run, segment, t, base.detach(), c, near.detach())
        k = (y - base) / c
    if torch.is_grad_enabled():
        return _differentiable(run, segment, t, base, c, y, k)
    return k


def _newton(run: Run, segment: Segment, t: float, base: Tensor, c: float, y: Tensor) -> Tensor:
    """y = base + c f(t, y)."""
    around = y.abs()
    for _ in range(ITERATIONS):
        velocity, jacobian = _linearised(run, segment, t, y)
        residual = base + c * velocity - y
        if not finite(residual):
            raise NotSolved(Status.NON_FINITE)
        # in units of the tolerances, so that entries of all sizes count equally
        scale = run.atol + run.rtol * torch.maximum(y.abs(), around)
        size = float(torch.linalg.vector_norm(residual / scale)) / math.sqrt(y.numel())
        matrix = partial(_newtons, jacobian, c, scale)
        step, unsolved_part = gmres(matrix, residual / scale, FORCED)
        step = scale * step
        y = y + step
        # (1 - c J)^-1 amplifies little for a stiff field, so the residual bounds the error
        if unsolved_part * size <= ACCURACY and float(run.size(step, y)) <= ACCURACY:
            return y
        # at rounding level it gets no smaller
        rounding = 8 * torch.finfo(y.dtype).eps * torch.maximum(y.abs(), around)
        if bool((step.abs() <= rounding).all()):
            return y
    raise NotSolved(Status.NOT_SOLVED)


def _newtons(jacobian: Linear, c: float, scale: Tensor, v: Tensor) -> Tensor:
    """(1 - c J) v, both in units of the scale."""
    v = scale * v
    return (v - c * jacobian(v)) / scale


def _linearised(run: Run, segment: Segment, t: float, y: Tensor) -> tuple[Tensor, Linear]:
    """f(t, y) and v -> J v. J v is the derivative of J' u by u along v, so one evaluation of the
    field serves all products.
    """
    # fused attention kernels have no second derivative; `recomputed` must not see these tensors
    with (
        torch.enable_grad(),
        sdpa_kernel(SDPBackend.MATH),
        saved_tensors_hooks(_as_it_is, _as_it_is),
    ):
        inner = y.detach().requires_grad_()
        u = torch.zeros_like(y).requires_grad_()
        values = run.velocity(segment, t, inner).to(y.dtype)
        back = None
        if values.requires_grad:
            (back,) = torch.autograd.grad(values, inner, u, create_graph=True, allow_unused=True)

    def product(v: Tensor) -> Tensor:
        along = None
        if back is not None and back.requires_grad:
            (along,) = torch.autograd.grad(back, u, v, retain_graph=True, allow_unused=True)
        if along is None:
            return torch.zeros_like(v)
        return along

    return values.detach(), product


def _as_it_is(x: Tensor) -> Tensor:
    return x


def _differentiable(
    run: Run, segment: Segment, t: float, base: Tensor, c: float, y: Tensor, k: Tensor
) -> Tensor:
    """k with the derivatives of its equation."""
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
                "second derivatives are not defined for implicit methods, whose stages are"
                " differentiated by the implicit function theorem: use an explicit method, as tsit5"
            )
        if not values.requires_grad:
            return cotangent
        rounding = torch.finfo(cotangent.dtype).eps
        solved, unsolved_part = gmres(transposed, cotangent, 100 * rounding)
        if not unsolved_part <= 10 * math.sqrt(rounding):
            raise SolveError(
                f"the gradient of an implicit stage at t = {t:.6g} is accurate to"
                f" {unsolved_part:.1g} only by GMRES: bound the step by max_step, or use an"
                " explicit method"
            )
        return solved

    def transposed(v: Tensor) -> Tensor:
        """(1 - c J') v."""
        (along,) = torch.autograd.grad(values, inner, v, retain_graph=True, allow_unused=True)
        if along is None:
            return v
        return v - c * along

    differentiable_k = k + (through - through.detach())
    differentiable_k.register_hook(implicit)
    return differentiable_k


@torch.no_grad()
def gmres(matrix: Linear, b: Tensor, accuracy: float) -> tuple[Tensor, float]:
    """x with |A x - b| <= accuracy |b|, or the best one found, and |A x - b|/|b|. x minimises the
    residual in growing Krylov spaces.
    """
    if b.is_complex():  # the derivative is linear over the reals only, as that of conj(x)

        def real_matrix(v: Tensor) -> Tensor:
            return torch.view_as_real(matrix(torch.view_as_complex(v)).resolve_conj())

        x, unsolved_part = gmres(real_matrix, torch.view_as_real(b), accuracy)
        return torch.view_as_complex(x), unsolved_part
    x = torch.zeros_like(b)
    residual = b
    size = float(torch.linalg.vector_norm(b))
    residual_size = size
    allowed = accuracy * size
    for _ in range(RESTARTS):
        if residual_size <= allowed or not math.isfinite(residual_size):
            break
        correction, residual_size = _cycle(matrix, residual, residual_size, allowed)
        x = x + correction
        # by rounding, the rotations' residual differs from the true one
        if residual_size > allowed or accuracy < 1e-6:
            residual = b - matrix(x)
            residual_size = float(torch.linalg.vector_norm(residual))
    if size == 0:
        return x, 0.0
    return x, residual_size / size


def _cycle(matrix: Linear, b: Tensor, size: float, allowed: float) -> tuple[Tensor, float]:
    """The best correction by up to `KRYLOV` products, and the norm of its residual, which Givens
    rotations give at each product.
    """
    basis = [b.reshape(-1) / size]
    columns: list[list[float]] = []
    rotations: list[tuple[float, float]] = []
    right = [size]
    for j in range(min(KRYLOV, b.numel())):
        w = matrix(basis[j].view_as(b)).reshape(-1)
        stacked = torch.stack(basis)
        # orthogonalised twice: once is inaccurate for a nearly dependent vector
        h = stacked @ w
        w = w - h @ stacked
        again = stacked @ w
        w = w - again @ stacked
        column = [*(h + again).tolist(), float(torch.linalg.vector_norm(w))]
        length = column[-1]
        for i, (cosine, sine) in enumerate(rotations):
            upper = column[i]
            lower = column[i + 1]
            column[i] = cosine * upper + sine * lower
            column[i + 1] = cosine * lower - sine * upper
        radius = math.hypot(column[-2], column[-1])
        if radius == 0 or not math.isfinite(radius):
            break
        cosine = column[-2] / radius
        sine = column[-1] / radius
        rotations.append((cosine, sine))
        columns.append([*column[:-2], radius])
        right[j:] = [cosine * right[j], -sine * right[j]]
        if abs(right[-1]) <= allowed or length <= torch.finfo(b.dtype).eps * radius:
            break
        basis.append(w / length)
    weights = [0.0] * len(columns)
    for i in reversed(range(len(columns))):
        later = sum(columns[j][i] * weights[j] for j in range(i + 1, len(columns)))
        weights[i] = (right[i] - later) / columns[i][i]
    total = torch.zeros_like(basis[0])
    for weight, vector in zip(weights, basis, strict=False):
        total = total.add(vector, alpha=weight)
    return total.view_as(b), abs(right[-1])

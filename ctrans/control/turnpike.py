"""Turnpikes: when costate P and velocity v are nearly constant in the middle of the depth.

Two problems have closed forms.

- Kinetic cost, velocities free in a convex set V, no cost of the state: minimise int_0^T lam/2
  |v|^2 dt + G(X(T)). H(P) does not depend on X, so dP/dt = -dH/dX = 0. P = grad G(X(T)) is constant
  and so is v*, the point of V nearest to -P/lam. |P| and |v| are flat everywhere, whatever T is
- Linear field and quadratic cost: x' = A x + B u, minimise int_0^T (x - a)'Q(x - a)/2 + lam/2 |u|^2
  dt + (x(T) - b)'F(x(T) - b)/2. Away from both ends x, P and u are exponentially close to the best
  steady state (Trelat, Zuazua 2015), at the rate of the Hamiltonian matrix's eigenvalue closest to
  the imaginary axis. No eigenvalue may be on that axis. A = 0 and Q = 0 has only the eigenvalue 0,
  and is the first problem: there P is flat too, but depends on T and X(0)

A trained Transformer is neither: its velocities come from weights that all tokens share, and its
fields depend on the state. `flatness` measures how flat |P| and |v| are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import scipy.linalg
import torch
from jaxtyping import Float
from torch import Tensor

from ctrans.base.shapes import PerChannel
from solvers import ConfigError


def flatness(values: Sequence[float | None]) -> float:
    """max/min over the middle half of the values, which are at equal distances; 1 if all are equal.

    It is inf if some are 0 and not all, and nan for fewer than two values there or if some are
    unknown.
    """
    count = len(values)
    middle = values[count // 4 : count - count // 4]
    known = [value for value in middle if value is not None and math.isfinite(value)]
    if len(known) < max(2, len(middle)):
        return math.nan
    largest = max(known)
    smallest = min(known)
    if smallest == largest:
        return 1.0
    if smallest == 0:
        return math.inf
    return largest / smallest


def flatness_by_kind(kinds: Sequence[str], values: Sequence[float | None]) -> dict[str, float]:
    """`flatness` of the sublayers of each kind: attention and FFN differ in size at any depth."""
    return {
        kind: flatness([value for other, value in zip(kinds, values, strict=True) if other == kind])
        for kind in dict.fromkeys(kinds)
    }


@dataclass(frozen=True, eq=False)
class LinearQuadratic:
    """min int_0^T (x - a)'Q(x - a)/2 + lam/2 |u|^2 dt + (x(T) - b)'F(x(T) - b)/2, x' = A x + B u.

    - `A`, `B`: the linear field and what the controls move
    - `state_cost`, `target`: Q, symmetric positive semidefinite, and a
    - `control_cost`: lam > 0
    - `terminal_cost`, `terminal_target`: F, symmetric positive semidefinite, and b

    P' = -Q(x - a) - A'P with P(T) = F(x(T) - b), and u = -B'P/lam. Raises ConfigError if the
    Hamiltonian matrix has eigenvalues on the imaginary axis: then there is no turnpike. (A, B)
    stabilisable and (A, Q) detectable rule that out.
    """

    A: Float[Tensor, "width width"]
    B: Float[Tensor, "width inputs"]
    state_cost: Float[Tensor, "width width"]
    target: PerChannel
    control_cost: float
    terminal_cost: Float[Tensor, "width width"]
    terminal_target: PerChannel

    @property
    def _moved(self) -> Float[Tensor, "width width"]:
        """BB'/lam."""
        return self.B @ self.B.mT / self.control_cost

    @property
    def hamiltonian_matrix(self) -> Float[Tensor, "both both"]:
        """M with (x, P)' = M (x, P) + (0, Q a)."""
        upper = torch.cat([self.A, -self._moved], -1)
        lower = torch.cat([-self.state_cost, -self.A.mT], -1)
        return torch.cat([upper, lower])

    @cached_property
    def riccati(self) -> Float[Tensor, "width width"]:
        """The stabilising solution Pi of A'Pi + Pi A - Pi BB'Pi/lam + Q = 0: the stable subspace of
        M is the range of [I; Pi].
        """
        width = len(self.A)
        _, basis, stable = scipy.linalg.schur(
            self.hamiltonian_matrix.numpy(), output="real", sort="lhp"
        )
        if stable != width:
            raise ConfigError(
                f"the Hamiltonian matrix has {stable} eigenvalues with negative real part of"
                f" {2 * width}, so no steady state attracts: give a cost of every state that the"
                " controls cannot move and A does not damp"
            )
        basis = torch.from_numpy(basis[:, :width]).to(self.A)
        transposed: Tensor = torch.linalg.solve(basis[:width].mT, basis[width:].mT)
        return transposed.mT

    @property
    def closed_loop(self) -> Float[Tensor, "width width"]:
        """A - BB'Pi/lam. Its eigenvalues are those of M with negative real part."""
        return self.A - self._moved @ self.riccati

    @property
    def rate(self) -> float:
        """mu: deviations fall like exp(-mu t) from the start and exp(-mu (T - t)) from the end."""
        return float(-torch.linalg.eigvals(self.closed_loop).real.max())

    @cached_property
    def steady(self) -> tuple[PerChannel, PerChannel]:
        """The best steady state and its costate, where (x, P)' = 0."""
        width = len(self.A)
        constant = torch.cat([torch.zeros_like(self.target), self.state_cost @ self.target])
        both = torch.linalg.solve(self.hamiltonian_matrix, -constant)
        return both[:width], both[width:]


@dataclass(frozen=True, eq=False)
class Extremal:
    """The optimal state, costate and control at some times."""

    x: Float[Tensor, "times width"]
    p: Float[Tensor, "times width"]
    u: Float[Tensor, "times inputs"]


def linear_quadratic_extremal(
    problem: LinearQuadratic,
    start: PerChannel,
    horizon: float,
    times: Sequence[float],
) -> Extremal:
    """x(t), P(t) and u(t) of the optimum from x(0) = `start` over [0, T]. Stable for any T.

    With y = P - Pi x and x = w + E y about the steady state, w' = A_c w and y' = -A_c'y, where A_c
    is the closed loop and A_c E + E A_c' = BB'/lam. So w falls from the start and y from the end,
    and the two boundary conditions give w(0) and y(T).
    """
    if not 0 < horizon < math.inf:
        raise ConfigError(f"horizon = {horizon!r}: give a positive finite T")
    width = len(problem.A)
    x_steady, p_steady = problem.steady
    loop = problem.closed_loop
    moved = scipy.linalg.solve_continuous_lyapunov(loop.numpy(), problem._moved.numpy())
    E = torch.from_numpy(moved).to(loop)
    eye = torch.eye(width).to(loop)
    Pi = problem.riccati
    F = problem.terminal_cost
    across = torch.linalg.matrix_exp(horizon * loop)
    # x(0) = start, and P(T) = F (x(T) - b), in w(0) and y(T)
    at_start = torch.cat([eye, E @ across.mT], -1)
    at_end = torch.cat([(Pi - F) @ across, (Pi - F) @ E + eye], -1)
    known = torch.cat([start - x_steady, F @ (x_steady - problem.terminal_target) - p_steady])
    both = torch.linalg.solve(torch.cat([at_start, at_end]), known)
    w = torch.stack([torch.linalg.matrix_exp(t * loop) @ both[:width] for t in times])
    y = torch.stack(
        [torch.linalg.matrix_exp((horizon - t) * loop).mT @ both[width:] for t in times]
    )
    deviation = w + y @ E.mT
    p = p_steady + deviation @ Pi.mT + y
    return Extremal(x=x_steady + deviation, p=p, u=-p @ problem.B / problem.control_cost)

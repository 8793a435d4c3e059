"""Section 5: which states the controls of a depth reach to first order."""

from __future__ import annotations

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from ctrans.base.draw import Draw
from ctrans.base.shapes import TokenRows
from ctrans.control.controllability import Gramians, gramians
from ctrans.dynamics.depth import Depth
from ctrans.dynamics.sublayer import Sublayer
from ctrans.theory.statement import Trial, Trials, at_most, equal, statement

SECTION = 5


class ControlledField(nn.Module):
    """f(x) = A x + B u for each token, with the control u as its only weight, at u = 0."""

    A: Tensor
    B: Tensor

    def __init__(self, A: Float[Tensor, "width width"], B: Float[Tensor, "width inputs"]):
        super().__init__()
        self.register_buffer("A", A)
        self.register_buffer("B", B)
        self.u = nn.Parameter(A.new_zeros(B.shape[-1]))

    def forward(self, x: TokenRows) -> TokenRows:
        return x @ self.A.mT + self.B @ self.u


def linear_gramians(
    A: Float[Tensor, "width width"], B: Float[Tensor, "width inputs"], *, segments: int, h: float
) -> Gramians:
    """The Gramians of x' = A x + B u of one token, in all directions."""
    sublayers = [Sublayer(ControlledField(A, B), "ffn") for _ in range(segments)]
    width = len(A)
    eye = torch.eye(width, dtype=A.dtype).reshape(width, 1, width)
    depth = Depth(sublayers, h, per_block=1)
    return gramians(depth, torch.zeros(1, width, dtype=A.dtype), {"all": eye})["all"]


def partly_controllable(
    draw: Draw, width: int, rank: int
) -> tuple[Float[Tensor, "width width"], Float[Tensor, "width 1"]]:
    """A and B of one input that controls a random subspace of dimension `rank` and no more.

    In an orthonormal basis A is block upper triangular and B is 0 in the last entries, so these
    have no control.
    """
    A = draw.normal(width, width)
    A[rank:, :rank] = 0
    B = draw.normal(width, 1)
    B[rank:] = 0
    basis = torch.linalg.qr(draw.normal(width, width)).Q
    return basis @ A @ basis.mT, basis @ B


@statement(
    "kalman-rank",
    "Kalman 1960; ctrans",
    "x' = A x + B u in d or more Euler steps: the Gramian of the end state has the rank and the"
    " range of [B, AB, ..., A^(d-1) B]",
    1e-6,
    0.25,
    as_printed=True,
)
def kalman_rank(draw: Draw) -> Trials:
    """The rank of the Gramian, its part outside of the range of Kalman's matrix, and the rank of
    that matrix.

    J = I + h A is a polynomial in A, so [B, JB, ..., J^(d-1) B] has the range of Kalman's matrix,
    and J^k B of later steps is in it by Cayley and Hamilton.
    """
    width = 2 + draw.integer(4)
    rank = 1 + draw.integer(width)
    A, B = partly_controllable(draw, width, rank)
    A = A / torch.linalg.matrix_norm(A, 2)
    powers = [torch.linalg.matrix_power(A, k) @ B for k in range(width)]
    kalman = torch.cat(powers, -1)
    # a step that is not small keeps the powers apart from each other
    found = linear_gramians(A, B, segments=width + draw.integer(4), h=1.0).weights
    U, S, _ = np.linalg.svd(kalman.numpy())
    outside = torch.from_numpy(U[:, rank:])
    left_over = (outside.mT @ found.matrix @ outside).norm() / found.matrix.norm()
    case = f"d = {width}, controllable dimension {rank}"
    return [
        equal(float(found.rank), float(rank), f"rank of the Gramian, {case}"),
        equal(float((S[0] * 1e-9 < S).sum()), float(rank), f"rank of Kalman's matrix, {case}"),
        Trial(float(left_over), f"share outside of the range of Kalman's matrix, {case}"),
    ]


@statement(
    "least-control",
    "Kalman 1960; ctrans",
    "the least sum_k |u_k|^2 that moves the end state of x' = A x + B u by c is c'W^-1 c, W its"
    " Gramian",
    1e-6,
    0.25,
    as_printed=True,
)
def least_control(draw: Draw) -> Trials:
    """c'W^-1 c against least squares over all controls at once, and against random controls that
    also reach c.
    """
    width = 2 + draw.integer(3)
    inputs = 1 + draw.integer(width)
    segments = width + draw.integer(4)
    A = draw.normal(width, width)
    A = A / torch.linalg.matrix_norm(A, 2)
    B = draw.normal(width, inputs)
    c = draw.normal(width)
    found = linear_gramians(A, B, segments=segments, h=1.0).weights
    least = c @ torch.linalg.pinv(found.matrix, rtol=1e-14, hermitian=True) @ c
    J = torch.eye(width, dtype=A.dtype) + A
    reach = torch.cat([torch.linalg.matrix_power(J, k) @ B for k in range(segments)], -1)
    inverse = torch.from_numpy(np.linalg.pinv(reach.numpy()))
    control = inverse @ c
    other = draw.normal(reach.shape[-1])
    other = control + other - inverse @ (reach @ other)
    case = f"d = {width}, {inputs} inputs, {segments} steps"
    size = float(control.square().sum())
    return [
        equal(float(least), size, f"c'W^-1 c against least squares, {case}"),
        at_most(float(least), float(other.square().sum()), f"another control to c, {case}"),
    ]

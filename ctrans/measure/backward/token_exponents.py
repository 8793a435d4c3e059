"""Finite-time Lyapunov exponents by input token: the rate at which a small change of its embedding
grows up to the last state.
"""

from __future__ import annotations

import dataclasses
import math
from functools import partial

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ctrans.measure.walk import Model, states_of, value_and_pullback
from solvers import ConfigError
from solvers.run import finite

ENTRIES = 1 << 20
"""Entries of a state per batch of Jacobian rows. The memory is that of one segment."""


@dataclasses.dataclass(frozen=True)
class TokenExponents:
    """lambda_j = (1/T) log |dX_T[reader]/dX_0[j]|_2 of each input token j of one sequence, in nats
    per unit of the depth-time T.

    Positive if a change of token j grows up to the last state of token `reader`, -inf if it has no
    effect there.
    """

    tokens: list[int]
    exponents: list[float]
    reader: int
    time: float


def token_exponents(
    model: Model, sequence: Int[Tensor, " tokens"], *, reader: int = -1
) -> TokenExponents:
    """`TokenExponents` from the rows of the discrete model's Jacobian: one backward pass for each
    channel of the state.

    Raises ConfigError if `reader` is no token of the sequence, or the Jacobian is not finite.
    """
    count = len(sequence)
    if not -count <= reader < count:
        raise ConfigError(f"reader = {reader}: the sequence has {count} tokens, 0 to {count - 1}")
    reader %= count
    rows = reader_jacobian(model, sequence, reader)
    time = model.depth.times[-1]
    sizes = torch.linalg.matrix_norm(rows.double().transpose(0, 1), 2).tolist()
    exponents = []
    for size in sizes:
        if size:
            exponents.append(math.log(size) / time)
        else:
            exponents.append(-math.inf)
    return TokenExponents(sequence.tolist(), exponents, reader, time)


def reader_jacobian(
    model: Model, sequence: Int[Tensor, " tokens"], reader: int
) -> Float[Tensor, "state tokens state"]:
    """dX_T[reader]/dX_0: entry i, j, l is the derivative of the reader's channel i by channel l of
    token j.
    """
    depth = model.depth
    size = model.embed(sequence.unsqueeze(0)).shape[-1]
    together = max(1, ENTRIES // (size * len(sequence)))
    parts = []
    for rows in torch.arange(size, device=sequence.device).split(together):
        *states, end = states_of(depth, model.embed(sequence.expand(len(rows), -1)))
        p = torch.zeros_like(end)
        p[torch.arange(len(rows)), reader, rows] = 1.0
        for sublayer, h, x in reversed(
            list(zip(depth.sublayers, depth.lengths, states, strict=True))
        ):
            _, p = value_and_pullback(partial(sublayer.step, dt=h), x, p)
        parts.append(p)
    jacobian = torch.cat(parts)
    if not finite(jacobian):
        raise ConfigError(
            "the Jacobian is not finite, so there are no exponents: ctrans simulate shows the"
            " segment where states become non-finite"
        )
    return jacobian

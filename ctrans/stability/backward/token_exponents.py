"""Finite-time Lyapunov exponents by input token: at what rate a small change of its embedding grows
on its way to the last state.
"""

from __future__ import annotations

import dataclasses
import math

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ctrans.depth import Depth
from ctrans.walk import Instrument, Model, walk
from solvers import ConfigError
from solvers.run import finite

ENTRIES = 1 << 20
"""So many entries of a state are carried at a time: rows of the Jacobian come in batches, whose
memory is that of one segment.
"""


@dataclasses.dataclass(frozen=True)
class TokenExponents:
    """lambda_j = (1/T) log |dX_T[reader]/dX_0[j]|_2 of every input token j of one sequence, T the
    depth-time, in nats a unit of it.

    Positive where a change of the token grows on its way to the state of token `reader`, -inf where
    it does not get there.
    """

    tokens: list[int]
    exponents: list[float]
    reader: int
    time: float


def token_exponents(model: Model, sequence: Int[Tensor, " tokens"], *, reader: int = -1) -> TokenExponents:
    """`TokenExponents` by the rows of the Jacobian: as many ways back as the state has numbers,
    each of the discrete model's own steps.

    Raises ConfigError for a reader that is no token of the sequence, and states that are not
    finite.
    """
    count = len(sequence)
    if not -count <= reader < count:
        raise ConfigError(f"reader = {reader}: the sequence has {count} tokens, 0 to {count - 1}")
    reader %= count
    rows = reader_jacobian(model, sequence, reader)
    time = model.depth.times[-1]
    sizes = torch.linalg.matrix_norm(rows.double().transpose(0, 1), 2).tolist()
    return TokenExponents(sequence.tolist(), [math.log(size) / time if size else -math.inf for size in sizes], reader, time)


def reader_jacobian(model: Model, sequence: Int[Tensor, " tokens"], reader: int) -> Float[Tensor, "state tokens state"]:
    """dX_T[reader]/dX_0: entry i, j, l is the change of the reader's i-th number with token j's
    l-th.
    """
    size = model.embed(sequence.unsqueeze(0)).shape[-1]
    together = max(1, ENTRIES // (size * len(sequence)))
    parts = []
    for rows in torch.arange(size, device=sequence.device).split(together):
        costates = _AtTheStart()
        walk(_Rows(model, reader), sequence.expand(len(rows), -1), rows, [costates])
        parts.append(costates.figures())
    found = torch.cat(parts)
    if not finite(found):
        raise ConfigError("the Jacobian is not finite, so that there are no exponents: see where states end by simulate")
    return found


class _Rows:
    """The model with the loss sum over c of X_T[c, reader, rows[c]], whose gradient is a row of the
    Jacobian for each sequence c.
    """

    def __init__(self, model: Model, reader: int):
        self.model, self.reader = model, reader

    @property
    def depth(self) -> Depth:
        return self.model.depth

    def embed(self, tokens: Tensor) -> Tensor:
        return self.model.embed(tokens)

    def head(self, x: Tensor) -> Tensor:
        return x

    def terminal_loss(self, x: Tensor, rows: Tensor) -> Tensor:
        return x[:, self.reader].gather(-1, rows.unsqueeze(-1)).sum()


class _AtTheStart(Instrument):
    """dL/dX_0."""

    def embedding(self, model: Model, tokens: Tensor, p: Tensor) -> None:
        self._found = p

    def figures(self) -> Tensor:
        return self._found

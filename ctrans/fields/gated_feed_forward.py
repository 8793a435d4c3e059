"""Gated FFNs: W_d (phi(W_g x + b_g) * (W_u x + b_u)) + b_d on each token alone."""

from __future__ import annotations

import math
from collections.abc import Iterator

from jaxtyping import Float
from torch import Tensor, nn

from ctrans.fields.activations import ACTIVATIONS
from ctrans.fields.ffn_bounds import Affine, gated_bound, gated_lipschitz
from ctrans.fields.protocols import Matrix, TokenBound
from solvers import ConfigError
from solvers.errors import look_up

MULTIPLE = 8
"""What the usual hidden width is a multiple of."""
GATES = {"swiglu": "silu", "geglu": "gelu", "reglu": "relu"}
"""Gated FFNs by their names, and the activations of their gates."""


def gated_hidden_width(width: int) -> int:
    """The least multiple of `MULTIPLE` from 8 d/3 on: three matrices of that width have as many entries as two of 4 d.

    As Llama's, but that it rounds up to multiples of 256.
    """
    return MULTIPLE * math.ceil(8 * width / 3 / MULTIPLE)


class GatedLinearUnits(nn.Module):
    """f(x) = W_d (phi(W_g x + b_g) * (W_u x + b_u)) + b_d on each token, phi one of `ACTIVATIONS` (Shazeer 2020).

    With SiLU it is SwiGLU, with GELU GEGLU, with ReLU ReGLU. It grows with the square of x: no affine function of |x| bounds it, and
    it has no Lipschitz constant but in a ball.
    """

    why_not = "its gate makes three factors of its matrices"

    def __init__(self, width: int, hidden: int, *, activation: str = "silu", bias: bool = True):
        super().__init__()
        phi = look_up("activation", activation, ACTIVATIONS)
        if phi.degree != 1:
            raise ConfigError(f"activation {activation!r} grows with the square of its argument: a gate takes one that does not")
        self.activation = activation
        self.gate = nn.Linear(width, hidden, bias=bias)
        self.up = nn.Linear(width, hidden, bias=bias)
        self.down = nn.Linear(hidden, width, bias=bias)

    def forward(self, x: Float[Tensor, "*batch tokens width"]) -> Float[Tensor, "*batch tokens width"]:
        y: Tensor = self.down(self.pre_projection(x))
        return y

    @property
    def output_projection(self) -> nn.Linear:
        """The last linear map: f(x) = output_projection(pre_projection(x))."""
        return self.down

    def pre_projection(self, x: Float[Tensor, "*batch tokens width"]) -> Float[Tensor, "*batch tokens hidden"]:
        """What the last linear map is applied to: phi(W_g x + b_g) * (W_u x + b_u)."""
        gated: Tensor = ACTIVATIONS[self.activation](self.gate(x)) * self.up(x)
        return gated

    def matrices(self) -> Iterator[Matrix]:
        """W_g, W_u and W_d."""
        yield Matrix(self.gate.weight, "gate")
        yield Matrix(self.up.weight, "up")
        yield Matrix(self.down.weight, "down")

    def bound(self) -> TokenBound:
        """`gated_bound`: gain r + offset + curvature r^2."""
        return gated_bound(*self._affine())

    def lipschitz(self, radius: float = math.inf, *, printed: bool = False) -> float:
        """`gated_lipschitz`, of tokens no longer than `radius`; `printed` takes slope 1."""
        return gated_lipschitz(*self._affine(), 1.0 if printed else ACTIVATIONS[self.activation].slope, radius)

    def _affine(self) -> tuple[Affine, Affine, Affine]:
        gate, up, down = (Affine(part.weight, part.bias) for part in (self.gate, self.up, self.down))
        return gate, up, down

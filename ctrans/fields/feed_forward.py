"""The FFN: W_2 phi(W_1 x + b_1) + b_2 on each token alone."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping
from typing import ClassVar

from jaxtyping import Float
from torch import Tensor, nn

from ctrans.fields.activations import ACTIVATIONS
from ctrans.fields.ffn_bounds import Affine, plain_bound, plain_lipschitz
from ctrans.fields.protocols import Matrix, TokenBound, Units
from ctrans.fields.scale import scale_linear
from solvers.errors import look_up


class FeedForward(nn.Module):
    """f(x) = W_2 phi(W_1 x + b_1) + b_2 on each token, phi one of `ACTIVATIONS`."""

    def __init__(self, width: int, hidden: int, *, activation: str = "gelu", bias: bool = True):
        super().__init__()
        look_up("activation", activation, ACTIVATIONS)
        self.activation = activation
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
        """What the last linear map is applied to: phi(W_1 x + b_1)."""
        return ACTIVATIONS[self.activation](self.up(x))

    def matrices(self) -> Iterator[Matrix]:
        """W_1 and W_2."""
        yield Matrix(self.up.weight, "up")
        yield Matrix(self.down.weight, "down")

    def units(self) -> Units:
        """phi(<w, x> + b) for every row w of W_1."""
        return Units(ACTIVATIONS[self.activation], self.up.out_features)

    def bound(self) -> TokenBound:
        """|f(x)_i| <= |W_2|_2 (|W_1|_2 max_j |x_j| + |b_1|) + |b_2|, as abs(phi(z)) <= abs(z); `plain_bound` where phi grows faster."""
        return plain_bound(*self._affine(), ACTIVATIONS[self.activation])

    def lipschitz(self, radius: float = math.inf, *, printed: bool = False) -> float:
        """L = Lip(phi) |W_2|_2 |W_1|_2 at every radius; `plain_lipschitz` where phi has no Lip(phi)."""
        return plain_lipschitz(*self._affine(), ACTIVATIONS[self.activation], radius, printed=printed)

    scalings: ClassVar[Mapping[str, bool]] = {"W1": False}
    """Kan's W_1; phi is not homogeneous, so that f does not become c f."""

    def scaled(self, name: str, c: float) -> FeedForward:
        """A copy with W_1 and b_1 times c."""
        look_up("scaling", name, self.scalings)
        twin = copy.deepcopy(self)
        scale_linear(twin.up, c)
        return twin

    def _affine(self) -> tuple[Affine, Affine]:
        return Affine(self.up.weight, self.up.bias), Affine(self.down.weight, self.down.bias)

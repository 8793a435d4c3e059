"""FFNs, which act on each token alone: W_2 phi(W_1 x + b_1) + b_2, and the gated W_d (phi(W_g x +
b_g) * (W_u x + b_u)) + b_d.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping
from typing import ClassVar

from jaxtyping import Float
from torch import Tensor, nn

from ctrans.base.option import Count
from ctrans.base.shapes import TokenRows
from ctrans.dynamics.fields.activations import ACTIVATIONS, Activation
from ctrans.dynamics.fields.ffn_bounds import Affine, BoundedFFN, FFNMaps
from ctrans.dynamics.fields.projected_map import ProjectedMap, scale_linear
from ctrans.dynamics.fields.protocols import Matrix, Role, Units
from solvers import ConfigError, checked, look_up

MULTIPLE = 8
"""The default hidden width is a multiple of this."""
GATES = {"swiglu": "silu", "geglu": "gelu", "reglu": "relu"}
"""Names of gated FFNs, and the activations of their gates."""


def gated_hidden_width(width: int) -> int:
    """The least multiple of `MULTIPLE` that is at least 8 d/3: three matrices of that width have as
    many entries as two of 4 d.

    Llama uses the same rule, but rounds up to multiples of 256.
    """
    return MULTIPLE * math.ceil(8 * width / 3 / MULTIPLE)


class HiddenLayer(BoundedFFN, ProjectedMap):
    """An FFN with one hidden layer. `roles` names its linear maps."""

    projection = "down"
    roles: ClassVar[tuple[Role, ...]]
    gate: nn.Linear
    up: nn.Linear
    down: nn.Linear

    def __init__(self, width: int, hidden: int, *, activation: str, bias: bool):
        super().__init__(len(self.roles) * width * hidden)
        look_up("activation", activation, ACTIVATIONS)
        self.activation = activation
        for role in self.roles:
            if role == "down":
                linear = nn.Linear(hidden, width, bias=bias)
            else:
                linear = nn.Linear(width, hidden, bias=bias)
            self.add_module(role, linear)

    @property
    def phi(self) -> Activation:
        """The activation."""
        return ACTIVATIONS[self.activation]

    def units(self) -> Units:
        """phi(<w, x> + b) for each row w of W_1, or of W_g with its gate."""
        return Units(self.phi, self.up.out_features, "gate" in self.roles, self.up.bias is not None)

    def matrices(self) -> Iterator[Matrix]:
        """The weights with their roles, the output projection last."""
        for role in self.roles:
            yield Matrix(getattr(self, role).weight, role)

    @property
    def maps(self) -> FFNMaps:
        by_role: dict[Role, Affine] = {}
        for role in self.roles:
            linear = getattr(self, role)
            by_role[role] = Affine(linear.weight, linear.bias)
        return FFNMaps(by_role.get("gate"), by_role["up"], by_role["down"], self.phi)


@checked
class FeedForward(HiddenLayer):
    """f(x) = W_2 phi(W_1 x + b_1) + b_2 on each token, phi one of `ACTIVATIONS`."""

    roles = ("up", "down")
    scalings: ClassVar[Mapping[str, bool]] = {"W1": False}
    """Kan's W_1. phi is not homogeneous, so f does not become c f."""

    def __init__(self, width: Count, hidden: Count, *, activation: str = "gelu", bias: bool = True):
        super().__init__(width, hidden, activation=activation, bias=bias)

    def pre_projection(self, x: TokenRows) -> Float[Tensor, "*batch tokens hidden"]:
        """The input of the output projection: phi(W_1 x + b_1)."""
        return self.phi(self.up(x))

    def scaled(self, name: str, c: float) -> FeedForward:
        """A copy with W_1 and b_1 times c."""
        look_up("scaling", name, self.scalings)
        twin = copy.deepcopy(self)
        scale_linear(twin.up, c)
        return twin


class GatedLinearUnits(HiddenLayer):
    """f(x) = W_d (phi(W_g x + b_g) * (W_u x + b_u)) + b_d on each token, phi one of `ACTIVATIONS`
    (Shazeer 2020).

    With SiLU it is SwiGLU, with GELU GEGLU, with ReLU ReGLU. It grows with the square of x, so it
    has no affine bound, and a Lipschitz constant only in a ball.
    """

    roles = ("gate", "up", "down")

    def __init__(self, width: Count, hidden: Count, *, activation: str = "silu", bias: bool = True):
        super().__init__(width, hidden, activation=activation, bias=bias)
        if self.phi.degree != 1:
            raise ConfigError(
                f"activation {activation!r} grows with the square of its argument, which a gate"
                " does not support: choose another, as silu"
            )

    def pre_projection(self, x: TokenRows) -> Float[Tensor, "*batch tokens hidden"]:
        """The input of the output projection: phi(W_g x + b_g) * (W_u x + b_u)."""
        gated: Tensor = self.phi(self.gate(x)) * self.up(x)
        return gated

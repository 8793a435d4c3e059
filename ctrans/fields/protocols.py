"""What a map may say about itself: small protocols, asked for by what an instrument needs and never
by a map's class.

A map f is any module from (*batch, tokens, width) to the same shape. The fewer of these it has, the
fewer instruments can speak of it, and they say so; each of them is exact for the map's weights as
they are.

| protocol              | what it gives                                            | who asks                                       |
| --------------------- | -------------------------------------------------------- | ---------------------------------------------- |
| `HasOutputProjection` | f(x) = output_projection(pre_projection(x))              | Hamiltonians over weights, scaling, last layer |
| `ExposesWeights`      | its weight matrices with their roles                     | initialisation, gradients by matrix            |
| `HasBound`            | how long f(x)_i can be where no abs(x_j) exceeds r       | forward and transport bounds                   |
| `HasLipschitz`        | a Lipschitz constant for inputs up to a length           | block bounds                                   |
| `ExposesHeads`        | attention's rows, and the matrices of each head          | theta, Emadi's bounds                          |
| `SupportsTokenSubset` | f(x) at chosen tokens, without the others                | local values of Emadi's bounds                 |
| `HasTemperature`      | the temperature of its softmax, which may be set         | temperature warm-up                            |
| `HasReferenceKernel`  | a path with forward-mode and second derivatives          | every Jacobian                                 |
| `Scalable`            | copies of it with weights inside times c                 | sensitivities against the weights' scale       |
| `HasUnits`            | f(x) = sum over units of out_k phi(<in_k, x> + b_k) + b  | the decay that keeps weights from running away |
| `MixesTokens`         | whether an output token depends on other input tokens    | the size of a Jacobian's problem               |
| `SumOfMaps`           | the maps that it is the sum of                           | what is asked of an attention alone            |
| `HasAuxiliary`        | terms that training may add to its objective             | the objective                                  |
| `Balances`            | the load of its parts, and a way to even it              | the training loop, after each update           |
| `HasDiscontinuities`  | how far a token is from where f jumps                    | the routing by depth                           |
| `ExplainsUnsupported` | why it has fewer of these than others                    | messages                                       |
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

from jaxtyping import Float, Int
from torch import Tensor, nn

from ctrans.fields.activations import Activation
from ctrans.fields.branch import Branch
from solvers.deprecated import adopt_old_members, old_names

Kind = Literal["attention", "ffn", "parallel"]
Role = Literal["query", "key", "value", "out", "gate", "up", "down", "router"]


class Matrix(NamedTuple):
    """One weight matrix of a map: a view of its parameter, and which one it is; or made of the
    parameter `copied`, where its rows do not lie together there, or are scaled.
    """

    weight: Float[Tensor, "out in"]
    role: Role
    copied: Tensor | None = None

    @property
    def last(self) -> bool:
        """Whether it is the map's last one, which writes to the residual stream."""
        return self.role in ("out", "down")


class TokenBound(NamedTuple):
    """abs(f(x)_i) <= gain r + offset + curvature r^2 for every token i, wherever no input token x_j
    is longer than r.

    An affine bound has no curvature; a gated FFN, which multiplies two linear maps of x, has no
    affine one.
    """

    gain: float
    offset: float
    curvature: float = 0.0

    def at(self, radius: float) -> float:
        """How long an output token can be where no input token is longer than `radius`."""
        # no product with a radius that may be infinite where there is no curvature
        return self.offset + radius * (self.gain + (self.curvature * radius if self.curvature else 0.0))

    def behind(self, gain: float, offset: float) -> TokenBound:
        """The bound of f(A x) where abs(A x_i) <= gain r + offset: k (g r + b)^2 + l (g r + b) + o,
        by powers of r.
        """
        slope = gain * (self.gain + (2 * self.curvature * offset if self.curvature else 0.0))
        return TokenBound(slope, self.at(offset) if offset else self.offset, self.curvature * gain**2)


class HeadMatrices(NamedTuple):
    """One head: queries Q x + q_0, keys K x + k_0, values V x + .., and the columns of W_O that it
    writes through.

    k_0 is None where it shifts the scores of a row alike, which the softmax does not see. It is
    given, 0 where there is none, where positions turn the keys (rotary embeddings) or something not
    linear acts on the scores (soft-capping).
    """

    query: Float[Tensor, "head width"]
    key: Float[Tensor, "head width"]
    value: Float[Tensor, "head width"]
    out: Float[Tensor, "width head"]
    query_offset: Float[Tensor, " head"] | None
    key_offset: Float[Tensor, " head"] | None = None


class Units(NamedTuple):
    """f(x) = sum over k = 1 .. number of out_k phi(<in_k, x> + b_k) + b, with phi the `activation`."""

    activation: Activation
    number: int


OLD_MEMBERS = {
    "HasOutputProjection": {"features": "pre_projection", "last": "output_projection"},
    "HasReferenceKernel": {"plain": "use_reference_kernel"},
}
"""Names of protocols' members in the version before."""


class _AcceptsOldMembers(type(Protocol)):  # type: ignore[misc]  # typing's own metaclass of protocols
    """`isinstance` accepts a map that has all members by their old names, and gives its class the
    new ones.
    """

    def __instancecheck__(cls, instance: Any) -> bool:
        if super().__instancecheck__(instance):
            return True
        renamed = OLD_MEMBERS[cls.__name__]
        old = all(hasattr(instance, name) for name in renamed) and not any(hasattr(instance, name) for name in renamed.values())
        if old:
            adopt_old_members(type(instance), renamed)
        return old


@runtime_checkable
class HasOutputProjection(Protocol, metaclass=_AcceptsOldMembers):
    """A map that names its last linear map: f(x) = output_projection(pre_projection(x))."""

    @property
    def output_projection(self) -> nn.Linear: ...

    def pre_projection(self, x: Tensor) -> Tensor: ...


@runtime_checkable
class ExposesWeights(Protocol):
    """A map that shows its weight matrices."""

    def matrices(self) -> Iterator[Matrix]: ...


@runtime_checkable
class HasBound(Protocol):
    """A map that knows how large its output can be. Raises ConfigError where its weights do not
    tell.
    """

    def bound(self) -> TokenBound: ...


@runtime_checkable
class HasLipschitz(Protocol):
    """A map with a Lipschitz constant in the largest token, abs(f(x) - f(y))_i <= L max_j abs(x_j -
    y_j).
    """

    def lipschitz(self, radius: float = math.inf, *, printed: bool = False) -> float:
        """L for all x and y whose tokens are no longer than `radius`, inf where there is none;
        `printed` takes the slope of the activation as 1, as the papers do.
        """


@runtime_checkable
class ExposesHeads(Protocol):
    """An attention whose row i of head h is softmax over j of <q_i, k_j>/(tau sqrt(d_h)), tau its
    temperature.

    Queries and keys may be turned by their positions first, and scores may pass a function of slope
    at most 1 (soft-capping) and get a number more for each pair of positions (ALiBi, T5's table),
    which changes no derivative.
    """

    @property
    def heads(self) -> int: ...

    @property
    def temperature(self) -> float: ...

    @property
    def normalised_scores(self) -> bool:
        """Whether scores are not bilinear in the input, because a norm acts on queries and keys, or
        are not known to be.
        """

    def probabilities(self, x: Tensor) -> Float[Tensor, "*batch heads tokens tokens"]: ...

    def head_matrices(self) -> Iterator[HeadMatrices]: ...


@runtime_checkable
class SupportsTokenSubset(Protocol):
    """A map that mixes tokens and can give one output token of each sequence for less than all of
    them.
    """

    def at_tokens(self, x: Float[Tensor, "batch tokens width"], chosen: Int[Tensor, " batch"]) -> Float[Tensor, "batch width"]:
        """f(x[b]) at the token chosen[b], with second derivatives whatever `use_reference_kernel`
        says.
        """


@runtime_checkable
class HasTemperature(Protocol):
    """An attention whose softmax has a temperature that may be set."""

    temperature: float


@runtime_checkable
class HasReferenceKernel(Protocol, metaclass=_AcceptsOldMembers):
    """A map that can do without a fused kernel, or without shapes that depend on what it computes."""

    use_reference_kernel: bool


@runtime_checkable
class Scalable(Protocol):
    """A map that can be had with weights inside of it times c: `scalings` names them, and says
    which make exactly c f of f.
    """

    @property
    def scalings(self) -> Mapping[str, bool]: ...

    def scaled(self, name: str, c: float) -> nn.Module: ...


@runtime_checkable
class HasUnits(Protocol):
    """A map of one hidden layer of units, each phi of an affine function of x: no gate multiplies
    them, as one does in SwiGLU.
    """

    def units(self) -> Units: ...


@runtime_checkable
class MixesTokens(Protocol):
    """A map that says whether an output token depends on other input tokens; attention does where
    nothing is said, an FFN not.
    """

    @property
    def mixes_tokens(self) -> bool: ...


def mixes_tokens(field: nn.Module, kind: Kind) -> bool:
    """What the map says of itself, else what maps of its kind do."""
    return field.mixes_tokens if isinstance(field, MixesTokens) else kind != "ffn"


@runtime_checkable
class SumOfMaps(Protocol):
    """A map that is the sum of others which are given the same input, but for gains of their own."""

    @property
    def branches(self) -> Mapping[Kind, Branch]: ...


@runtime_checkable
class HasAuxiliary(Protocol):
    """A map with terms of its own in the training's objective, each a mean over the tokens x that
    the map is given.

    They are functions of x, not of what the map was last called with, so that they hold for every
    method and every gradient kind.
    """

    def auxiliary(self, x: Float[Tensor, "*batch tokens width"]) -> Mapping[str, Float[Tensor, ""]]: ...


@runtime_checkable
class Balances(Protocol):
    """A map of several parts, which tokens are sent to: how many go to each, and a way to even that
    out without a gradient.
    """

    def load(self, x: Float[Tensor, "*batch tokens width"]) -> Float[Tensor, " parts"]: ...

    def rebalance(self, load: Float[Tensor, " parts"], rate: float) -> None: ...


@runtime_checkable
class HasDiscontinuities(Protocol):
    """A map that is smooth but for switches: no token nearer to x_i than this lies behind one. Its
    derivatives are those of the piece.
    """

    def distance_to_switch(self, x: Float[Tensor, "*batch tokens width"]) -> Float[Tensor, "*batch tokens"]: ...


@runtime_checkable
class ExplainsUnsupported(Protocol):
    """A map that may lack protocols which others of its kind have, and says why: in a sentence
    without a full stop, or "".
    """

    why_not: str


def why_not(field: object) -> str:
    """Why the map has fewer protocols than others of its kind: ": its reason", to go on after a
    sentence, or "".
    """
    return f": {field.why_not}" if isinstance(field, ExplainsUnsupported) and field.why_not else ""


__getattr__ = old_names(__name__)

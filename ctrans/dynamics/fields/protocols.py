"""Small protocols by which a map describes itself. Probes test for a protocol, never for a map's
class.

A map f is any module from (*batch, tokens, width) to the same shape. All protocols are optional; a
probe reports which one it lacks. Each is exact for the map's present weights.

| protocol              | what it gives                                            | users                                          |
| --------------------- | -------------------------------------------------------- | ---------------------------------------------- |
| `HasOutputProjection` | f(x) = output_projection(pre_projection(x))              | Hamiltonians over weights, scaling, last layer |
| `ExposesWeights`      | its weight matrices with their roles                     | initialisation, gradients by matrix            |
| `HasBound`            | the largest abs(f(x)_i) if no abs(x_j) exceeds r         | forward and transport bounds                   |
| `HasLipschitz`        | a Lipschitz constant for inputs up to a length           | block bounds                                   |
| `ExposesRows`         | attention's rows                                         | theta, entropy of rows                         |
| `ExposesHeads`        | attention's rows, and the matrices of each head          | Emadi's bounds                                 |
| `SupportsTokenSubset` | f(x) at chosen tokens, without the others                | local values of Emadi's bounds                 |
| `HasTemperature`      | the temperature of its softmax, which can be set         | temperature warm-up                            |
| `HasReferenceKernel`  | a kernel with forward-mode and second derivatives        | every Jacobian                                 |
| `Scalable`            | copies of it with weights inside times c                 | sensitivities to the weights' scale            |
| `HasUnits`            | f(x) = sum of out_k phi(<in_k, x> + b_k) + b, or gated   | the decay that bounds the weights              |
| `MixesTokens`         | whether an output token depends on other input tokens    | the size of a Jacobian                         |
| `SumOfMaps`           | the maps of which it is the sum                          | probes of attention alone                      |
| `HasAuxiliary`        | terms that training may add to its objective             | the objective                                  |
| `Balances`            | the load of its parts, and a way to even it              | the training loop, after each update           |
| `HasDiscontinuities`  | the distance of a token from the jumps of f              | the routing by depth                           |
| `ExplainsUnsupported` | why it lacks some of these protocols                     | messages                                       |
"""  # noqa: E501  # a table

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Literal, NamedTuple, Protocol, runtime_checkable

from jaxtyping import Float, Int
from torch import Tensor, nn

from ctrans.base.protocol import AsksTheInstance
from ctrans.base.shapes import ReadingRows, Scalar, SequenceRows, TokenRows, WeightMatrix
from ctrans.dynamics.fields.activations import Activation
from ctrans.dynamics.fields.branch import Branch

OfHead = Float[Tensor, "head width"]
"""A map from the state to a head."""

Kind = Literal["attention", "ffn", "parallel", "part"]
Role = Literal["query", "key", "value", "out", "gate", "up", "down", "router"]


class Matrix(NamedTuple):
    """A weight matrix of a map, with its role: a view of its parameter. If it is a copy, `copied`
    is the parameter; its rows are then not contiguous there, or are scaled.
    """

    weight: WeightMatrix
    role: Role
    copied: Tensor | None = None

    @property
    def last(self) -> bool:
        """Whether it is the output projection, which writes to the residual stream."""
        return self.role in ("out", "down")


class TokenBound(NamedTuple):
    """abs(f(x)_i) <= gain r + offset + curvature r^2 for every token i, if no input token x_j is
    longer than r.

    An affine bound has curvature 0. A gated FFN, which multiplies two linear maps of x, has no
    affine bound.
    """

    gain: float
    offset: float
    curvature: float = 0.0

    def at(self, radius: float) -> float:
        """The largest length of an output token if no input token is longer than `radius`."""
        slope = self.gain
        if self.curvature:  # without it, avoid 0 times an infinite radius
            slope += self.curvature * radius
        return self.offset + radius * slope

    def behind(self, gain: float, offset: float) -> TokenBound:
        """The bound of f(A x) if abs(A x_i) <= gain r + offset: k (g r + b)^2 + l (g r + b) + o, by
        powers of r.
        """
        slope = self.gain
        if self.curvature:
            slope += 2 * self.curvature * offset
        offset_of_map = self.offset
        if offset:
            offset_of_map = self.at(offset)
        return TokenBound(gain * slope, offset_of_map, self.curvature * gain**2)


class HeadMatrices(NamedTuple):
    """One head: queries Q x + q_0, keys K x + k_0, values V x + v_0, and the columns of W_O to
    which it writes. v_0 is None without bias, or if the map does not show it.

    k_0 is None if it shifts all scores of a row equally, which the softmax ignores. It is given (0
    without bias) if keys are rotated by position, or if the scores pass a nonlinear function
    (soft-capping).
    """

    query: OfHead
    key: OfHead
    value: OfHead
    out: Float[Tensor, "width head"]
    query_offset: Float[Tensor, " head"] | None
    key_offset: Float[Tensor, " head"] | None = None
    value_offset: Float[Tensor, " head"] | None = None


class Units(NamedTuple):
    """f(x) = sum over k = 1 .. number of out_k phi(<in_k, x> + b_k) + b, with phi the `activation`.

    - `gated`: whether each unit is multiplied by <u_k, x> + c_k
    - `bias`: whether units have the offsets b_k
    """

    activation: Activation
    number: int
    gated: bool = False
    bias: bool = False


@runtime_checkable
class HasOutputProjection(Protocol, metaclass=AsksTheInstance):
    """A map with an output projection: f(x) = output_projection(pre_projection(x))."""

    output_projection: nn.Linear

    def pre_projection(self, x: Tensor) -> Tensor: ...


@runtime_checkable
class ExposesWeights(Protocol, metaclass=AsksTheInstance):
    """A map that gives its weight matrices."""

    def matrices(self) -> Iterator[Matrix]: ...


@runtime_checkable
class HasBound(Protocol, metaclass=AsksTheInstance):
    """A map with a bound on its output. `bound` raises ConfigError if the weights do not determine
    one.
    """

    def bound(self) -> TokenBound: ...


@runtime_checkable
class HasLipschitz(Protocol):
    """A map with a Lipschitz constant in the largest token, abs(f(x) - f(y))_i <= L max_j abs(x_j -
    y_j).
    """

    def lipschitz(self, radius: float = math.inf, *, printed: bool = False) -> float:
        """L for all x and y whose tokens are no longer than `radius`; inf if there is none.
        `printed` takes the slope of the activation as 1, as the papers do.
        """


@runtime_checkable
class ExposesRows(Protocol, metaclass=AsksTheInstance):
    """An attention whose row i of head h is how head h weighs tokens for token i: numbers of at
    least 0 that sum to 1. The tokens are those of the state, or of another sequence.
    """

    heads: int

    def probabilities(self, x: Tensor) -> ReadingRows: ...


@runtime_checkable
class ExposesHeads(ExposesRows, Protocol, metaclass=AsksTheInstance):
    """An attention whose row i of head h is softmax over j of <q_i, k_j>/(tau sqrt(d_h)), tau its
    temperature.

    Queries and keys may be rotated by their positions first. Scores may pass a function of slope at
    most 1 (soft-capping), and a number may be added for each pair of positions (ALiBi, T5's table),
    which changes no derivative.
    """

    temperature: float
    normalised_scores: bool
    """Whether scores are not bilinear in the input, for example because a norm acts on queries and
    keys, or may not be.
    """

    def head_matrices(self) -> Iterator[HeadMatrices]: ...


@runtime_checkable
class SupportsTokenSubset(Protocol):
    """A map that mixes tokens and computes one output token of each sequence for less than the cost
    of all.
    """

    def at_tokens(
        self, x: SequenceRows, chosen: Int[Tensor, " batch"]
    ) -> Float[Tensor, "batch width"]:
        """f(x[b]) at the token chosen[b], with second derivatives whatever `use_reference_kernel`
        is.
        """


@runtime_checkable
class HasTemperature(Protocol, metaclass=AsksTheInstance):
    """An attention whose softmax has a temperature that can be set."""

    temperature: float


@runtime_checkable
class HasReferenceKernel(Protocol, metaclass=AsksTheInstance):
    """A map that can avoid fused kernels and shapes that depend on values."""

    use_reference_kernel: bool


@runtime_checkable
class Scalable(Protocol, metaclass=AsksTheInstance):
    """A map that gives copies with some weights times c. `scalings` has their names, and whether f
    becomes exactly c f.
    """

    scalings: Mapping[str, bool]

    def scaled(self, name: str, c: float) -> nn.Module: ...


@runtime_checkable
class HasUnits(Protocol):
    """A map with one hidden layer of units, each phi of an affine function of x, or gated."""

    def units(self) -> Units: ...


@runtime_checkable
class MixesTokens(Protocol, metaclass=AsksTheInstance):
    """A map that states whether an output token depends on other input tokens. By default attention
    does and an FFN does not.
    """

    mixes_tokens: bool


def mixes_tokens(field: nn.Module, kind: Kind) -> bool:
    """The map's own statement, or the default for maps of its kind."""
    if isinstance(field, MixesTokens):
        return field.mixes_tokens
    return kind != "ffn"


@runtime_checkable
class SumOfMaps(Protocol, metaclass=AsksTheInstance):
    """A map that is the sum of others with the same input, except for gains of their own."""

    branches: Mapping[Kind, Branch]


@runtime_checkable
class HasAuxiliary(Protocol):
    """A map with its own terms in the training objective, each a mean over the tokens x of its
    input.

    They are functions of x, not of the map's last call, so they hold for every method and every
    kind of gradient.
    """

    def auxiliary(self, x: TokenRows) -> Mapping[str, Scalar]: ...


@runtime_checkable
class Balances(Protocol):
    """A map of several parts to which tokens are sent: it counts the tokens of each part, and evens
    them without a gradient.
    """

    def load(self, x: TokenRows) -> Float[Tensor, " parts"]: ...

    def rebalance(self, load: Float[Tensor, " parts"], rate: float) -> None: ...


@runtime_checkable
class HasDiscontinuities(Protocol):
    """A map that is smooth between switches. The distance is a lower bound to the nearest switch;
    derivatives are those of the present piece.
    """

    def distance_to_switch(self, x: TokenRows) -> Float[Tensor, "*batch tokens"]: ...


@runtime_checkable
class ExplainsUnsupported(Protocol, metaclass=AsksTheInstance):
    """A map that explains why it lacks protocols that others of its kind have: a clause without a
    full stop, or "".
    """

    why_not: str


def why_not(field: object) -> str:
    """Why the map lacks protocols: ": its reason", to append to a sentence, or ""."""
    if isinstance(field, ExplainsUnsupported) and field.why_not:
        return f": {field.why_not}"
    return ""

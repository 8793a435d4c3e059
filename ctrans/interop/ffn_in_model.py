"""A foreign model's FFN as a map that exposes its matrices and bounds: a plain FFN or a gated
one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from ctrans.dynamics.fields import ACTIVATIONS, Activation, Matrix, Role, Units
from ctrans.dynamics.fields.ffn_bounds import BoundedFFN, FFNMaps
from ctrans.interop.attention_reading import in_another_dtype
from ctrans.interop.module_chain import MapInModel, ModuleChain, Projection, same_rows
from ctrans.interop.norms import named_norms
from ctrans.interop.recorded_calls import RecordedCall, watched
from ctrans.interop.tolerances import difference, unit


def _quick_gelu(z: Tensor) -> Tensor:
    return z * torch.sigmoid(1.702 * z)


KNOWN: Mapping[str, Activation] = ACTIVATIONS | {
    "gelu_tanh": Activation(partial(F.gelu, approximate="tanh"), 1.129),
    "quick_gelu": Activation(_quick_gelu, 1.09984),
    "elu": Activation(F.elu, 1.0),
    "mish": Activation(F.mish, 1.0885),
    "leaky_relu": Activation(F.leaky_relu, 1.0),
}
"""Activations that a foreign FFN may have. A gate needs one of degree 1, with abs(phi(z)) <=
abs(z).
"""
FAR = 50.0
"""How much larger they are when a reading is tried for a clipped activation."""
TELLING = 2.0
"""Size of the activations' arguments at which activations differ enough to be told apart."""


@dataclasses.dataclass(frozen=True)
class FeedForwardReading:
    """Where the matrices are: W_d phi(W_u x + b_u) + b_d, or with a gate W_d (phi(W_g x + b_g) *
    (W_u x + b_u)) + b_d.
    """

    gate: Projection | None
    up: Projection
    down: Projection
    activation: str


class ReadFeedForward(BoundedFFN, MapInModel):
    """An FFN with the matrices and the activation of its reading, with a gate if that has one."""

    def __init__(self, chain: ModuleChain, reading: FeedForwardReading):
        super().__init__(chain)
        self.reading = reading

    @property
    def projections(self) -> dict[Role, Projection]:
        """Where W_g (if there is a gate), W_u and W_d are."""
        projections: dict[Role, Projection] = {}
        if self.reading.gate is not None:
            projections["gate"] = self.reading.gate
        projections["up"] = self.reading.up
        projections["down"] = self.reading.down
        return projections

    def matrices(self) -> Iterator[Matrix]:
        """W_g (if there is a gate), W_u and W_d."""
        for role, projection in self.projections.items():
            yield from projection.matrices(self, role)

    def units(self) -> Units:
        """phi(<w, x> + b) for each row w of W_1, or of W_g with its gate."""
        maps = self.maps
        return Units(maps.phi, len(maps.up.weight), maps.gate is not None, maps.up.bias is not None)

    @property
    def maps(self) -> FFNMaps:
        maps = {role: part.affine(self) for role, part in self.projections.items()}
        activation = KNOWN[self.reading.activation]
        return FFNMaps(maps.get("gate"), maps["up"], maps["down"], activation)


class PlainFeedForward(ReadFeedForward):
    """f(x) = W_2 phi(W_1 x + b_1) + b_2 on each token, phi in `KNOWN`."""


class GatedFeedForward(ReadFeedForward):
    """f(x) = W_d (phi(W_g x + b_g) * (W_u x + b_u)) + b_d on each token, phi in `KNOWN`: SwiGLU,
    GeGLU.

    It grows with the square of x, so its bound and its Lipschitz constant depend on the radius of
    its input.
    """


def read_ffn(chain: ModuleChain, x: Tensor) -> FeedForwardReading | str:
    """What the FFN computes at these random states, scaled so that activations differ; or the
    reason why it is not known.

    The last linear map is W_d and the others act on x. One is W_u; two are a gate and W_u in either
    order; one with twice the rows holds both. The reading is the combination with a known
    activation that gives the input of W_d. The model must be in eval mode, and
    `find_output_projection` must have run.
    """
    if chain.output_path is None:
        return f"it {chain.ending}"
    inner, _ = _seen(chain, x)
    if inner and inner[0].x.dtype != x.dtype:
        return in_another_dtype(inner[0].x.dtype, x.dtype)
    if not inner or not all(same_rows(part.x, x) for part in inner):
        if len(inner) == 1:
            return "the linear map before its last does not act on its input"
        return f"not all of the {len(inner)} linear maps before its last act on its input"
    size = torch.cat([part.y for part in inner], -1).square().mean().sqrt()
    x = x * TELLING / size
    inner, last = _seen(chain, x)
    fits: list[tuple[float, FeedForwardReading]] = []
    down = Projection(last.path, 0, last.y.shape[-1], scale_path=chain.scale_path)
    for gate, up in _candidates(inner, last.x.shape[-1]):
        up_value = _value(up, inner)
        for name, activation in KNOWN.items():
            if gate is None:
                hidden = activation(up_value)
            elif activation.degree == 1:
                hidden = activation(_value(gate, inner)) * up_value
            else:
                continue
            fits.append((difference(hidden, last.x), FeedForwardReading(gate, up, down, name)))
    if fits:
        miss, reading = min(fits, key=lambda fit: fit[0])
        if miss <= 64 * unit(x.dtype) and _holds_far(chain, reading, FAR * x):
            return reading
    norms = named_norms(chain)
    if norms:
        return f"norms act between its maps ({norms})"
    return (
        "it is not recognised as a plain or gated FFN: its activation is none of"
        f" {', '.join(KNOWN)}, its matrices are parts of larger ones, or more is between them"
    )


def _holds_far(chain: ModuleChain, reading: FeedForwardReading, x: Tensor) -> bool:
    """Whether the reading holds at large arguments too, where clipped activations differ."""
    inner, last = _seen(chain, x)
    activation = KNOWN[reading.activation]
    hidden = _value(reading.up, inner)
    if reading.gate is None:
        hidden = activation(hidden)
    else:
        hidden = activation(_value(reading.gate, inner)) * hidden
    return difference(hidden, last.x) <= 64 * unit(x.dtype)


def ffn_in_model(chain: ModuleChain, reading: FeedForwardReading | str) -> MapInModel:
    """The map with all that its reading shows. If `reading` is a text, it says why the reading
    failed.
    """
    if isinstance(reading, str):
        return MapInModel(chain, reading)
    if reading.gate is None:
        return PlainFeedForward(chain, reading)
    return GatedFeedForward(chain, reading)


def _seen(chain: ModuleChain, x: Tensor) -> tuple[list[RecordedCall], RecordedCall]:
    with watched(chain.linear_maps()) as seen:
        chain(x)
    return seen[:-1], seen[-1]


def _candidates(
    inner: list[RecordedCall], hidden: int
) -> Iterator[tuple[Projection | None, Projection]]:
    """Pairs (gate, up) that fit the shapes."""
    parts = [Projection(part.path, 0, part.y.shape[-1]) for part in inner]
    if len(parts) == 1 and parts[0].stop == 2 * hidden:
        parts = parts[0].cut([hidden, hidden])
    if len(parts) == 1 and parts[0].stop == hidden:
        yield None, parts[0]
    if len(parts) == 2 and all(part.stop - part.start == hidden for part in parts):
        first, second = parts
        yield first, second
        yield second, first


def _value(projection: Projection, inner: list[RecordedCall]) -> Tensor:
    """The output of the projection."""
    output: Tensor = next(part.y for part in inner if part.path == projection.path)
    return output[..., projection.start : projection.stop]

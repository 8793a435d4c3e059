"""What a diagnosis holds beside each other: weights and 0, eps and states, embedding and depth, sublayers and neighbours."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from ctrans.depth import Depth
from ctrans.fields import ExposesHeads, ExposesWeights
from ctrans.norm import Norm, SphereNorm
from ctrans.stability.diagnosis.down import NORMS, Readings, add
from ctrans.stability.diagnosis.reading import Reading, named, place_of
from ctrans.walk import Instrument, StepContext
from solvers.run import finite

LARGE = 10.0
"""A root mean square of states above which an embedding counts as large."""
SHARE = 0.1
"""What the depth adds to a state beside it, below which it counts for little where the embedding is large."""


class EpsBesideStates(Instrument):
    """eps over mean((C x)^2) of what each norm divides by, in the median over tokens."""

    def begin(self, depth: Depth, x0: Tensor) -> None:
        self._depth, self._found = depth, Readings()

    def forward(self, at: StepContext) -> None:
        part = at.sublayer
        if part.input_norm is not None:
            read = at.entered if part.residual is None else part.residual.read(at.entered)
            self._read(at.k, "input_norm", part.input_norm, read)
        if part.state_norm is None and part.output_norm is not None:
            self._read(at.k, "output_norm", part.output_norm, part.field(part.given(at.entered)))

    def _read(self, k: int, attribute: str, norm: Norm, x: Tensor) -> None:
        if not isinstance(norm, SphereNorm):  # squashing and clipping divide by nothing
            return
        size = float(norm.centre(x.detach()).double().square().mean(-1).median())
        if not norm.eps or not size or not math.isfinite(size):
            return
        place = f"{place_of(self._depth, k)}, {NORMS[attribute][1]}"
        said = f"eps = {norm.eps:.3g}, and the mean square of what the norm divides is {size:.3g}"
        add(self._found, "eps over mean square", Reading(norm.eps / size, place, said, k))

    def figures(self) -> Readings:
        return self._found


class EmbeddingBesideDepth(Instrument):
    """How large X_0 is, how much of it is the text's, and what the depth adds to it in the end, Y the state without any sublayer."""

    def begin(self, depth: Depth, x0: Tensor) -> None:
        self._depth, self._found, self._without = depth, Readings(), x0
        self._last, self._size = x0, float(x0.double().square().mean().sqrt())
        x = x0.detach().double()
        if x.dim() != 3 or len(x) < 2 or not finite(x):
            return
        own = float((x - x.mean(0, keepdim=True)).square().sum())
        whole = float((x - x.mean((0, 1), keepdim=True)).square().sum())
        if own and whole:  # sequences that are one and the same say nothing of this
            said = f"{own / whole:.2g} of its variance differs from sequence to sequence at one position"
            add(self._found, "text in the embedding", Reading(own / whole, "the embedding", said, None))

    def forward(self, at: StepContext) -> None:
        norm = at.sublayer.state_norm
        self._without = self._without if norm is None else norm(self._without)
        self._last = at.y

    def figures(self) -> Readings:
        y, without = self._last.detach().double(), self._without.detach().double()
        if finite(y) and finite(without) and self._size:
            share = float(((y - without).norm(dim=-1) / y.norm(dim=-1)).median())
            said = (
                f"its root mean square is {self._size:.3g}, and the whole depth makes {share:.2g} of the median token at its end"
            )
            add(
                self._found,
                "depth beside a large embedding",
                Reading(max(share / SHARE, LARGE / self._size), "the embedding", said),
            )
        return self._found


class Moves(Instrument):
    """Two ratios of what sublayers of a kind add to the median token: this one's over its neighbours' largest, their least over this one's.

    Neighbours stand in the blocks before and behind; at an end these are the two next blocks, so that a quiet one makes no loud one of
    it. Of two blocks alone neither is called the quiet one.
    """

    def begin(self, depth: Depth, x0: Tensor) -> None:
        self._depth, self._moves = depth, dict[int, float]()

    def forward(self, at: StepContext) -> None:
        if at.sublayer.state_norm is None and finite(at.y):
            self._moves[at.k] = float((at.y - at.x).detach().double().norm(dim=-1).median())

    def figures(self) -> Readings:
        found = Readings()
        for k, move in self._moves.items():
            beside = self._beside(k)
            most, least = max(beside, default=0.0), min(beside, default=0.0)
            said = f"it moves the median token by {move:.3g}"
            if most:
                loud = f"{said}, {move / most:.3g} times as much as its like in blocks beside"
                add(found, "move over the neighbours'", Reading(move / most, place_of(self._depth, k), loud, k))
            if move and least and len(beside) > 1:
                quiet = f"{said}, its like in blocks beside by {least / move:.3g} times as much"
                add(found, "neighbours' move over its own", Reading(least / move, place_of(self._depth, k), quiet, k))
        return found

    def _beside(self, k: int) -> list[float]:
        each = self._depth.per_block
        places = [k - each, k + each]
        if not all(place in self._moves for place in places):
            places += [k - 2 * each, k + 2 * each]
        return [self._moves[place] for place in places if place in self._moves]


class ZeroHeads(Instrument):
    """The largest entry of each head's queries, keys, values and outputs; of matrices that are not 0 as a whole."""

    def begin(self, depth: Depth, x0: Tensor) -> None:
        self._depth, self._found = depth, Readings()

    def forward(self, at: StepContext) -> None:
        field = None if at.sublayer.attention is None else at.sublayer.attention.field
        if not isinstance(field, ExposesHeads) or not isinstance(field, ExposesWeights):
            return
        zero = []
        for head, parts in enumerate(field.head_matrices()):
            each = {"queries": parts.query, "keys": parts.key, "values": parts.value, "outputs": parts.out}
            zero += [f"the {name} of head {head}" for name, weight in each.items() if not bool(weight.any())]
        said = f"{named(zero)} {'are' if zero else 'no head has weights that are'} 0"
        add(self._found, "heads of zeros", Reading(float(len(zero)), place_of(self._depth, at.k), said, at.k))

    def figures(self) -> Readings:
        return self._found


@torch.no_grad()
def weights_of_zeros(model: nn.Module, depth: Depth) -> Readings:
    """The largest entry of every matrix, by its own name and the sublayer that it is in; of a stack of matrices, as experts are, that
    of the one where it is least.
    """
    found, places = Readings(), parameter_places(depth)
    for name, weight in own_parameters(model):
        if weight.dim() in (2, 3) and not weight.is_meta and weight.numel() > 1:
            k = places.get(id(weight))
            each = weight.detach().abs().amax((-2, -1))
            largest, which = float(each.min()), f"[{int(each.argmin())}]" if weight.dim() == 3 else ""
            place = f"the weight {name}{which}" if k is None else f"{place_of(depth, k)}: the weight {name}{which}"
            said = "every entry is 0, so that nothing comes through it" if not largest else f"largest entry {largest:.2g}"
            add(found, "largest entry of a matrix", Reading(largest, place, said, k))
    return found


def own_parameters(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The parameters by the names that they have in the model that was opened."""
    yield from opened(model).named_parameters()


def opened(model: nn.Module) -> nn.Module:
    """The module inside of everything that has a `Depth`: the user's own."""
    inner = getattr(model, "model", None)
    return opened(inner) if isinstance(inner, nn.Module) and isinstance(getattr(model, "depth", None), Depth) else model


def parameter_places(depth: Depth) -> Mapping[int, int]:
    """In which segment a parameter is, by its id."""
    return {id(weight): k for k, part in enumerate(depth.sublayers) for weight in part.parameters()}

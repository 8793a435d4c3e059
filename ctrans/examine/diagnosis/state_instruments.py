"""The diagnosis' instruments of hidden states: their entries, and what the embedding, sublayers and
blocks contribute to them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ctrans.base.median import median_of
from ctrans.dynamics.depth import Depth
from ctrans.examine.diagnosis.reading import DiagnosticInstrument, place_of, rms
from ctrans.interop.block_structure import MIX
from ctrans.interop.operations import Graph, Operations
from ctrans.measure.backward.sensitivity import CLOSED, NOT_FINITE, Sensitivity
from ctrans.measure.findings import Reading, Readings
from ctrans.measure.forward.depth_share import token_similarity, without_map
from ctrans.measure.forward.moments import token_lengths
from ctrans.measure.forward.single_entries import largest_entry
from ctrans.measure.walk import Model, StepContext, Turn, of_text
from solvers.run import finite

MASSIVE = 100.0
OF_MEDIAN = 1000.0
"""An entry is massive if it exceeds `MASSIVE` and `OF_MEDIAN` times the median (Sun et al. 2024).
"""
LARGE_EMBEDDING = 10.0
"""An embedding with a larger root mean square counts as large."""
SMALL_SHARE = 0.1
"""With a large embedding, a depth that adds less than this share of the state has little effect."""


class StatesByDepth(DiagnosticInstrument):
    """Of X_0 and of X at each segment's end: non-finite entries, massive entries, and the
    similarity of tokens.
    """

    name = "states"

    def start(self, x0: Tensor) -> None:
        self._read(x0, "the embedded text", None)

    def forward(self, at: StepContext) -> None:
        self._read(at.y, f"the end of {place_of(self.depth, at.k)}", at.k)

    def _read(self, x: Tensor, location: str, segment: int | None) -> None:
        bad = int((~x.isfinite()).sum())
        self.add(
            "entries that are not finite",
            float(bad),
            f"{bad} of {x.numel()} entries of the state",
            segment,
            location,
        )
        if bad:
            return
        largest, times, sequence, token, channel = largest_entry(x, self.kept)
        where = f"in channel {channel} of token {token}, sequence {sequence}"
        figure = f"|x| = {largest:.3g}, {times:.3g} times the median, {where}"
        self.add(
            "massive activation",
            min(largest / MASSIVE, times / OF_MEDIAN),
            figure,
            segment,
            location,
        )
        likeness = token_similarity(x, self.kept)
        self.add(
            "token similarity",
            likeness,
            f"two tokens of a sequence have a mean cosine of {likeness:.4f}",
            segment,
            location,
        )


class BlockMoves(DiagnosticInstrument):
    """|x_end - y_end|/|x_end| of each block, with y carried through the block's state norms alone:
    the share of its sublayers.
    """

    name = "what blocks do"

    def forward(self, at: StepContext) -> None:
        per_block = self.depth.per_block
        if at.k % per_block == 0:
            self._without = at.x
        self._without = without_map(at.sublayer, self._without)
        if at.k % per_block == per_block - 1 and finite(at.y):
            moves = of_text(at.y - self._without, self.kept)
            moved = token_lengths(moves) / token_lengths(of_text(at.y, self.kept))
            share = median_of(moved)
            number = at.k // per_block
            location = f"{self.depth.unit} {number} (segments {at.k - per_block + 1} to {at.k})"
            self.add(
                "block moves",
                share,
                f"its sublayers make {share:.2g} of the median token at its end",
                at.k,
                location,
            )


class SublayerMoves(DiagnosticInstrument):
    """What a sublayer adds to the median token, relative to its neighbours of the same kind: its
    own over their largest, and their least over its own.

    Neighbours are in the blocks before and after. At an end they are the next two blocks, so that a
    quiet sublayer does not make its only neighbour look loud. With two blocks, neither counts as
    quiet.
    """

    name = "what sublayers add"

    def start(self, x0: Tensor) -> None:
        self._moves = dict[int, float]()

    def forward(self, at: StepContext) -> None:
        if at.sublayer.state_norm is None and finite(at.y):
            added = of_text(at.y - at.x, self.kept).detach()
            self._moves[at.k] = median_of(added.double().norm(dim=-1))

    def figures(self) -> Readings:
        for k, move in self._moves.items():
            beside = self._beside(k)
            most = max(beside, default=0.0)
            least = min(beside, default=0.0)
            moves = f"it moves the median token by {move:.3g}"
            if most:
                figure = f"{moves}, {move / most:.3g} times as much as its like in blocks beside"
                self.add("move over the neighbours'", move / most, figure, k)
            if move and least and len(beside) > 1:
                figure = f"{moves}, its like in blocks beside by {least / move:.3g} times as much"
                self.add("neighbours' move over its own", least / move, figure, k)
        return self.found

    def _beside(self, k: int) -> list[float]:
        per_block = self.depth.per_block
        sublayers = self.depth.sublayers
        alike = [
            segment
            for segment in range(k % per_block, len(sublayers), per_block)
            if sublayers[segment].kind == sublayers[k].kind
        ]
        place = alike.index(k)
        near = self._moves_of(alike, place, 1)
        if len(near) == 2:
            return near
        return near + self._moves_of(alike, place, 2)

    def _moves_of(self, alike: Sequence[int], place: int, apart: int) -> list[float]:
        """The moves of the segments so far apart in this list, on both sides."""
        places = [i for i in (place - apart, place + apart) if 0 <= i < len(alike)]
        return [self._moves[alike[i]] for i in places if alike[i] in self._moves]


def _embeds(model: Model, tokens: Tensor) -> bool:
    """Whether the first state is computed from the tokens. Learned latents that read the tokens are
    not.
    """
    assert isinstance(model, nn.Module)
    graph = Graph(model)
    with torch.no_grad(), Operations(graph.met, {}):
        x = model.embed(tokens)
    return graph.number(x) in graph.after(graph.number(tokens))


class EmbeddingShare(DiagnosticInstrument):
    """The size of X_0, the share of it that depends on the text, and the share of the last state
    that the depth adds.
    """

    name = "embedding"

    @property
    def looks_back(self) -> bool:
        """No: it asks for the tokens in a walk with a loss, and does without."""
        return False

    def start(self, x0: Tensor) -> None:
        self._last = x0
        self._without = x0
        self._size = rms(of_text(x0, self.kept))
        self._is_the_same = False
        x = x0.detach().double()
        if x.dim() != 3 or len(x) < 2 or not finite(x):
            return
        counted = torch.ones_like(x[..., :1])
        if self.kept is not None:
            counted = self.kept.unsqueeze(-1).double()
        at_position = (x * counted).sum(0) / counted.sum(0).clamp(min=1)
        everywhere = (x * counted).sum((0, 1)) / counted.sum()
        text_variance = float(((x - at_position).square() * counted).sum())
        total_variance = float(((x - everywhere).square() * counted).sum())
        # as of equal sequences: `head` knows the tokens. A mean of equal numbers is rounded
        rounding = torch.finfo(x.dtype).eps
        self._is_the_same = text_variance <= rounding * total_variance
        if total_variance and not self._is_the_same:
            share = text_variance / total_variance
            figure = (
                f"{share:.2g} of its variance differs from sequence to sequence at one position"
            )
            self.add("text in the embedding", share, figure, place="the embedding")

    def head(self, model: Model, at: Turn) -> None:
        tokens = at.tokens
        differ = len(tokens) > 1 and bool((tokens != tokens[:1]).any())
        if self._is_the_same and differ and _embeds(model, tokens):
            figure = "it is the same for all sequences, whose tokens differ"
            self.add("text in the embedding", 0.0, figure, place="the embedding")

    def forward(self, at: StepContext) -> None:
        norm = at.sublayer.state_norm
        if norm is not None:
            self._without = norm(self._without)
        self._last = at.y

    def figures(self) -> Readings:
        y = of_text(self._last, self.kept).detach().double()
        without = of_text(self._without, self.kept).detach().double()
        if finite(y) and finite(without) and self._size:
            share = median_of((y - without).norm(dim=-1) / y.norm(dim=-1))
            size = f"its root mean square is {self._size:.3g}"
            figure = f"{size}, and the whole depth makes {share:.2g} of the median token at its end"
            value = max(share / SMALL_SHARE, LARGE_EMBEDDING / self._size)
            self.add("depth beside a large embedding", value, figure, place="the embedding")
        return self.found


def sensitivity_readings(depth: Depth, sensitivities: list[Sensitivity]) -> Readings:
    """Readings of h |dv/dX|, for the sublayers where it is known; inf if the Jacobian overflows at
    a finite state. A sublayer that only a scale of 0 closes has none: it trains. Nor has a part
    that adds the same to every state, such as a table of positions.
    """
    readings: list[Reading] = []
    for k, (h, sensitivity) in enumerate(zip(depth.lengths, sensitivities, strict=False)):
        mixes = getattr(depth.sublayers[k].field, "label", "") == MIX
        if sensitivity.note == CLOSED or (mixes and sensitivity.value == 0):
            continue
        if sensitivity.value is None and sensitivity.note != NOT_FINITE:
            continue
        if sensitivity.value is None:
            value = math.inf
        else:
            value = sensitivity.value
        figure = f"|dv/dX| = {value:.3g}"
        if h != 1:
            figure += f", in a step of h = {h:g}"
        readings.append(Reading(h * value, place_of(depth, k), figure, k))
    return {"sensitivity": readings}

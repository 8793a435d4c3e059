"""The diagnosis' instruments of the forward pass: gains of norms, states, heads, sublayer
contributions and sensitivities.
"""

from __future__ import annotations

import math
import statistics

import torch
from torch import Tensor

from ctrans.dynamics.depth import Depth
from ctrans.dynamics.fields import ExposesHeads, ExposesWeights, HasOutputProjection
from ctrans.dynamics.fields.positions import later_tokens
from ctrans.dynamics.norm import Norm, SphereNorm
from ctrans.examine.diagnosis.reading import DiagnosticInstrument, named, place_of, rms
from ctrans.measure.attention.row_entropy import entropy_of_rows
from ctrans.measure.backward.sensitivity import NOT_FINITE, Sensitivity
from ctrans.measure.findings import Reading, Readings
from ctrans.measure.forward.depth_share import token_similarity, without_map
from ctrans.measure.forward.moments import token_lengths
from ctrans.measure.forward.single_entries import largest_entry
from ctrans.measure.walk import StepContext
from solvers import ConfigError
from solvers.run import finite

NORMS = {
    "state_norm": ("gain around the state", "the norm around the state"),
    "output_norm": ("gain of an output norm", "the output norm"),
    "input_norm": ("gain of an input norm", "the input norm"),
}
"""By a sublayer's attribute: the quantity of its smallest gain, and the norm's name."""
DEAD = 1e-3
"""A gain below this share of the norm's median counts as dead."""
OUTLIER = 10.0
"""A channel is an outlier if its mean |x| exceeds this many times the median channel's. Those that
MiniLM's last norm silences have 42 to 64 times it.
"""
MASSIVE, OF_MEDIAN = 100.0, 1000.0
"""An entry is massive if it exceeds `MASSIVE` and `OF_MEDIAN` times the median (Sun et al. 2024).
"""
LEAST_ENTROPY = 0.05
"""A head whose rows have less entropy, in nats, is saturated: one token has about 99% of the
weight.
"""
LARGE_INPUT = 10.0
"""Above this root mean square, the finding of a saturated head names attention's input, because its
scale may be the cause.
"""
LARGE_EMBEDDING = 10.0
"""An embedding with a larger root mean square counts as large."""
SMALL_SHARE = 0.1
"""With a large embedding, a depth that adds less than this share of the state has little effect."""


def smallest_gain(gains: Tensor, left_out: Tensor | None = None) -> tuple[float, str]:
    """The smallest |gamma_i| over the median, and the dead channels in words. Channels `left_out`
    do not count.
    """
    size = gains.detach().abs().double().flatten()
    median = float(size.median())
    if left_out is None:
        counted = size
    else:
        counted = size.masked_fill(left_out, math.inf)
    if median:
        share = float(counted.min()) / median
    else:
        share = math.nan
    dead = [int(i) for i in counted.argsort() if counted[i] < DEAD * median] or [
        int(counted.argmin())
    ]
    each = [f"|gamma| = {float(size[i]):.2g} in channel {i}" for i in dead]
    return share, f"{named(each)}; the norm's median is {median:.2g}"


def silenced(norm: Norm, x: Tensor) -> tuple[Tensor, float, str]:
    """The channels with a dead gain whose input is an outlier, their largest ratio, and words.

    The ratio is a channel's mean |x_i| over the median of all channels.
    """
    size = norm.gamma.detach().abs().double().flatten()
    each = x.detach().abs().double().flatten(0, -2).mean(0)
    ratio = each / each.median().clamp(min=torch.finfo(torch.float64).tiny)
    if ratio.shape != size.shape:
        return torch.zeros_like(size, dtype=torch.bool), 0.0, "the norm has groups of channels"
    quiet = (size < DEAD * size.median()) & (ratio > OUTLIER)
    words = [
        f"|x| = {float(each[i]):.3g} in channel {int(i)}, {float(ratio[i]):.3g} times the median"
        for i in quiet.nonzero()[:, 0]
    ]
    return (
        quiet,
        float(ratio[quiet].max()) if quiet.any() else 0.0,
        f"{named(words)}, with a gain of nearly 0",
    )


class GainsByNorm(DiagnosticInstrument):
    """Gains of each sublayer's norms: the smallest and the largest over the median, and an output
    norm's root mean square.
    """

    name = "gains"

    def forward(self, at: StepContext) -> None:
        for attribute, (quantity, name) in NORMS.items():
            norm: Norm | None = getattr(at.sublayer, attribute)
            if norm is None:
                continue
            gains = norm.gamma.detach()
            place = f"{place_of(self.depth, at.k)}, {name}"
            largest = float(gains.abs().max())
            size = rms(gains)
            quiet = None
            if attribute != "output_norm" and finite(at.x):
                if attribute == "input_norm":
                    x = at.sublayer.residual.read(at.entered)
                else:
                    x = at.entered + at.h * at.sublayer(at.entered)
                quiet, ratio, words = silenced(norm, x)
                self.add("outlier with a dead gain", ratio, words, at.k, place)
            self.add(quantity, *smallest_gain(gains, quiet), at.k, place)
            self.add(
                "largest gain of a norm",
                largest,
                f"its largest |gamma| is {largest:.2g}",
                at.k,
                place,
            )
            median = float(gains.abs().double().median())
            if median:
                figure = (
                    f"|gamma| = {largest:.3g} in channel {int(gains.abs().argmax())}; the norm's"
                    f" median is {median:.2g}"
                )
                self.add("largest gain over the median", largest / median, figure, at.k, place)
            if attribute == "output_norm":
                self.add(
                    "output gain", size, f"the gains' root mean square is {size:.3g}", at.k, place
                )


class StatesByDepth(DiagnosticInstrument):
    """Of X_0 and of X at each segment's end: non-finite entries, massive entries, and the
    similarity of tokens.
    """

    name = "states"

    def start(self, x0: Tensor) -> None:
        self._read(x0, "the embedded text", None)

    def forward(self, at: StepContext) -> None:
        self._read(at.y, f"the end of {place_of(self.depth, at.k)}", at.k)

    def _read(self, x: Tensor, place: str, segment: int | None) -> None:
        bad = int((~x.isfinite()).sum())
        self.add(
            "entries that are not finite",
            float(bad),
            f"{bad} of {x.numel()} entries of the state",
            segment,
            place,
        )
        if bad:
            return
        largest, times, sequence, token, channel = largest_entry(x, self.kept)
        where = f"in channel {channel} of token {token}, sequence {sequence}"
        figure = f"|x| = {largest:.3g}, {times:.3g} times the median, {where}"
        self.add(
            "massive activation", min(largest / MASSIVE, times / OF_MEDIAN), figure, segment, place
        )
        likeness = token_similarity(x, self.kept)
        self.add(
            "token similarity",
            likeness,
            f"two tokens of a sequence have a mean cosine of {likeness:.4f}",
            segment,
            place,
        )


class BlockMoves(DiagnosticInstrument):
    """|x_end - y_end|/|x_end| of each block, with y carried through the block's state norms alone:
    the share of its sublayers.
    """

    name = "what blocks do"

    def forward(self, at: StepContext) -> None:
        each = self.depth.per_block
        if at.k % each == 0:
            self._without = at.x
        self._without = without_map(at.sublayer, self._without)
        if at.k % each == each - 1 and finite(at.y):
            moved = token_lengths(at.y - self._without) / token_lengths(at.y)
            share = float(moved.double().median())
            place = f"block {at.k // each} (segments {at.k - each + 1} to {at.k})"
            self.add(
                "block moves",
                share,
                f"its sublayers make {share:.2g} of the median token at its end",
                at.k,
                place,
            )


class HeadRows(DiagnosticInstrument):
    """The mean entropy of each head's rows over tokens that read more than one token. Attention
    that does not expose rows has none.
    """

    name = "heads"

    def start(self, x0: Tensor) -> None:
        self._entropies = list[float]()

    def forward(self, at: StepContext) -> None:
        if at.x.shape[-2] < 2:
            raise ConfigError("each sequence has one token, which reads itself alone")
        attention = at.sublayer.attention
        if attention is None or not isinstance(attention.field, ExposesHeads) or not finite(at.x):
            return
        x = attention.given(at.sublayer.given(at.entered))
        rows = attention.field.probabilities(x).double()
        rows = rows.reshape(-1, *rows.shape[-3:]).movedim(-3, 0)
        if self.kept is None:
            counted = torch.ones(rows.shape[1:3], dtype=torch.bool, device=rows.device)
        else:
            counted = self.kept
        counted = counted.reshape(rows.shape[1:3])
        if not rows.triu(1).any():
            # the first token of a causal text reads itself alone
            counted = counted & (counted.cumsum(-1) > 1)
        rows = rows[:, counted]
        if not rows.shape[1]:
            return
        entropy = entropy_of_rows(rows).mean(-1)
        self._entropies += entropy.tolist()
        likely = rows.topk(2).values
        apart = torch.where(
            likely[..., 1] > 0, (likely[..., 0] / likely[..., 1]).log(), math.inf
        ).amax(-1)
        order = entropy.argsort()
        saturated = [h for h in order.tolist() if entropy[h] < LEAST_ENTROPY] or order[:1].tolist()
        each = [
            f"head {h}: {float(entropy[h]):.2g} nats, its largest logit above the next by"
            f" {_apart(float(apart[h]))}"
            for h in saturated
        ]
        size = rms(x)
        if size > LARGE_INPUT:
            read = f"; what it reads has a root mean square of {size:.3g}"
        else:
            read = ""
        self.add("least entropy of a head", float(entropy.min()), f"{named(each)}{read}", at.k)

    def figures(self) -> Readings:
        if (middle := statistics.median(self._entropies or [math.nan])) >= 0:
            self.add(
                "median entropy of a head",
                middle,
                f"{middle:.2g} nats in half of all heads or less",
                place="all attention",
            )
        return self.found


def _apart(logits: float) -> str:
    if math.isinf(logits):
        return "more than the dtype resolves"
    return f"up to {logits:.3g}"


class ScoreSpread(DiagnosticInstrument):
    """The deviation of log a_ij, in nats, over the tokens j that row i of attention reads. Each
    layer's median over heads and rows, over the median of the other layers.

    A layer whose scores have the wrong scale stands out. Weights a_ij that are 0 in their dtype
    count as its smallest number. With two layers there is no reading.
    """

    name = "scores"

    def start(self, x0: Tensor) -> None:
        self._spread = dict[int, float]()

    def forward(self, at: StepContext) -> None:
        attention = at.sublayer.attention
        if (
            attention is None
            or not isinstance(attention.field, ExposesHeads)
            or not finite(at.x)
            or at.x.shape[-2] < 3
        ):
            return
        rows = attention.field.probabilities(attention.given(at.sublayer.given(at.entered)))
        later = later_tokens(rows)
        if not (rows > 0)[..., later].any():
            read = ~later
        else:
            read = torch.ones_like(later)
        scores = rows.double().clamp(min=torch.finfo(rows.dtype).tiny).log()
        count = read.sum(-1)
        middle = (scores * read).sum(-1, keepdim=True) / count.unsqueeze(-1)
        spread = (((scores - middle) * read).square().sum(-1) / count).sqrt()
        self._spread[at.k] = float(spread[..., count > 2].median())

    def figures(self) -> Readings:
        for k, spread in self._spread.items():
            others = sorted(each for other, each in self._spread.items() if other != k)
            if len(others) > 1 and others[len(others) // 2] and spread:
                ratio = spread / others[len(others) // 2]
                figure = (
                    f"its scores deviate by {spread:.3g} in a row, {ratio:.3g} times as much as"
                    " those of the other layers"
                )
                self.add("scores over the other layers'", ratio, figure, k)
        return self.found


class DeadUnits(DiagnosticInstrument):
    """The share of an FFN's features, before its last map, that are the same for all tokens."""

    name = "units"

    def forward(self, at: StepContext) -> None:
        branch = at.sublayer.branches.get("ffn")
        if branch is None or not isinstance(branch.field, HasOutputProjection) or not finite(at.x):
            return
        units = (
            branch.field.pre_projection(branch.given(at.sublayer.given(at.entered)))
            .detach()
            .flatten(0, -2)
        )
        least = torch.finfo(units.dtype).eps * units.abs().max()
        share = float(((units - units[:1]).abs().amax(0) <= least).double().mean())
        self.add(
            "share of dead units",
            share,
            f"{100 * share:.0f}% of its units are the same for all tokens",
            at.k,
        )


class ZeroHeads(DiagnosticInstrument):
    """The number of each sublayer's heads with query, key, value or output weights that are all
    0.
    """

    name = "heads of zeros"

    def forward(self, at: StepContext) -> None:
        if at.sublayer.attention is None:
            field = None
        else:
            field = at.sublayer.attention.field
        if not isinstance(field, ExposesHeads) or not isinstance(field, ExposesWeights):
            return
        zero = []
        for head, parts in enumerate(field.head_matrices()):
            each = {
                "queries": parts.query,
                "keys": parts.key,
                "values": parts.value,
                "outputs": parts.out,
            }
            zero += [
                f"the {name} of head {head}" for name, weight in each.items() if not weight.any()
            ]
        if zero:
            figure = f"{named(zero)} are 0"
        else:
            figure = "no head has weights that are 0"
        self.add("heads of zeros", float(len(zero)), figure, at.k)


class EpsShare(DiagnosticInstrument):
    """eps over mean((C x)^2), the median over tokens, of each norm's input x."""

    name = "eps"

    def forward(self, at: StepContext) -> None:
        part = at.sublayer
        if part.input_norm is not None:
            read = part.residual.read(at.entered)
            self._read(at.k, "input_norm", part.input_norm, read)
        if part.state_norm is None and part.output_norm is not None:
            self._read(at.k, "output_norm", part.output_norm, part.field(part.given(at.entered)))

    def _read(self, k: int, attribute: str, norm: Norm, x: Tensor) -> None:
        if not isinstance(norm, SphereNorm):  # other norms squash or clip, and do not divide
            return
        size = float(norm.centre(x.detach()).double().square().mean(-1).median())
        if norm.eps and size and math.isfinite(size):
            figure = f"eps = {norm.eps:.3g}, and the mean square of the norm's input is {size:.3g}"
            self.add(
                "eps over mean square",
                norm.eps / size,
                figure,
                k,
                f"{place_of(self.depth, k)}, {NORMS[attribute][1]}",
            )


class EmbeddingShare(DiagnosticInstrument):
    """The size of X_0, the share of it that depends on the text, and the share of the last state
    that the depth adds.
    """

    name = "embedding"

    def start(self, x0: Tensor) -> None:
        self._last = self._without = x0
        self._size = rms(x0)
        x = x0.detach().double()
        if x.dim() != 3 or len(x) < 2 or not finite(x):
            return
        own = float((x - x.mean(0, keepdim=True)).square().sum())
        whole = float((x - x.mean((0, 1), keepdim=True)).square().sum())
        if own and whole:  # equal sequences do not show it
            figure = (
                f"{own / whole:.2g} of its variance differs from sequence to sequence at one"
                " position"
            )
            self.add("text in the embedding", own / whole, figure, place="the embedding")

    def forward(self, at: StepContext) -> None:
        norm = at.sublayer.state_norm
        if norm is None:
            self._without = self._without
        else:
            self._without = norm(self._without)
        self._last = at.y

    def figures(self) -> Readings:
        y = self._last.detach().double()
        without = self._without.detach().double()
        if finite(y) and finite(without) and self._size:
            share = float(((y - without).norm(dim=-1) / y.norm(dim=-1)).median())
            size = f"its root mean square is {self._size:.3g}"
            figure = f"{size}, and the whole depth makes {share:.2g} of the median token at its end"
            value = max(share / SMALL_SHARE, LARGE_EMBEDDING / self._size)
            self.add("depth beside a large embedding", value, figure, place="the embedding")
        return self.found


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
            self._moves[at.k] = float((at.y - at.x).detach().double().norm(dim=-1).median())

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
        each = self.depth.per_block
        places = [k - each, k + each]
        if not all(place in self._moves for place in places):
            places += [k - 2 * each, k + 2 * each]
        return [self._moves[place] for place in places if place in self._moves]


def sensitivity_readings(depth: Depth, each: list[Sensitivity]) -> Readings:
    """Readings of h |dv/dX|, for the sublayers where it is known; inf if the Jacobian overflows at
    a finite state.
    """
    found: list[Reading] = []
    for k, (h, sensitivity) in enumerate(zip(depth.lengths, each, strict=False)):
        if sensitivity.value is None and sensitivity.note != NOT_FINITE:
            continue
        if sensitivity.value is None:
            value = math.inf
        else:
            value = sensitivity.value
        figure = f"|dv/dX| = {value:.3g}" + (f", in a step of h = {h:g}" if h != 1 else "")
        found.append(Reading(h * value, place_of(depth, k), figure, k))
    return {"sensitivity": found}

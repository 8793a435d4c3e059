"""The diagnosis' instruments of attention's heads and of an FFN's units."""

from __future__ import annotations

import math
import statistics

import torch
from torch import Tensor

from ctrans.base.median import median_of
from ctrans.dynamics.fields import ExposesHeads, ExposesRows, ExposesWeights, HasOutputProjection
from ctrans.examine.diagnosis.reading import DiagnosticInstrument, named, rms
from ctrans.measure.attention.row_entropy import entropy_of_rows
from ctrans.measure.findings import Readings
from ctrans.measure.walk import StepContext, of_text
from solvers import ConfigError
from solvers.run import finite

LEAST_ENTROPY = 0.05
"""A head whose rows have less entropy, in nats, is saturated: one token has about 99% of the
weight.
"""
LARGE_INPUT = 10.0
"""Above this root mean square, the finding of a saturated head names attention's input, because its
scale may be the cause.
"""


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
        if attention is None or not isinstance(attention.field, ExposesRows) or not finite(at.x):
            return
        x = attention.given(at.sublayer.given(at.entered))
        rows = attention.field.probabilities(x)
        if rows.shape[-1] < 2:
            return
        readable = readable_tokens(attention.field, x, rows)
        if self.kept is not None and rows.shape[-1] == rows.shape[-2]:
            readable = readable & self.kept.unsqueeze(-2).unsqueeze(-2)
        rows = rows.double().reshape(-1, *rows.shape[-3:]).movedim(-3, 0)
        # a row that can read one token alone, such as the first of a causal text, has no entropy
        counted = (readable.sum(-1) > 1).any(-2).reshape(rows.shape[1:3])
        if self.kept is not None:
            counted = counted & self.kept.reshape(counted.shape)
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
        saturated = [h for h in order.tolist() if entropy[h] < LEAST_ENTROPY]
        if not saturated:
            saturated = order[:1].tolist()
        saturation = [
            f"head {h}: {float(entropy[h]):.2g} nats, its largest logit above the next by"
            f" {_apart(float(apart[h]))}"
            for h in saturated
        ]
        size = rms(of_text(x, self.kept))
        input_size = ""
        if size > LARGE_INPUT:
            input_size = f"; what it reads has a root mean square of {size:.3g}"
        self.add(
            "least entropy of a head",
            float(entropy.min()),
            f"{named(saturation)}{input_size}",
            at.k,
        )

    def figures(self) -> Readings:
        if not self._entropies:
            return self.found
        middle = statistics.median(self._entropies)
        if middle >= 0:
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

    A layer whose scores have the wrong scale stands out. Token j counts for token i if no mask
    hides it (`readable_tokens`). Weights that are 0 all the same count as the smallest number of
    their dtype. With two layers there is no reading.
    """

    name = "scores"

    def start(self, x0: Tensor) -> None:
        self._spread = dict[int, float]()

    def forward(self, at: StepContext) -> None:
        attention = at.sublayer.attention
        if (
            attention is None
            or not isinstance(attention.field, ExposesRows)
            or not finite(at.x)
            or at.x.shape[-2] < 3
        ):
            return
        x = attention.given(at.sublayer.given(at.entered))
        rows = attention.field.probabilities(x)
        counted = torch.ones(rows.shape[:-1], dtype=torch.bool, device=rows.device)
        readable = readable_tokens(attention.field, x, rows)
        if self.kept is not None:
            counted &= self.kept.unsqueeze(-2)
        if self.kept is not None and rows.shape[-1] == rows.shape[-2]:
            readable = readable & self.kept.unsqueeze(-2).unsqueeze(-2)
        scores = rows.double().clamp(min=torch.finfo(rows.dtype).tiny).log()
        count = readable.sum(-1)
        middle = (scores * readable).sum(-1, keepdim=True) / count.unsqueeze(-1)
        spread = (((scores - middle) * readable).square().sum(-1) / count).sqrt()
        counted &= count > 2
        if counted.any():
            self._spread[at.k] = median_of(spread[counted])

    def figures(self) -> Readings:
        for k, spread in self._spread.items():
            other_layers = [value for layer, value in self._spread.items() if layer != k]
            if len(other_layers) < 2:
                continue
            middle = statistics.median(other_layers)
            if middle and spread:
                ratio = spread / middle
                figure = (
                    f"its scores deviate by {spread:.3g} in a row, {ratio:.3g} times as much as"
                    " those of the other layers"
                )
                self.add("scores over the other layers'", ratio, figure, k)
        return self.found


def readable_tokens(field: ExposesRows, x: Tensor, rows: Tensor) -> Tensor:
    """Which tokens each of the rows (*batch, heads, tokens, read) of attention may read: those that
    it reads at inputs of 0, where scores are alike, and those that it does read at x. Weights that
    are 0 all the same, as of scores far apart, are not those of a mask.
    """
    alike = field.probabilities(torch.zeros_like(x))
    if alike.shape != rows.shape or not finite(alike):
        return rows != 0
    return (alike != 0) | (rows != 0)


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
            matrices = {
                "queries": parts.query,
                "keys": parts.key,
                "values": parts.value,
                "outputs": parts.out,
            }
            zero += [
                f"the {name} of head {head}"
                for name, weight in matrices.items()
                if not weight.any()
            ]
        if zero:
            figure = f"{named(zero)} are 0"
        else:
            figure = "no head has weights that are 0"
        self.add("heads of zeros", float(len(zero)), figure, at.k)


class DeadUnits(DiagnosticInstrument):
    """The share of an FFN's features, before its last map, that are the same for all tokens."""

    name = "units"

    def forward(self, at: StepContext) -> None:
        branch = at.sublayer.branches.get("ffn")
        if branch is None or not isinstance(branch.field, HasOutputProjection) or not finite(at.x):
            return
        x = branch.given(at.sublayer.given(at.entered))
        rows = of_text(x.detach(), self.kept).flatten(0, -2)
        if not bool((rows != rows[:1]).any()):
            return  # equal inputs have equal features
        units = of_text(branch.field.pre_projection(x).detach(), self.kept).flatten(0, -2)
        least = torch.finfo(units.dtype).eps * units.abs().max()
        share = float(((units - units[:1]).abs().amax(0) <= least).double().mean())
        self.add(
            "share of dead units",
            share,
            f"{100 * share:.0f}% of its units are the same for all tokens",
            at.k,
        )

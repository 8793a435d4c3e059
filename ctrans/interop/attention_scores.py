"""The scores of a foreign attention: whether they are a number times <Q x, K x>, and which.

Rotary positions are set to the same position for all tokens, where rotations R cancel: <R q, R k> =
<q, k>. If they cancel for a position in the middle of the text, R is a rotation up to a factor,
which becomes part of the scale.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ctrans.interop.attention_rows import seeing_rows
from ctrans.interop.module_chain import JoinedProjections, ModuleChain, Projection
from ctrans.interop.tolerances import difference, tolerance

ROTARY = "position_embeddings"
"""The argument that gives blocks cosines and sines, each (batch, tokens, head)."""
SCALES = ("scaling", "scale", "softmax_scale")
"""Attributes that hold the factor of the scores."""
FAINT = 0.3
"""A size of scores at which a soft-cap has no visible effect."""
STRONG = 3.0
"""A size of scores at which a soft-cap has an effect, and rows still have all their digits."""


def by_head(z: Tensor, heads: int, head: int) -> Tensor:
    """(batch, tokens, groups * head) as (batch, heads, tokens, head), with each group repeated for
    the heads that share it.
    """
    parts: Tensor = z.unflatten(-1, (-1, head)).transpose(1, 2)
    return parts.repeat_interleave(heads // parts.shape[1], dim=1)


@dataclass(frozen=True)
class Scores:
    """The scores of an attention, known from the logarithms of its rows up to a constant for each
    row.
    """

    chain: ModuleChain
    x: Tensor
    context: dict[str, Any]
    visible: Tensor
    head: int
    cap: float | None
    maps: dict[Projection | JoinedProjections, Tensor] = field(default_factory=dict)
    """What has been computed of x, by its projection."""

    def scale(
        self, query: Projection | JoinedProjections, key: Projection | JoinedProjections
    ) -> float | None:
        """The factor of <Q x_i + b_q, K x_j + b_k> in the scores, or None if scores are something
        else.

        It is fitted at states so small that a cap has no effect, and must reproduce the rows at
        larger states. A factor that the module states is used if it fits. Otherwise the fit is
        rounded up, so that bounds remain valid.
        """
        small = self._state_size(query, key, FAINT * math.sqrt(self.head))
        large = self._state_size(query, key, STRONG * math.sqrt(self.head))
        if not 0 < small < large < math.inf:
            return None
        close = tolerance(self.x.dtype)
        faint = self._centred(self._products(query, key, small))
        by_position = self._observed(0.0)
        products_by_rows = (faint * (self._observed(small) - by_position)).sum()
        fitted = float(products_by_rows / faint.square().sum())
        agreeing = [stated for stated in self._stated() if abs(stated - fitted) <= close * stated]
        if agreeing:
            scale = max(agreeing)
        else:
            scale = fitted * (1 + close)
        scores = scale * self._products(query, key, large)
        if self.cap is None:
            capped = scores
        else:
            capped = self.cap * torch.tanh(scores / self.cap)
        if not scale > 0:
            return None
        miss = difference(self._centred(capped), self._observed(large) - by_position)
        if miss <= 2 * close:
            return scale
        return None

    def has_position_scores(self) -> bool:
        """Whether a number for each pair of positions is added to the scores: rows at x = 0 depend
        on the position.
        """
        return bool(self._observed(0.0).abs().max() > tolerance(self.x.dtype))

    def _stated(self) -> list[float]:
        """Candidates for the scale: what the module states, 1/sqrt(head), and none; each also times
        the squared length of the rotary tables.
        """
        attributes = [getattr(self.chain.stages[0], name, None) for name in SCALES]
        factors = [
            float(attribute)
            for attribute in attributes
            if isinstance(attribute, (int, float)) and not isinstance(attribute, bool)
        ]
        factors += [self.head**-0.5, 1.0]
        stretches = {1.0}
        if isinstance(self.context.get(ROTARY), tuple):
            cosines, sines = self.context[ROTARY]
            length = float((cosines.double().square() + sines.double().square()).max())
            if not abs(length - 1) <= tolerance(cosines.dtype):
                stretches.add(length)
        return [factor * stretch for factor in factors for stretch in stretches]

    def _state_size(
        self,
        query: Projection | JoinedProjections,
        key: Projection | JoinedProjections,
        target: float,
    ) -> float:
        """t for which the products of t x differ within rows by about `target`."""
        t = 1.0
        for _ in range(60):
            products = self._centred(self._products(query, key, t))
            size = float((products.square().sum() / self.visible.sum()).sqrt())
            following = t * math.sqrt(target / max(size, 1e-30))
            if following == t:
                break
            t = following
        return t

    def _products(
        self, query: Projection | JoinedProjections, key: Projection | JoinedProjections, t: float
    ) -> Tensor:
        """<Q t x_i + b_q, K t x_j + b_k> for each head."""
        q = self._projected(query, t)
        k = self._projected(key, t)
        return q @ k.transpose(-1, -2)

    def _projected(self, projection: Projection | JoinedProjections, t: float) -> Tensor:
        if projection not in self.maps:
            weight = projection.weight(self.chain).to(self.x.dtype)
            self.maps[projection] = F.linear(self.x, weight).double()
        z = t * self.maps[projection]
        bias = projection.bias(self.chain)
        if bias is not None:
            z = z + bias.double()
        return by_head(z, self.visible.shape[1], self.head)

    def _observed(self, t: float) -> Tensor:
        """The logarithms of the rows at t x, centred."""
        with seeing_rows(self.chain.stages[0]) as last_rows:
            self.chain(t * self.x, **self.context)
        rows = last_rows()
        assert rows is not None
        return self._centred(torch.where(self.visible, rows.double(), 1.0).log())

    def _centred(self, scores: Tensor) -> Tensor:
        """Scores minus their mean over the tokens that a row reads; 0 elsewhere."""
        visible_scores = torch.where(self.visible, scores, 0.0)
        mean = visible_scores.sum(-1, keepdim=True) / self.visible.sum(-1, keepdim=True)
        return torch.where(self.visible, scores - mean, 0.0)


def at_one_position(context: dict[str, Any]) -> dict[str, Any]:
    """The context with the last token's rotary position for all tokens."""
    if ROTARY not in context:
        return context
    rotary = context[ROTARY]
    at_the_last: Tensor | tuple[Tensor, ...]
    if isinstance(rotary, Tensor):
        at_the_last = rotary[..., -1:, :].expand_as(rotary)
    else:
        at_the_last = tuple(table[..., -1:, :].expand_as(table) for table in rotary)
    return {**context, ROTARY: at_the_last}

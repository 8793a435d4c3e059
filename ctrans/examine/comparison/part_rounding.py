"""How large a difference of outputs is, and what random rounding makes of a part of a model."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ctrans.dynamics.weights.on_demand import WeightKey, altered
from ctrans.examine.comparison.parts import ModelParts
from ctrans.examine.comparison.rounding_noise import Draws, RoundingNoise, changed_by
from ctrans.examine.comparison.weight_pairs import WeightPair, rounded_pairs
from ctrans.examine.comparison.weight_relations import Relation

SAMPLES = 3
"""Runs with random rounding, for each part."""


@dataclass(frozen=True)
class DifferenceSize:
    """A difference of outputs: its root mean square, its largest entry, and the first as a share of
    what the part makes.
    """

    rms: float
    largest: float
    share: float


def differences(first: Sequence[Tensor], second: Sequence[Tensor]) -> list[DifferenceSize]:
    """The size of the difference of each pair of outputs."""
    return [difference(x, y) for x, y in zip(first, second, strict=True)]


def difference(x: Tensor, y: Tensor) -> DifferenceSize:
    """The size of y - x, with the share |y - x|/|x|; infinite for other shapes. Entries that are
    the same infinite number count as equal.
    """
    if x.shape != y.shape:
        return DifferenceSize(math.inf, math.inf, math.inf)
    x, y = _both_finite(x.double(), y.double())
    gap = y - x
    rms = float(gap.square().mean().sqrt()) if gap.numel() else 0.0
    size = float(x.square().mean().sqrt()) if x.numel() else 0.0
    share = 0.0
    if rms:
        share = rms / size if size else math.inf
    return DifferenceSize(rms, float(gap.abs().amax()) if gap.numel() else 0.0, share)


def _both_finite(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Both, without entries that are the same infinite number, as of hidden logits."""
    same = (x == y) & ~x.isfinite()
    if not bool(same.any()):
        return x, y
    return x.masked_fill(same, 0), y.masked_fill(same, 0)


def ratio_of(defect: DifferenceSize, rounding: DifferenceSize) -> float:
    """How many times as large as rounding a defect is: infinite where rounding changes nothing, or
    where one of the two is not finite, which tells nothing.
    """
    ratios = []
    for of_defect, of_rounding in (
        (defect.rms, rounding.rms),
        (defect.largest, rounding.largest),
    ):
        if of_defect == 0:
            ratios.append(0.0)
        elif of_rounding == 0 or not math.isfinite(of_defect + of_rounding):
            ratios.append(math.inf)
        else:
            ratios.append(of_defect / of_rounding)
    return max(ratios)


class PartRounding:
    """Runs of the first model's parts with random rounding."""

    def __init__(
        self,
        a: ModelParts,
        lower: torch.dtype,
        own: torch.dtype,
        found: list[tuple[WeightPair, Relation]],
    ):
        self.parts = a
        self.unit = torch.finfo(lower).eps
        if lower != own:
            self.unit /= 2  # a number is rounded by at most half of the distance to the next
        self.draws = Draws()
        self.rounded = rounded_pairs(found)
        module = a.module
        everything = list(module.parameters()) if module is not None else []
        by_part = [
            [weight for sublayer in a.sublayers_of(part) for weight in sublayer.parameters()]
            for part in range(len(a))
        ]
        inside = {id(weight) for weights in by_part for weight in weights}
        outside = [weight for weight in everything if id(weight) not in inside]
        self.weights = [outside, *by_part[1:-1], outside]
        self.all_weights = everything
        self.loss_variance = 0.0

    def run(
        self, compute: Callable[[], list[Tensor]], weights: Sequence[nn.Parameter]
    ) -> list[Tensor]:
        """What the first model computes, once, with random rounding of results and weights."""
        with self._changed(weights), RoundingNoise(self.unit, self.draws):
            return compute()

    def tensor(
        self, part: int, compute: Callable[[], Tensor], dtype: torch.dtype | None = None
    ) -> Tensor:
        """The same for a single tensor of a part; with a dtype, its results rounded as there."""
        if dtype is None:
            return self.run(lambda: [compute()], self.weights[part])[0]
        with RoundingNoise(torch.finfo(dtype).eps / 2, self.draws):
            return compute()

    def embedding(self, tokens: Any) -> list[Tensor]:
        """The same for the embedding, of which the weights and the output are rounded alone: a
        model's whole pass computes more up to its first block, such as angles of positions, which
        are computed with more digits than states. Of images the whole embedding is rounded: it is a
        map of their numbers.
        """
        if isinstance(tokens, Tensor) and tokens.is_floating_point():
            return self.run(lambda: [self.parts.model.embed(tokens)], self.weights[0])
        with self._changed(self.weights[0]):
            x = self.parts.model.embed(tokens)
        with RoundingNoise(self.unit, self.draws):
            return [x * 1.0]

    @contextlib.contextmanager
    def _changed(self, weights: Sequence[nn.Parameter]) -> Iterator[None]:
        """Inside, these weights have random changes, and so has each weight on demand that a part
        reads.
        """
        changes = {
            weight: self._weight_change(id(weight), weight.detach())
            for weight in weights
            if weight.is_floating_point()
        }
        with contextlib.ExitStack() as stack:
            if self.parts.module is not None:
                stack.enter_context(altered(self.parts.module, self._altered))
            stack.enter_context(changed_by(changes))
            yield

    def _altered(self, key: WeightKey, weight: Tensor) -> Tensor:
        if not weight.is_floating_point():
            return weight
        return self._weight_change(key, weight).add_(weight)

    def _weight_change(self, key: WeightKey | int, weight: Tensor) -> Tensor:
        draws = self.draws.like(weight, 1.0)
        if key in self.rounded:
            # the true change of each entry, with a random sign
            return draws.sign_().mul_(self.rounded[key].added_to(weight))
        return draws.mul_(self.unit).mul_(weight)

    def of(
        self,
        part: int,
        given: Any,
        outputs: Sequence[Tensor],
        change_of_loss: Callable[[list[Tensor]], float] | None = None,
    ) -> list[DifferenceSize]:
        """How far the outputs of a part move, the largest of the samples. `change_of_loss` is what
        moved outputs change of the loss; its mean square is added to `loss_variance`.
        """
        sizes = []
        for _ in range(SAMPLES):
            if part == 0:
                moved = self.embedding(given)
            else:
                moved = self.run(lambda: self.parts.outputs(part, given), self.weights[part])
            sizes.append(differences(outputs, moved))
            if change_of_loss is not None:
                change = change_of_loss(moved)
                self.loss_variance += change * change / SAMPLES  # inf where ** 2 overflows
        return [max(several, key=lambda size: size.rms) for several in zip(*sizes, strict=True)]

    def of_loss(self, tokens: Any, loss: float) -> float:
        """The root mean square of what rounding changes of the loss, in whole passes."""
        return self._of_loss(lambda: self.embedding(tokens)[0], 1, self.all_weights, loss)

    def of_head(self, x: Tensor) -> float:
        """The same of the head and the loss alone."""
        loss = self.parts.loss_of(x)
        return self._of_loss(lambda: x, len(self.parts) - 1, self.weights[-1], loss)

    def loss_of_logits(self, logits: Tensor) -> float:
        """Their loss, computed once with random rounding."""
        with RoundingNoise(self.unit, self.draws):
            return self.parts.loss_of_logits(logits)

    def _of_loss(
        self,
        start: Callable[[], Tensor],
        part: int,
        weights: Sequence[nn.Parameter],
        loss: float,
    ) -> float:
        total = 0.0
        for _ in range(SAMPLES):
            x = start()
            with self._changed(weights), RoundingNoise(self.unit, self.draws):
                change = self.parts.loss_of(self.parts.last_from(part, x)) - loss
                total += change * change
        return math.sqrt(total / SAMPLES)

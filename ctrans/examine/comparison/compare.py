"""Where two models part: `compare`.

Two models of K sublayers each, Phi_k and Psi_k, read the same text. With X_k the states of the
first model,

    e_k = Psi_k(X_k) - Phi_k(X_k)

is the *local defect* of sublayer k: what the second model does otherwise, without what it inherits
from before. With G_k(x) the loss of the second model from state x before part k on, the difference
of the losses is the sum of *shares*,

    L_B - L_A = sum_k [ G_{k+1}(Psi_k(X_k)) - G_{k+1}(Phi_k(X_k)) ]
              = sum_k [ G_k(X_k) - G_{k+1}(X_{k+1}) ],

which telescopes. The embedding and the head are parts too. To first order a share is
<P_{k+1}, e_k>, with P the costate of the second model; the rest is O(|e|^2).

A defect is compared with what rounding makes of the same part of the first model: `RoundingNoise`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from ctrans.base.as_found import as_found
from ctrans.control.costate import costate
from ctrans.examine.comparison.parts import ModelParts
from ctrans.examine.comparison.rounding_noise import Draws, RoundingNoise, changed_by
from ctrans.examine.comparison.stages import Stage, stages_of
from ctrans.examine.comparison.weight_relations import (
    Relation,
    WeightPair,
    as_changes,
    pairs_of,
    relation_of,
)
from ctrans.interop.foreign_errors import FOREIGN_ERRORS, named_error
from ctrans.measure.walk import Model, check_targets
from solvers import ConfigError, SolveError

SAMPLES = 3
"""Runs with random rounding, for each part."""
CHANGED = 4.0
"""A defect so many times as large as the rounding that was measured is a change."""


@dataclass(frozen=True)
class PartDifference:
    """What is different in a part of two models.

    - `name`: the part in words
    - `defect`: |e_k| as a share of what the part makes, root mean square. Of a sublayer that is
      what it adds, or the next state if that differs by more than rounding explains
    - `rounding`: the same for what rounding makes of the first model's part
    - `ratio`: the largest ratio of defect to rounding, of root mean squares and of largest entries;
      0 if the part is equal to the bit
    - `behind`: |X_B - X_A|/|X_A| behind the part, both models on their own; of the head, that of
      the logits
    - `share`: the part's share of L_B - L_A; nan without a loss
    - `first_order`: <P, e_k>; nan where there is no costate
    """

    name: str
    defect: float
    rounding: float
    ratio: float
    behind: float
    share: float
    first_order: float

    @property
    def changed(self) -> bool:
        """Whether rounding does not explain the defect."""
        return not self.ratio <= CHANGED


@dataclass(frozen=True)
class WeightDifference:
    """A weight that differs: its names, its part, and how the second follows from the first."""

    name: str
    other_name: str
    part: str
    relation: str
    kind: str
    distance: float


@dataclass(frozen=True)
class ModelComparison:
    """What `compare` found.

    - `losses`: L_A and L_B; nan without a loss
    - `rounding_of_loss`: what rounding alone changes of the first one's loss, root mean square
    - `parts`: along the depth
    - `inside`: of the first part that changed, its stages
    - `weights`: those that differ; `equal_weights` and `unmatched` count the others
    - `missing`: what was not measured, and why
    """

    losses: tuple[float, float]
    rounding_of_loss: float
    parts: tuple[PartDifference, ...]
    inside: tuple[Stage, ...]
    weights: tuple[WeightDifference, ...]
    equal_weights: int
    unmatched: tuple[str, ...]
    missing: dict[str, str]

    @property
    def difference(self) -> float:
        """L_B - L_A."""
        first, second = self.losses
        return second - first

    @property
    def changed(self) -> list[PartDifference]:
        """The parts whose defect rounding does not explain, along the depth."""
        return [part for part in self.parts if part.changed]

    @property
    def stage(self) -> Stage | None:
        """The first stage that changed of the first sublayer that did."""
        return next((stage for stage in self.inside if stage.changed), None)

    @property
    def equal(self) -> bool:
        """Whether no part differs in any bit."""
        return all(part.ratio == 0 for part in self.parts)


@torch.no_grad()
def compare(
    first: Model,
    second: Model,
    tokens: Any,
    targets: Any = None,
    *,
    progress: Callable[[int], None] | None = None,
) -> ModelComparison:
    """Where the second model parts from the first on this text. Both compute in evaluation mode,
    each in its own dtype, and stay as they are.

    - `tokens`, `targets`: what the models read, and the targets of their losses; without targets
      there are no shares
    - `progress(k)`: called after part k

    Raises ConfigError for models of other depths or widths, whose parts do not belong together, and
    for targets that are not one for each token.
    """
    with ExitStack() as stack:
        for model in (first, second):
            if targets is not None:
                check_targets(model, tokens, targets)
            stack.enter_context(as_found(model))
        return _compared(ModelParts(first, targets), ModelParts(second, targets), tokens, progress)


def _compared(
    a: ModelParts, b: ModelParts, tokens: Any, progress: Callable[[int], None] | None
) -> ModelComparison:
    _check_alike(a, b)
    missing: dict[str, str] = {}
    found, unmatched = _weight_relations(a, b)
    own_states = list(a.states(tokens))
    other_states = list(b.states(tokens))
    _check_states(own_states, other_states)
    lower = _lower(own_states[0].dtype, other_states[0].dtype)
    noise = _Noise(a, lower, own_states[0].dtype, found)
    of_a = [tokens, *(x.to(lower).to(x.dtype) for x in own_states)]
    of_b = [
        tokens,
        *(x.to(lower).to(y.dtype) for x, y in zip(own_states, other_states, strict=True)),
    ]
    tails = [math.nan] * (len(a) + 1)
    first_order = [math.nan] * len(a)
    if a.targets is not None:
        tails[-1] = a.loss_of(own_states[-1])
        try:
            first_order = _first_order(a, b, tokens, of_a, of_b)
        except (*FOREIGN_ERRORS, ConfigError, SolveError) as error:
            missing["first-order share"] = named_error(error)
    last = len(a) - 1
    ends_a = [*own_states, *a.outputs(last, own_states[-1])]
    ends_b = [*other_states, *b.outputs(last, other_states[-1])]
    parts = []
    for k, name in enumerate(a.names):
        outputs = a.outputs(k, of_a[k])
        defects = _differences(outputs, b.outputs(k, of_b[k]))
        roundings = noise.of(k, of_a[k], outputs)
        ratios = [_ratio(d, r) for d, r in zip(defects, roundings, strict=True)]
        shown = 0
        if ratios[0] <= CHANGED:
            shown = ratios.index(max(ratios))
        if a.targets is not None:
            tails[k] = b.loss_from(k, of_b[k])
        parts.append(
            PartDifference(
                name=name,
                defect=defects[shown].share,
                rounding=roundings[shown].share,
                ratio=max(ratios),
                behind=_difference(ends_a[k], ends_b[k]).share,
                share=math.nan,
                first_order=first_order[k],
            )
        )
        if progress is not None:
            progress(k)
    parts = [
        replace(part, share=share - following)
        for part, (share, following) in zip(parts, pairwise(tails), strict=True)
    ]
    inside: tuple[Stage, ...] = ()
    for k, part in enumerate(parts):
        if part.changed:
            inside = stages_of(a, b, k, of_a[k], of_b[k], partial(noise.tensor, k), CHANGED)
            break
    rounding_of_loss = math.nan
    if a.targets is not None:
        rounding_of_loss = noise.of_loss(tokens, tails[-1])
    return ModelComparison(
        losses=(tails[-1], tails[0]),
        rounding_of_loss=rounding_of_loss,
        parts=tuple(parts),
        inside=inside,
        weights=tuple(_weight_differences(a, found)),
        equal_weights=sum(relation.kind == "equal" for _, relation in found),
        unmatched=tuple(unmatched),
        missing=missing,
    )


def _weight_differences(
    a: ModelParts, found: list[tuple[WeightPair, Relation]]
) -> Iterator[WeightDifference]:
    """The weights that differ, with the part of the first model that has them."""
    places = a.part_of()
    for pair, relation in found:
        if relation.kind == "equal":
            continue
        part = ""
        if id(pair.first) in places:
            part = a.names[places[id(pair.first)]]
        yield WeightDifference(
            name=pair.first_name,
            other_name=pair.second_name,
            part=part,
            relation=relation.words,
            kind=relation.kind,
            distance=relation.distance,
        )


def _check_alike(a: ModelParts, b: ModelParts) -> None:
    if len(a) != len(b):
        raise ConfigError(
            f"the models have {len(a) - 2} and {len(b) - 2} sublayers, so that their parts do not"
            " belong together: compare models of one depth that ctrans reads in the same way"
        )


def _check_states(of_a: Sequence[Tensor], of_b: Sequence[Tensor]) -> None:
    for k, (x, y) in enumerate(zip(of_a, of_b, strict=True)):
        if x.device != y.device:
            raise ConfigError(
                f"the models compute on {x.device} and {y.device}: move one to the other device"
            )
        if x.shape != y.shape:
            raise ConfigError(
                f"their states X_{k} have the shapes {tuple(x.shape)} and {tuple(y.shape)}: compare"
                " models of one width on the same inputs"
            )


def _lower(first: torch.dtype, second: torch.dtype) -> torch.dtype:
    """The dtype of fewer digits."""
    return max(first, second, key=lambda dtype: torch.finfo(dtype).eps)


def _weight_relations(
    a: ModelParts, b: ModelParts
) -> tuple[list[tuple[WeightPair, Relation]], list[str]]:
    first, second = a.module, b.module
    if first is None or second is None:
        return [], []
    pairs, unmatched = pairs_of(first, second)
    return [(pair, relation_of(pair.first, pair.second)) for pair in pairs], unmatched


@dataclass(frozen=True)
class _Size:
    """A difference of outputs: its root mean square, its largest entry, and the first as a share of
    what the part makes.
    """

    rms: float
    largest: float
    share: float


def _differences(first: Sequence[Tensor], second: Sequence[Tensor]) -> list[_Size]:
    return [_difference(x, y) for x, y in zip(first, second, strict=True)]


def _difference(x: Tensor, y: Tensor) -> _Size:
    if x.shape != y.shape:
        return _Size(math.inf, math.inf, math.inf)
    x, y = _both_finite(x.double(), y.double())
    gap = y - x
    rms = float(gap.square().mean().sqrt()) if gap.numel() else 0.0
    size = float(x.square().mean().sqrt()) if x.numel() else 0.0
    share = 0.0
    if rms:
        share = rms / size if size else math.inf
    return _Size(rms, float(gap.abs().amax()) if gap.numel() else 0.0, share)


def _both_finite(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Both, without entries that are the same infinite number, as of hidden logits."""
    same = (x == y) & ~x.isfinite()
    if not bool(same.any()):
        return x, y
    return x.masked_fill(same, 0), y.masked_fill(same, 0)


def _ratio(defect: _Size, rounding: _Size) -> float:
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


class _Noise:
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
        self.rounded = as_changes(found)
        module = a.module
        everything = list(module.parameters()) if module is not None else []
        of_sublayers = [list(sublayer.parameters()) for sublayer in a.sublayers]
        inside = {id(weight) for weights in of_sublayers for weight in weights}
        outside = [weight for weight in everything if id(weight) not in inside]
        self.weights = [outside, *of_sublayers, outside]
        self.all_weights = everything

    def run(
        self, compute: Callable[[], list[Tensor]], weights: Sequence[nn.Parameter]
    ) -> list[Tensor]:
        """What the first model computes, once, with random rounding of results and weights."""
        with changed_by(self._weight_changes(weights)), RoundingNoise(self.unit, self.draws):
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
        are computed with more digits than states.
        """
        with changed_by(self._weight_changes(self.weights[0])):
            x = self.parts.model.embed(tokens)
        with RoundingNoise(self.unit, self.draws):
            return [x * 1.0]

    def _weight_changes(self, weights: Sequence[nn.Parameter]) -> dict[nn.Parameter, Tensor]:
        changes = {}
        for weight in weights:
            if not weight.is_floating_point():
                continue
            draws = self.draws.like(weight.detach(), 1.0)
            if weight in self.rounded:
                # the true change of each entry, with a random sign
                changes[weight] = draws.sign_().mul_(self.rounded[weight])
            else:
                changes[weight] = draws.mul_(self.unit).mul_(weight.detach())
        return changes

    def of(self, part: int, given: Any, outputs: Sequence[Tensor]) -> list[_Size]:
        """How far the outputs of a part move, the largest of the samples."""

        def moved() -> list[Tensor]:
            if part == 0:
                return self.embedding(given)
            return self.run(lambda: self.parts.outputs(part, given), self.weights[part])

        sizes = [_differences(outputs, moved()) for _ in range(SAMPLES)]
        return [max(several, key=lambda size: size.rms) for several in zip(*sizes, strict=True)]

    def of_loss(self, tokens: Any, loss: float) -> float:
        """The root mean square of what rounding changes of the loss."""
        total = 0.0
        for _ in range(SAMPLES):
            x = self.embedding(tokens)[0]
            moved = self.run(partial(self._loss_from, x), self.all_weights)
            total += (float(moved[0]) - loss) ** 2
        return math.sqrt(total / SAMPLES)

    def _loss_from(self, x: Tensor) -> list[Tensor]:
        return [torch.tensor(self.parts.loss_from(1, x))]


def _first_order(
    a: ModelParts, b: ModelParts, tokens: Any, of_a: Sequence[Any], of_b: Sequence[Any]
) -> list[float]:
    """<P_{k+1}, e_k> for the embedding and each sublayer; nan for the head."""
    costates = costate(b.model, tokens, b.targets).costates
    found = []
    for k, p in enumerate(costates):
        defect = b.outputs(k, of_b[k])[-1].double() - a.outputs(k, of_a[k])[-1].double()
        found.append(float((p.double() * defect).sum()))
    return [*found, math.nan]

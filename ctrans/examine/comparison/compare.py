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
from torch import Tensor

from ctrans.base.as_found import as_found
from ctrans.control.costate import costate
from ctrans.examine.comparison.part_rounding import (
    PartRounding,
    difference,
    differences,
    ratio_of,
)
from ctrans.examine.comparison.parts import HEAD, ModelParts
from ctrans.examine.comparison.recording import RecordedParts, Recording, parts_beside
from ctrans.examine.comparison.stages import Stage, stages_of
from ctrans.examine.comparison.weight_relations import (
    Relation,
    WeightPair,
    pairs_of,
    relation_of,
)
from ctrans.interop.foreign_errors import FOREIGN_ERRORS, named_error
from ctrans.measure.walk import Model
from solvers import ConfigError, SolveError

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
    def head(self) -> PartDifference | None:
        """The head; None beside a recording without logits."""
        last = self.parts[-1]
        return last if last.name == HEAD else None

    @property
    def sublayers(self) -> list[PartDifference]:
        """The parts between the embedding and the head."""
        return [part for part in self.parts[1:] if part.name != HEAD]

    @property
    def stage(self) -> Stage | None:
        """The first stage that changed of the first sublayer that did."""
        return next((stage for stage in self.inside if stage.changed), None)

    @property
    def equal(self) -> bool:
        """Whether no part differs in any bit."""
        return all(part.ratio == 0 for part in self.parts)


Side = Model | Recording
"""A model, or what was recorded of one."""


@torch.no_grad()
def compare(
    first: Side,
    second: Side,
    tokens: Any,
    targets: Any = None,
    *,
    progress: Callable[[int], None] | None = None,
) -> ModelComparison:
    """Where the second model parts from the first on this text. Both compute in evaluation mode,
    each in its own dtype, and stay as they are.

    - `first`, `second`: models. The first may be a recording
    - `tokens`, `targets`: what the models read, and the targets of their losses; without targets
      there are no shares
    - `progress(k)`: called after part k

    Raises ConfigError for models of other depths or widths, whose parts do not belong together, and
    for a recording as the second.
    """
    if isinstance(second, Recording):
        raise ConfigError(
            f"{str(second.path)!r} is a recording, which has no parts to run: name it first"
        )
    with ExitStack() as stack:
        stack.enter_context(as_found(second))
        if isinstance(first, Recording):
            b = parts_beside(first, second, targets)
            a = RecordedParts(first, b, second.embed(tokens))
            return _compared(_Pair(a, b, b), tokens, progress)
        stack.enter_context(as_found(first))
        own = ModelParts(first, targets)
        other = ModelParts(second, targets)
        _check_alike(own, other)
        return _compared(_Pair(own, other, own), tokens, progress)


@dataclass(frozen=True)
class _Pair:
    """Two models, and the one of them whose parts run with random rounding: the first, unless that
    is a recording.
    """

    a: ModelParts | RecordedParts
    b: ModelParts
    rounded: ModelParts


def _compared(pair: _Pair, tokens: Any, progress: Callable[[int], None] | None) -> ModelComparison:
    a = pair.a
    b = pair.b
    missing = dict(_not_recorded(a))
    found, unmatched = _weight_relations(a, b)
    own_states = list(a.states(tokens))
    other_states = list(b.states(tokens))
    _check_states(own_states, other_states)
    lower = _lower(own_states[0].dtype, other_states[0].dtype)
    of_a = [tokens, *(x.to(lower).to(x.dtype) for x in own_states)]
    of_b = [
        tokens,
        *(x.to(lower).to(y.dtype) for x, y in zip(own_states, other_states, strict=True)),
    ]
    of_rounded = of_a if pair.rounded is a else of_b
    noise = PartRounding(pair.rounded, lower, of_rounded[1].dtype, found)
    tails = [math.nan] * (len(a) + 1)
    first_order = [math.nan] * len(a)
    if a.targets is not None:
        tails[-1] = a.loss_of(own_states[-1])
        try:
            first_order = _first_order(a, b, tokens, of_a, of_b)
        except (*FOREIGN_ERRORS, ConfigError, SolveError) as error:
            missing["first-order share"] = named_error(error)
    last = len(b) - 1
    ends_a = list(own_states)
    ends_b = list(other_states)
    if len(a) == len(b):
        ends_a += a.outputs(last, own_states[-1])
        ends_b += b.outputs(last, other_states[-1])
    parts = []
    for k, name in enumerate(a.names):
        outputs = a.outputs(k, of_a[k])
        outputs_b = b.outputs(k, of_b[k])
        defects = differences(outputs, outputs_b)
        of_noise = outputs if pair.rounded is a else outputs_b
        roundings = noise.of(k, of_rounded[k], of_noise)
        ratios = [ratio_of(d, r) for d, r in zip(defects, roundings, strict=True)]
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
                behind=difference(ends_a[k], ends_b[k]).share,
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
    first_changed = next((k for k, part in enumerate(parts) if part.changed), None)
    if first_changed is not None and isinstance(a, ModelParts):
        k = first_changed
        inside = stages_of(a, b, k, of_a[k], of_b[k], partial(noise.tensor, k), CHANGED)
    rounding_of_loss = math.nan
    if a.targets is not None:
        own_loss = tails[-1] if pair.rounded is a else tails[0]
        rounding_of_loss = noise.of_loss(tokens, own_loss)
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


def _not_recorded(a: ModelParts | RecordedParts) -> Iterator[tuple[str, str]]:
    """What a recording does not say, and why."""
    if isinstance(a, ModelParts):
        return
    yield "stages of the part that changed", "a recording has no parts that run"
    yield "weights that differ", "a recording has no weights"
    yield (
        "shares by the recording's own tail",
        "it does not run, so shares are by the other model's",
    )
    if a.logits is None:
        yield "the head", "the recording has no tensor logits"


def _weight_differences(
    a: ModelParts | RecordedParts, found: list[tuple[WeightPair, Relation]]
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
    a: ModelParts | RecordedParts, b: ModelParts
) -> tuple[list[tuple[WeightPair, Relation]], list[str]]:
    first, second = a.module, b.module
    if first is None or second is None:
        return [], []
    pairs, unmatched = pairs_of(first, second)
    return [(pair, relation_of(pair.first, pair.second)) for pair in pairs], unmatched


def _first_order(
    a: ModelParts | RecordedParts,
    b: ModelParts,
    tokens: Any,
    of_a: Sequence[Any],
    of_b: Sequence[Any],
) -> list[float]:
    """<P_{k+1}, e_k> for the embedding and each part of sublayers; nan for the head."""
    costates = costate(b.model, tokens, b.targets).costates[:: b.size]
    found = []
    for k, p in enumerate(costates):
        defect = b.outputs(k, of_b[k])[-1].double() - a.outputs(k, of_a[k])[-1].double()
        found.append(float((p.double() * defect).sum()))
    return [*found, math.nan][: len(a)]

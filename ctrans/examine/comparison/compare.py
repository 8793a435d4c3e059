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

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from ctrans.base.as_found import as_found
from ctrans.control.costate import costate
from ctrans.dynamics.weights.on_demand import resident
from ctrans.examine.comparison.explanations import EditTrial, Explanation, explanations_of
from ctrans.examine.comparison.kept_parts import (
    KeptParts,
    contributions_of,
    differences_of,
    fine_and_coarse,
    kept_parts,
)
from ctrans.examine.comparison.model_comparison import (
    CHANGED,
    ModelComparison,
    PartDifference,
    WeightDifference,
)
from ctrans.examine.comparison.part_rounding import (
    PartRounding,
    difference,
    differences,
    ratio_of,
)
from ctrans.examine.comparison.parts import ModelParts, Tails
from ctrans.examine.comparison.recording import RecordedParts, Recording, parts_beside
from ctrans.examine.comparison.stages import Stage, stages_of
from ctrans.examine.comparison.weight_pairs import WeightPair, pairs_of, relations_of
from ctrans.examine.comparison.weight_relations import Relation
from ctrans.interop.foreign_errors import FOREIGN_ERRORS, named_error
from ctrans.measure.walk import Model, check_targets, own_loss
from solvers import ConfigError, SolveError

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
    for targets that are not one for each token, and for a recording as the second.
    """
    if isinstance(second, Recording):
        raise ConfigError(
            f"{str(second.path)!r} is a recording, which has no parts to run: name it first"
        )
    with contextlib.ExitStack() as stack:
        for model in (first, second):
            if targets is not None and not isinstance(model, Recording):
                check_targets(model, tokens, targets)
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
    walk = _Walk(pair, tokens)
    costates: Sequence[Tensor] = ()
    if a.targets is not None:
        try:
            costates = costate(b.model, tokens, b.targets).costates[:: b.size]
        except (*FOREIGN_ERRORS, ConfigError, SolveError) as error:
            missing["first-order share"] = named_error(error)
    noise = PartRounding(pair.rounded, walk.lower, walk.of_rounded[1].dtype, found)
    passes = Tails(b)
    parts = []
    for k in range(len(a)):
        if a.targets is not None:
            passes.enter(k, walk.of_b[k])
        parts.append(_part(walk, k, noise, costates))
        if progress is not None:
            progress(k)
    losses: list[float] = []
    if a.targets is not None:
        losses = [*map(b.loss_of, passes.states), a.loss_of(walk.own_states[-1])]
        parts = [
            replace(part, share=share - following)
            for part, (share, following) in zip(parts, pairwise(losses), strict=True)
        ]
    inside: tuple[Stage, ...] = ()
    explanations: tuple[Explanation, ...] = ()
    kept: tuple[KeptParts, ...] = ()
    first_changed = next((k for k, part in enumerate(parts) if part.changed), None)
    if first_changed is not None:
        inside = _stages(walk, first_changed, noise)
        explanations = _explanations(walk, first_changed, parts[first_changed], noise, found)
    elif any(part.ratio for part in parts):
        kept, at_end = _kept_parts(walk, passes.states)
        for k, share in enumerate(at_end):
            parts[k] = replace(parts[k], at_end=share)
    return ModelComparison(
        losses=(losses[-1], losses[0]) if losses else (math.nan, math.nan),
        rounding_of_loss=_rounding_of_loss(walk, noise, costates, losses),
        parts=tuple(parts),
        inside=inside,
        explanations=explanations,
        kept=kept,
        weights=tuple(_weight_differences(a, found)),
        equal_weights=sum(relation.kind == "equal" for _, relation in found),
        unmatched=tuple(unmatched),
        missing=missing,
    )


class _Walk:
    """The states of two models on one text, and what each part of them is given: the first model's
    states, with the digits that both dtypes have.
    """

    def __init__(self, pair: _Pair, tokens: Any):
        self.pair = pair
        self.tokens = tokens
        a = pair.a
        b = pair.b
        self.own_states = list(a.states(tokens))
        self.other_states = list(b.states(tokens))
        _check_states(self.own_states, self.other_states)
        self.ends = list(zip(self.own_states, self.other_states, strict=True))
        """What each model has behind each part: a state, and behind the head its output."""
        if len(a) == len(b):
            last = len(b) - 1
            (of_own,) = a.outputs(last, self.own_states[-1])
            (of_other,) = b.outputs(last, self.other_states[-1])
            self.ends.append((of_own, of_other))
            if isinstance(a, RecordedParts):
                a.check_logits(of_other)
        self.lower = _lower(self.own_states[0].dtype, self.other_states[0].dtype)
        self.of_a = [tokens, *(x.to(self.lower).to(x.dtype) for x in self.own_states)]
        self.of_b = [
            tokens,
            *(x.to(self.lower).to(y.dtype) for x, y in self.ends[: len(self.own_states)]),
        ]
        self.of_rounded = self.of_a if pair.rounded is a else self.of_b


def _part(walk: _Walk, k: int, noise: PartRounding, costates: Sequence[Tensor]) -> PartDifference:
    """Part k of both models on the same input; what is known of the whole depth only is nan."""
    pair = walk.pair
    outputs = pair.a.outputs(k, walk.of_a[k])
    outputs_b = pair.b.outputs(k, walk.of_b[k])
    defects = differences(outputs, outputs_b)
    of_noise = outputs if pair.rounded is pair.a else outputs_b
    change_of_loss = _change_of_loss(noise, k, costates, of_noise)
    roundings = noise.of(k, walk.of_rounded[k], of_noise, change_of_loss)
    ratios = [ratio_of(d, r) for d, r in zip(defects, roundings, strict=True)]
    shown = 0
    if ratios[0] <= CHANGED:
        shown = ratios.index(max(ratios))
    return PartDifference(
        name=pair.a.names[k],
        defect=defects[shown].share,
        shown=shown,
        rounding=roundings[shown].share,
        ratio=max(ratios),
        behind=difference(*walk.ends[k]).share,
        amplified=_amplified(walk.of_b, walk.other_states, k, outputs_b[-1]),
        at_end=math.nan,
        share=math.nan,
        first_order=_first_order(costates, k, outputs[-1], outputs_b[-1]),
    )


def _stages(walk: _Walk, k: int, noise: PartRounding) -> tuple[Stage, ...]:
    """The stages of part k; none if the first model is a recording."""
    a = walk.pair.a
    if isinstance(a, RecordedParts):
        return ()
    given = (walk.of_a[k], walk.of_b[k])
    return stages_of(a, walk.pair.b, k, *given, partial(noise.tensor, k), CHANGED)


def _kept_parts(
    walk: _Walk, last_states: Sequence[Tensor]
) -> tuple[tuple[KeptParts, ...], list[float]]:
    """Which parts to keep in the finer precision, and what each part makes of the last state, as a
    share of its size. Nothing for a recording, and without targets.
    """
    a = walk.pair.a
    b = walk.pair.b
    if isinstance(a, RecordedParts) or a.targets is None:
        return (), []
    fine, coarse, of_fine, of_coarse = fine_and_coarse(a, b, walk.own_states, walk.other_states)
    last = of_fine[-1]
    if of_fine[0].dtype == of_coarse[0].dtype:
        contributions = differences_of(last_states)
    else:
        contributions = contributions_of(fine, last, of_coarse)
    kept = kept_parts(
        fine, coarse, walk.tokens, contributions, last, of_coarse, of_second=fine is b
    )
    size = float(last.double().norm())
    at_end = [float(each.norm()) / size for each in contributions] if size else []
    return tuple(kept), at_end


def _rounding_of_loss(
    walk: _Walk, noise: PartRounding, costates: Sequence[Tensor], losses: Sequence[float]
) -> float:
    """The root mean square of what rounding changes of the loss; nan without targets."""
    if not losses:
        return math.nan
    rounded = walk.pair.rounded
    if not costates:
        return noise.of_loss(walk.tokens, losses[-1] if rounded is walk.pair.a else losses[0])
    of_head = 0.0
    if own_loss(rounded.model) is not None:
        of_head = noise.of_head(walk.of_rounded[-1])
    return math.sqrt(noise.loss_variance + of_head**2)


def _amplified(
    of_b: Sequence[Any], other_states: Sequence[Tensor], k: int, next_of_own: Tensor
) -> float:
    """The factor of part k on what it inherits; its second output is Psi_k(X_k)."""
    if not 0 < k < len(other_states):
        return math.nan
    before = float((other_states[k - 1].double() - of_b[k].double()).norm())
    behind = float((other_states[k].double() - next_of_own.double()).norm())
    return behind / before if before else math.nan


def _explanations(
    walk: _Walk,
    k: int,
    part: PartDifference,
    noise: PartRounding,
    found: list[tuple[WeightPair, Relation]],
) -> tuple[Explanation, ...]:
    """The edits that explain part k."""
    pair = walk.pair
    of_a = walk.of_a[k]
    of_b = walk.of_b[k]
    outputs = (pair.a.outputs(k, of_a), pair.b.outputs(k, of_b))
    runs_first = pair.rounded is pair.a
    given = of_a if runs_first else of_b
    own, wanted = outputs if runs_first else reversed(outputs)
    rounding = noise.of(k, given, own)
    keys = pair.rounded.keys_of(k, given)
    places = pair.a.part_of()
    pairs = [
        each
        for each, relation in found
        if relation.kind not in ("equal", "rounded")
        and places.get(each.of_first.key, k) == k
        and (each.of_first.key in keys or not each.of_first.on_demand)
    ]
    pair.b.clear()
    trial = EditTrial(
        parts=pair.rounded,
        number=k,
        given=given,
        own=own,
        wanted=wanted,
        defect=part.defect,
        shown=part.shown,
        rounding=rounding,
        other=pair.b if runs_first else None,
    )
    with contextlib.ExitStack() as stack:
        if keys and pair.rounded.module is not None:
            stack.enter_context(resident(pair.rounded.module, keys))
        return tuple(explanations_of(trial, walk.tokens, pairs, CHANGED))


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
        if pair.of_first.key in places:
            part = a.names[places[pair.of_first.key]]
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
    pairs, unmatched = pairs_of(first, second, a.part_of(), b.part_of())
    return list(zip(pairs, relations_of(pairs), strict=True)), unmatched


def _first_order(costates: Sequence[Tensor], k: int, own: Tensor, other: Tensor) -> float:
    """<P_{k+1}, e_k> of the embedding and each part of sublayers; nan of the head, and without
    costates.
    """
    if k >= len(costates):
        return math.nan
    return float((costates[k].double() * (other.double() - own.double())).sum())


def _change_of_loss(
    noise: PartRounding, k: int, costates: Sequence[Tensor], outputs: Sequence[Tensor]
) -> Callable[[list[Tensor]], float] | None:
    """What moved outputs of part k change of the loss, to first order; of the head, exactly. None
    without costates, and for a head whose loss is not that of its logits.
    """
    if k < len(costates):
        return lambda moved: _first_order(costates, k, outputs[-1], moved[-1])
    if not costates or own_loss(noise.parts.model) is not None:
        return None
    loss = noise.parts.loss_of_logits(outputs[0])
    return lambda moved: noise.loss_of_logits(moved[0]) - loss

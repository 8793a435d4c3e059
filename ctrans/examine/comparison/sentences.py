"""What a comparison of two models found, in sentences."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ctrans.examine.comparison.output_relations import BROKEN_IN_BOTH
from ctrans.measure.measured import Answer

if TYPE_CHECKING:
    from ctrans.examine.comparison.explanations import Explanation
    from ctrans.examine.comparison.kept_parts import KeptParts
    from ctrans.examine.comparison.model_comparison import (
        ModelComparison,
        PartDifference,
        WeightDifference,
    )

ORDERS = ("transposed", "rows in another order", "columns in another order")
"""Kinds of relations of weights with the same entries."""
NOISE = 1e-12
"""A difference of last states that nobody brings down: that of a refactoring in float64."""


def answer(first: str, second: str, found: ModelComparison) -> Answer:
    """Where the models part, in a sentence or two."""
    if not found.changed:
        unseen = [
            weight
            for weight in found.weights
            if weight.kind != "rounded" and not _is_layout(found, weight)
        ]
        text = _without_change(first, second, found)
        if not unseen:
            return Answer(text, "good")
        names = f"{len(unseen)} weights differ by more than rounding"
        if len(unseen) == 1:
            names = "1 weight differs by more than rounding"
        text += f" But {names}, which this text does not show: {unseen[0].name}."
        return Answer(text, "note")
    changed = found.changed
    if found.stage is not None and found.stage.kind == BROKEN_IN_BOTH:
        return Answer(
            f"{first} and {second} are both not finite from {changed[0].name} on, first in its"
            f" {found.stage.name}. What follows cannot be compared.",
            "bad",
        )
    text = f"{first} and {second} part at {changed[0].name}{_stage(found)}"
    weights = _weights_of(found, changed[0])
    if weights:
        text += f". There {weights[0].name} differs: {weights[0].relation}"
    if found.explanations:
        text += f". {_sentence(found.explanations[0])}"
    text += _shares(found, changed)
    if len(changed) > 1:
        text += f". {len(changed)} of {len(found.parts)} parts changed: {_listed(changed)}"
    else:
        text += ". Rounding explains the other parts, or they are equal"
    return Answer(f"{text}.", "bad")


def _without_change(first: str, second: str, found: ModelComparison) -> str:
    """The answer where no part changed, in sentences."""
    if found.equal:
        return f"{first} and {second} compute the same on this text, bit for bit."
    worst = max(found.parts, key=lambda part: part.ratio)
    text = (
        f"Rounding explains every difference between {first} and {second}. The largest defect, at"
        f" {worst.name}, is {worst.ratio:.2g} times what rounding makes there."
    )
    if not math.isnan(found.difference):
        text += (
            f" The loss differs by {found.difference:.2g}, and rounding moves it by about"
            f" {found.rounding_of_loss:.1g}."
        )
    if len(found.kept) > 1 and found.kept[0].difference > NOISE:
        text += f" {_kept(first, second, found.kept)}"
    rounded = [weight for weight in found.weights if weight.kind == "rounded"]
    if len(rounded) == 1:
        text += f" The weight {rounded[0].name} is {rounded[0].relation}."
    elif rounded:
        text += f" {len(rounded)} weights are {rounded[0].relation}, as {rounded[0].name}."
    return text


def _kept(first: str, second: str, kept: Sequence[KeptParts]) -> str:
    """What the largest set of parts, kept as in the finer model, leaves of the difference."""
    finer = second if kept[0].of_second else first
    *others, last = kept[-1].names
    names = f"{', '.join(others)} and {last}" if others else last
    return (
        f"Kept as in {finer}, {names} bring the difference of the last states from"
        f" {kept[0].difference:.2g} to {kept[-1].difference:.2g}."
    )


def _sentence(explanation: Explanation) -> str:
    """With its first letter large."""
    words = str(explanation)
    return words[:1].upper() + words[1:]


def _stage(found: ModelComparison) -> str:
    """The first stage that changed of the first sublayer that did, in words."""
    stage = found.stage
    if stage is None or stage.name == "map":
        return ""
    if stage.relation:
        return f", in its {stage.name}: {stage.relation}"
    return f", in its {stage.name}"


def _weights_of(found: ModelComparison, part: PartDifference) -> list[WeightDifference]:
    """The weights of a part that differ by more than rounding, and not only by how a library keeps
    them.
    """
    return [
        weight
        for weight in found.weights
        if weight.part == part.name and weight.kind != "rounded" and not _is_layout(found, weight)
    ]


def _is_layout(found: ModelComparison, weight: WeightDifference) -> bool:
    """Whether the weight has another name in the second model and its entries in another order, and
    weights of parts that did not change have just that order too.
    """
    if weight.kind not in ORDERS or weight.name == weight.other_name:
        return False
    changed = {part.name for part in found.changed}
    return any(
        other.part not in changed
        and other.relation == weight.relation
        and other.name != other.other_name
        for other in found.weights
    )


def _shares(found: ModelComparison, changed: Sequence[PartDifference]) -> str:
    """How much of the difference of the losses comes from the parts that changed."""
    if math.isnan(found.difference):
        return ""
    total = sum(part.share for part in changed)
    where = "this part" if len(changed) == 1 else "the parts that changed"
    text = f". The loss differs by {found.difference:.2g}, of which {total:.2g} comes from {where}"
    if abs(total) <= 2 * found.rounding_of_loss:
        text += ", no more than rounding moves it"
    elif len(changed) > 1:
        most = max(changed, key=lambda part: abs(part.share))
        text += f", most of it ({most.share:.2g}) from {most.name}"
    return text


def _listed(parts: Sequence[PartDifference]) -> str:
    names = [part.name for part in parts]
    if len(names) > 6:
        return f"{', '.join(names[:5])} .. {names[-1]}"
    return ", ".join(names)

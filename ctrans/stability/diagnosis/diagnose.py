"""A model's figures of one walk as findings in plain words, the most severe first.

>>> for symptom in diagnose(model, tokens[:, :-1], tokens[:, 1:]).symptoms:
...     print(symptom.ailment, symptom.worst.place, symptom.worst.said, symptom.helps)
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from ctrans.stability.backward.sensitivity import NOT_FINITE, Sensitivity
from ctrans.stability.diagnosis.ahead import ReadsAhead
from ctrans.stability.diagnosis.ailments import AILMENTS, SEVERITIES, Ailment, Severity
from ctrans.stability.diagnosis.back import CostatesByDepth, DecayOverThreshold, Logits, TiedGradients
from ctrans.stability.diagnosis.down import (
    BlockMoves,
    GainsByNorm,
    HeadRows,
    Readings,
    StatesByDepth,
    VelocitySensitivities,
    gains_outside,
    sensitivity_readings,
    weights_that_are_not_finite,
)
from ctrans.stability.diagnosis.proportions import (
    EmbeddingBesideDepth,
    EpsBesideStates,
    Moves,
    ZeroHeads,
    opened,
    own_parameters,
    parameter_places,
    weights_of_zeros,
)
from ctrans.stability.diagnosis.reading import Reading, cut, place_of
from ctrans.stability.diagnosis.words import in_words
from ctrans.walk import Attempt, Instrument, Lane, Model, loss_refusal, walk_lanes
from solvers import ConfigError

JACOBIAN_TOKENS, JACOBIAN_SEQUENCES = 64, 4
"""Of how many tokens a Jacobian is, and of how many sequences the worst one counts."""
TOLERANCE = 0.02
"""Relative error at which a Jacobian's norm is known well enough."""


@dataclasses.dataclass(frozen=True)
class Symptom:
    """A finding: readings of one `Ailment` outside of its limits, the worst first. Every field suits JSON.

    `limit`, `source`, `does` and `helps` are the table's. `seen` of `texts` walks found it, and `values` has the worst reading of each
    walk in which it was known, found or not.
    """

    ailment: str
    severity: Severity
    readings: list[Reading]
    limit: str
    source: str
    does: str
    helps: str
    seen: int = 1
    texts: int = 1
    values: list[float] = dataclasses.field(default_factory=list)

    @property
    def worst(self) -> Reading:
        return self.readings[0]

    @property
    def deviation(self) -> float | None:
        """The standard deviation of `values`; None of one walk, or where one is not finite."""
        known = len(self.values) > 1 and all(map(math.isfinite, self.values))
        return statistics.stdev(self.values) if known else None


@dataclasses.dataclass(frozen=True)
class Diagnosis:
    """What is wrong with a model on a text, the most severe first; none where nothing is. Every field suits JSON.

    `readings` are all figures by quantity; `unknown` says what could not be looked at and why, by quantity or instrument. `texts` is
    how many walks it is of.
    """

    symptoms: list[Symptom]
    readings: Readings
    unknown: dict[str, str]
    texts: int = 1

    @property
    def healthy(self) -> bool:
        return not self.symptoms

    @property
    def examined(self) -> list[str]:
        """The ailments whose quantity has a reading."""
        return [name for name, ailment in AILMENTS.items() if self.readings.get(ailment.quantity)]

    def __str__(self) -> str:
        """What `ctrans diagnose` prints."""
        return in_words(self)

    @property
    def unexamined(self) -> list[str]:
        """Those whose quantity has none: the model has no such part, or it could not be looked at (`unknown`)."""
        return [name for name, ailment in AILMENTS.items() if not self.readings.get(ailment.quantity)]

    @property
    def near(self) -> dict[str, Reading]:
        """By ailment, the reading that is nearest to its limit from inside, of those within the factor `Ailment.near` of it; an ailment
        that is a finding already, or follows from one, is not among them.
        """
        found = {symptom.ailment for symptom in self.symptoms}
        left_out = found | {hidden for name in found for hidden in AILMENTS[name].hides}
        close = {}
        for name, ailment in AILMENTS.items():
            each = [reading for reading in self.readings.get(ailment.quantity, []) if ailment.close(reading.value)]
            if each and name not in left_out:
                close[name] = max(each, key=lambda reading: ailment.excess(reading.value))
        return close


@dataclasses.dataclass(frozen=True, eq=False)
class Examination:
    """Instruments to be walked: over all of the text (`whole`), over what Jacobians are for (`part`); then `conclude`."""

    model: Model
    whole: Mapping[str, Attempt]
    part: Sequence[Attempt]
    sensitivities: Callable[[], Sequence[Sensitivity] | None]

    def conclude(self) -> Diagnosis:
        """What the instruments found."""
        readings: Readings = {}
        unknown: dict[str, str] = {}
        own = self._of_weights()
        broken = own.pop("entries that are not finite", None)
        if broken:  # what is wrong in the weights themselves comes before what it does to states
            readings["entries that are not finite"] = broken
        for name, instrument in self.whole.items():
            figures: Mapping[str, Sequence[Reading]] | None = instrument.figures()
            if instrument.note is not None:
                unknown[name] = instrument.note
            _join(readings, figures or {})
        _join(readings, own)
        each = self.sensitivities()
        _join(readings, sensitivity_readings(self.model.depth, list(each or [])))
        refused = [(k, s.note) for k, s in enumerate(each or []) if s.value is None and s.note != NOT_FINITE]
        if each is None:
            unknown["sensitivities"] = "left out"
        elif refused:
            (k, note), count = refused[0], len(self.model.depth.sublayers)
            place = place_of(self.model.depth, k)
            unknown["sensitivities"] = (
                f"of {len(refused)} of {count} sublayers, the first {place}: {note}; those of the others are known"
            )
            if len(refused) == count:
                unknown["sensitivities"] = note
        if not readings.get("least entropy of a head"):
            unknown.setdefault("heads", "this model's attention does not show the rows of its heads")
        return Diagnosis(judge(readings), readings, unknown)

    def _of_weights(self) -> Readings:
        if not isinstance(self.model, nn.Module) or self.model.depth.streamed:
            return {}
        depth = self.model.depth
        found = weights_that_are_not_finite(own_parameters(self.model), depth, parameter_places(depth))
        _join(found, weights_of_zeros(self.model, depth))
        sublayer = self.model.depth.sublayers[0]
        norm = next((n for n in (sublayer.input_norm, sublayer.output_norm, sublayer.state_norm) if n is not None), None)
        if norm is not None:
            _join(found, gains_outside(opened(self.model), depth, norm.width))
        return found


def check_decay(weight_decay: float | None) -> None:
    """Raises ConfigError for a weight decay that is negative or not finite."""
    if weight_decay is not None and not 0 <= weight_decay < math.inf:
        raise ConfigError(f"weight_decay = {weight_decay!r}: give the training's, a finite number of at least 0")


INSTRUMENTS: dict[str, Callable[[], Instrument]] = {
    "gains": GainsByNorm,
    "states": StatesByDepth,
    "what blocks do": BlockMoves,
    "heads": HeadRows,
    "heads of zeros": ZeroHeads,
    "eps": EpsBesideStates,
    "embedding": EmbeddingBesideDepth,
    "what sublayers add": Moves,
    "logits and loss": Logits,
    "costates": CostatesByDepth,
    "tied weights": TiedGradients,
    "what tokens read": ReadsAhead,
}
"""What looks at a model, by what it looks at; figures are readings by quantity. A new one is one entry, and one of `AILMENTS`."""


def examine(
    model: Model,
    *,
    weight_decay: float | None = None,
    heads: Attempt | None = None,
    sensitivities: Callable[[], Sequence[Sensitivity] | None] | None = None,
) -> Examination:
    """The instruments of a diagnosis, to be walked with others or alone.

    `heads` is a `HeadRows` that somebody else asks too; `sensitivities` gives those of the sublayers where somebody else in the walk
    measures them.
    """
    check_decay(weight_decay)
    whole = {name: Attempt(make()) for name, make in INSTRUMENTS.items()}
    whole |= {} if heads is None else {"heads": heads}
    if weight_decay is not None:
        whole["decay over dt lam*"] = Attempt(DecayOverThreshold(weight_decay))
    if sensitivities is not None:
        return Examination(model, whole, [], sensitivities)
    own = Attempt(VelocitySensitivities(TOLERANCE))
    return Examination(model, whole, [own], own.figures)


def diagnose(
    model: Model,
    tokens: Tensor,
    targets: Any = None,
    *,
    weight_decay: float | None = None,
    progress: Callable[[int], None] | None = None,
) -> Diagnosis:
    """What is wrong with a model on a text, the most severe first, from one walk there and, with targets, back.

    `weight_decay` is that of its training, to be compared with dt lam*. Jacobians are of the first 64 tokens of up to 4
    sequences, and of one where weights are made on demand.
    Without targets, or where these have no loss under the model, what needs a loss is in `unknown`.
    """
    examination = examine(model, weight_decay=weight_decay)
    refusal = "no targets were given, and so no loss" if targets is None else loss_refusal(model, tokens, targets)
    whole = list(examination.whole.values())
    for each in whole:
        each.note = refusal if each.looks_back else None
    several = 1 if model.depth.streamed else JACOBIAN_SEQUENCES
    lanes = [
        Lane(tokens, targets if refusal is None else None, whole),
        Lane(cut(tokens, several, JACOBIAN_TOKENS), None, examination.part),
    ]
    walk_lanes(model, lanes, progress=progress)
    return examination.conclude()


def judge(readings: Mapping[str, Sequence[Reading]]) -> list[Symptom]:
    """A symptom for each ailment with readings outside of its limits, in the order of severity and then of how far outside."""
    found = {
        name: symptom
        for name, ailment in AILMENTS.items()
        if (symptom := _symptom(name, ailment, readings.get(ailment.quantity, [])))
    }
    for name in list(found):
        for hidden in AILMENTS[name].hides:
            if name in found and hidden in found:
                _hide(found, hidden, {reading.segment for reading in found[name].readings} - {None})
    return sorted(found.values(), key=_order)


def _hide(found: dict[str, Symptom], name: str, segments: set[int | None]) -> None:
    """Leaves out what is seen at segments where its cause is said already."""
    left = [reading for reading in found[name].readings if reading.segment not in segments]
    if left:
        found[name] = dataclasses.replace(found[name], readings=left, values=[left[0].value])
    else:
        del found[name]


def merged(diagnoses: Sequence[Diagnosis]) -> Diagnosis:
    """Several walks' diagnoses, of other texts or seeds, as one: symptoms of any, with how many walks saw them and each one's value.

    `readings` are those of the first walk.
    """
    first, count = diagnoses[0], len(diagnoses)
    symptoms = []
    for name, ailment in AILMENTS.items():
        own = [symptom for each in diagnoses for symptom in each.symptoms if symptom.ailment == name]
        if own:
            readings = [each.readings.get(ailment.quantity, []) for each in diagnoses]
            values = [max(row, key=lambda r: ailment.excess(r.value)).value for row in readings if row]
            worst = max(own, key=lambda symptom: ailment.excess(symptom.worst.value))
            symptoms.append(dataclasses.replace(worst, seen=len(own), texts=count, values=values))
    unknown = {name: why for each in diagnoses for name, why in each.unknown.items()}
    return Diagnosis(sorted(symptoms, key=_order), first.readings, unknown, count)


def _symptom(name: str, ailment: Ailment, readings: Sequence[Reading]) -> Symptom | None:
    outside = [reading for reading in readings if ailment.excess(reading.value) > 0]
    if not outside:
        return None
    # the first along the depth, where all are equally far outside
    outside.sort(key=lambda reading: -ailment.excess(reading.value))
    return Symptom(
        name,
        ailment.severity,
        outside,
        ailment.limit,
        ailment.source,
        ailment.does,
        ailment.helps,
        values=[outside[0].value],
    )


def _order(symptom: Symptom) -> tuple[int, float]:
    return SEVERITIES.index(symptom.severity), -AILMENTS[symptom.ailment].excess(symptom.worst.value)


def _join(readings: Readings, more: Mapping[str, Sequence[Reading]] | Any) -> None:
    for quantity, each in more.items():
        readings.setdefault(quantity, []).extend(each)

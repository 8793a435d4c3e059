"""How far a model is from the maximum principle, as one table: of each layer, and of what training
can change (`ctrans hjb-check --principle`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from ctrans.base.from_json import from_json
from ctrans.control.attained import Attained, attained
from ctrans.control.controllability import Controllability, controllability
from ctrans.control.costate import ZERO_GRADIENT, continuous_or_discrete
from ctrans.control.maximum_principle import ALIGNMENTS, MaximumPrinciple, maximum_principle
from ctrans.control.optimal_trajectory import OptimalTrajectory, optimal_trajectory
from ctrans.control.turnpike import flatness_by_kind
from ctrans.examine import controllable
from ctrans.measure import state_measures as state_measures  # the costate
from ctrans.measure.findings import Mark
from ctrans.measure.measured import Answer, Measured, Value, along_depth
from ctrans.measure.measures import MEASURES, Measure
from ctrans.measure.missing import tried
from ctrans.measure.walk import Model, SegmentCallback

_ALIGNMENT = (
    "cos(-P, v), or (<P, centre> - <P, v>)/(<P, centre> + H) where a norm bounds velocities. 1:"
    " sublayers lower the loss as fast as they can; 0: they do not change it, as after training;"
    " below 0: they raise it"
)
_GAP = (
    "H(P) + <P, v>: how much faster the loss would fall if a layer's output could be chosen freely"
    " at each token; infinite where nothing bounds it"
)
_DRIFT = "departure of <P, v> from what the ODE conserves: the solver's error"
_FLATNESS = (
    "largest over smallest in the middle half of the depth, of attention or FFN, the larger; 1:"
    " flat, as with free velocities and a kinetic cost"
)
ATTAINED = "left by all weights"
"""The measure that the reason is filed under if it is not known what training attains."""
OPTIMAL = "loss of the optimal trajectory"
"""The measure that the reason is filed under if there is no optimal trajectory."""

_TOPIC = "The maximum principle"

MEASURES.add(
    "ctrans hjb-check --principle",
    {
        "loss of the text": Measure(
            formula="mean cross-entropy in nats a token, at the end of the ODE if it has a costate",
            unit="nats",
            topic=_TOPIC,
        ),
        "mean alignment": Measure(formula=f"{_ALIGNMENT}; mean over segments", topic=_TOPIC),
        "loss of the optimal trajectory": Measure(
            formula=(
                "the loss that relaxed sweeps of the maximum principle reach from the embedding,"
                " with velocities free at each token; with --kinetic without its cost"
            ),
            unit="nats",
            source="Li, Chen, Tai and E (2018), with the closed-form maximiser",
            topic=_TOPIC,
        ),
        "kinetic cost of the optimal trajectory": Measure(
            formula="lam/2 sum of h |v|^2 over segments and tokens",
            unit="nats",
            topic=_TOPIC,
            detail=True,
        ),
        "loss by sweep": Measure(
            formula=(
                "loss and kinetic cost after each sweep of the maximum principle, from the model's"
                " own velocities on"
            ),
            unit="nats",
            scope="size",
            over="sweeps",
            log=False,
        ),
        "largest gap": Measure(formula=f"{_GAP}; the largest of all segments", topic=_TOPIC),
        "largest drift": Measure(formula=f"{_DRIFT}; the largest of all segments", topic=_TOPIC),
        "first-order condition": Measure(
            formula="largest decrease of the loss, to first order, that the shared weights leave",
            topic=_TOPIC,
        ),
        "flatness of the costate": Measure(formula=f"|P|, {_FLATNESS}", topic=_TOPIC, detail=True),
        "flatness of the velocity": Measure(formula=f"|v|, {_FLATNESS}", topic=_TOPIC, detail=True),
        "size of the velocity": Measure(
            formula="|v|, of what the sublayer adds per depth-time", scope="sublayer", detail=True
        ),
        "gap to free velocities": Measure(formula=_GAP, unit="H(P) + <P, v>", scope="sublayer"),
        "gap of a layer that does nothing": Measure(
            formula="H(P), the fastest that any allowed velocity could lower the loss",
            unit="H(P)",
            scope="sublayer",
            bounds="gap to free velocities",
        ),
        "alignment": Measure(
            formula=_ALIGNMENT,
            unit="alignment with the best velocity",
            scope="sublayer",
            log=False,
        ),
        "drift": Measure(formula=_DRIFT, unit="change of <P, v> on a segment", scope="sublayer"),
        "descent": Measure(
            formula=("<P, v>: rate at which the sublayer changes the loss; below 0 it lowers it"),
            scope="sublayer",
            detail=True,
            log=False,
        ),
        "work": Measure(
            formula="dt <P, v>, the change of the loss by the sublayer's output",
            scope="sublayer",
            log=False,
            detail=True,
        ),
        "work of the last weights": Measure(
            formula=(
                "<th, dL/dth>, the same by the size of the last weights: equal to the work, and 0"
                " after training. Of a weight that sublayers share, this sublayer's part of it"
            ),
            scope="sublayer",
            log=False,
            detail=True,
        ),
        "left by free velocities": Measure(
            formula="loss left, to first order, by velocities that are free at each token",
            scope="sublayer",
            detail=True,
        ),
        "left by the last weights": Measure(
            formula="the same by the last weights within their norm", scope="sublayer", detail=True
        ),
        "left by all weights": Measure(
            formula=("the same by all parameters within theirs, from below, as ascents found it"),
            scope="sublayer",
            detail=True,
        ),
        "left to first order": Measure(
            formula="its first-order condition, which holds at a saddle too",
            scope="sublayer",
            detail=True,
        ),
    },
)


@dataclass(frozen=True)
class Principled:
    """The maximum principle of a model, what training attains, what replaces the ODE's costate if
    anything does, the optimal trajectory, and what the controls can move. `end` is the time of
    the last state. `missing` says what was not measured, and why.
    """

    principle: MaximumPrinciple
    attained: Attained | None
    instead: str | None = None
    missing: dict[str, str] = field(default_factory=dict)
    optimal: OptimalTrajectory | None = None
    controllability: Controllability | None = None
    end: float | None = None

    def values(self, model: str) -> Iterator[Value]:
        """The rows of the table."""
        principle = self.principle
        yield Value(model, "loss of the text", principle.loss)
        if self.optimal is not None:
            yield Value(model, OPTIMAL, self.optimal.loss)
            yield Value(model, "kinetic cost of the optimal trajectory", self.optimal.cost)
            for sweep, loss in enumerate(self.optimal.history):
                yield Value(model, "loss by sweep", loss, step=sweep)
        yield from _largest(model, "largest gap", principle.gap, infinite=True)
        alignment = _finite(principle.alignment)
        if alignment:
            yield Value(model, "mean alignment", sum(alignment) / len(alignment))
        yield from _largest(model, "largest drift", principle.drift)
        kinds = principle.kinds
        costate = flatness_by_kind(kinds, principle.costate_norm)
        velocity = flatness_by_kind(kinds, principle.velocity_norm)
        yield from _largest(model, "flatness of the costate", list(costate.values()))
        yield from _largest(model, "flatness of the velocity", list(velocity.values()))
        times = list(principle.times)
        if self.end is not None:
            times.append(self.end)
        yield from along_depth(model, "times", times)
        for segment, kind in enumerate(principle.kinds):
            yield Value(model, "kind of a sublayer", None, depth=segment, words=kind)
        yield from along_depth(model, "costate", principle.costate_norm)
        yield from along_depth(model, "size of the velocity", principle.velocity_norm)
        yield from along_depth(model, "descent", principle.product)
        yield from along_depth(model, "drift", principle.drift)
        yield from along_depth(model, "gap to free velocities", principle.gap)
        yield from along_depth(model, "gap of a layer that does nothing", principle.hamiltonian)
        yield from along_depth(model, "alignment", principle.alignment)
        if self.attained is not None:
            yield from self._attained_values(model, self.attained)
        if self.controllability is not None:
            yield from controllable.values_of(model, self.controllability)

    def _attained_values(self, model: str, attained: Attained) -> Iterator[Value]:
        yield from _largest(model, "first-order condition", attained.first_order)
        series = {
            "work": attained.work,
            "work of the last weights": attained.radial,
            "left by free velocities": attained.pointwise_gap,
            "left by the last weights": attained.last_gap,
            ATTAINED: attained.shared_gap,
            "left to first order": attained.first_order,
        }
        for measure, figures in series.items():
            yield from along_depth(model, measure, figures)

    @property
    def notes(self) -> list[str]:
        """What could not be had, and what replaces it."""
        lines: list[str] = []
        if self.instead is not None:
            lines.append(self.instead)
        lines += [f"{where} is skipped: {why}" for where, why in self.principle.missing.items()]
        if not any(_finite(self.principle.costate_norm)):
            lines.append(ZERO_GRADIENT)
        lines += [ALIGNMENTS[name].words for name in dict.fromkeys(self.principle.measures)]
        if self.controllability is not None:
            lines.append(controllable.note_of(self.controllability))
        return lines

    @property
    def placement(self) -> str:
        names = set(self.principle.placements)
        if len(names) == 1:
            return names.pop()
        return "mixed"


def principled(
    model: Model,
    tokens: Tensor,
    targets: Any,
    *,
    rtol: float | None = None,
    atol: float | None = None,
    kinetic: float | None = None,
    progress: SegmentCallback | None = None,
) -> Principled:
    """The maximum principle of a model on a text, with what training attains, the optimal
    trajectory, and what the controls can move.

    - `rtol`, `atol`: tolerances of state and costate
    - `kinetic`: the weight of a kinetic cost of that trajectory; None for none
    - `progress(k)`: called after each segment
    """
    costate, instead = continuous_or_discrete(model, tokens, targets, rtol=rtol, atol=atol)
    principle = maximum_principle(model.depth, costate)
    missing = dict(principle.missing)
    reached = tried(missing, ATTAINED, attained, model, tokens, targets, progress=progress)
    optimal = tried(missing, OPTIMAL, optimal_trajectory, model, tokens, targets, kinetic=kinetic)
    moved = tried(
        missing,
        controllable.CONTROLLABILITY,
        controllability,
        model,
        tokens,
        targets,
        progress=progress,
    )
    return Principled(
        principle, reached, instead, missing, optimal, moved, end=model.depth.times[-1]
    )


def measured(models: Mapping[str, Principled]) -> Measured:
    """The table of several models."""
    return Measured(
        values=tuple(value for name, model in models.items() for value in model.values(name)),
        missing={name: model.missing for name, model in models.items() if model.missing},
        answers=(answer(models),),
        notes={name: model.notes for name, model in models.items() if model.notes},
        styles={name: model.placement for name, model in models.items()},
    )


def answer(models: Mapping[str, Principled]) -> Answer:
    """Whether the layers pull with the gradient or against it."""
    costates = [_finite(model.principle.costate_norm) for model in models.values()]
    if not any(any(norms) for norms in costates):
        return Answer(f"{ZERO_GRADIENT}.", "bad")
    parts = []
    mark: Mark = "good"
    for name, model in models.items():
        alignments = _finite(model.principle.alignment)
        if not alignments:
            parts.append(f"{name}: no alignment with the gradient could be measured")
            mark = "note"
            continue
        lowers = sum(value > 0 for value in alignments)
        mean = sum(alignments) / len(alignments)
        parts.append(
            f"{name}: {lowers} of {len(alignments)} sublayers move the state in a direction that"
            f" lowers the loss (mean alignment {mean:.2g})"
        )
    return Answer(f"{'; '.join(parts)}.", mark)


def as_object(models: Mapping[str, Principled]) -> dict[str, Any]:
    """The models in the JSON of version 1."""
    return {
        "placements": {name: model.principle for name, model in models.items()},
        "attained": {name: model.attained for name, model in models.items()},
        "instead": {
            name: model.instead for name, model in models.items() if model.instead is not None
        },
        "missing": {name: model.missing for name, model in models.items() if model.missing},
    }


def measured_in(result: Mapping[str, Any]) -> Measured:
    """The table of a JSON of version 1. Raises ConfigError for another object."""
    models = {}
    for name, model in result["placements"].items():
        principle = from_json(MaximumPrinciple, model)
        missing = dict(principle.missing)
        attained = result["attained"].get(name)
        if isinstance(attained, Mapping):
            attained = from_json(Attained, attained)
        else:
            missing[ATTAINED] = attained or "not computed"  # once it was the reason
            attained = None
        missing |= (result.get("missing") or {}).get(name, {})
        instead = (result.get("instead") or {}).get(name)
        models[name] = Principled(principle, attained, instead, missing)
    return measured(models)


def _finite(values: Sequence[float | None]) -> list[float]:
    return [value for value in values if value is not None and math.isfinite(value)]


def _largest(
    model: str, measure: str, values: Sequence[float | None], *, infinite: bool = False
) -> Iterator[Value]:
    if infinite:
        counted = [value for value in values if value is not None]
    else:
        counted = _finite(values)
    if counted:
        yield Value(model, measure, max(counted))

"""The least loss that is still within reach along a model's trajectory, as one table
(`ctrans hjb-check`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ctrans.control.least_loss import PROVEN, LeastLoss, least_loss
from ctrans.interop.opened import STAND_INS, Opened
from ctrans.measure.measured import Answer, Measured, Value, along_depth
from ctrans.measure.measures import MEASURES, Measure
from ctrans.measure.missing import tried
from ctrans.measure.walk import Model

FLAT = 1e-6
"""A rise of the least loss by less than this many nats, or this share, is rounding."""

FEW = 4
"""The largest number of models whose curves are all drawn."""
DRAWN = ("pre", "peri")
"""Of more models these placements are, with the first norm."""
LEAST_LOSS = "least loss within reach"
"""The measure that the reason is filed under if there is none."""

MEASURES.add(
    "ctrans hjb-check",
    {
        "least loss": Measure(
            formula=(
                "Phi(X_0, 0), the least loss that velocities which are free at each token reach"
                " from the embedding, as a search found it: no weights of the maps do better at"
                " these gains and ends"
            ),
            unit="loss",
            source="Hopf and Lax; Kan, eq. 56",
        ),
        "least loss that is proven": Measure(
            formula="what the least loss is proven to be at least, for our own GPT",
            unit="loss",
            source="THEORY.md, section 4",
            detail=True,
        ),
        "optimality gap": Measure(
            formula="the model's loss less the least loss, the sum over its sublayers",
            unit="loss",
            detail=True,
        ),
        LEAST_LOSS: Measure(
            formula=(
                "Phi(X, t), the least loss that free velocities still reach from the model's state."
                " It never falls, and ends at the model's loss. Where every state is within reach,"
                " it is flat and jumps at the end"
            ),
            unit="loss",
            scope="state",
            source="Hopf and Lax; Kan, eq. 56",
            log=False,
        ),
        PROVEN: Measure(
            formula="what the least loss within reach is proven to be at least",
            unit="loss",
            scope="state",
            source="THEORY.md, section 4",
            bounds=LEAST_LOSS,
        ),
        "optimality gap of a token": Measure(
            formula=(
                "what a token adds to the optimality gap, in its share of the mean loss. Red:"
                " much. Blue: little"
            ),
            unit="loss",
            scope="token",
        ),
        "optimality gap of a sublayer": Measure(
            formula=(
                "rise of the least loss within reach over a sublayer: what the sublayers after it"
                " can no longer gain"
            ),
            unit="loss",
            scope="sublayer",
            log=False,
            detail=True,
        ),
    },
)


@dataclass(frozen=True)
class Valued:
    """The least loss within reach of a model, or why there is none.

    - `kinds`: of its sublayers
    - `words`: the texts of the tokens of the first sequence, to show the gap of each; () for none
    """

    placement: str
    kinds: tuple[str, ...]
    reached: LeastLoss | None
    missing: dict[str, str]
    words: tuple[str, ...] = ()

    @property
    def is_flat(self) -> bool:
        """Whether nothing changes before the last segment, as every state is within reach."""
        return self.reached is not None and not self.reached.bounded[-2]


def valued(
    model: Model,
    tokens: Tensor,
    targets: Any,
    *,
    placement: str,
    kinetic: float | None = None,
    words: Sequence[str] = (),
) -> Valued:
    """The least loss within reach of a model on a text. There is none with a `kinetic` cost, which
    makes another problem, and for a loss that stands in for the model's own.
    """
    missing: dict[str, str] = {}
    reached: LeastLoss | None = None
    if kinetic is not None:
        missing[LEAST_LOSS] = "it is about velocities without a cost, and --kinetic adds one"
    elif isinstance(model, Opened) and model.loss in STAND_INS:
        missing[LEAST_LOSS] = "the loss stands in for one that the model was trained for"
    else:
        reached = tried(missing, LEAST_LOSS, least_loss, model, tokens, targets)
    if reached is not None:
        missing |= reached.missing
    kinds = tuple(sublayer.kind for sublayer in model.depth.sublayers)
    return Valued(placement, kinds, reached, missing, tuple(words))


def measured(models: Mapping[str, Valued]) -> Measured:
    """The table of several models. Of more than FEW models those of the placements DRAWN have a
    curve, with the first norm.
    """
    drawn = set(models)
    if len(models) > FEW:
        first = _first_of_placements(models)
        drawn = {first[placement] for placement in DRAWN if placement in first}
    values: list[Value] = []
    for name, model in models.items():
        if model.reached is None:
            continue
        values += _of_run(name, model.reached)
        if name in drawn:
            values += along_depth(name, LEAST_LOSS, model.reached.found)
            values += along_depth(name, PROVEN, model.reached.proven)
        for k, (rise, kind) in enumerate(zip(model.reached.gaps, model.kinds, strict=True)):
            values.append(
                Value(name, "optimality gap of a sublayer", rise, depth=k, place=f"{k} ({kind})")
            )
        values += _of_tokens(name, model.reached, model.words)
    return Measured(
        values=tuple(values),
        missing={name: model.missing for name, model in models.items() if model.missing},
        answers=answers(models),
    )


def _of_run(model: str, reached: LeastLoss) -> Iterator[Value]:
    """The least loss at the start, and how far the model is from it."""
    found = reached.found[0]
    yield Value(model, "least loss", found)
    proven = reached.proven[0]
    if proven is not None:
        yield Value(model, "least loss that is proven", proven)
    yield Value(model, "optimality gap", reached.found[-1] - found)


def _of_tokens(model: str, reached: LeastLoss, words: Sequence[str]) -> Iterator[Value]:
    """The optimality gap of each token of the first sequence, with its text."""
    if reached.by_token is None:
        return
    gaps = reached.by_token[-1] - reached.by_token[0]
    for k, (word, gap) in enumerate(zip(words, gaps[0].tolist(), strict=False)):
        yield Value(model, "optimality gap of a token", gap, step=k, place=word)


def answers(models: Mapping[str, Valued]) -> tuple[Answer, ...]:
    """Where the optimality gap comes from, of one model for each placement; of few models only."""
    first = _first_of_placements(models)
    if len(models) > FEW:
        return ()
    sentences = []
    for placement, name in first.items():
        reached = models[name].reached
        if reached is None or models[name].is_flat:
            continue
        total = reached.found[-1] - reached.found[0]
        if total <= FLAT:
            continue
        worst = max(range(len(reached.gaps)), key=lambda k: reached.gaps[k])
        sentences.append(
            f"the optimality gap of {placement} is {total:.3g} of its loss of"
            f" {reached.found[-1]:.3g}, {reached.gaps[worst]:.3g} of it from segment {worst}"
            f" ({models[name].kinds[worst]})"
        )
    flat = [placement for placement, name in first.items() if models[name].is_flat]
    if flat:
        sentences.append(
            "the least loss within reach does not change before the last segment of"
            f" {', '.join(flat)}, as free velocities reach every state, or every state of a norm"
        )
    if not sentences:
        return ()
    text = "; ".join(sentences)
    if len(first) < len(models):
        text = f"of the first norm, {text}"
    return (Answer(f"{text[0].upper()}{text[1:]}.", "note"),)


def _first_of_placements(models: Mapping[str, Valued]) -> dict[str, str]:
    """The first model of each placement."""
    first: dict[str, str] = {}
    for name, model in models.items():
        first.setdefault(model.placement, name)
    return first

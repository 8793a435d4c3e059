"""Where two models part, as one table (`ctrans compare`)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from typing import Any

from ctrans.examine.comparison.model_comparison import (
    CHANGED,
    ModelComparison,
)
from ctrans.examine.comparison.sentences import answer
from ctrans.examine.comparison.stages import Stage
from ctrans.measure.measured import Measured, Value
from ctrans.measure.measures import MEASURES, Measure

_of_parts = partial(Measure, topic="Where two models part", subject="models")
DEFECT = "local defect"
EXPLAINED = "what rounding explains"
SHOWN_WEIGHTS = 8
"""Weights that differ are named up to this number."""
MEASURES.add(
    "ctrans compare",
    {
        "parts that changed": _of_parts(
            formula=(
                f"parts whose local defect is more than {CHANGED:g} times what rounding makes of"
                " them"
            ),
            decimals=0,
        ),
        "loss of the first": _of_parts(formula="L_A, on this text", unit="loss"),
        "difference of the losses": _of_parts(formula="L_B - L_A", unit="loss"),
        "rounding of the loss": _of_parts(
            formula=(
                "what rounding alone changes of the first model's loss: the root of the sum over"
                " parts of the mean square of <P, change>, for random rounding of every result"
            ),
            unit="loss",
            source="stochastic arithmetic, Vignes, 1974",
        ),
        "largest defect over rounding": _of_parts(
            formula="the largest ratio of a part's local defect to its rounding", detail=True
        ),
        "defect of the embedding": _of_parts(
            formula="|E_B - E_A|/|E_A|, root mean square, of the embedded text", detail=True
        ),
        "defect of the head": _of_parts(
            formula="the same of the logits, at the first model's last state", detail=True
        ),
        "share of the embedding": _of_parts(
            formula="the embedding's share of the difference of the losses", detail=True
        ),
        "share of the head": _of_parts(formula="the same of the head", detail=True),
        DEFECT: Measure(
            formula=(
                "|dt r'_k(X_k) - dt r_k(X_k)|/|dt r_k(X_k)|: what the second model's sublayer adds"
                " otherwise on the first one's state, before a norm around the sum; where the next"
                " state alone shows a change, |Psi_k(X_k) - Phi_k(X_k)|/|Phi_k(X_k)|"
            ),
            unit="relative difference",
            scope="sublayer",
        ),
        EXPLAINED: Measure(
            formula=(
                f"{CHANGED:g} times the same for the first model with random rounding of every"
                " result: a larger defect is a change"
            ),
            unit="relative difference",
            scope="sublayer",
            bounds=DEFECT,
        ),
        "difference of states": Measure(
            formula="|X_B - X_A|/|X_A|, each model on its own states",
            unit="relative difference",
            scope="state",
        ),
        "share of the loss' difference": Measure(
            formula=(
                "G_k(X_k) - G_{k+1}(X_{k+1}), with G_k the second model's loss from a state of the"
                " first one on. The shares of all parts add up to L_B - L_A"
            ),
            unit="loss",
            scope="sublayer",
            log=False,
        ),
        "part of the last difference": Measure(
            formula=(
                "if rounding alone explains all, |Z_{k+1} - Z_k|/|X_K|: what that of sublayer k"
                " makes of the last state. Z_k is the last state that the model of more digits"
                " makes of the other one's state X'_k"
            ),
            unit="relative difference",
            scope="sublayer",
            detail=True,
            charted=False,
        ),
        "amplification": Measure(
            formula=(
                "|Psi_k(X'_k) - Psi_k(X_k)|/|X'_k - X_k|: how many times as large a sublayer makes"
                " the difference that it inherits"
            ),
            scope="sublayer",
            detail=True,
            charted=False,
        ),
        "first-order share": Measure(
            formula="<P_{k+1}, e_k>, with P the second model's costate and e_k the local defect",
            unit="loss",
            scope="sublayer",
            log=False,
            detail=True,
            charted=False,
        ),
    },
)


def measured(first: str, second: str, comparison: ModelComparison) -> Measured:
    """The table of a comparison of two models of these names."""
    name = f"{first} to {second}"
    missing = dict(comparison.missing)
    if math.isnan(comparison.difference):
        missing["difference of the losses"] = "requires targets"
    return Measured(
        values=tuple(_values(name, comparison)),
        missing={name: missing} if missing else {},
        answers=(answer(first, second, comparison),),
        notes={name: list(_notes(comparison))},
    )


def _values(name: str, found: ModelComparison) -> Iterator[Value]:
    yield Value(name, "parts that changed", float(len(found.changed)))
    if not math.isnan(found.difference):
        yield Value(name, "loss of the first", found.losses[0])
        yield Value(name, "difference of the losses", found.difference)
        yield Value(name, "rounding of the loss", found.rounding_of_loss)
    worst = max(found.parts, key=lambda part: part.ratio)
    yield Value(name, "largest defect over rounding", worst.ratio, place=worst.name)
    embedding = found.parts[0]
    yield Value(name, "defect of the embedding", embedding.defect)
    if not math.isnan(embedding.share):
        yield Value(name, "share of the embedding", embedding.share)
    if found.head is not None:
        yield Value(name, "defect of the head", found.head.defect)
        if not math.isnan(found.head.share):
            yield Value(name, "share of the head", found.head.share)
    for k, part in enumerate(found.sublayers):
        place = f"{k} ({part.name})"
        yield Value(name, DEFECT, part.defect, depth=k, place=place)
        yield Value(name, EXPLAINED, CHANGED * part.rounding, depth=k, place=place)
        if not math.isnan(part.at_end):
            yield Value(name, "part of the last difference", part.at_end, depth=k, place=place)
        if not math.isnan(part.amplified):
            yield Value(name, "amplification", part.amplified, depth=k, place=place)
        if not math.isnan(part.share):
            yield Value(name, "share of the loss' difference", part.share, depth=k, place=place)
        if not math.isnan(part.first_order):
            yield Value(name, "first-order share", part.first_order, depth=k, place=place)
    for k, part in enumerate([found.parts[0], *found.sublayers]):
        yield Value(name, "difference of states", part.behind, depth=k)


def _notes(found: ModelComparison) -> Iterator[str]:
    if found.inside:
        stages = [f"{stage.name} {_verdict(stage)}" for stage in found.inside]
        yield f"inside of {found.changed[0].name}: {', '.join(stages)}"
    for kept in found.kept[1:]:
        finer = "second" if kept.of_second else "first"
        names = "; ".join(kept.names)
        yield f"kept as in the {finer}: {names}: leaves {kept.difference:.2g} of the last states"
    for explanation in found.explanations[1:]:
        yield f"also {explanation}"
    differing = [weight for weight in found.weights if weight.kind != "rounded"]
    rounded = len(found.weights) - len(differing)
    for weight in differing[:SHOWN_WEIGHTS]:
        also = "" if weight.name == weight.other_name else f" (there {weight.other_name})"
        yield f"weight {weight.name}{also}: {weight.relation}"
    rest = len(differing) - SHOWN_WEIGHTS
    if rest > 0:
        yield f"{rest} further weights differ"
    if not (found.equal_weights or found.weights or found.unmatched):
        return  # as of a recording
    counts = [f"{found.equal_weights} weights are equal"]
    if rounded:
        how = next(weight.relation for weight in found.weights if weight.kind == "rounded")
        counts.append(f"{rounded} are {how}")
    if found.unmatched:
        counts.append(f"{len(found.unmatched)} have no partner, as {found.unmatched[0]}")
    yield "; ".join(counts)


def _verdict(stage: Stage) -> str:
    if stage.defect == 0:
        return "equal"
    if not stage.changed:
        return "rounded"
    if stage.relation:
        return f"changed ({stage.relation})"
    return f"changed ({stage.defect:.2g} of its size apart)"


def as_object(comparison: ModelComparison) -> dict[str, Any]:
    """The comparison in the JSON."""
    derived = {
        "difference": comparison.difference,
        "changed": [part.name for part in comparison.changed],
    }
    return {**vars(comparison), **derived}

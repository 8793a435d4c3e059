"""What `ctrans control` shows: how far a model's layers are from the best ones at each depth, and
what training can change.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ctrans.control.costate import ZERO_GRADIENT
from ctrans.report.placement_style import equation
from ctrans.report.sections import Answer, Cell, Chapter, Column, Line, Plot, Table, Words, cell, finite, number, numbers

ALIGNMENT = "1: sublayers lower the loss as fast as they can; 0: they do not change it, as after training; below 0: they raise it"
CONSERVED = "departure from a quantity that the ODE conserves: the solver's error"
COLUMNS = (
    Column("model"),
    Column("loss", "mean cross-entropy in nats a token"),
    Column("alignment", ALIGNMENT, "mean over segments"),
    Column(
        "largest gap",
        "how much faster the loss would fall if a layer's output could be chosen freely at each token; ∞ where nothing bounds it",
        "H(P) + <P, v>",
    ),
    Column(
        "conservation error", "largest departure from a quantity that the ODE conserves: the solver's error", "drift of <P, v>"
    ),
    Column("first-order condition", "largest decrease of the loss, to first order, that the shared weights leave"),
)
BY_SEGMENT = (
    Column("segment"),
    Column("sublayer"),
    Column("depth-time", "", "t"),
    Column("costate", "size of the loss's gradient by the hidden state", "|P| = |dL/dX|"),
    Column("velocity", "size of what the sublayer adds per depth-time", "|v|", detail=True),
    Column("descent", "rate at which the sublayer changes the loss; below 0 it lowers it", "<P, v>"),
    Column("conservation error", CONSERVED, "drift of <P, v>", detail=True),
    Column("steepest descent", "the fastest that any allowed velocity could lower the loss", "H(P)"),
    Column("gap", "steepest descent plus descent", "H(P) + <P, v>"),
    Column("alignment", ALIGNMENT, "cos(−P, v), or (<P, centre> − <P, v>)/(<P, centre> + H) where a norm bounds velocities"),
)
ATTAINED = (
    Column("segment"),
    Column("sublayer"),
    Column("work", "change of the loss by the sublayer's output", "dt <P, v>"),
    Column(
        "of the last weights", "the same by the size of its last weights: equal to the work, and 0 after training", "<th, dL/dth>"
    ),
    Column("free", "loss left, to first order, by velocities that are free at each token"),
    Column("last weights", "the same by the last weights within their norm"),
    Column("all weights", "the same by all parameters within theirs, from below, as ascents found it"),
    Column("condition", "its first-order condition, which holds at a saddle too"),
)
MEASURES = {
    "gap": "alignment is the share of the steepest descent that the velocity achieves of what its norm allows token by token",
    "cosine": "alignment is cos(−P, v), as no norm at the output bounds velocities",
}


def models(result: Mapping[str, Any]) -> dict[str, Any]:
    """The readings, each with what training attains."""
    return {
        name: {**reading, "attained": result["attained"].get(name), "instead": (result.get("instead") or {}).get(name)}
        for name, reading in result["placements"].items()
    }


def chapters(models: Mapping[str, Any], result: Mapping[str, Any]) -> list[Chapter]:
    """The answer with a row for each model, charts by depth, then tables by segment, and what
    training attains.
    """
    by_depth = [_by_segment(name, model) for name, model in models.items()]
    attained = [part for name, model in models.items() for part in _attained(name, model["attained"])]
    return [
        Chapter("Summary", [_answer(models), Table("", COLUMNS, [_row(name, model) for name, model in models.items()])]),
        Chapter("Remarks", [Words(line) for name, model in models.items() for line in _notes(name, model)]),
        Chapter("By depth", _charts(models), picture="control"),
        Chapter("Figures by depth", by_depth, folded=len(models) > 1),
        Chapter("What training attains", attained, folded=True),
    ]


def _answer(models: Mapping[str, Any]) -> Answer:
    """Whether the layers pull with the gradient or against it."""
    if not any(finite(model["costate_norm"]) and max(finite(model["costate_norm"])) > 0 for model in models.values()):
        return Answer(f"{ZERO_GRADIENT}.", "bad")
    parts = []
    for name, model in models.items():
        known = finite(model["alignment"])
        lowers = sum(value > 0 for value in known)
        mean = sum(known) / len(known) if known else 0.0
        parts.append(
            f"{name}: {lowers} of {len(known)} sublayers move the state in a direction that lowers the loss (mean alignment {mean:.2g})"
        )
    return Answer(f"{'; '.join(parts)}.", "good")


def _row(name: str, model: Mapping[str, Any]) -> list[Cell]:
    alignment = finite(model["alignment"])
    gaps = [value for value in numbers(model["gap"]) if value is not None]
    attained = model["attained"]
    condition = max(finite(attained["first_order"]), default=None) if isinstance(attained, Mapping) else None
    return [
        cell(name),
        cell(model["loss"]),
        cell(sum(alignment) / len(alignment) if alignment else None),
        cell(max(gaps, default=None)),
        cell(max(finite(model["drift"]), default=None)),
        cell(condition),
    ]


def _notes(name: str, model: Mapping[str, Any]) -> list[str]:
    """What could not be had, and what replaces it."""
    lines = [] if model["instead"] is None else [str(model["instead"])]
    lines += [f"{segment} is skipped: {why}" for segment, why in (model["skipped"] or {}).items()]
    lines += [] if any(finite(model["costate_norm"])) else [ZERO_GRADIENT]
    lines += [] if isinstance(model["attained"], Mapping) else [f"what training attains is left out: {model['attained']}"]
    return [f"{name}: {line}" for line in lines]


def _charts(models: Mapping[str, Any]) -> list[Plot]:
    free = [line for line in _lines(models, "hamiltonian", bound=True) if finite(line.y)]
    gaps = [line for line in _lines(models, "gap") if finite(line.y)]
    return [
        Plot("Costate", "depth-time t", "|P| = |dL/dX|", _lines(models, "costate_norm"), "The loss's gradient by the state."),
        Plot(
            "Gap to free velocities",
            "depth-time t",
            "H(P) + <P, v>",
            [*gaps, *free],
            "How much faster the loss would fall if velocities were free at each token. Dashed: the gap of a layer that does nothing. "
            "There is no line where nothing bounds velocities.",
        ),
        Plot(
            "Alignment",
            "depth-time t",
            "alignment with the best velocity",
            _lines(models, "alignment"),
            "1 is the best velocity, 0 a critical point. It is cos(−P, v) where nothing bounds velocities.",
            log=False,
        ),
        Plot(
            "Conservation error", "depth-time t", "change of <P, v> on a segment", _lines(models, "drift"), "The solver's error."
        ),
    ]


def _lines(models: Mapping[str, Any], key: str, *, bound: bool = False) -> list[Line]:
    return [
        Line(name, [number(t) or 0.0 for t in model["times"]], numbers(model[key]), _placement(model), bound)
        for name, model in models.items()
        if model[key]
    ]


def _placement(model: Mapping[str, Any]) -> str:
    names = set(model["placements"])
    return str(next(iter(names))) if len(names) == 1 else "mixed"


def _by_segment(name: str, model: Mapping[str, Any]) -> Table:
    keys = ("kinds", "times", "costate_norm", "velocity_norm", "product", "drift", "hamiltonian", "gap", "alignment")
    measures = "; ".join(MEASURES[measure] for measure in dict.fromkeys(model["measures"]))
    return Table(
        f"{name}: {equation(_placement(model))}", BY_SEGMENT, _rows(model, keys), measures, rows_shown=12, alternate=True
    )


def _attained(name: str, found: Any) -> list[Table | Words]:
    if not isinstance(found, Mapping):
        return [Words(f"{name}: {found or 'not computed'}")]
    keys = ("kinds", "work", "radial", "pointwise_gap", "last_gap", "shared_gap", "first_order")
    return [Table(f"{name}, discrete model", ATTAINED, _rows(found, keys), rows_shown=12, alternate=True)]


def _rows(found: Mapping[str, Any], keys: Sequence[str]) -> list[list[Cell]]:
    return [[cell(k), *(cell(found[key][k]) for key in keys)] for k in range(len(found["times"]))]

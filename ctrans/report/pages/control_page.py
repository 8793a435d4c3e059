"""What `ctrans control` shows: how far a model's layers are from the best ones at each depth, and
what training can change.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ctrans.control.costate import ZERO_GRADIENT
from ctrans.report.placement_style import equation
from ctrans.report.sections import (
    Answer,
    Chapter,
    Column,
    JSONObject,
    Line,
    Plot,
    Table,
    Words,
    finite,
    table,
)

ALIGNMENT = (
    "1: sublayers lower the loss as fast as they can; 0: they do not change it, as after training;"
    " below 0: they raise it"
)
CONSERVED = "departure from a quantity that the ODE conserves: the solver's error"
COLUMNS = (
    "model",
    Column("loss", "mean cross-entropy in nats a token"),
    Column("alignment", ALIGNMENT, "mean over segments"),
    Column(
        "largest gap",
        "how much faster the loss would fall if a layer's output could be chosen freely at each"
        " token; ∞ where nothing bounds it",
        "H(P) + <P, v>",
    ),
    Column(
        "conservation error",
        "largest departure from a quantity that the ODE conserves: the solver's error",
        "drift of <P, v>",
    ),
    Column(
        "first-order condition",
        "largest decrease of the loss, to first order, that the shared weights leave",
    ),
)
BY_SEGMENT = {
    "kinds": Column("sublayer"),
    "times": Column("depth-time", "", "t"),
    "costate_norm": Column(
        "costate", "size of the loss's gradient by the hidden state", "|P| = |dL/dX|"
    ),
    "velocity_norm": Column(
        "velocity", "size of what the sublayer adds per depth-time", "|v|", detail=True
    ),
    "product": Column(
        "descent", "rate at which the sublayer changes the loss; below 0 it lowers it", "<P, v>"
    ),
    "drift": Column("conservation error", CONSERVED, "drift of <P, v>", detail=True),
    "hamiltonian": Column(
        "steepest descent", "the fastest that any allowed velocity could lower the loss", "H(P)"
    ),
    "gap": Column("gap", "steepest descent plus descent", "H(P) + <P, v>"),
    "alignment": Column(
        "alignment",
        ALIGNMENT,
        "cos(−P, v), or (<P, centre> − <P, v>)/(<P, centre> + H) where a norm bounds velocities",
    ),
}
ATTAINED = {
    "kinds": Column("sublayer"),
    "work": Column("work", "change of the loss by the sublayer's output", "dt <P, v>"),
    "radial": Column(
        "of the last weights",
        "the same by the size of its last weights: equal to the work, and 0 after training",
        "<th, dL/dth>",
    ),
    "pointwise_gap": Column(
        "free", "loss left, to first order, by velocities that are free at each token"
    ),
    "last_gap": Column("last weights", "the same by the last weights within their norm"),
    "shared_gap": Column(
        "all weights", "the same by all parameters within theirs, from below, as ascents found it"
    ),
    "first_order": Column("condition", "its first-order condition, which holds at a saddle too"),
}
MEASURES = {
    "gap": (
        "alignment is the share of the steepest descent that the velocity achieves of what its norm"
        " allows token by token"
    ),
    "cosine": "alignment is cos(−P, v), as no norm at the output bounds velocities",
}


def models(result: JSONObject) -> dict[str, Any]:
    """The readings, each with what training attains."""
    return {
        name: {
            **reading,
            "attained": result["attained"].get(name),
            "instead": (result.get("instead") or {}).get(name),
        }
        for name, reading in result["placements"].items()
    }


def chapters(models: JSONObject, result: JSONObject) -> list[Chapter]:
    """The answer with a row for each model, charts by depth, then tables by segment, and what
    training attains.
    """
    by_depth = [
        _along(
            f"{name}: {equation(_placement(model))}",
            BY_SEGMENT,
            model,
            "; ".join(MEASURES[measure] for measure in dict.fromkeys(model["measures"])),
        )
        for name, model in models.items()
    ]
    attained = [_attained(name, model["attained"]) for name, model in models.items()]
    return [
        Chapter(
            "Summary",
            [
                _answer(models),
                table(COLUMNS, [_row(name, model) for name, model in models.items()]),
            ],
        ),
        Chapter(
            "Remarks",
            [Words(line) for name, model in models.items() for line in _notes(name, model)],
        ),
        Chapter("By depth", _charts(models), picture="control"),
        Chapter("Figures by depth", by_depth, folded=len(models) > 1),
        Chapter("What training attains", attained, folded=True),
    ]


def _answer(models: JSONObject) -> Answer:
    """Whether the layers pull with the gradient or against it."""
    if not any(
        finite(model["costate_norm"]) and max(finite(model["costate_norm"])) > 0
        for model in models.values()
    ):
        return Answer(f"{ZERO_GRADIENT}.", "bad")
    parts = []
    for name, model in models.items():
        known = finite(model["alignment"])
        lowers = sum(value > 0 for value in known)
        many = (
            f"{lowers} of {len(known)} sublayers move the state in a direction that lowers the loss"
        )
        parts.append(f"{name}: {many} (mean alignment {_mean(known) or 0.0:.2g})")
    return Answer(f"{'; '.join(parts)}.", "good")


def _mean(values: Sequence[float]) -> float | None:
    if values:
        return sum(values) / len(values)
    return None


def _row(name: str, model: JSONObject) -> list[Any]:
    gaps = [value for value in model["gap"] if value is not None]
    attained = model["attained"]
    if isinstance(attained, Mapping):
        conditions = finite(attained["first_order"])
    else:
        conditions = []
    largest = (max(values, default=None) for values in (gaps, finite(model["drift"]), conditions))
    return [name, model["loss"], _mean(finite(model["alignment"])), *largest]


def _notes(name: str, model: JSONObject) -> list[str]:
    """What could not be had, and what replaces it."""
    if model["instead"] is None:
        lines = []
    else:
        lines = [str(model["instead"])]
    lines += [f"{segment} is skipped: {why}" for segment, why in (model["skipped"] or {}).items()]
    if any(finite(model["costate_norm"])):
        lines += []
    else:
        lines += [ZERO_GRADIENT]
    if isinstance(model["attained"], Mapping):
        lines += []
    else:
        lines += [f"what training attains is left out: {model['attained']}"]
    return [f"{name}: {line}" for line in lines]


def _charts(models: JSONObject) -> list[Plot]:
    gaps = [*_lines(models, "gap"), *_lines(models, "hamiltonian", bound=True)]
    return [
        Plot(
            "Costate",
            "depth-time t",
            "|P| = |dL/dX|",
            _lines(models, "costate_norm"),
            "The loss's gradient by the state.",
        ),
        Plot(
            "Gap to free velocities",
            "depth-time t",
            "H(P) + <P, v>",
            [line for line in gaps if finite(line.y)],
            "How much faster the loss would fall if velocities were free at each token. Dashed: the"
            " gap of a layer that does nothing. There is no line where nothing bounds velocities.",
        ),
        Plot(
            "Alignment",
            "depth-time t",
            "alignment with the best velocity",
            _lines(models, "alignment"),
            "1 is the best velocity, 0 a critical point. It is cos(−P, v) where nothing bounds"
            " velocities.",
            log=False,
        ),
        Plot(
            "Conservation error",
            "depth-time t",
            "change of <P, v> on a segment",
            _lines(models, "drift"),
            "The solver's error.",
        ),
    ]


def _lines(models: JSONObject, key: str, *, bound: bool = False) -> list[Line]:
    return [
        Line(name, model["times"], model[key], _placement(model), bound)
        for name, model in models.items()
        if model[key]
    ]


def _placement(model: JSONObject) -> str:
    names = set(model["placements"])
    if len(names) == 1:
        return str(next(iter(names)))
    return "mixed"


def _attained(name: str, found: Any) -> Table | Words:
    if not isinstance(found, Mapping):
        return Words(f"{name}: {found or 'not computed'}")
    return _along(f"{name}, discrete model", ATTAINED, found)


def _along(
    title: str, columns: Mapping[str, Column], found: JSONObject, meaning: str = ""
) -> Table:
    """A row for each segment: its figures by the keys of the columns."""
    rows = [[k, *(found[key][k] for key in columns)] for k in range(len(found["times"]))]
    return table(
        ["segment", *columns.values()], rows, title, meaning, rows_shown=12, alternate=True
    )

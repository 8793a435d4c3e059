"""What `ctrans train` shows: how a run ended, and its losses and states by iteration."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ctrans.report.sections import (
    Answer,
    Cell,
    Chapter,
    Column,
    JSONObject,
    Line,
    Plot,
    Table,
    cell,
    digits,
    table,
)
from ctrans.study.outcomes import LEARNED

FIGURES = {
    "ending": Column("how it ended"),
    "step": Column("iterations done"),
    "first_validation_loss": Column(
        "first loss", "validation loss before the first iteration, nats a token"
    ),
    "validation_loss": Column("last loss", "validation loss at the end"),
    "best_validation_loss": Column("best loss", "the lowest validation loss"),
    "depthless_loss": Column(
        "loss without depth", "what a table reaches that knows only the current token and its place"
    ),
    "best_step": Column("best iteration", "the iteration with the best loss"),
    "accuracy": Column("accuracy", "share of the held-out answers that are right"),
    "parameters": Column("parameters"),
    "trained_parameters": Column(
        "trained parameters", "parameters that are trained: fewer with adapters of low rank"
    ),
    "seconds": Column("seconds"),
}
CURVES = {
    "training": (
        "Training loss",
        "cross-entropy, nats a token",
        "Means over about a hundred stretches of iterations.",
    ),
    "validation": (
        "Validation loss",
        "cross-entropy, nats a token",
        "Of text that the model is not trained on.",
    ),
    "learning_rate": ("Learning rate", "learning rate", ""),
    "gradient_norm": ("Gradient", "|dL/dW|, all weights, before clipping", ""),
    "growth": (
        "Growth of the hidden state",
        "rms X_T / rms X_0",
        "Size of the last hidden state over that of the first one.",
    ),
    "largest": ("Largest entry", "largest |x| of any hidden state", ""),
}
"""By key of `losses` and `curves`: title, vertical axis and meaning of the chart."""
LINEAR = ("training", "validation", "learning_rate")


def chapters(models: JSONObject, result: JSONObject) -> list[Chapter]:
    """The answer with a row for each run, its curves, and its loss with other numbers of blocks."""
    runs = {
        name or str((each.get("model") or {}).get("placement", "run")): each
        for name, each in models.items()
    }
    rows = [[name, *(_figure(key, run) for key in FIGURES)] for name, run in runs.items()]
    return [
        Chapter(
            "Result",
            [
                *(_answer(name, run) for name, run in runs.items()),
                table(["run", *FIGURES.values()], rows),
            ],
        ),
        Chapter("By iteration", [_curve(runs, key) for key in CURVES], picture="loss"),
        Chapter("Other depths", _other_depths(runs)),
    ]


def _answer(name: str, run: JSONObject) -> Answer:
    first, last, best = (run.get(f"{which}validation_loss") for which in ("first_", "", "best_"))
    ending = run.get("ending")
    step = run.get("step")
    floor = run.get("depthless_loss")
    said = f"{name}: {ending} after {step:,} iterations"
    if first is not None and last is not None:
        said += f". The validation loss went from {digits(first)} to {digits(last)} nats a token"
    if best is not None:
        said += f"; the best validation loss is {best:.4f} at step {run.get('best_step')}"
    if best is not None and floor is not None and best > floor - LEARNED:
        said += (
            f". A table that knows only the current token has {digits(floor)}: this training shows"
            " little of what depth does"
        )
    finished = ending == "finished"
    return Answer(f"{said}.", "bad" if ending == "diverged" else "" if finished else "note")


def _figure(key: str, run: JSONObject) -> Cell:
    if key == "trained_parameters" and run.get(key) == run.get("parameters"):
        return cell(None)
    return cell(run.get(key), "note" if key == "ending" and run.get(key) != "finished" else "")


def _curve(runs: JSONObject, key: str) -> Plot:
    title, axis, meaning = CURVES[key]
    figures = {
        name: {**(run.get("losses") or {}), **(run.get("curves") or {})}
        for name, run in runs.items()
    }
    lines = [_line(name, runs[name], each.get(key) or []) for name, each in figures.items()]
    return Plot(title, "iteration", axis, lines, meaning, log=key not in LINEAR)


def _other_depths(runs: JSONObject) -> list[Table | Plot]:
    """The loss of the same weights in other numbers of blocks."""
    found = {
        name: sorted((int(d), loss) for d, loss in (run.get("other_depths") or {}).items())
        for name, run in runs.items()
    }
    rows = [[name, depth, loss] for name, each in found.items() for depth, loss in each]
    columns = ["run", "blocks", Column("validation loss", "nats a token, of the same weights")]
    lines = [_line(name, runs[name], each) for name, each in found.items()]
    chart = Plot(
        "The same weights in other numbers of blocks",
        "blocks",
        "validation loss, nats a token",
        lines,
        log=False,
    )
    return [table(columns, rows), chart]


def _line(name: str, run: JSONObject, pairs: Sequence[Sequence[Any]]) -> Line:
    placement = (run.get("model") or {}).get("placement")
    return Line(
        name,
        [at for at, _ in pairs],
        [value for _, value in pairs],
        placement if isinstance(placement, str) else None,
    )

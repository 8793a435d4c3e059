"""What `ctrans rate` shows: losses of short trainings by learning rate, and the estimate."""

from __future__ import annotations

from ctrans.report.sections import Answer, Cell, Chapter, Column, JSONObject, Line, Plot, table

UNSURE = "It is an estimate from short trainings. A long one can fail at it, or accept more."
LOSS = "mean training loss of its last steps; inf if a loss or a gradient was not finite"


def chapters(models: JSONObject, result: JSONObject) -> list[Chapter]:
    """The estimate, the losses by rate, and what gives way first."""
    answers = [Answer(_words(name, found), "note") for name, found in models.items()]
    tables = [
        table(name, ["learning rate", Column("loss", LOSS)], [[rung["rate"], _loss(rung)] for rung in found["rungs"]])
        for name, found in models.items()
    ]
    lines = [
        Line(name or "short trainings", [rung["rate"] for rung in found["rungs"]], [rung["loss"] for rung in found["rungs"]])
        for name, found in models.items()
    ]
    chart = Plot("Loss of short trainings", "learning rate", "loss at the end, nats", lines, log_x=True)
    return [
        Chapter("Largest stable learning rate", [*answers, *tables]),
        Chapter("By learning rate", [chart], picture="rate"),
    ]


def _loss(rung: JSONObject) -> Cell:
    return Cell(f"{rung['loss']:.4f}", rung["loss"])


def _words(name: str, found: JSONObject) -> str:
    before = f"{name}: " if name else ""
    if found["rate"] is None:
        return f"{before}No short training lowered the loss of {found['first']:.3g}. Try lower rates, or a larger --budget."
    first = f"The largest stable learning rate is about {found['rate']:.2g}, at {found['cost']:.1%} of a training's cost."
    gives = f" Above it the first alarm is {found['gives_way']}." if found["gives_way"] else ""
    return f"{before}{first}{gives} {UNSURE}"

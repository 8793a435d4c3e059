"""What `ctrans rate` shows: losses by learning rate, and the largest stable rate."""

from __future__ import annotations

from ctrans.report.sections import Answer, Cell, Chapter, Column, JSONObject, Line, Plot, table

SHORT = (
    "The trainings were shorter than --iterations. At 1%, 4% and 20% of it, answers were no better"
    " than a constant."
)
LOSS = "mean training loss of its last steps; inf if a loss or a gradient was not finite"


def chapters(models: JSONObject, result: JSONObject) -> list[Chapter]:
    """The rate, the losses by rate, and what gives way first."""
    answers = [Answer(_words(name, found), "note") for name, found in models.items()]
    tables = [
        table(
            ["learning rate", Column("loss", LOSS)],
            [[rung["rate"], _loss(rung)] for rung in found["rungs"]],
            name,
        )
        for name, found in models.items()
    ]
    lines = [
        Line(
            name or "loss",
            [rung["rate"] for rung in found["rungs"]],
            [rung["loss"] for rung in found["rungs"]],
        )
        for name, found in models.items()
    ]
    chart = Plot("Loss at the end", "learning rate", "loss at the end, nats", lines, log_x=True)
    return [
        Chapter("Largest stable learning rate", [*answers, *tables]),
        Chapter("By learning rate", [chart], picture="rate"),
    ]


def _loss(rung: JSONObject) -> Cell:
    return Cell(f"{rung['loss']:.4f}", rung["loss"])


def _words(name: str, found: JSONObject) -> str:
    if name:
        before = f"{name}: "
    else:
        before = ""
    if found["rate"] is None:
        return f"{before}There is no largest stable learning rate here: {found['reason']}."
    if found["at_least"]:
        most = "is at least"
    else:
        most = "is about"
    if found["gives_way"]:
        gives = f" Above it the first alarm is {found['gives_way']}."
    else:
        gives = ""
    if found["options"]["share"] < 1:
        short = f" {SHORT}"
    else:
        short = ""
    return f"{before}The largest stable learning rate {most} {found['rate']:.2g}.{gives}{short}"

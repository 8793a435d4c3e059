"""The charts of a training, which `ctrans watch` shows: its progress, findings, and figures over
the steps and by depth. Titles and units are those of the table of measures.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from typing import Any

import numpy as np

from ctrans.measure.measures import MEASURES
from ctrans.report.charts import AXES
from ctrans.report.progress import duration
from ctrans.report.sections import (
    MOST_FINDINGS,
    Answer,
    Cell,
    Chapter,
    Column,
    Findings,
    JSONObject,
    Line,
    Plot,
    Section,
    Table,
    Words,
    mark_of,
    table,
)
from ctrans.report.sparkline import sparkline
from ctrans.training.monitor import GAUGES
from ctrans.training.monitor.history import kept_reports
from ctrans.training.monitor.post_mortem import LEAST, RULE

OVER_TIME = (
    "loss",
    "highest_loss",
    "gradient_norm",
    "highest_gradient_norm",
    "learning_rate",
    "largest_logit",
)
"""The figures of a whole run that have a chart."""
DRAWN = ("rms", "gradient", "logit", "update", "step_share", "velocity")
"""The figures by depth that the picture shows."""
FURTHER = ("costate", "bound_share", "adam_gradient_ratio", "peak", "entropy", "routing")
"""The figures by depth that the page shows too."""
MOMENTS = 200
"""At most so many positions of the slider where several runs are shown together."""
TIME = 16
"""Characters of a sparkline over time."""
DEPTH = 14
"""Characters of a sparkline over depth."""
TIMELINE = 7
"""Deviations in the timeline."""
EARLY = slice(-12)
"""Findings shown with --verbose only."""
LATE = slice(-12, None)
"""The newest findings."""


def chapters(models: JSONObject) -> list[Chapter]:
    """How each run goes and what was found, its last figures, charts over the steps and by
    depth.
    """
    runs = {name or "run": _with_findings(run) for name, run in models.items()}
    several = len(runs) > 1
    titles = {name: name if several else "" for name in runs}
    not_seen = []
    unseen = [_titled(titles[name], line) for name, run in runs.items() for line in _not_seen(run)]
    if unseen:
        not_seen.append(Words("These figures could not be measured:", unseen))
    newest = [Findings(run["findings"][LATE], titles[name]) for name, run in runs.items()]
    older = [_older(run["findings"][EARLY], titles[name]) for name, run in runs.items()]
    drawn = [_by_depth(runs, gauge) for gauge in DRAWN]
    further = [_by_depth(runs, gauge) for gauge in FURTHER]
    answers = [_answer(titles[name], run) for name, run in runs.items()]
    remarks = [  # a result of an earlier version has none
        Words(_titled(titles[name], line))
        for name, run in runs.items()
        for line in run.get("remarks", ())
    ]
    return [
        Chapter("Progress", [*answers, *remarks, _runs(runs)]),
        Chapter("Not seen", not_seen),
        Chapter("Findings", newest),
        Chapter("Earlier findings", older, folded=True),
        Chapter(
            "What moved first",
            [part for run in runs.values() if run.get("why") for part in _why(run)],
            picture="watch",
        ),
        Chapter(
            "Last figures",
            [_figures(titles[name], run) for name, run in runs.items() if run["steps"]],
        ),
        Chapter(
            "Over the steps", [_over_time(runs, gauge) for gauge in OVER_TIME], picture="watch"
        ),
        Chapter("By depth", drawn, picture="watch"),
        Chapter("Further figures by depth", further, folded=True),
        Chapter("About the slider", [Words(_slider(runs))], folded=True),
    ]


def _titled(title: str, text: str) -> str:
    """The text after the name of its run, where there are several."""
    if title:
        return f"{title}: {text}"
    return text


def _why(run: JSONObject) -> list[Section]:
    """What left its past, as a sentence, a timeline and a table."""
    deviations = run["why"]["deviations"]
    loss = run["why"]["loss"]
    sigma = run["why"]["sigma"]
    events = []
    later = "The loss did not leave its past for three reports"
    if loss is not None:
        later = f"The loss left its past at step {loss:,}"
        events.append((float(loss), "loss"))
    rule = "the 6-sigma rule never warned"
    if sigma is not None:
        rule = f"the 6-sigma rule first warned at step {sigma:,}"
        events.append((float(sigma), "6 sigma"))
    reports = len(run["steps"])
    if reports < LEAST + 2:
        return [
            Words(
                f"{reports} reports cannot say what moved first: {LEAST} must come before the"
                " fault. Give a smaller every=."
            )
        ]
    if not deviations:
        return [
            Words(
                "No gauge left its past. A fault that is there from the first step leaves no trace"
                f" here. {later}; {rule}."
            )
        ]
    first = deviations[0]
    summary = (
        f"First, at step {first['step']:,}: {first['place']}, {GAUGES[first['gauge']].formula}."
        f" {later}; {rule}."
    )
    last_step = run["steps"][-1]
    bars = []
    for i, deviation in enumerate(deviations[:TIMELINE], 1):
        name = f"{i}. {deviation['place']}: {deviation['gauge']}"
        bars.append(Line(name, [deviation["step"], last_step], [i, i], local=True))
    order = Plot(
        "What left its past",
        "training step",
        "order",
        bars,
        "Each line begins where it left its past.",
        log=False,
        events=events,
    )
    columns = [
        "step",
        "place",
        "figure",
        Column("times", "the figure over the median of its past"),
        Column("deviations", RULE),
    ]
    keys = ("step", "place", "gauge", "times", "deviations")
    rows = [[deviation[key] for key in keys] for deviation in deviations[:MOST_FINDINGS]]
    return [Words(summary), order, table(columns, rows)]


def _with_findings(run: JSONObject) -> JSONObject:
    """The run, each finding with its step before its place."""
    findings = [
        {**finding, "place": f"step {finding['step']}: {finding['place']}"}
        for finding in run["findings"]
    ]
    return {**run, "findings": findings}


def _answer(name: str, run: JSONObject) -> Answer:
    """How far it is, how fast, how long it will take, how it ended, and the worst that was
    found.
    """
    severities = [finding["severity"] for finding in run["findings"]]
    counts = ", ".join(
        f"{severities.count(severity)} {severity}" for severity in dict.fromkeys(severities)
    )
    unread = run.get("unread", 0)  # a result of an earlier version has none
    if not severities and not unread:
        findings = "no findings"
    elif not severities:
        findings = "no findings in the lines of its log that can be read"
    elif len(severities) == 1:
        findings = f"1 finding ({counts})"
    else:
        findings = f"{len(severities)} findings ({counts})"
    parts = [*_progress(run), run["ended"] or "still running, or killed"]
    mark = mark_of(run["findings"])
    if unread:
        findings += f"; damaged lines, which may hold more: {unread:,}"
    if unread and mark == "good":
        mark = "note"
    return Answer(_titled(name, f"{', '.join(parts)}; {findings}."), mark)


def _progress(run: JSONObject) -> list[str]:
    if not run["steps"]:
        return ["no report yet"]
    step = run["steps"][-1]
    total = run["log"]["total"]
    seconds = run["last"].get("seconds")
    if total and step > total:  # a header of another run
        parts = [f"step {step:,}, after the last of {total:,}"]
    elif total:
        parts = [f"step {step:,} of {total:,} ({step / total:.0%})"]
    else:
        parts = [f"step {step:,}"]
    if seconds is not None and seconds > 0:
        parts.append(f"{1 / seconds:.3g} steps/s")
        if total and total > step and not run["ended"]:
            parts.append(f"about {duration(seconds * (total - step))} to go")
    return parts


def _runs(runs: JSONObject) -> Table:
    columns = [
        "run",
        "model",
        "sublayers",
        "steps between reports",
        Column("step", "training step of the last report"),
        "of",
        Column("first loss", "training loss of the first report, in nats a token"),
        "last loss",
        Column("loss", "the loss over the steps, from its least to its largest"),
        "learning rate",
        Column("gradient", MEASURES["gradient_norm"].formula),
    ]
    rows = []
    for name, run in runs.items():
        steps = run["steps"] or [None]
        losses = run["loss"] or [None]
        log = run["log"]
        last = run["last"]
        figures = [
            str(log["model"]).split(",")[0],
            len(log["places"]),
            log["every"],
            steps[-1],
            log["total"],
            losses[0],
            losses[-1],
        ]
        bars = Cell(sparkline(_floats(run["loss"]), 2 * TIME))
        rows.append([name, *figures, bars, last.get("learning_rate"), last.get("gradient_norm")])
    return table(columns, rows)


def _not_seen(run: JSONObject) -> list[str]:
    """What the run, its last report and its last probe could not look at, and why."""
    results = [run, *run["probes"][-1:]]
    reasons: dict[str, Any] = {}
    for result in results:
        reasons |= result.get("missing") or result.get("unknown") or {}  # its name in version 0.3
    lines = [f"{where}: {why}" for where, why in reasons.items()]
    unseen = run["log"].get("unseen")
    if unseen:
        lines.insert(0, unseen)
    return lines


def _older(findings: Sequence[JSONObject], title: str) -> Findings:
    """The newest of earlier findings, as many as are shown."""
    if len(findings) <= MOST_FINDINGS:
        return Findings(findings, title)
    left_out = f"the last {MOST_FINDINGS:,} of {len(findings):,} earlier findings; the JSON has all"
    return Findings(findings[-MOST_FINDINGS:], title, left_out)


def _figures(name: str, run: JSONObject) -> Table:
    """Each figure by depth of the last report, and how its largest value moved over the steps."""
    rows = []
    for gauge in (*DRAWN, *FURTHER):
        reports = [_floats(values) for values in run["history"]["by_depth"].get(gauge, ())]
        if not reports:
            continue
        last = np.array(reports[-1])
        last_finite = last[np.isfinite(last)]
        if len(last_finite):
            figures = [last_finite.min(), np.median(last_finite), last_finite.max()]
        else:
            figures = [None] * 3
        largest = [max(filter(math.isfinite, values), default=math.nan) for values in reports]
        # these two have no figure at some depths
        by_depth = last_finite if gauge in ("routing", "costate") else last
        bars = [Cell(sparkline(by_depth, DEPTH)), Cell(sparkline(largest, TIME))]
        rows.append([MEASURES.title(gauge), *figures, *bars])
    columns = [
        "figure",
        Column("least", "over the depth, at the last report"),
        "median",
        "largest",
        Column("by depth", "from the first sublayer to the last, at the last report"),
        Column(
            "largest over time",
            "the largest value over the depth, from the first report to the last",
        ),
    ]
    return table(columns, rows, name)


def _over_time(runs: JSONObject, gauge: str) -> Plot:
    """A figure of the whole run, with a line where each kind of serious finding was first
    reported.
    """
    title = MEASURES.title(gauge).capitalize()
    unit = GAUGES[gauge].unit
    lines = []
    for name, run in runs.items():
        values = run["history"]["over_time"].get(gauge, ())
        if len(values) > 1:
            lines.append(Line(name, run["steps"], values))
    first_steps: dict[str, float] = {}
    for run in runs.values():
        for finding in run["findings"]:
            if finding["severity"] != "note":
                first_steps.setdefault(finding["check"], float(finding["step"]))
    events = []
    if gauge in ("loss", "gradient_norm"):
        events = [(step, check) for check, step in first_steps.items()]
    return Plot(
        title,
        "training step",
        unit,
        lines,
        GAUGES[gauge].formula,
        log=GAUGES[gauge].log,
        events=events,
    )


def _by_depth(runs: JSONObject, gauge: str) -> Plot:
    """Each run's figures along the depth; at a moment, those of its last report until then."""
    title = MEASURES.title(gauge)
    unit = GAUGES[gauge].unit
    histories = {
        name: run["history"] for name, run in runs.items() if gauge in run["history"]["by_depth"]
    }
    steps = sorted({step for history in histories.values() for step in history["steps"]})
    moments = [steps[i] for i in kept_reports(len(steps), MOMENTS)]
    frames = {
        f"{step:,}": [_until(history, gauge, step) for history in histories.values()]
        for step in moments
    }
    last_frame = list(frames.values())[-1] if frames else []
    lines = [
        Line(name, list(range(len(y))), y) for name, y in zip(histories, last_frame, strict=True)
    ]
    scope = AXES[GAUGES[gauge].scope]
    return Plot(
        title.capitalize(),
        scope,
        unit,
        lines,
        GAUGES[gauge].formula,
        frames=frames,
        over="Training step",
    )


def _until(history: JSONObject, gauge: str, step: int) -> Sequence[float | None]:
    """The figures of the last report until that step, None before the first."""
    reports: Sequence[Sequence[float | None]] = history["by_depth"][gauge]
    report = bisect_right(history["steps"], step) - 1
    if report < 0:
        return [None] * len(reports[-1])
    return reports[report]


def _slider(runs: JSONObject) -> str:
    counts = ", ".join(
        f"{len(run['history']['steps'])} of {len(run['steps'])}" for run in runs.values()
    )
    return (
        f"The slider moves over {counts} reports of the log, which keeps fewer of the older ones. "
        "The vertical axis does not change while the slider moves."
    )


def _floats(values: Sequence[Any]) -> list[float]:
    """With nan for what is not known."""
    return [math.nan if value is None else value for value in values]

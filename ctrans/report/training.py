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
from ctrans.report.view import AXES
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
BARS = "▁▂▃▄▅▆▇█"
TIME, DEPTH = 16, 14
"""Characters of a sparkline over time, and over depth."""
TIMELINE = 7
"""Deviations in the timeline."""
EARLY, LATE = slice(-12), slice(-12, None)
"""Findings shown with --verbose only, and the newest ones."""


def chapters(models: JSONObject) -> list[Chapter]:
    """How each run goes and what was found, its last figures, charts over the steps and by
    depth.
    """
    runs = {name or "run": _with_findings(each) for name, each in models.items()}
    unseen = [
        f"{name}: {words}" if len(runs) > 1 else words
        for name, run in runs.items()
        for words in _not_seen(run)
    ]
    found, older = _found(runs)
    drawn = [_by_depth(runs, gauge) for gauge in DRAWN]
    others = [_by_depth(runs, gauge) for gauge in FURTHER]
    several = len(runs) > 1
    return [
        Chapter(
            "Progress",
            [*(_answer(name if several else "", run) for name, run in runs.items()), _runs(runs)],
        ),
        Chapter(
            "Not seen", [Words("These figures could not be measured:", unseen)] if unseen else []
        ),
        Chapter("Findings", found),
        Chapter("Earlier findings", older, folded=True),
        Chapter(
            "What moved first",
            [part for name, run in runs.items() if run.get("why") for part in _why(run)],
            picture="watch",
        ),
        Chapter(
            "Last figures",
            [_figures(name if several else "", run) for name, run in runs.items() if run["steps"]],
        ),
        Chapter(
            "Over the steps", [_over_time(runs, gauge) for gauge in OVER_TIME], picture="watch"
        ),
        Chapter("By depth", drawn, picture="watch"),
        Chapter("Further figures by depth", others, folded=True),
        Chapter("About the slider", [Words(_slider(runs))], folded=True),
    ]


def _why(run: JSONObject) -> list[Section]:
    """What left its past, as a sentence, a timeline and a table."""
    found = run["why"]["deviations"]
    loss = run["why"]["loss"]
    sigma = run["why"]["sigma"]
    if loss is None:
        later = "The loss did not leave its past for three reports"
    else:
        later = f"The loss left its past at step {loss:,}"
    rule = (
        f"the 6-sigma rule {'never warned' if sigma is None else f'first warned at step {sigma:,}'}"
    )
    reports = len(run["steps"])
    if reports < LEAST + 2:
        return [
            Words(
                f"{reports} reports cannot say what moved first: {LEAST} must come before the"
                " fault. Give a smaller every=."
            )
        ]
    if not found:
        return [
            Words(
                "No gauge left its past. A fault that is there from the first step leaves no trace"
                f" here. {later}; {rule}."
            )
        ]
    first = found[0]
    said = (
        f"First, at step {first['step']:,}: {first['place']}, {GAUGES[first['gauge']].formula}."
        f" {later}; {rule}."
    )
    events = [
        (float(step), name)
        for step, name in ((loss, "loss"), (sigma, "6 sigma"))
        if step is not None
    ]
    bars = [
        Line(f"{i}. {each['place']}: {each['gauge']}", [each["step"], run["steps"][-1]], [i, i])
        for i, each in enumerate(found[:TIMELINE], 1)
    ]
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
    rows = [
        [each["step"], each["place"], each["gauge"], each["times"], each["deviations"]]
        for each in found[:MOST_FINDINGS]
    ]
    return [Words(said), order, table(columns, rows)]


def _with_findings(run: JSONObject) -> JSONObject:
    """The run, each finding with its step before its place."""
    return {
        **run,
        "findings": [
            {**each, "place": f"step {each['step']}: {each['place']}"} for each in run["findings"]
        ],
    }


def _answer(name: str, run: JSONObject) -> Answer:
    """How far it is, how fast, how long it will take, how it ended, and the worst that was
    found.
    """
    known = [finding["severity"] for finding in run["findings"]]
    counts = ", ".join(f"{known.count(severity)} {severity}" for severity in dict.fromkeys(known))
    if known:
        found = f"{len(known)} finding{'s' * (len(known) != 1)} ({counts})"
    else:
        found = "no findings"
    parts = [*_progress(run), run["ended"] or "still running, or killed"]
    return Answer(
        f"{name}{': ' * bool(name)}{', '.join(parts)}; {found}.", mark_of(run["findings"])
    )


def _progress(run: JSONObject) -> list[str]:
    if not run["steps"]:
        return ["no report yet"]
    step = run["steps"][-1]
    total = run["log"]["total"]
    seconds = run["last"].get("seconds")
    parts = [f"step {step:,}" + (f" of {total:,} ({step / total:.0%})" if total else "")]
    if seconds is not None and seconds > 0:
        parts.append(f"{1 / seconds:.3g} steps/s")
        if total and total > step and not run["ended"]:
            parts.append(f"about {duration(seconds * (total - step))} to go")
    return parts


def _runs(runs: JSONObject) -> Table:
    columns = [
        *("run", "model", "sublayers", "steps between reports"),
        Column("step", "training step of the last report"),
        "of",
        Column("first loss", "training loss of the first report, in nats a token"),
        "last loss",
        Column("loss", "the loss over the steps, from its least to its largest"),
        "learning rate",
        Column("gradient", "norm of the gradient by all weights"),
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
    last = (run["probes"] or [{}])[-1].get("unknown") or {}
    known = {**(run.get("unknown") or {}), **last}
    return [
        *filter(None, [run["log"].get("unseen")]),
        *(f"{where}: {why}" for where, why in known.items()),
    ]


def _found(runs: JSONObject) -> tuple[list[Findings], list[Findings]]:
    """The newest findings of each run, and the ones before."""
    runs = {name if len(runs) > 1 else "": run["findings"] for name, run in runs.items()}
    newest = [Findings(found[LATE], title) for title, found in runs.items()]
    older = [_older(found[EARLY], title) for title, found in runs.items()]
    return newest, older


def _older(found: Sequence[JSONObject], title: str) -> Findings:
    """The newest of earlier findings, as many as are shown."""
    if len(found) <= MOST_FINDINGS:
        return Findings(found, title)
    said = f"the last {MOST_FINDINGS:,} of {len(found):,} earlier findings; the JSON has all"
    return Findings(found[-MOST_FINDINGS:], f"{title}{': ' * bool(title)}{said}")


def _figures(name: str, run: JSONObject) -> Table:
    """Each figure by depth of the last report, and how its largest value moved over the steps."""
    rows = []
    for gauge in (*DRAWN, *FURTHER):
        series = [_floats(each) for each in run["history"]["by_depth"].get(gauge, ())]
        if not series:
            continue
        last = np.array(series[-1])
        known = last[np.isfinite(last)]
        if len(known):
            three = [known.min(), np.median(known), known.max()]
        else:
            three = [None] * 3
        largest = [max(filter(math.isfinite, each), default=math.nan) for each in series]
        if gauge in ("routing", "costate"):
            deep = known
        else:
            deep = last
        bars = [Cell(sparkline(deep, DEPTH)), Cell(sparkline(largest, TIME))]
        rows.append([MEASURES.title(gauge), *three, *bars])
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


def sparkline(values: Sequence[float] | np.ndarray, width: int) -> str:
    """The values as bars, each the mean of its stretch, from the least to the largest; x where one
    is not finite.

    Logarithms are drawn where all are positive and span more than a factor of 4.
    """
    if not len(values):
        return ""
    array = np.asarray(values, dtype=float)
    parts = np.array_split(array, min(width, len(array)))
    with np.errstate(over="ignore"):
        means = np.array(
            [
                part[np.isfinite(part)].mean() if np.isfinite(part).any() else math.nan
                for part in parts
            ]
        )
    known = means[np.isfinite(means)]
    if not len(known):
        return "x" * len(means)
    if known.min() > 0 and known.max() / 4 > known.min():
        means = np.log(means)
        known = np.log(known)
    low = known.min() / 2
    span = known.max() / 2 - known.min() / 2
    levels = [(value / 2 - low) / (span or 1.0) for value in means]
    return "".join(
        "x" if not math.isfinite(value) else BARS[min(len(BARS) - 1, int(value * len(BARS)))]
        for value in levels
    )


def _over_time(runs: JSONObject, gauge: str) -> Plot:
    """A figure of the whole run, with a line where each kind of serious finding was first
    reported.
    """
    title = MEASURES.title(gauge).capitalize()
    unit = GAUGES[gauge].unit
    lines = [
        Line(name, run["steps"], values)
        for name, run in runs.items()
        if len(values := run["history"]["over_time"].get(gauge, ())) > 1
    ]
    first: dict[str, float] = {}
    for finding in (
        finding
        for run in runs.values()
        for finding in run["findings"]
        if finding["severity"] != "note"
    ):
        first.setdefault(finding["check"], float(finding["step"]))
    if gauge in ("loss", "gradient_norm"):
        events = [(step, check) for check, step in first.items()]
    else:
        events = []
    says = GAUGES[gauge].formula
    return Plot(
        title,
        "training step",
        unit,
        lines,
        says,
        log=gauge not in ("loss", "highest_loss"),
        events=events,
    )


def _by_depth(runs: JSONObject, gauge: str) -> Plot:
    """Each run's figures along the depth; at a moment, those of its last report until then."""
    title = MEASURES.title(gauge)
    unit = GAUGES[gauge].unit
    shown = {name: run for name, run in runs.items() if gauge in run["history"]["by_depth"]}
    steps = sorted({step for run in shown.values() for step in run["history"]["steps"]})
    moments = [steps[i] for i in kept_reports(len(steps), MOMENTS)]
    places = {name: len(run["history"]["by_depth"][gauge][-1]) for name, run in shown.items()}
    frames = {
        f"{step:,}": [
            _until(run["history"], gauge, step, places[name]) for name, run in shown.items()
        ]
        for step in moments
    }
    if frames:
        last = list(frames.values())[-1]
    else:
        last = []
    lines = [Line(name, list(range(len(y))), y) for name, y in zip(shown, last, strict=True)]
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


def _until(history: JSONObject, gauge: str, step: int, places: int) -> Sequence[float | None]:
    at = bisect_right(history["steps"], step) - 1
    found: Sequence[float | None] = history["by_depth"][gauge][at] if at >= 0 else [None] * places
    return found


def _slider(runs: JSONObject) -> str:
    kept = ", ".join(
        f"{len(each['history']['steps'])} of {len(each['steps'])}" for each in runs.values()
    )
    return (
        f"The slider moves over {kept} reports of the log, which keeps fewer of the older ones. "
        "The vertical axis does not change while the slider moves."
    )


def _floats(values: Sequence[Any]) -> list[float]:
    """With nan for what is not known."""
    return [math.nan if value is None else value for value in values]

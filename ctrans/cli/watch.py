"""`ctrans watch`."""

from __future__ import annotations

import dataclasses
import io
import json
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.text import Text

from ctrans.base.option import LARGEST, Range, option
from ctrans.cli.click_options import argument
from ctrans.cli.ending import directory_of, end
from ctrans.cli.request import WrittenRequest, command_of
from ctrans.cli.signals import forget_signal
from ctrans.report.contents import page_of
from ctrans.report.files import to_json
from ctrans.report.sections import Page
from ctrans.report.terminal import show
from ctrans.training.monitor import MonitorLog
from ctrans.training.monitor.history import history
from ctrans.training.monitor.log import LOG, lines_of, read_log
from ctrans.training.monitor.post_mortem import PostMortem, post_mortem
from ctrans.training.monitor.watched import measured
from solvers import ConfigError

MOST_PLACES = 50_000
"""The most sublayers of a log that are shown; a model of 10,000 blocks has 20,000."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class WatchRequest(WrittenRequest):
    """The request of `watch`: the `directory` of a monitor's log."""

    directory: Path = argument("DIR")
    once: bool = option(
        default=False,
        help="Show the current state, then exit. This is the default if stdout is not a terminal.",
    )
    why: bool = option(
        default=False,
        help="Also show what moved first: the gauges and places that left their past, in order.",
    )
    refresh: float = option(
        2.0, "Seconds between updates.", limits=Range(0.1, LARGEST, "at least 0.1 seconds")
    )
    out: Path | None = option(
        None, "Directory for watch.png and watch.json.", group="Output", default_words="DIR"
    )


@command_of(WatchRequest, "watch")
def command(request: WatchRequest) -> None:
    """Show a running or finished training with a monitor: progress, figures by depth, alarms.

    DIR is the directory of Monitor(out=...), or --out of ctrans train --monitor. The terminal
    follows the run until it ends or you press Ctrl-C. Then the directory gets watch.png and
    watch.json.

    \b
    ctrans train --monitor --out out/train & ctrans watch out/train
    ctrans watch out/train --once --why
    """
    check_places(request.directory)
    log = read_log(request.directory)
    directory = directory_of(request, request.directory)
    console = Console(emoji=False)
    if not (request.once or request.quiet) and console.is_terminal:
        log = _followed(request, console, log)
    result = findings(log, why=request.why)
    end(request, directory, {**result, "measured": measured(result).as_json()})


def check_places(directory: Path) -> None:
    """Raises ConfigError for a log of which a header names more sublayers than a page can show."""
    for line in lines_of(directory):
        header = line.get("header")
        if not isinstance(header, dict):
            continue
        for name in ("places", "kinds", "heads"):
            entries = header.get(name)
            if isinstance(entries, list) and len(entries) > MOST_PLACES:
                raise ConfigError(
                    f"{str(directory / LOG)!r} has a header with {len(entries):,} {name}, and"
                    f" ctrans shows at most {MOST_PLACES:,} sublayers: give another log"
                )


def findings(log: MonitorLog, *, why: bool = False) -> dict[str, Any]:
    """The keys of the JSON result."""
    last: dict[str, Any] = {}
    missing: dict[str, Any] = {}
    losses: list[float] = []
    if log.reports:
        last = dict(log.reports[-1].figures)
        missing = dict(log.reports[-1].missing)
        losses = [float(loss) for loss in log.series("loss")]
    return {
        "log": log.header,
        "ended": log.ended,
        "steps": log.steps,
        "loss": losses,
        "last": last,
        "history": history(log),
        "why": what_moved_first(log) if why else None,
        "findings": log.findings,
        "probes": log.probes,
        "missing": missing,
        "unread": log.unread,
        "remarks": log.remarks,
    }


def what_moved_first(log: MonitorLog) -> PostMortem:
    """What left its past, in order; nothing in a log without reports."""
    if not log.reports:
        return PostMortem([], None, None)
    return post_mortem(log)


def _page(log: MonitorLog, *, why: bool = False) -> Page:
    return page_of({"watch": json.loads(to_json({"command": "watch", **findings(log, why=why)}))})


def _live(request: WatchRequest, console: Console, log: MonitorLog) -> Text:
    """The page as text of the terminal's width."""
    inner = Console(
        emoji=False, highlight=False, file=io.StringIO(), width=console.width, force_terminal=True
    )
    with inner.capture() as capture:
        show(_page(log, why=request.why), inner, verbose=request.verbose, explain=request.explain)
    return Text.from_ansi(capture.get())


def _followed(request: WatchRequest, console: Console, log: MonitorLog) -> MonitorLog:
    """Shows the log until the run ends or the user presses Ctrl-C, and returns its last state."""
    try:
        with Live(
            _live(request, console, log), console=console, auto_refresh=False, transient=True
        ) as live:
            while not log.ended:
                time.sleep(request.refresh)
                log = read_log(request.directory)
                live.update(_live(request, console, log), refresh=True)
    except KeyboardInterrupt:
        forget_signal()
    return log

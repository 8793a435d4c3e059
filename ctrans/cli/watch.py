"""`ctrans watch`."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.live import Live

from ctrans.cli.click_options import argument
from ctrans.cli.ending import CPU, check_json, result_of, write_json
from ctrans.cli.request import WrittenRequest, command_of
from ctrans.monitor.history import history
from ctrans.monitor.log import MonitorLog, read_log
from ctrans.option import option
from ctrans.report.files import check_writable, png, write_atomic
from ctrans.report.watch_figure import watch_figure
from ctrans.report.watch_report import page
from solvers import ConfigError

LEAST_WAIT = 0.1
"""Seconds between two looks, at least."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class WatchRequest(WrittenRequest):
    """The request of `watch`: the `directory` of a log."""

    directory: Path = argument("DIR")
    once: bool = option(False, "Show the run as it is, then end. This is also so if stdout is not a terminal.")
    refresh: float = option(2.0, "Seconds between two looks.")
    out: Path | None = option(None, "Directory for watch.png and watch.json.", group="Output", default_words="DIR")


@command_of(WatchRequest, "watch")
def command(request: WatchRequest) -> None:
    """Show a training that is watched by ctrans.monitor, running or finished: progress, figures by depth, alarms.

    DIR is what Monitor(out=...) was given, or --out of ctrans train --monitor. The terminal follows the run until it ends or Ctrl-C;
    then the directory gets watch.png and watch.json.

    \b
    ctrans train --monitor --out out/train & ctrans watch out/train
    ctrans watch out/train --once
    """
    if not request.refresh >= LEAST_WAIT:
        raise ConfigError(f"refresh = {request.refresh}: give at least {LEAST_WAIT} seconds")
    log = read_log(request.directory)
    out = None if request.quiet and request.out is None else request.out or request.directory
    check_json(request, out)
    if out is not None:
        check_writable(out)
    console = Console()
    if request.once or request.quiet or not console.is_terminal:
        if not request.quiet:
            console.print(page(log))
    else:
        log = _followed(request, console, log)
    write_json(request, out, {**result_of(request, request.shown(), CPU), **findings(log)})
    if out is not None and log.reports:
        write_atomic(out / "watch.png", png(watch_figure(log)))
    if not request.quiet:
        names = ["watch.json", *(["watch.png"] if log.reports else [])]
        click.echo(f"Written: {', '.join(f'{out}/{name}' for name in names)}")


def findings(log: MonitorLog) -> dict[str, Any]:
    """What the JSON has of a log."""
    runs = {name: value for report in log.reports[-1:] for name, value in report.figures.items()}
    return {
        "log": log.header,
        "ended": log.ended,
        "steps": log.steps,
        "loss": [float(loss) for loss in log.series("loss")] if log.reports else [],
        "last": runs,
        "history": history(log),
        "alarms": log.alarms,
        "probes": log.probes,
    }


def _followed(request: WatchRequest, console: Console, log: MonitorLog) -> MonitorLog:
    """The log when the run has ended, or Ctrl-C was pressed."""
    try:
        with Live(page(log), console=console, auto_refresh=False, screen=False) as live:
            while not log.ended:
                time.sleep(request.refresh)
                log = read_log(request.directory)
                live.update(page(log), refresh=True)
    except KeyboardInterrupt:
        pass
    return log

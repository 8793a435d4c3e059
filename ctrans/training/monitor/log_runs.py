"""Which lines of a monitor's log are of one run: a file may hold several, as two logs joined by
hand, or reports of another model than its header's.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ctrans.training.monitor.log_lines import Header, LogLine, Report, header_of, report_of
from ctrans.training.monitor.training_measures import GAUGES
from solvers import ConfigError


def newest_run(lines: Sequence[LogLine]) -> tuple[list[LogLine], list[str]]:
    """The lines of the last run, its header first, and remarks. A run begins at a header, and where
    the steps of reports go back.
    """
    header: LogLine | None = None
    begin = 0
    last_step = -1
    reason = ""
    for i, line in enumerate(lines):
        if header_of(line) is not None:
            if header is not None:
                begin = i
                reason = "a second header follows"
            header = line
            last_step = -1
            continue
        report = report_of(line)
        if report is None:
            continue
        if report.step < last_step:
            begin = i
            reason = f"the steps go back from {last_step:,} to {report.step:,}"
        last_step = report.step
    if not reason:
        return list(lines), []
    run = list(lines[begin:])
    if header is not None and header not in run:
        run.insert(0, header)
    return run, [f"The log holds several runs: {reason}. Only the last run is shown."]


def of_model(
    reports: Sequence[Report], header: Header, path: Path
) -> tuple[list[Report], list[str]]:
    """The reports of a model with the header's sublayers, and a remark on the others. Raises
    ConfigError if there are only others.
    """
    sublayers = len(header.places)
    fitting = [report for report in reports if _sublayers(report) <= {sublayers}]
    others = [report for report in reports if not _sublayers(report) <= {sublayers}]
    if not others:
        return fitting, []
    number = max(_sublayers(others[-1]))
    if not fitting:
        raise ConfigError(
            f"{str(path)!r} has the header of a model with {sublayers} sublayers and reports of one"
            f" with {number}: restore the header of these reports, or give another log"
        )
    return fitting, [
        f"Reports of a model with another number of sublayers, as {number} instead of"
        f" {sublayers}, are not shown: {len(others):,} of {len(reports):,}."
    ]


def _sublayers(report: Report) -> set[int]:
    """The numbers of figures of its gauges of sublayers."""
    return {
        len(figures)
        for name, figures in report.figures.items()
        if isinstance(figures, list) and figures and GAUGES[name].scope == "sublayer"
    }

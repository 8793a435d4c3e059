"""The log of a watched training: JSON lines, readable after a killed run, and few however long the
run.

A line is a header, a report, a finding, a probe or an end (`ctrans.training.monitor.log_lines`). At
`KEPT` reports the writer drops every second one of the older three quarters, so that old reports
become sparse: 100,000 steps of 200 sublayers with a report every 50 steps take 7 MB instead of 80.
The writer flushes each line, and replaces the whole file to drop reports. The header names the
writer, so that a writer sees when another one has begun a log in the same place.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import uuid
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from ctrans.base.durable_files import write_durably
from ctrans.base.given_files import cannot_read, nested_too_deep, read_lines
from ctrans.base.json_values import is_step, plain
from ctrans.measure.findings import Finding
from ctrans.training.log import append_line, writing
from ctrans.training.monitor.earlier_log import RUN, is_continued, set_aside
from ctrans.training.monitor.log_lines import (
    Header,
    LogLine,
    Report,
    end_of,
    finding_of,
    header_of,
    is_finite,
    line_of,
    probe_of,
    report_of,
)
from ctrans.training.monitor.log_runs import newest_run, of_model
from ctrans.training.monitor.training_measures import GAUGES
from solvers import ConfigError

LOGGER = logging.getLogger("ctrans.training.monitor")
Content = TypeVar("Content")

LOG = "monitor.jsonl"
ADVICE = "or choose another out="
KEPT = 512
"""The number of reports at which older ones are dropped."""
DENSE = KEPT // 4
"""The number of newest reports that are never dropped."""
MOST_OF_A_KIND = 4 * KEPT
"""The most findings, probes, headers and ends each that are read of a log."""
REPORT = "by"
KINDS = ("header", REPORT, "finding", "alarm", "probe", "end")
"""The entries that say what a line is."""
PEAKS = ("highest_loss", "highest_gradient_norm")
"""Gauges of which the report after a dropped one keeps the larger value."""


@dataclasses.dataclass(frozen=True, eq=False)
class MonitorLog:
    """The contents of a log. `ended` says how the run ended; "" for one that still runs or was
    killed. `unread` is the number of its lines that are damaged. `remarks` say what
    is left out of a file with several runs.
    """

    header: Header
    reports: list[Report]
    findings: list[dict[str, Any]]
    probes: list[dict[str, Any]]
    ended: str = ""
    unread: int = 0
    remarks: Sequence[str] = ()

    def series(self, name: str) -> NDArray[np.float64]:
        """A gauge over time: (reports,) for one of the run, else (reports, places); nan is
        unknown.
        """
        if GAUGES[name].scope == "run":
            numbers = [report.figures.get(name, np.nan) for report in self.reports]
            return np.array(numbers, dtype=float)
        width = self.width(name)
        unknown = [np.nan] * width
        rows = []
        for report in self.reports:
            row = report.figures.get(name)
            if isinstance(row, list) and len(row) == width:
                rows.append(row)
            else:
                rows.append(unknown)
        return np.array(rows, dtype=float)

    def width(self, name: str) -> int:
        """The number of places of a gauge; 0 for one of the run, and for one without figures."""
        rows = (report.figures.get(name) for report in self.reports)
        return max((len(row) for row in rows if isinstance(row, list)), default=0)

    @property
    def steps(self) -> list[int]:
        return [report.step for report in self.reports]


class LogWriter:
    """Writes the log of a directory. It drops lines after `start`, the step from which the training
    continues. `goes_on` is whether it does, as from a memory; None: if `start` is not 0. It keeps
    the log of another training under another name. `run` names the run of `ctrans train`; "" for
    another training.

    Lines that cannot be written stay in memory, and the next line tries again; the logger
    "ctrans.training.monitor" warns once. If another monitor begins a log in the same directory,
    this one writes no more. Nor does a fork of its process. Raises TypeError for a line with a
    value that JSON lacks, and does not keep it.
    """

    def __init__(
        self,
        directory: Path,
        header: Header,
        start: int = 0,
        *,
        goes_on: bool | None = None,
        run: str = "",
    ):
        self.path = directory / LOG
        self._start = start
        if goes_on is None:
            goes_on = start > 0
        self._goes_on = goes_on
        self._place: tuple[int, int] | None = None
        """The device and the number of the directory in which the log was begun."""
        self._of = header
        self._run = run
        self._header: LogLine = {"header": dataclasses.asdict(header), "writer": uuid.uuid4().hex}
        if run:
            self._header[RUN] = run
        self._begun = False
        self._looked = False
        """Whether the log that was there is known to be this training's, or kept."""
        self._warned = False
        self._said_lost = False
        self._process = os.getpid()
        self._reports = 0
        """Of the file and of those that wait."""
        self._waiting: list[LogLine] = []
        self._write()

    def report(self, report: Report) -> None:
        self._add(line_of(report))

    def finding(self, step: int, finding: Finding) -> None:
        self._add({"step": step, "finding": finding})

    def probe(self, step: int, figures: Mapping[str, Any]) -> None:
        self._add({"step": step, "probe": figures})

    def end(self, step: int, reason: str) -> None:
        self._add({"step": step, "end": reason})

    def _add(self, line: LogLine) -> None:
        line = plain(line)
        # a value that JSON lacks raises here, and does not wait with each later line
        json.dumps(line)
        self._waiting.append(line)
        self._reports += count_reports([line])
        self._write()

    def _write(self) -> None:
        try:
            with writing(self.path, ADVICE):
                self._put()
        except ConfigError as error:
            if count_reports(self._waiting) >= KEPT:
                self._waiting = thinned(self._waiting)
            if not self._warned:
                LOGGER.warning("the log stays in memory: %s", error)
            self._warned = True

    def _put(self) -> None:
        """Writes the lines that wait: one by appending it; with more, or to drop reports, the whole
        file. Raises OSError and ConfigError.
        """
        if os.getpid() != self._process:
            raise ConfigError(
                f"a fork of the process that writes {str(self.path)!r} writes nothing there"
            )
        status = os.stat(self.path.parent)
        place = (status.st_dev, status.st_ino)
        if self._place not in (None, place):
            raise ConfigError(
                f"{str(self.path.parent)!r} is no longer the directory in which the monitor began:"
                " nothing more is written there"
            )
        writer = None
        if self._begun:
            writer = self._writer_of_file()
        elif not self._looked:
            self._keep_others()
        if self._begun and writer is None and not self._said_lost:
            self._said_lost = True
            LOGGER.warning(
                "%r was removed or cut while the training goes on: it lacks the reports so far",
                str(self.path),
            )
        if writer not in (None, self._header["writer"]):
            raise ConfigError(
                f"another monitor writes {str(self.path)!r}: give each one its own out="
            )
        if writer is not None and len(self._waiting) == 1 and self._reports < KEPT:
            append_line(self.path, self._waiting[0], ADVICE)
        else:
            self._rewrite()
        self._place = place
        self._waiting.clear()

    def _keep_others(self) -> None:
        """Keeps the log of another training under another name, before this one takes its place."""
        is_ours = is_continued(
            _all_lines_of(self.path.parent, unfinished=True),
            self._of,
            self.path,
            self._start,
            goes_on=self._goes_on,
            run=self._run,
        )
        if not is_ours:
            set_aside(self.path)
            self._start = 0
        self._looked = True

    def _rewrite(self) -> None:
        """Writes the whole file: the lines in it that stay, and those that wait."""
        earlier = [
            line
            for line in lines_of(self.path.parent)
            if "header" not in line and "end" not in line
        ]
        if not self._begun:
            earlier = [line for line in earlier if self._start and line["step"] <= self._start]
        lines = [*earlier, *self._waiting]
        if count_reports(lines) >= KEPT:
            lines = thinned(lines)
        text = "".join(json.dumps(line) + "\n" for line in (self._header, *lines))
        write_durably(self.path, text.encode())
        self._begun = True
        self._reports = count_reports(lines)

    def _writer_of_file(self) -> str | None:
        """The writer in the file's header; None without a file or header."""
        first = next(lines_of(self.path.parent), {})
        if "header" not in first:
            return None
        writer: str = first.get("writer", "")
        return writer


def read_log(directory: str | Path) -> MonitorLog:
    """Reads the log in that directory, without lines that are incomplete or that no monitor writes.

    Of a file with several runs it reads the last. The result is safe to show, whatever the file
    has. Raises ConfigError if there is no log, or it cannot be read.
    """
    directory = Path(directory)
    few, damaged, of_kinds = _few(_all_lines_of(directory))
    lines, remarks = newest_run(few)
    headers = [header_of(line) for line in lines]
    reports = [report_of(line) for line in lines]
    findings = [finding_of(line) for line in lines]
    probes = [probe_of(line) for line in lines]
    ends = [end_of(line) for line in lines]
    header = next(_present(headers), None)
    if header is None and not (directory / LOG).exists():
        raise ConfigError(
            f"there is no {LOG} in {str(directory)!r}: Monitor(out=DIR) and ctrans train --monitor"
            " --out DIR write it, so give that DIR"
        )
    if header is None:
        raise ConfigError(
            f"{str(directory / LOG)!r} is no log of a monitor: give the directory of"
            " Monitor(out=...)"
        )
    unread = damaged + sum(
        all(content is None for content in contents)
        for contents in zip(headers, reports, findings, probes, ends, strict=True)
    )
    reports_of_model, further_remarks = of_model(list(_present(reports)), header, directory / LOG)
    return MonitorLog(
        header,
        reports_of_model,
        list(_present(findings)),
        list(_present(probes)),
        next(_present(reversed(ends)), ""),
        unread,
        [*of_kinds, *remarks, *further_remarks],
    )


def _few(lines: Iterable[LogLine]) -> tuple[list[LogLine], int, list[str]]:
    """The lines, with as few reports as a writer keeps and at most `MOST_OF_A_KIND` of each other
    kind; the number of damaged lines; and a remark on what is left out.

    Of a kind with more lines the first half of them and the newest ones stay: the first alarm says
    the most.
    """
    few: list[LogLine] = []
    counts: Counter[str] = Counter()
    damaged = 0
    left_out: Counter[str] = Counter()
    for line in lines:
        kind = _kind(line)
        if kind is None:
            damaged += 1
            continue
        few.append(line)
        counts[kind] += 1
        if kind == REPORT and counts[kind] >= 2 * KEPT:
            few = thinned(few)
            counts[kind] = count_reports(few)
        elif kind != REPORT and counts[kind] > 2 * MOST_OF_A_KIND:
            few = _first_and_newest(few, kind)
            left_out[kind] += counts[kind] - MOST_OF_A_KIND
            counts[kind] = MOST_OF_A_KIND
    if counts[REPORT] >= KEPT:
        few = thinned(few)
    for kind, count in counts.items():
        if kind != REPORT and count > MOST_OF_A_KIND:
            few = _first_and_newest(few, kind)
            left_out[kind] += count - MOST_OF_A_KIND
    remarks = [
        f"The log holds {left_out[kind] + MOST_OF_A_KIND:,} lines of the kind {kind!r}: the"
        f" first and the newest {MOST_OF_A_KIND // 2:,} are shown."
        for kind in left_out
    ]
    return few, damaged, remarks


def _kind(line: LogLine) -> str | None:
    """The kind of a line; None for one that no monitor writes."""
    return next((kind for kind in KINDS if kind in line), None)


def _first_and_newest(lines: Sequence[LogLine], kind: str) -> list[LogLine]:
    """The lines with only the first and the newest ones of a kind."""
    places = [i for i, line in enumerate(lines) if _kind(line) == kind]
    half = MOST_OF_A_KIND // 2
    dropped = set(places[half:-half])
    return [line for i, line in enumerate(lines) if i not in dropped]


def _present(contents: Iterable[Content | None]) -> Iterator[Content]:
    """The contents of the lines that have one."""
    return (content for content in contents if content is not None)


def lines_of(directory: Path) -> Iterator[LogLine]:
    """The lines as objects, without those that are damaged. None without a file.

    Raises ConfigError for a log that cannot be read to its end, since a writer would drop the rest.
    """
    return filter(None, _all_lines_of(directory))


def _all_lines_of(directory: Path, *, unfinished: bool = False) -> Iterator[LogLine]:
    """As `lines_of`, with an empty object for each damaged line. A last line without its end may
    not be written yet: it is among them only if `unfinished`.
    """
    path = directory / LOG
    try:
        exists = path.is_file()
    except OSError as error:
        raise cannot_read(path, error) from None
    if not exists:
        return
    for text in read_lines(path):
        if text.strip() and (unfinished or text.endswith("\n")):
            yield _line_in(text)


def _line_in(text: str) -> LogLine:
    """The line in a text; an empty object for one of others, or nested too deep."""
    try:
        line = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    if not isinstance(line, dict) or nested_too_deep(line):
        return {}
    if "header" in line or is_step(line.get("step")):
        return line
    return {}


def count_reports(lines: Iterable[LogLine]) -> int:
    """The number of reports among the lines."""
    return sum("by" in line for line in lines)


def thinned(lines: Sequence[LogLine]) -> list[LogLine]:
    """The lines without every second report before the newest `DENSE` ones. The next report keeps
    the dropped peaks.
    """
    reports = [i for i, line in enumerate(lines) if "by" in line]
    dropped = set(reports[:-DENSE][::2])
    sparse: list[LogLine] = []
    peaks: dict[str, float] = {}
    for i, line in enumerate(lines):
        run = _run(line)
        if i in dropped:
            peaks = {name: run[name] for name in PEAKS if isinstance(run.get(name), float)}
            continue
        if "by" in line and peaks:
            larger = {
                name: max(value, run.get(name, value))
                for name, value in peaks.items()
                if is_finite(run.get(name, value))
            }
            line = {**line, "run": {**run, **larger}}
            peaks = {}
        sparse.append(line)
    return sparse


def _run(line: LogLine) -> dict[str, Any]:
    """The figures of the run in a report; none in a damaged one."""
    run = line.get("run")
    if isinstance(run, dict):
        return run
    return {}

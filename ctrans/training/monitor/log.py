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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from ctrans.base.given_files import cannot_read, nested_too_deep, read_lines
from ctrans.base.json_values import is_step, plain
from ctrans.measure.findings import Finding
from ctrans.model.weights_file import write_durably
from ctrans.training.log import append_line, writing
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
from ctrans.training.monitor.training_measures import GAUGES
from solvers import ConfigError

LOGGER = logging.getLogger("ctrans.training.monitor")
Made = TypeVar("Made")

LOG = "monitor.jsonl"
ADVICE = "or choose another out="
KEPT = 512
"""The number of reports at which older ones are dropped."""
DENSE = KEPT // 4
"""The number of newest reports that are never dropped."""
PEAKS = ("highest_loss", "highest_gradient_norm")
"""Gauges of which the report after a dropped one keeps the larger value."""


@dataclasses.dataclass(frozen=True, eq=False)
class MonitorLog:
    """The contents of a log. `ended` says how the run ended; "" for one that still runs or was
    killed.
    """

    header: Header
    reports: list[Report]
    findings: list[dict[str, Any]]
    probes: list[dict[str, Any]]
    ended: str = ""

    def series(self, name: str) -> NDArray[np.float64]:
        """A gauge over time: (reports,) for one of the run, else (reports, places); nan is
        unknown.
        """
        rows = [report.figures.get(name) for report in self.reports]
        width = self.width(name)
        if GAUGES[name].scope == "run":
            return np.array([np.nan if row is None else row for row in rows], dtype=float)
        return np.array(
            [
                row if isinstance(row, list) and len(row) == width else [np.nan] * width
                for row in rows
            ],
            dtype=float,
        )

    def width(self, name: str) -> int:
        """The number of places of a gauge; 0 for one of the run, and for one without figures."""
        rows = (report.figures.get(name) for report in self.reports)
        return max((len(row) for row in rows if isinstance(row, list)), default=0)

    @property
    def steps(self) -> list[int]:
        return [report.step for report in self.reports]


class LogWriter:
    """Writes the log of a directory. It drops lines after `start`, the step from which the training
    continues.

    Lines that cannot be written stay in memory, and the next line tries again; the logger
    "ctrans.training.monitor" warns once. If another monitor begins a log in the same directory,
    this one writes no more. Nor does a fork of its process. Raises TypeError for a line with a
    value that JSON lacks, and does not keep it.
    """

    def __init__(self, directory: Path, header: Header, start: int = 0):
        self.path = directory / LOG
        self._start = start
        self._header: LogLine = {"header": dataclasses.asdict(header), "writer": uuid.uuid4().hex}
        self._begun = False
        self._warned = False
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

    def end(self, step: int, words: str) -> None:
        self._add({"step": step, "end": words})

    def _add(self, line: LogLine) -> None:
        line = plain(line)
        json.dumps(
            line
        )  # a value that JSON lacks raises here, and does not wait with each later line
        self._waiting.append(line)
        self._reports += "by" in line
        self._write()

    def _write(self) -> None:
        try:
            with writing(self.path, ADVICE):
                self._put()
        except ConfigError as error:
            if sum("by" in line for line in self._waiting) >= KEPT:
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
        writer = self._writer_of_file() if self._begun else None
        if writer not in (None, self._header["writer"]):
            raise ConfigError(
                f"another monitor writes {str(self.path)!r}: give each one its own out="
            )
        if writer is not None and len(self._waiting) == 1 and self._reports < KEPT:
            append_line(self.path, self._waiting[0], ADVICE)
        else:
            earlier = [
                line
                for line in lines_of(self.path.parent)
                if "header" not in line and "end" not in line
            ]
            if not self._begun:
                earlier = [line for line in earlier if self._start and line["step"] <= self._start]
            lines = [*earlier, *self._waiting]
            if sum("by" in line for line in lines) >= KEPT:
                lines = thinned(lines)
            else:
                lines = lines
            write_durably(
                self.path,
                "".join(json.dumps(line) + "\n" for line in (self._header, *lines)).encode(),
            )
            self._begun = True
            self._reports = sum("by" in line for line in lines)
        self._waiting.clear()

    def _writer_of_file(self) -> str | None:
        """The writer in the file's header; None without a file or header."""
        first = next(lines_of(self.path.parent), {})
        return first.get("writer", "") if "header" in first else None


def read_log(directory: str | Path) -> MonitorLog:
    """Reads the log in that directory, without lines that are incomplete or that no monitor writes.

    The result is safe to show, whatever the file has. Raises ConfigError if there is no log, or it
    cannot be read.
    """
    directory = Path(directory)
    lines = _few(lines_of(directory))
    header = next(_each(header_of, lines), None)
    if header is None:
        raise ConfigError(
            f"{str(directory / LOG)!r} is no log of a monitor: give the directory of"
            " Monitor(out=...)"
        )
    return MonitorLog(
        header,
        list(_each(report_of, lines)),
        list(_each(finding_of, lines)),
        list(_each(probe_of, lines)),
        next(_each(end_of, reversed(lines)), ""),
    )


def _few(lines: Iterable[LogLine]) -> list[LogLine]:
    """The lines, with as few reports as a writer keeps."""
    kept: list[LogLine] = []
    reports = 0
    for line in lines:
        kept.append(line)
        reports += "by" in line
        if reports >= 2 * KEPT:
            kept = thinned(kept)
            reports = sum("by" in line for line in kept)
    if reports >= KEPT:
        return thinned(kept)
    return kept


def _each(made: Callable[[LogLine], Made | None], lines: Iterable[LogLine]) -> Iterator[Made]:
    return (found for line in lines if (found := made(line)) is not None)


def lines_of(directory: Path) -> Iterator[LogLine]:
    """The lines as objects, without those that are incomplete or nested too deep. None without a
    file.

    Raises ConfigError for a log that cannot be read to its end, since a writer would drop the rest.
    """
    path = directory / LOG
    try:
        there = path.is_file()
    except OSError as error:
        raise cannot_read(path, error) from None
    for text in read_lines(path) if there else ():
        try:
            line = json.loads(text)
        except (ValueError, RecursionError):
            continue
        whole = text.endswith("\n") and isinstance(line, dict) and not nested_too_deep(line)
        if whole and ("header" in line or is_step(line.get("step"))):
            yield line


def thinned(lines: Sequence[LogLine]) -> list[LogLine]:
    """The lines without every second report before the newest `DENSE` ones. The next report keeps
    the dropped peaks.
    """
    reports = [i for i, line in enumerate(lines) if "by" in line]
    dropped = set(reports[:-DENSE][::2])
    kept: list[LogLine] = []
    peaks: dict[str, float] = {}
    for i, line in enumerate(lines):
        if i in dropped:
            own = _run(line)
            peaks = {name: own[name] for name in PEAKS if isinstance(own.get(name), float)}
            continue
        if "by" in line and peaks:
            own = _run(line)
            larger = {
                name: max(value, own.get(name, value))
                for name, value in peaks.items()
                if is_finite(own.get(name, value))
            }
            line = {**line, "run": {**own, **larger}}
            peaks = {}
        kept.append(line)
    return kept


def _run(line: LogLine) -> dict[str, Any]:
    """The figures of the run in a report; none in a damaged one."""
    run = line.get("run")
    if isinstance(run, dict):
        return run
    return {}

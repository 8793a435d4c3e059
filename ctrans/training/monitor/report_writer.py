"""Where the reports of a monitor go: its log, and other loggers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ctrans.measure.findings import Finding
from ctrans.training.monitor.log import LogWriter
from ctrans.training.monitor.log_lines import Header, Report
from ctrans.training.monitor.reactions import distributed
from ctrans.training.monitor.report_callbacks import ReportCallback, summarised, write_tensorboard
from ctrans.training.monitor.sites import Sites, unwatched_blocks
from ctrans.training.monitor.waiting import warn
from ctrans.training.run_directory import RunDirectory


class ReportWriter:
    """Writes reports to the log in `out` and to callbacks, in the first process only.

    The log begins with the first report, whose figures its header needs. Raises ConfigError for a
    directory that cannot be written to.
    """

    def __init__(
        self,
        sites: Sites,
        out: Path | None,
        callbacks: Sequence[ReportCallback],
        *,
        every: int,
        start: int,
        goes_on: bool,
        total: int | None,
        tensorboard: bool,
    ):
        self.sites = sites
        self.out = out
        self.every = every
        self.start = start
        self.goes_on = goes_on
        self.run = ""
        self.total = total
        self.callbacks = list(callbacks)
        self.is_first_process = not distributed() or torch.distributed.get_rank() == 0
        self._log: LogWriter | None = None
        if out is not None and self.is_first_process:
            RunDirectory(out).check_writable()
            if tensorboard:
                self.callbacks.append(write_tensorboard(out, start))

    def __getstate__(self) -> dict[str, Any]:
        """The state of a copy, which writes no log."""
        return {**vars(self), "out": None, "_log": None}

    def write(
        self,
        report: Report,
        alarms: Sequence[Finding],
        probed: Mapping[str, Any] | None,
        *,
        heads: list[int],
    ) -> None:
        """Writes a report, its alarms and the figures of a probe. Callbacks get the report last; an
        error of one becomes a warning.
        """
        if not self.is_first_process:
            return
        if self.out is not None:
            if self._log is None:
                header = self._header(report, heads)
                self._log = LogWriter(
                    self.out, header, self.start, goes_on=self.goes_on, run=self.run
                )
            self._log.report(report)
            for alarm in alarms:
                self._log.finding(report.step, alarm)
            if probed is not None:
                self._log.probe(report.step, probed)
        if self.callbacks:
            summary = summarised(report.figures)
            for callback in self.callbacks:
                try:
                    callback(report.step, summary)
                except Exception as error:  # a user's function may raise anything
                    warn(report.step, "no report", error)

    def end(self, step: int, reason: str) -> None:
        """Ends the log."""
        log = self._log
        self._log = None
        if log is not None:
            log.end(step, reason)

    def _header(self, report: Report, heads: list[int]) -> Header:
        unseen = []
        if "rms" not in report.figures:
            unseen.append(
                "no forward pass was seen: for a compiled model, give monitor.step its batch="
            )
        others = unwatched_blocks(self.sites)
        if others:
            unseen.append(f"blocks that are not watched: {', '.join(others)}")
        return Header(
            model=self.sites.description,
            places=[site.place for site in self.sites.by_depth],
            kinds=[str(site.sublayer.kind) for site in self.sites.by_depth],
            heads=heads,
            every=self.every,
            total=self.total,
            unseen="; ".join(unseen),
        )

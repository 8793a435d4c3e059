"""The log of a watched training: JSON lines that a killed run leaves readable, and that stay few however long it runs.

A line is a header, a report, an alarm, a probe or an end. In a report what there is by depth is one text for each gauge: bfloat16
(three digits, the range of float32, also inf and nan) in base64, 2.7 characters a number. When there are `KEPT` reports, every second
one of the older three quarters is dropped, so that the newest are as dense as they were written and the oldest ever sparser: 100,000
steps of 200 sublayers reported every 50 are about 7 MB and not 80. A line is written whole and flushed; thinning writes another file
and puts it in the log's place.
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ctrans.monitor.gauge_table import GAUGES, Figures
from solvers import ConfigError

LOG = "monitor.jsonl"
KEPT = 512
"""Of more reports than that, older ones are thinned."""
DENSE = KEPT // 4
"""So many of the newest are never dropped."""
PEAKS = ("highest_loss", "highest_gradient_norm")
"""What a report that is dropped leaves to the next one: the larger of both."""
Line = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Header:
    """What a log is of: the model in a line, its sublayers' places and kinds, how many heads each has, how often it reports.

    `total` is how many steps the training will have, None where nobody said; `unseen` says what is not measured and why.
    """

    model: str
    places: list[str]
    kinds: list[str]
    heads: list[int]
    every: int
    total: int | None = None
    unseen: str = ""


@dataclasses.dataclass(frozen=True, eq=False)
class Report:
    """The figures of one step. By depth they are lists; see `GAUGES`. `unknown` says by place what could not be looked at, and why."""

    step: int
    figures: Figures
    unknown: Mapping[str, str] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, eq=False)
class MonitorLog:
    """What a log holds: reports, alarms and probes as they were written, and how it ended, "" for a run that goes on or was killed."""

    header: Header
    reports: list[Report]
    alarms: list[dict[str, Any]]
    probes: list[dict[str, Any]]
    ended: str = ""

    def series(self, name: str) -> NDArray[np.float64]:
        """A gauge over time: (reports,) for the run's, else (reports, places); nan where it was not seen."""
        rows = [report.figures.get(name) for report in self.reports]
        width = max((len(row) for row in rows if isinstance(row, list)), default=0)
        if GAUGES[name].scope == "run":
            return np.array([np.nan if row is None else row for row in rows], dtype=float)
        return np.array([row if isinstance(row, list) and len(row) == width else [np.nan] * width for row in rows], dtype=float)

    @property
    def steps(self) -> list[int]:
        return [report.step for report in self.reports]


class LogWriter:
    """Appends to the log of a directory. `start` is the step that the training goes on from; what was written after it is dropped.

    Raises ConfigError where it cannot be written.
    """

    def __init__(self, directory: Path, header: Header, start: int = 0):
        self.path = directory / LOG
        try:
            directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise _unwritten(self.path, error) from None
        kept = [line for line in lines_of(directory) if "header" not in line and "end" not in line and line["step"] <= start]
        self._reports = sum("by" in line for line in kept) if start else 0
        self._replace([{"header": dataclasses.asdict(header)}, *(kept if start else [])])

    def report(self, report: Report) -> None:
        self._append(_line_of(report))
        self._reports += 1
        if self._reports >= KEPT:
            lines = thinned(list(lines_of(self.path.parent)))
            self._reports = sum("by" in line for line in lines)
            self._replace(lines)

    def alarm(self, step: int, alarm: Mapping[str, Any]) -> None:
        self._append({"step": step, "alarm": plain_numbers(alarm)})

    def probe(self, step: int, figures: Mapping[str, Any]) -> None:
        self._append({"step": step, "probe": plain_numbers(figures)})

    def end(self, step: int, words: str) -> None:
        self._append({"step": step, "end": words})

    def _append(self, line: Line) -> None:
        try:
            with self.path.open("a") as file:
                file.write(json.dumps(line, allow_nan=False) + "\n")
        except OSError as error:
            raise _unwritten(self.path, error) from None

    def _replace(self, lines: Sequence[Line]) -> None:
        temporary = self.path.with_name(f".{LOG}")
        try:
            with temporary.open("w") as file:
                file.writelines(json.dumps(line, allow_nan=False) + "\n" for line in lines)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, self.path)
        except OSError as error:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise _unwritten(self.path, error) from None


def read_log(directory: str | Path) -> MonitorLog:
    """The log in that directory. Lines that are not whole are left out. Raises ConfigError where there is none."""
    directory = Path(directory)
    lines = list(lines_of(directory))
    header = next((line["header"] for line in lines if "header" in line), None)
    if header is None:
        raise ConfigError(f"{str(directory / LOG)!r} is no log of a monitor: give the directory that Monitor(out=...) was given")
    known = {field.name for field in dataclasses.fields(Header)}
    return MonitorLog(
        Header(**{name: value for name, value in header.items() if name in known}),
        [_report_of(line) for line in lines if "by" in line],
        [{"step": line["step"], **line["alarm"]} for line in lines if "alarm" in line],
        [{"step": line["step"], **line["probe"]} for line in lines if "probe" in line],
        next((line["end"] for line in reversed(lines) if "end" in line), ""),
    )


def lines_of(directory: Path) -> Iterator[Line]:
    """What lines hold, those that are not whole left out."""
    try:
        with (directory / LOG).open(errors="replace") as file:
            for text in file:
                try:
                    line = json.loads(text)
                except ValueError:
                    continue
                if text.endswith("\n") and isinstance(line, dict) and ("header" in line or isinstance(line.get("step"), int)):
                    yield line
    except OSError:
        return


def thinned(lines: Sequence[Line]) -> list[Line]:
    """All lines but every second report of those before the newest `DENSE`, whose peaks the next one takes over."""
    reports = [i for i, line in enumerate(lines) if "by" in line]
    dropped = set(reports[:-DENSE][::2])
    kept: list[Line] = []
    peaks: dict[str, float] = {}
    for i, line in enumerate(lines):
        if i in dropped:
            peaks = {name: line["run"][name] for name in PEAKS if isinstance(line["run"].get(name), float)}
            continue
        if "by" in line and peaks:
            own = line["run"]
            larger = {
                name: max(value, own.get(name, value)) for name, value in peaks.items() if not isinstance(own.get(name), str)
            }
            line, peaks = {**line, "run": {**own, **larger}}, {}
        kept.append(line)
    return kept


def encoded(values: Sequence[float]) -> str:
    """bfloat16 to nearest, in base64. nan stays nan."""
    with np.errstate(over="ignore"):
        bits = np.asarray(values, dtype=np.float32).view(np.uint32)
    finite = (bits & 0x7F800000) != 0x7F800000
    rounded = np.where(finite, bits + 0x7FFF + ((bits >> 16) & 1), bits | ((bits & 0xFFFF) != 0) * np.uint32(0x400000))
    return base64.b64encode((rounded >> 16).astype("<u2").tobytes()).decode()


def decoded(text: str) -> list[float]:
    """The bfloat16 numbers that `encoded` wrote."""
    bits = np.frombuffer(base64.b64decode(text), dtype="<u2").astype(np.uint32) << 16
    found: list[float] = bits.view(np.float32).tolist()
    return found


def plain_numbers(value: Any) -> Any:
    """The value for JSON: numbers that it lacks as the texts "inf", "-inf", "nan"; dataclasses as objects."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return plain_numbers(dataclasses.asdict(value))
    if isinstance(value, Mapping):
        return {str(key): plain_numbers(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain_numbers(each) for each in value]
    return str(value) if isinstance(value, float) and not np.isfinite(value) else value


def _line_of(report: Report) -> Line:
    run = {name: _rounded(value) for name, value in report.figures.items() if not isinstance(value, list)}
    return {
        "step": report.step,
        "run": plain_numbers(run),
        "by": {name: encoded(value) for name, value in report.figures.items() if isinstance(value, list)},
        **({"unknown": dict(report.unknown)} if report.unknown else {}),
    }


def _rounded(value: float) -> float:
    return float(f"{value:.6g}")


def _report_of(line: Line) -> Report:
    run = {name: float(value) for name, value in line["run"].items()}
    by = {name: decoded(text) for name, text in line["by"].items()}
    return Report(line["step"], {**run, **by}, line.get("unknown", {}))


def _unwritten(path: Path, error: OSError) -> ConfigError:
    return ConfigError(f"cannot write {str(path)!r}: {error.strerror or error}; free some space, or choose another out=")

"""The log of a run: one JSON object per line for each iteration, for changed settings of a resumed
run, and for divergence. The first row names the run, so that its checkpoints know their log.

A log may be larger than memory: what reads it reads a row at a time.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import re
from array import array
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from ctrans.base.durable_files import remedy, write_parts_durably
from ctrans.base.given_files import check_file, read_lines
from ctrans.base.json_values import is_number, is_step, plain
from ctrans.model.sums import GENERATIONS
from ctrans.training.removal import make_room
from ctrans.training.training_state import State
from solvers import ConfigError

LOGGER = logging.getLogger("ctrans.training")
LOG = "log.jsonl"
MONITOR = "monitor.jsonl"
RECORDS = (LOG, MONITOR)
"""The logs of a run beside its checkpoints: its own, and that of a monitor."""
RESULT = "train.json"
WATCHED = "watch.json"
RESULTS = (RESULT, "loss.png", WATCHED, "watch.png")
"""What `ctrans train` and `ctrans watch` write beside the logs of a run, each with its picture."""
RESULT_BEGINS = re.compile(rb'\s*\{\s*"command":\s*"train"')
WATCHED_BEGINS = re.compile(rb'\s*\{\s*"command":\s*"watch"')
PICTURE_BEGINS = re.compile(rb"\x89PNG[\s\S]*tEXtSoftware\x00ctrans")
"""How pictures of ctrans begin. Those of version 0.3 and before stay as a user's."""
MONITOR_BEGINS = re.compile(
    rb'\s*\{\s*"header":\s*\{\s*"model":\s*"(?:[^"\\]|\\.)*",\s*"places":|\Z'
)
ENOUGH = 4096
"""Bytes in which a file says who wrote it."""
RUN = "run"
"""The key of the first row with the run's `State.run`."""
LINEAGE = "lineage"
"""The key of a row of settings given anew with the run's `State.lineage` after it."""
PUT_BACK = "Put back the one that belongs here, or move the log away to go on without its rows"
RESUME = "then go on with --resume"
AGAIN = "then give the same command again"
Row = dict[str, Any]
SMOOTH = 100
"""`curves` has means over about this number of stretches of iterations."""
ITERATION = {"training": "loss", "learning_rate": "learning_rate", "gradient_norm": "gradient_norm"}
EVALUATION = {"validation": "validation_loss", "growth": "growth", "largest": "largest"}
"""The curves of iterations and of evaluations, by name, and their figures in rows."""
FIRST_OR_EVALUATION = ((RUN, "validation_loss"), EVALUATION.values())
"""The keys of the rows by which a run's log is known. Other programs log iterations with the same
keys as a run.
"""


class RunLog:
    """The log to which a run adds its rows. It warns once if rows that it added are lost, as after
    a removal or a rotation of the file.
    """

    def __init__(self, directory: Path):
        self.directory = directory
        self._length = 0
        self._warned = False

    def append(self, row: Row) -> None:
        """Adds a row. Raises ConfigError, and adds nothing, if it cannot write."""
        path = self.directory / LOG
        if not self._warned and _is_shorter(path, self._length):
            self._warned = True
            LOGGER.warning(
                "%r was removed or cut while the run goes on: the log, its curves and train.json"
                " lack rows before step %d",
                str(path),
                row["step"],
            )
        append(self.directory, row)
        self._length = _size(path)


def _is_shorter(path: Path, length: int) -> bool:
    """Whether the file is shorter, or missing. One that cannot be looked at is not known to be."""
    try:
        return path.stat().st_size < length
    except FileNotFoundError:
        return length > 0
    except OSError:
        return False


def _size(path: Path) -> int:
    """The size of a file in bytes; 0 for one that is missing."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


def append(directory: Path, row: Row) -> None:
    """Adds a row. Raises ConfigError, and adds nothing, if it cannot write."""
    advice = RESUME
    if RUN in row:  # the first row comes before the first checkpoint
        advice = AGAIN
    append_line(directory / LOG, row, advice)


def append_line(path: Path, value: Any, advice: str) -> None:
    """Adds a line of JSON to a file, with inf and nan as texts. Raises ConfigError with the advice,
    and adds nothing, if it cannot write.
    """
    length = _size(path)
    with writing(path, advice):
        try:
            with path.open("a") as file:
                file.write(json.dumps(plain(value), allow_nan=False) + "\n")
        except OSError:
            with contextlib.suppress(OSError):
                os.truncate(path, length)
            raise


@contextlib.contextmanager
def writing(path: Path, advice: str) -> Iterator[None]:
    """Turns an OSError inside into a ConfigError."""
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"cannot write {str(path)!r}: {error.strerror or error}; {remedy(error)}, {advice}"
        ) from None


def read(directory: Path) -> Iterator[Row]:
    """The rows, without lines that are incomplete or damaged."""
    path = directory / LOG
    if path.exists():
        yield from (row for row in _rows(path) if row is not None)


Curves = dict[str, list[tuple[float, float]]]
"""(step, value) pairs for each figure."""


@dataclasses.dataclass(frozen=True)
class Summary:
    """What a run's result has of its log: its curves, and the row of its last evaluation."""

    curves: Curves
    last_evaluation: Row


def summary(rows: Iterable[Row]) -> Summary:
    """The summary of rows, which are read once and not kept."""
    iterations = {key: array("d") for key in ("step", *ITERATION.values())}
    evaluations: Curves = {name: [] for name in EVALUATION}
    last_evaluation: Row = {}
    for row in rows:
        if row.keys() >= set(ITERATION.values()):
            for key, values in iterations.items():
                values.append(float(row[key]))
        if row.keys() >= set(EVALUATION.values()):
            for name, key in EVALUATION.items():
                evaluations[name].append((float(row["step"]), float(row[key])))
        if "validation_loss" in row:
            last_evaluation = row
    means = {key: _means(values) for key, values in iterations.items()}
    pairs = {
        name: list(zip(means["step"], means[key], strict=True)) for name, key in ITERATION.items()
    }
    return Summary({**pairs, **evaluations}, last_evaluation)


def curves(rows: Iterable[Row]) -> Curves:
    """(step, value) pairs for each figure. Those of iterations are means over about `SMOOTH`
    stretches of equal length.
    """
    return summary(rows).curves


def _means(values: Sequence[float]) -> list[float]:
    length = max(1, len(values) // SMOOTH)
    starts = range(0, len(values) - length + 1, length)
    return [sum(values[start : start + length]) / length for start in starts]


def check_of_run(directory: Path, generation: str, state: State) -> None:
    """Raises ConfigError if the log is of another run than the checkpoint of this state in this
    directory of checkpoints, or of a copy of the run that went on with other settings.

    A row anywhere that names another run, or has another first or best validation loss, is of
    another run. A log without its first row is said to lack rows when it is cut.
    """
    path = directory / LOG
    if LOG in _set_aside(directory, generation):
        path = directory / _aside(generation, LOG)
    if not path.exists():
        return
    progress = state.progress
    for row in _rows(path):
        if row is None:
            continue
        # an earlier version named no run
        names_another = bool(state.run) and row.get(RUN) not in (None, state.run)
        if names_another or _has_another_loss(row, 0, progress.first):
            loss = row.get("validation_loss")
            raise ConfigError(
                f"{str(path)!r} is the log of another run than the checkpoint: their first"
                f" validation losses are {loss} and {progress.first}, or their settings or first"
                f" weights differ. {PUT_BACK}"
            )
    if _lineage_in(path, state.progress.step) not in (state.lineage, None):
        raise ConfigError(
            f"{str(path)!r} is the log of another run than the checkpoint: they began as one run,"
            f" and one of them went on with other settings. {PUT_BACK}"
        )
    for row in _rows(path):
        if row is not None and _has_another_loss(row, progress.best_step, progress.best):
            raise ConfigError(
                f"{str(path)!r} is the log of another run than the checkpoint: their validation"
                f" losses at step {progress.best_step} are {row['validation_loss']} and"
                f" {progress.best}. {PUT_BACK}"
            )


def _has_another_loss(row: Row, step: int | None, loss: float | None) -> bool:
    """Whether the row is of an evaluation at that step with another validation loss."""
    return row["step"] == step and "validation_loss" in row and row["validation_loss"] != loss


def _lineage_in(path: Path, step: int) -> str | None:
    """The lineage in a log of a run that has come to that step; "" if it was given no settings
    anew, None if a damaged line may have said so.
    """
    lineage = ""
    for row in _rows(path):
        if row is None:
            return None
        if "settings" in row and row["step"] < step:
            lineage = str(row.get(LINEAGE, ""))
    return lineage


def unsaved(directory: Path) -> bool:
    """Whether the log has rows of step 0 only, the first one as a run writes it: the run ended
    before its first checkpoint.
    """
    rows = _rows(directory / LOG)
    first = next(rows, None)
    if first is None or first["step"] != 0 or not _is_row_of(FIRST_OR_EVALUATION, first):
        return False
    return all(row is not None and row["step"] == 0 for row in rows)


def others(directory: Path) -> list[Path]:
    """The files with the names of a run's logs that no run or monitor wrote."""
    written = _records(*(directory / name for name in RECORDS))
    paths = [directory / name for name in RECORDS if name not in written]
    return [path for path in paths if os.path.lexists(path)]


def keep_others(paths: Iterable[Path]) -> None:
    """Gives these `others` the name `log.jsonl-others`, and a warning says so. Raises OSError."""
    for path in paths:
        kept = make_room(path)
        LOGGER.warning(
            "%r was not written by ctrans, and has the name of a log of the run: it is kept as %r",
            str(path),
            kept,
        )


def cut(directory: Path, step: int) -> None:
    """Removes the rows after the checkpoint of that iteration, and says if rows before it are
    missing. Raises ConfigError, and changes nothing, if it cannot write.
    """
    kept = _Kept(step)
    with writing(directory / LOG, RESUME):
        write_parts_durably(directory / LOG, kept.lines(directory / LOG))
    last_step = kept.last_step
    if last_step is None and step > 0:
        LOGGER.warning(
            "%r had no rows, and the run continues from step %d: the log, its curves and train.json"
            " lack the steps before",
            str(directory / LOG),
            step,
        )
    elif last_step is not None and last_step < step:
        LOGGER.warning(
            "%r ended at step %d, and the run continues from step %d: the log, its curves and"
            " train.json lack the steps between",
            str(directory / LOG),
            last_step,
            step,
        )
    if kept.missing:
        LOGGER.warning(
            "%r lacks %d of the rows before step %d: so do its curves and train.json",
            str(directory / LOG),
            kept.missing,
            last_step,
        )


class _Kept:
    """The lines of a log that a run keeps when it continues from a step. A row of a step that was
    there is none of the run's: someone added it.

    After the lines were read, `last_step` is that of the last row, and `missing` the number of
    steps, from step 0, without a row before it.
    """

    def __init__(self, step: int):
        self.step = step
        self.last_step: int | None = None
        self.missing = 0

    def lines(self, path: Path) -> Iterator[bytes]:
        if not path.exists():
            return
        previous = -1
        for line, row in _lines(path):
            if row is None or not self._is_kept(row):
                continue
            self.missing += max(0, row["step"] - previous - 1)
            previous = max(previous, row["step"])
            self.last_step = previous
            if "diverged" not in row:
                yield line.encode()

    def _is_kept(self, row: Row) -> bool:
        is_at_step = row["step"] == self.step and "settings" not in row
        is_once_more = self.last_step is not None and (
            row["step"] < self.last_step
            or (row["step"] == self.last_step and not row.keys() & {"settings", "diverged"})
        )
        return bool((row["step"] < self.step or is_at_step) and not is_once_more)


def set_aside(directory: Path, generation: str, new: str) -> None:
    """Sets aside the logs and the results of a run that a new one overwrites, under the name of a
    directory of checkpoints (`generation`) that is not the `new` run's. Raises OSError.

    A user's file with the name of a log gets the name `log.jsonl-others`, and a warning says so.

    What is aside under the `new` run's directory is of an earlier run there, which is no more, if
    it begins as a run writes it. A user's file in the place of what is set aside gets the name
    `checkpoints.log.jsonl-others`.
    """
    keep_others(others(directory))
    already = _set_aside(directory, generation)
    for name in _of_run(directory):
        record = directory / name
        aside = directory / _aside(generation, name)
        if name in already:  # the record is of a run that was killed before its first checkpoint
            record.unlink(missing_ok=True)
        elif record.exists():
            make_room(aside)
            os.replace(record, aside)
    _forget_aside(directory, new)


def bring_back(directory: Path, generation: str) -> None:
    """Restores what was set aside for these checkpoints, if there is anything, and removes what was
    set aside for others.
    """
    for name in _set_aside(directory, generation):
        os.replace(directory / _aside(generation, name), directory / name)
    for other_generation in GENERATIONS:
        _forget_aside(directory, other_generation)


def _forget_aside(directory: Path, generation: str) -> None:
    for name in _set_aside(directory, generation):
        (directory / _aside(generation, name)).unlink()


def _set_aside(directory: Path, generation: str) -> list[str]:
    """The names of what a run set aside for these checkpoints. A file with other content is a
    user's.
    """
    records = (directory / _aside(generation, name) for name in RECORDS)
    results = (directory / _aside(generation, name) for name in RESULTS)
    return [
        *_records(*records, kinds=(*FIRST_OR_EVALUATION, ITERATION.values())),
        *_results(*results),
    ]


def _records(
    log: Path, monitor: Path, *, kinds: Iterable[Collection[str]] = FIRST_OR_EVALUATION
) -> list[str]:
    """The names of those of these logs that a run and a monitor wrote, or that are empty. A run's
    log has a row with the keys of one of the `kinds`.
    """
    names = []
    if _has_row_of(kinds, log):
        names.append(LOG)
    if _begins(monitor, MONITOR_BEGINS):
        names.append(MONITOR)
    return names


def _has_row_of(kinds: Iterable[Collection[str]], path: Path) -> bool:
    """Whether the file is empty, or a line of it is a row of these kinds: a damaged log is still
    the run's.
    """
    try:
        check_file(path)
        if path.stat().st_size == 0:
            return True
        return any(row is not None and _is_row_of(kinds, row) for row in _rows(path))
    except (OSError, ConfigError):
        return False


def _is_row_of(kinds: Iterable[Collection[str]], row: Row) -> bool:
    return any(row.keys() >= set(names) for names in kinds)


def _results(result: Path, picture: Path, watched: Path, picture_of_watched: Path) -> list[str]:
    """The names of those of these results that ctrans wrote. The picture of the training is a run's
    if its result is: a new run replaces it.
    """
    names = []
    if _begins(result, RESULT_BEGINS):
        names += [
            name for name, path in zip(RESULTS, (result, picture), strict=False) if path.exists()
        ]
    if _begins(watched, WATCHED_BEGINS):
        names.append(WATCHED)
        if _begins(picture_of_watched, PICTURE_BEGINS):
            names.append(RESULTS[-1])
    return names


def _begins(path: Path, words: re.Pattern[bytes]) -> bool:
    """Whether the file begins so; False for one that is missing or cannot be read."""
    try:
        check_file(path)
        with path.open("rb") as file:
            return words.match(file.read(ENOUGH)) is not None
    except (OSError, ConfigError):
        return False


def forget_unsaved(directory: Path) -> None:
    """Removes the logs and the results of a run that ended before its first checkpoint. `others`
    stay.
    """
    if (directory / LOG).exists():
        for name in _of_run(directory):
            (directory / name).unlink(missing_ok=True)


def _of_run(directory: Path) -> list[str]:
    """The names of the logs and of the results that ctrans wrote."""
    records = _records(*(directory / name for name in RECORDS))
    return [*records, *_results(*(directory / name for name in RESULTS))]


def _aside(generation: str, name: str) -> str:
    return f".{generation}.{name}"


def _rows(path: Path) -> Iterator[Row | None]:
    """The row of each line, None for a line that is incomplete or damaged."""
    return (row for _, row in _lines(path))


def _lines(path: Path) -> Iterator[tuple[str, Row | None]]:
    """Each line and its row, None for a line that is incomplete or damaged."""
    figures = {*ITERATION.values(), *EVALUATION.values()}
    for line in read_lines(path):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            row = None
        complete = line.endswith("\n") and isinstance(row, dict) and is_step(row.get("step"))
        if complete and all(is_number(row[name]) for name in figures & row.keys()):
            yield line, row
        else:
            yield line, None

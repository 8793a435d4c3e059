"""A log that is there already when a monitor begins its own. That of another training is kept under
another name, and that of a training that goes on is gone on with.
"""

from __future__ import annotations

import itertools
import logging
import os
from collections.abc import Iterable
from functools import partial
from pathlib import Path

from ctrans.base.durable_files import write_parts_durably
from ctrans.training.monitor.log_lines import Header, LogLine, header_of

LOGGER = logging.getLogger("ctrans.training.monitor")
PART = 1 << 20
"""The bytes of a log that are copied at a time."""
RUN = "run"
"""The key of a header's line with the name of the run, next to the header."""


def is_continued(
    lines: Iterable[LogLine],
    header: Header,
    path: Path,
    start: int,
    *,
    goes_on: bool,
    run: str = "",
) -> bool:
    """Whether a training with this header continues the log with these lines. It does if it goes on
    from a step or a memory, with the sublayers of the log's header; or if the log has no more than
    a header and an end. Logs a warning if the log lacks the steps before `start`.

    A training with the name of a `run` continues the log with that name, whatever its step, and
    none with another name. A log without a header is of another program.
    """
    last_step = 0
    has_content = False
    is_of_model = False
    for line in lines:
        earlier_header = header_of(line)
        if earlier_header is not None:
            is_of_model = _sublayers(earlier_header) == _sublayers(header)
            earlier_run = line.get(RUN)
            if run and earlier_run:
                is_of_model = is_of_model and earlier_run == run
                goes_on = goes_on or earlier_run == run
        elif "end" not in line:
            has_content = True
            last_step = max(last_step, line.get("step", 0))
    if not has_content:
        return True
    if goes_on and is_of_model and last_step + max(header.every, 1) < start:
        LOGGER.warning(
            "%r ends at step %d, and the training goes on from step %d: the log lacks the steps"
            " between; if it is of another training, give this one its own out=",
            str(path),
            last_step,
            start,
        )
    return goes_on and is_of_model


def _sublayers(header: Header) -> list[tuple[str, str]]:
    return list(zip(header.places, header.kinds, strict=False))


def set_aside(path: Path) -> None:
    """Keeps the log of another training as monitor-1.jsonl, or with the next free number. The file
    itself stays until another one replaces it. Raises OSError.
    """
    places = (path.with_name(f"{path.stem}-{number}{path.suffix}") for number in itertools.count(1))
    place = next(place for place in places if not os.path.lexists(place))
    try:
        os.link(path, place)
    except OSError:  # a file system without hard links
        with path.open("rb") as file:
            write_parts_durably(place, iter(partial(file.read, PART), b""))
    LOGGER.warning(
        "%r is the log of another training, or no log of a monitor: it is kept as %r",
        str(path),
        str(place),
    )

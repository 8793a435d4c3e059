"""Standard error that may be full or closed: what it does not take is dropped, and work goes on."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from typing import IO, Any, cast


def discard_stderr() -> None:
    """From now on, what is printed on stderr goes nowhere. What Python holds back for it goes there
    too, so that the end of the process does not fail for it.
    """
    with suppress(OSError, ValueError):
        number = sys.stderr.fileno()
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, number)
        os.close(nowhere)


def forgiving_stderr() -> IO[str]:
    """The present stderr as a stream whose writes do not fail, for libraries that print there."""
    # that of the process, if rich has put its own in front
    stream = getattr(sys.stderr, "rich_proxied_file", sys.stderr)
    return cast(IO[str], _ForgivingStream(stream))


class _ForgivingStream:
    def __init__(self, stream: IO[str]):
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Writes the text if the stream takes it."""
        try:
            self._stream.write(text)
        except (OSError, ValueError):
            discard_stderr()
        return len(text)

    def flush(self) -> None:
        """Hands what was written to the operating system if it takes it."""
        try:
            self._stream.flush()
        except (OSError, ValueError):
            discard_stderr()

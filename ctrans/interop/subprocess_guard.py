"""A function run in a process of its own with bounded time and memory: for libraries that whoever wrote a file can make run away."""

from __future__ import annotations

import contextlib
import os
import resource
import select
import signal
import time
import warnings
from collections.abc import Callable
from pathlib import Path

from solvers import ConfigError

WAIT = 3
"""How many times its seconds of computing a process may take by the clock, where others compute beside it."""
MOST_BYTES = 1 << 30
"""What it may give back."""
DONE, FAILED = b"0", b"1"


def run_guarded(act: Callable[[], bytes], *, seconds: int, memory: int) -> bytes:
    """What it returns, computed in a copy of this process: so many seconds of computing at most, so many bytes beyond what it has.

    Raises ConfigError, in a line, for whatever it raises, with the limit where it meets one.
    """
    reading, writing = os.pipe()
    with warnings.catch_warnings(action="ignore"):  # of threads, which the copy does without
        process = os.fork()
    if process == 0:
        os.close(reading)
        _act(act, writing, seconds, memory)
    os.close(writing)
    try:
        said = _read(reading, time.monotonic() + WAIT * seconds)
    finally:
        os.close(reading)
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
    if said[:1] == DONE:
        return said[1:]
    if said[:1] == FAILED:
        raise ConfigError(said[1:].decode(errors="replace"))
    raise ConfigError(f"it needs more than the {seconds} seconds and {memory / 1e9:.2g} GB that it is given")


def _act(act: Callable[[], bytes], writing: int, seconds: int, memory: int) -> None:
    """Within the copy, which ends here."""
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # where libraries panic aloud
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_CPU, (_used_seconds() + seconds, resource.RLIM_INFINITY))
        with contextlib.suppress(OSError):  # a system that does not say what it has given
            pages = int(Path("/proc/self/statm").read_text().split()[0])
            resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + memory, resource.RLIM_INFINITY))
        try:
            said = DONE + act()
        except BaseException as error:
            # a library's panic is no Exception, and its parts raise whatever a file leads them to
            what = "out of memory" if isinstance(error, MemoryError) else " ".join(str(error).split())[:200]
            said = FAILED + (what or type(error).__name__).encode(errors="replace")
        with os.fdopen(writing, "wb") as pipe:
            pipe.write(said)
    finally:
        os._exit(0)


def _used_seconds() -> int:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return int(used.ru_utime + used.ru_stime) + 1


def _read(reading: int, deadline: float) -> bytes:
    """All that is written there until it is closed; nothing if it is too late or too much."""
    said = bytearray()
    while select.select([reading], [], [], max(0.0, deadline - time.monotonic()))[0]:
        piece = os.read(reading, 1 << 20)
        if not piece:
            return bytes(said)
        said += piece
        if len(said) > MOST_BYTES:
            break
    return b""

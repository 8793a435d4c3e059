"""A function run in a process of its own with bounded time and memory: for libraries that whoever
wrote a file can make run away.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import resource
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

from solvers import ConfigError

WAIT = 3
"""How many times its seconds of computing a process may take by the clock, where others compute at
the same time.
"""
MOST_BYTES = 1 << 30
"""How much it may return."""
DONE, FAILED = b"0", b"1"


def run_guarded(act: Callable[[], bytes], *, seconds: int, memory: int) -> bytes:
    """What it returns, computed in a copy of this process: so many seconds of computing at most, so
    many bytes beyond what it has.

    Raises ConfigError, in a line, for whatever it raises, with the limit where it reaches one.
    """
    fork = multiprocessing.get_context("fork")
    receiver, sender = fork.Pipe(duplex=False)
    process = fork.Process(target=_act, args=(act, sender, seconds, memory))
    with warnings.catch_warnings(action="ignore"):  # of threads, which the copy does without
        process.start()
    sender.close()
    said = b""
    with receiver, contextlib.suppress(EOFError, OSError):  # it was ended, or it returns too much
        if receiver.poll(WAIT * seconds):
            said = receiver.recv_bytes(MOST_BYTES)
    process.kill()
    process.join()
    if said[:1] == DONE:
        return said[1:]
    if said[:1] == FAILED:
        raise ConfigError(said[1:].decode(errors="replace"))
    raise ConfigError(f"it needs more than the {seconds} seconds and {memory / 1e9:.2g} GB that it is given")


def _act(act: Callable[[], bytes], sender: Connection, seconds: int, memory: int) -> None:
    """Within the copy."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # where libraries panic aloud
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    used = resource.getrusage(resource.RUSAGE_SELF)
    resource.setrlimit(resource.RLIMIT_CPU, (int(used.ru_utime + used.ru_stime) + 1 + seconds, resource.RLIM_INFINITY))
    with contextlib.suppress(OSError):  # a system that does not say what it has given
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + memory, resource.RLIM_INFINITY))
    try:
        said = DONE + act()
    except BaseException as error:
        # a library's panic is no Exception, and its parts raise whatever a file leads them to
        what = "out of memory" if isinstance(error, MemoryError) else " ".join(str(error).split())[:200]
        said = FAILED + (what or type(error).__name__).encode(errors="replace")
    sender.send_bytes(said)

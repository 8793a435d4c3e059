"""Runs a function in its own process with bounded time and memory, for libraries that a malicious
file can make run away.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import resource
import warnings
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from ctrans.base.printable import one_line
from solvers import ConfigError

WAIT = 3
"""The wall-clock limit as a multiple of the limit on processor seconds."""
MOST_BYTES = 1 << 30
"""The largest result in bytes."""
DONE = b"0"
FAILED = b"1"


def run_guarded(act: Callable[[], Any], *, seconds: int, memory: int) -> Any:
    """The result of `act`, which JSON can hold, from a copy of this process, with at most that many
    processor seconds and additional bytes of memory.

    Raises ConfigError with one line for any exception of `act`, or with the limit if it is reached.
    """
    fork = multiprocessing.get_context("fork")
    receiver, sender = fork.Pipe(duplex=False)
    process = fork.Process(target=_act, args=(act, sender, seconds, memory))
    with warnings.catch_warnings(action="ignore"):  # about threads, which the copy does not need
        process.start()
    sender.close()
    message = b""
    with receiver, suppress(EOFError, OSError):  # the process ended, or it returns too much
        if receiver.poll(WAIT * seconds):
            message = receiver.recv_bytes(MOST_BYTES)
    process.kill()
    process.join()
    status = message[:1]
    content = message[1:]
    if status == DONE:
        return json.loads(content)
    if status == FAILED:
        raise ConfigError(content.decode(errors="replace"))
    raise ConfigError(
        f"it needs more than its limit of {seconds} seconds and {memory / 1e9:.2g} GB"
    )


def _act(act: Callable[[], Any], sender: Connection, seconds: int, memory: int) -> None:
    """Runs inside of the copy."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):  # libraries print panics, and what a file holds
        os.dup2(nowhere, stream)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    used = resource.getrusage(resource.RUSAGE_SELF)
    _limit(resource.RLIMIT_CPU, int(used.ru_utime + used.ru_stime) + 1 + seconds)
    with suppress(OSError):  # a system without /proc
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        _limit(resource.RLIMIT_AS, pages * resource.getpagesize() + memory)
    try:
        message = DONE + json.dumps(act()).encode()
    except BaseException as error:
        # a library's panic is no Exception
        if isinstance(error, MemoryError):
            text = "out of memory"
        else:
            text = one_line(error) or type(error).__name__
        message = FAILED + text.encode(errors="replace")
    sender.send_bytes(message)


def _limit(kind: int, amount: int) -> None:
    """Sets a limit of this process; to what the user allows (`ulimit`) if that is less."""
    _, hard = resource.getrlimit(kind)
    if hard != resource.RLIM_INFINITY:
        amount = min(amount, hard)
    resource.setrlimit(kind, (amount, hard))

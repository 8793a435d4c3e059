"""Failures of a command: the line that it says, and its exit code."""

from __future__ import annotations

import io
import os
import signal
import sys
import tempfile
import traceback
from contextlib import suppress

import click

from ctrans.base.printable import text_of
from ctrans.cli.plugins import FILES
from ctrans.cli.say import STDOUT, say
from ctrans.cli.signals import words_of

UNEXPECTED = 70
"""The exit code of an error that ctrans did not expect: EX_SOFTWARE of sysexits.h."""
OF_MEMORY = ("alloc", "out of memory")
"""Words of torch's errors if memory is missing."""
SHOWN = "CTRANS_TRACEBACK"
"""The environment variable that prints tracebacks."""


def explained(error: BaseException) -> tuple[str, int]:
    """The line and the exit code for an error that ends a command. The traceback of an unexpected
    one stays in a file.
    """
    if os.environ.get(SHOWN):
        _show(error)
    if isinstance(error, click.ClickException):
        message = error.format_message()
        if isinstance(error, click.NoSuchOption) and error.option_name == "--plugin":
            message += " Give it before the command: ctrans --plugin FILE COMMAND"
        return message, error.exit_code
    if isinstance(error, (click.Abort, KeyboardInterrupt)):
        return words_of(signal.SIGINT), 128 + signal.SIGINT
    from solvers import ConfigError, SolveError  # with them torch

    if isinstance(error, ConfigError):
        return str(error), 2
    if isinstance(error, SolveError):
        return str(error), 1
    if _is_of_memory(error):
        return "out of memory: lower --width, --depth, --context or --batch", 2
    name = f"{type(error).__name__}: {text_of(error)[:500]}"
    frames = traceback.extract_tb(error.__traceback__)
    user_frames = [frame for frame in frames if frame.filename in FILES]
    if user_frames:
        last = user_frames[-1]
        return f"{last.filename}, line {last.lineno}, failed: {name}; {_traceback_of(error)}", 2
    if (
        isinstance(error, io.UnsupportedOperation)
        and isinstance(sys.stdout, io.TextIOBase)
        and not sys.stdout.writable()
    ):
        return "stdout is closed: redirect it to a file or a pipe", 2
    if isinstance(error, OSError) and _is_of_stdout(error):
        return (
            f"cannot write to standard output: {error.strerror or error}: free some space there, or"
            " send it elsewhere"
        ), 2
    if isinstance(error, OSError):
        message = str(error.strerror or error)
        if error.filename is not None:
            message = f"{str(error.filename)!r}: {message}"
        return message, 2
    message = f"ctrans did not expect this error, please report it: {name}; {_traceback_of(error)}"
    return message, UNEXPECTED


def _is_of_memory(error: BaseException) -> bool:
    if isinstance(error, MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(word in text_of(error) for word in OF_MEMORY)


def _is_of_stdout(error: OSError) -> bool:
    """Whether writing to stdout failed: ctrans says so in the error, and click does not."""
    frames = traceback.extract_tb(error.__traceback__)
    is_of_click = any(frame.filename == click.utils.__file__ for frame in frames)
    return error.filename == STDOUT or (error.filename is None and is_of_click)


def _traceback_of(error: BaseException) -> str:
    """Where the traceback is, in words: in a file, or above if no file can be written."""
    if not os.environ.get(SHOWN):
        with suppress(OSError):
            number, path = tempfile.mkstemp(".txt", "ctrans-traceback-")
            with open(number, "w", encoding="utf-8", errors="backslashreplace") as file:
                file.writelines([f"{sys.argv}\n", *traceback.format_exception(error)])
            return f"the traceback is in {path} ({SHOWN}=1 prints it)"
        _show(error)
    return "the traceback is above"


def _show(error: BaseException) -> None:
    with suppress(OSError):
        if sys.stderr is not None:
            say("".join(traceback.format_exception(error)), end="", to=sys.stderr)

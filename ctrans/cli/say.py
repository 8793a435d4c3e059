"""The one function by which commands print text."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import IO

import click

from ctrans.base.printable import printable
from ctrans.base.standard_error import discard_stderr

STDOUT = "standard output"
"""What an error of writing to stdout has for the name of a file."""


def say(text: str, *, error: bool = False, end: str = "\n", to: IO[str] | None = None) -> None:
    """Prints the text, by default on stdout, with control characters escaped. An error is one
    line on stderr; if stderr is full or closed, the command goes on without the line.
    """
    text = printable(text)
    if error:
        one_line = text.strip().replace("\n", "\\n")
        try:
            click.echo(f"ctrans: {one_line}", file=to, err=True)
        except OSError:
            discard_stderr()
    else:
        with naming_stdout():
            click.echo(text + end, file=to, nl=False)


@contextmanager
def naming_stdout() -> Iterator[None]:
    """Inside, an error of writing names stdout, as one of a file names the file."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = STDOUT
        raise


def say_last(text: str) -> None:
    """Prints the line of an error with which the process ends, if stderr takes it."""
    with suppress(KeyboardInterrupt):
        say(text, error=True)


def discard_stdout() -> None:
    """From now on, what is printed on stdout goes nowhere, since nobody reads it any more."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


def say_if_read(line: str) -> None:
    """Prints a line. The run continues if stdout is closed, as by `head` or a closed terminal."""
    if not sys.stdout.writable():
        return
    try:
        say(line)
    except OSError:
        discard_stdout()


@contextmanager
def stdout_apart() -> Iterator[None]:
    """Inside, sys.stdout writes to a copy of descriptor 1, whose place stderr has. So stdout gets
    nothing of native code, of processes that are started, and of sys.__stdout__.
    """
    before = sys.stdout
    if not _is_stdout_of_process(before):
        yield
        return
    before.flush()
    copy = open(os.dup(1), "w", encoding=before.encoding, errors=before.errors)  # noqa: SIM115 closed below
    os.dup2(2, 1)
    sys.stdout = copy
    try:
        yield
    finally:
        sys.stdout = before
        with suppress(OSError):
            before.flush()
        os.dup2(copy.fileno(), 1)
        with suppress(OSError):  # which what was printed has raised
            copy.close()


def _is_stdout_of_process(stream: IO[str] | None) -> bool:
    if stream is None:  # closed
        return False
    try:
        return stream.writable() and stream.fileno() == 1
    except (OSError, ValueError):  # a stream without a descriptor, or a closed one
        return False


def end_stdout() -> None:
    """From now on, what is printed goes to stderr: functions that users' code left for the exit of
    the process may print.
    """
    if not _is_stdout_of_process(sys.stdout):
        return
    with suppress(OSError):
        sys.stdout.flush()
        os.dup2(2, 1)
        sys.stdout = sys.stderr

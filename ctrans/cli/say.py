"""The one function by which commands print text."""

from __future__ import annotations

import contextlib
import os
import sys
from typing import IO

import click

from ctrans.printable import printable


def say(text: str, *, error: bool = False, end: str = "\n", to: IO[str] | None = None) -> None:
    """Prints the text, by default on stdout, with control characters escaped. An error is one
    line on stderr.
    """
    shown = printable(text)
    click.echo("ctrans: " + shown.strip().replace("\n", "\\n") if error else shown + end, file=to, nl=error, err=error)


def say_last(text: str) -> None:
    """Prints the line of an error with which the process ends, if stderr takes it."""
    with contextlib.suppress(OSError, KeyboardInterrupt):
        say(text, error=True)


def discard_stdout() -> None:
    """From now on, what is printed on stdout goes nowhere, since nobody reads it any more."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)

"""The one function by which commands print text."""

from __future__ import annotations

from typing import IO

import click

from ctrans.printable import printable


def say(text: str, *, error: bool = False, end: str = "\n", to: IO[str] | None = None) -> None:
    """Prints the text, by default on stdout, with control characters escaped. An error is one
    line on stderr.
    """
    shown = printable(text)
    click.echo("ctrans: " + shown.strip().replace("\n", "\\n") if error else shown + end, file=to, nl=error, err=error)

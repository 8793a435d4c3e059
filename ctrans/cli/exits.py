"""Exits of a command by ctrans itself, which differ from a sys.exit in code of users."""

from __future__ import annotations


class Exit(SystemExit):
    """The end of a command with this exit code, after what it says."""


class Terminated(Exit):
    """The end of a command by SIGTERM or SIGHUP, as by Ctrl-C: what it has begun is closed."""

    def __init__(self, number: int):
        super().__init__(128 + number)
        self.number = number

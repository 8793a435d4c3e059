"""Errors that other people's code raises, in the words of one line."""

from __future__ import annotations

FOREIGN_ERRORS = (Exception,)
"""What a model's code may raise when it runs on inputs that it was not written for: anything."""


def one_line(error: BaseException) -> str:
    """The first 200 characters of an error's text, on one line."""
    return " ".join(str(error).split())[:200]


def named_error(error: BaseException) -> str:
    """'TypeError: its text on one line'."""
    return f"{type(error).__name__}: {one_line(error)}"

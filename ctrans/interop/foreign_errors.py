"""Errors raised by foreign code, as text on one line."""

from __future__ import annotations

from ctrans.printable import text_of

FOREIGN_ERRORS = (Exception,)
"""A model's code may raise any exception on inputs that it was not written for."""


def one_line(error: BaseException) -> str:
    """The first 200 characters of an error's text, on one line; its type if it has no text."""
    return " ".join(text_of(error).split())[:200] or type(error).__name__


def named_error(error: BaseException) -> str:
    """The error as 'TypeError: its text on one line'."""
    return f"{type(error).__name__}: {one_line(error)}"

"""Errors raised by foreign code, as text on one line."""

from __future__ import annotations

from ctrans.base.printable import one_line

FOREIGN_ERRORS = (Exception,)
"""A model's code may raise any exception on inputs that it was not written for."""


def named_error(error: BaseException) -> str:
    """The error as 'TypeError: its text on one line', and for one of dtypes what to give."""
    text = f"{type(error).__name__}: {one_line(error)}"
    is_of_dtypes = "dtype" in text or "double" in text.lower()
    if is_of_dtypes:
        return f"{text}; if its code makes float32 tensors, give --dtype float32"
    return text

"""Warnings of other libraries and of users' code, and tracebacks of their threads: a command shows
them with --verbose only, so that its own line comes first.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

OURS = "ctrans"
"""The loggers with this name, or below it, are always shown."""


class OtherWarnings(logging.Handler):
    """Keeps what Python would print on stderr, each as a function that prints it, until it is
    known whether the command shows it.
    """

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.is_shown: bool | None = None
        """None as long as it is not known."""
        self.waiting: list[Callable[[], Any]] = []
        self.last_resort = logging.lastResort
        self.show_warning = warnings.showwarning
        self.thread_hook = threading.excepthook
        self.unraisable_hook = sys.unraisablehook

    def install(self) -> None:
        """From now on, this object gets what Python would print."""
        warnings.showwarning = self._keeping(self.show_warning)
        threading.excepthook = self._keeping(self.thread_hook)
        sys.unraisablehook = self._keeping(self.unraisable_hook)
        logging.lastResort = self

    def remove(self) -> None:
        """Python prints again."""
        warnings.showwarning = self.show_warning
        threading.excepthook = self.thread_hook
        sys.unraisablehook = self.unraisable_hook
        logging.lastResort = self.last_resort

    def emit(self, record: logging.LogRecord) -> None:
        """A record of a logger that has no handler."""
        if self.last_resort is None:
            return
        if record.name.partition(".")[0] == OURS:
            self.last_resort.handle(record)
        else:
            self._keeping(self.last_resort.handle)(record)

    def settle(self, *, is_shown: bool) -> None:
        """Prints what waits, and from now on all that comes; or drops them."""
        self.is_shown = is_shown
        waiting = self.waiting
        self.waiting = []
        if is_shown:
            for printing in waiting:
                printing()

    def _keeping(self, printing: Callable[..., Any]) -> Callable[..., None]:
        def keep(*arguments: Any, **options: Any) -> None:
            if self.is_shown:
                printing(*arguments, **options)
            elif self.is_shown is None:
                self.waiting.append(lambda: printing(*arguments, **options))

        return keep


INSTALLED: list[OtherWarnings] = []
"""That of the command that runs, if one does."""


@contextlib.contextmanager
def other_warnings(*, is_own_process: bool) -> Iterator[None]:
    """Inside, warnings wait for `settle_other_warnings`. In a process of its own they do so until
    its exit, when Python ends other objects, which may warn.
    """
    kept = OtherWarnings()
    kept.install()
    INSTALLED.append(kept)
    try:
        yield
    finally:
        if not is_own_process:
            INSTALLED.remove(kept)
            kept.remove()


def settle_other_warnings(*, verbose: bool) -> None:
    """Shows the warnings that wait and all that come if the command is `verbose`, or if python -W
    or PYTHONWARNINGS asks for warnings. Else it drops them.
    """
    for kept in INSTALLED:
        kept.settle(is_shown=verbose or bool(sys.warnoptions))

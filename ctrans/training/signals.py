"""Signals that ask a training to stop: the training notes one and stops after the present
iteration.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType

STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Wish:
    """The number of the signal that asked to stop; 0 before one did."""

    number: int = 0


@contextlib.contextmanager
def stopping() -> Iterator[Wish]:
    """Inside, notes the first SIGINT, SIGTERM or SIGHUP. A second one acts as it did before.

    A signal that was ignored, such as SIGHUP under nohup, stays ignored. Outside the main thread,
    which alone can handle signals, nothing changes.
    """
    wish = Wish()
    if threading.current_thread() is not threading.main_thread():
        yield wish
        return
    handlers = {number: signal.getsignal(number) for number in STOPPING}
    before = {
        number: handler for number, handler in handlers.items() if handler is not signal.SIG_IGN
    }
    wakeup_fd = signal.set_wakeup_fd(-1)  # nobody ends the process for the first signal

    def restore() -> None:
        signal.set_wakeup_fd(wakeup_fd)
        for number, handler in before.items():
            signal.signal(number, handler)

    def note(number: int, frame: FrameType | None) -> None:
        wish.number = number
        restore()

    for number in before:
        signal.signal(number, note)
    try:
        yield wish
    finally:
        restore()

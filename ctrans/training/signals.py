"""A wish to stop, from Ctrl-C, a scheduler or a terminal that closes, noted and obeyed between two
iterations.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType

STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Wish:
    """The number of the signal that asked to stop; 0 while none did."""

    number: int = 0


@contextlib.contextmanager
def stopping() -> Iterator[Wish]:
    """Inside, the first SIGINT, SIGTERM or SIGHUP is only noted; a second one acts as it did
    before.

    One that was ignored, as SIGHUP under nohup, stays so. Outside the main thread, which alone may
    handle signals, nothing changes.
    """
    wish = Wish()
    if threading.current_thread() is not threading.main_thread():
        yield wish
        return
    handlers = {number: signal.getsignal(number) for number in STOPPING}
    before = {number: handler for number, handler in handlers.items() if handler is not signal.SIG_IGN}

    def restore() -> None:
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

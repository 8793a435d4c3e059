"""Signals that end a command, also inside one long operation of torch."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from types import FrameType

from ctrans.cli.exits import Terminated
from ctrans.cli.say import say_last

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
PATIENCE = 3.0
"""Seconds in which Python has to call the handler of a signal."""


class _Seen:
    """The number of the signal that ends the command; 0 before one came."""

    number: int = 0


def signal_seen() -> int:
    """The number of the signal that ends the command, or 0. Code that the signal interrupts may
    hide the error that the signal raised.
    """
    return _Seen.number


def forget_signal() -> None:
    """The command goes on after the signal that it caught."""
    _Seen.number = 0


def words_of(number: int) -> str:
    """What a command says that the signal ends."""
    if number == signal.SIGINT:
        return "interrupted"
    return f"ended by {signal.Signals(number).name}"


def _imports(frame: FrameType | None) -> bool:
    """Whether a module is being imported. An error would leave a part of it behind, which other
    modules then use: numpy's calls itself for ever.
    """
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False


@contextlib.contextmanager
def ending_by_signals() -> Iterator[None]:
    """Inside, a signal of `ENDING` that has its default action raises KeyboardInterrupt or
    Terminated.

    `signal_seen` has its number. Python calls a handler only between two operations. If it has not
    called this one after `PATIENCE`, a thread ends the process with a line. Files stay whole, since
    ctrans names them when they are complete. Outside the main thread nothing changes.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    called = threading.Event()
    _Seen.number = 0

    def end(number: int, frame: FrameType | None) -> None:
        called.set()
        _Seen.number = number
        if _imports(frame):
            say_last(words_of(number))
            os._exit(128 + number)
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        raise Terminated(number)

    def watch() -> None:
        while number := os.read(read_end, 1):
            if signal.getsignal(number[0]) is end and not called.wait(PATIENCE):
                say_last(words_of(number[0]))
                os._exit(128 + number[0])
        os.close(read_end)

    defaults = (signal.SIG_DFL, signal.default_int_handler)
    actions = {number: signal.getsignal(number) for number in ENDING}
    before = {number: action for number, action in actions.items() if action in defaults}
    for number in before:
        signal.signal(number, end)
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    earlier = signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
    threading.Thread(target=watch, daemon=True).start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(earlier)
        os.close(write_end)
        for number, action in before.items():
            signal.signal(number, action)


# a fork's signals are not for the thread of its parent
os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))

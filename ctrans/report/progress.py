"""A progress bar on stderr for work that takes over a second."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

PATIENCE = 1.0
"""Seconds before the bar appears: quick work stays quiet."""


@contextlib.contextmanager
def progress_bar(what: str, total: int, done: int = 0) -> Iterator[Callable[[str], None]]:
    """Gives a function to call as each of `total` pieces is done, with a word on what is under way; `done` of them were before.
    Silent where stderr is no terminal.
    """
    console = Console(stderr=True)
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
    )
    task = bar.add_task(what, total=total, completed=done)
    started = time.perf_counter()
    shown = False

    def advance(word: str) -> None:
        nonlocal shown
        bar.update(task, advance=1, description=f"{what}: {word}")
        if not shown and console.is_terminal and time.perf_counter() - started > PATIENCE:
            bar.start()
            shown = True

    try:
        yield advance
    finally:
        if shown:
            bar.stop()

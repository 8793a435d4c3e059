"""A progress bar on stderr for work that takes over a second."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

PATIENCE = 1.0
"""Seconds before the bar appears: quick work stays quiet."""


class Bar:
    """Called as each of `total` pieces of work is done, with a word on what is under way; `say` changes the word alone."""

    def __init__(self, what: str, total: int, done: int):
        self._console = Console(stderr=True)
        columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn()
        self._progress = Progress(*columns, console=self._console, transient=True)
        self._what, self._task = what, self._progress.add_task(what, total=total, completed=done)
        self._started, self._shown = time.perf_counter(), False

    def __call__(self, word: str) -> None:
        self._update(word, 1)

    def say(self, word: str) -> None:
        """What is under way, where a piece of work takes long."""
        self._update(word, 0)

    def close(self) -> None:
        if self._shown:
            self._progress.stop()

    def _update(self, word: str, done: int) -> None:
        self._progress.update(self._task, advance=done, description=f"{self._what}: {word}")
        if not self._shown and self._console.is_terminal and time.perf_counter() - self._started > PATIENCE:
            self._progress.start()
            self._shown = True


@contextlib.contextmanager
def progress_bar(what: str, total: int, done: int = 0) -> Iterator[Bar]:
    """Gives a `Bar` over `total` pieces of work, of which `done` were before. Silent where stderr is no terminal."""
    bar = Bar(what, total, done)
    try:
        yield bar
    finally:
        bar.close()

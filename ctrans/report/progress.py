"""How the progress of long work is shown: a bar on stderr, and the lines of a training."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import closing
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from ctrans.base.printable import printable
from ctrans.base.standard_error import forgiving_stderr

PATIENCE = 1.0
"""Seconds before the bar appears."""
LONG = 10.0
"""Seconds from which on it is said how long work will take, where there is no bar that shows it."""
SHARE = 1 / 16
"""Of the work, which has to be done before that is said, unless it takes longer than `LONG`."""
AMISS = 2.0
"""By what factor an estimate has to change to be said again: pieces of work differ, and those done
first need not be like the rest.
"""


def duration(seconds: float) -> str:
    """A duration in words: "25 s", "3 minutes", "2 hours"."""
    if seconds < 90:
        return f"{5 * max(1, round(seconds / 5))} s"
    minutes = round(seconds / 60)
    if minutes < 90:
        return f"{minutes} minutes"
    return f"{round(seconds / 3600)} hours"


class Bar:
    """Called as each of `total` pieces of work is done, or several at once, with a word on what is
    under way; with 0 pieces the word alone changes.
    """

    def __init__(self, what: str, total: int, done: int):
        # the work goes on if nobody reads stderr, or its disk is full
        self._console = Console(file=forgiving_stderr(), emoji=False)
        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
        )
        self._progress = Progress(*columns, console=self._console, transient=True)
        self._what = what
        self._task = self._progress.add_task(what, total=total, completed=done)
        self._started = time.perf_counter()
        self._shown = False
        self._total = total - done
        self._done = 0
        # the last estimate that was printed, in seconds
        self._printed = 0.0
        # when the first piece was done, which has what is made once in it, and how many
        self._first: tuple[float, int] | None = None

    def close(self) -> None:
        """Removes the bar if it is shown."""
        if self._shown:
            self._progress.stop()

    def of(self, word: str) -> Callable[..., None]:
        """A function that a computation calls as each piece is done, with this word."""
        return lambda *_: self(word)

    def __call__(self, word: str, done: int = 1) -> None:
        self._progress.update(
            self._task, advance=done, description=printable(f"{self._what}: {word}")
        )
        self._done += done
        elapsed = time.perf_counter() - self._started
        if self._first is None and done:
            self._first = elapsed, self._done
        if elapsed <= PATIENCE:
            return
        if self._console.is_terminal:
            if not self._shown:
                self._progress.start()
                self._shown = True
        elif done and self._first is not None and self._done < self._total:
            before, pieces = self._first
            later = self._done - pieces
            if later == 0 or (later < self._total * SHARE and elapsed < LONG):
                return
            estimate = before + (elapsed - before) * (self._total - pieces) / later
            if not self._printed / AMISS <= estimate <= self._printed * AMISS:
                self._printed = estimate
                if estimate > LONG:
                    message = f"{self._what}: about {duration(estimate)} in all"
                    self._console.print(message, markup=False, highlight=False, soft_wrap=True)


def progress_bar(what: str, total: int, done: int = 0) -> closing[Bar]:
    """Gives a `Bar` over `total` pieces of work, of which `done` were before.

    Where stderr is no terminal it says how long the work will take, if that is over `LONG` seconds,
    and again where that was `AMISS`.
    """
    return closing(Bar(what, total, done))


def bar_words(row: dict[str, Any]) -> str:
    """What the progress bar says of an iteration."""
    return f"loss {row['loss']:.3f}, {row['tokens_per_second']:,.0f} tokens/s"


def evaluation_line(row: dict[str, Any], iterations: int) -> str:
    """What is printed of an evaluation."""
    width = len(str(iterations))
    parts = [
        f"step {row['step']:{width}d}/{iterations}",
        f"validation loss {row['validation_loss']:.4f}",
    ]
    if "loss" in row:
        parts += [
            f"loss {row['loss']:.4f}",
            f"|gradient| {row['gradient_norm']:.2g}",
            f"lr {row['learning_rate']:.1e}",
        ]
    parts.append(f"rms X_T/X_0 {row['growth']:.3g}")
    if "accuracy" in row:
        parts.insert(2, f"accuracy {100 * row['accuracy']:.1f} %")
    if "theta" in row:
        parts.append(f"theta {row['theta']:.4f}")
    return ", ".join(parts)

"""Which edit of a model lowers its loss: a fault is found by undoing it.

The sequences are split into two halves. An edit is found if the loss falls by more than
`LEAST_FALL` nats and `ERRORS` standard errors of the paired differences, on the first half and then
on the second, which played no part in its choice. The search goes on from the best edit, for
further ones.

On logits the edited model must also predict better than counting tokens does, unless the fall is
above `LARGE_FALL`. And it has a rival.

The rival is the same model with its outputs divided by the number that suits these sequences best:
an edit must beat it. A healthy model is too sure on a text unlike that of its training, and many a
change that makes it less sure lowers its loss.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from ctrans.examine.search.edit import Edit, EditKind
from ctrans.examine.search.edits import EDITS, edits_of
from ctrans.examine.search.limits import (
    ERRORS,
    FEWEST_TARGETS,
    LARGE_FALL,
    LEAST_FALL,
    MOST_EDITS,
)
from ctrans.examine.search.runs import Runs, rows_of
from ctrans.examine.search.whole_edits import smaller_outputs
from ctrans.measure.findings import Reading
from ctrans.measure.walk import Model
from solvers import ConfigError

ShareDone = Callable[[float], None]
"""Called with the share of the work that is done."""


@dataclasses.dataclass(frozen=True)
class Found:
    """An edit that lowers the loss: on the first half, where it was chosen, and on the second.

    `unit` is that of the loss, empty if it is not known.
    """

    edit: Edit
    before: float
    after: float
    confirmed_before: float
    confirmed_after: float
    unit: str = ""

    def __str__(self) -> str:
        return (
            f"with {self.edit.words} the loss falls from {self.before:.3g} to {self.after:.3g}"
            f"{self.unit}, and on other sequences from {self.confirmed_before:.3g} to"
            f" {self.confirmed_after:.3g}"
        )


@dataclasses.dataclass(frozen=True)
class EditSearch:
    """What a search found.

    - `found`: edits that lower the loss, each on top of those before it
    - `tried`: how many edits were tried, stronger ones of a kind and further rounds included
    - `untried`: how many were not, because the time had passed
    """

    found: list[Found]
    tried: int
    untried: int

    @property
    def readings(self) -> list[Reading]:
        """The fall of the loss on the second half by all edits that were found; 0 without one."""
        left = ""
        if self.untried:
            left = f"; the time ended before {self.untried} others"
        if not self.found:
            words = f"no edit passes, of {self.tried} that were tried{left}"
            return [Reading(0.0, "the whole model", words)]
        fall = self.found[0].confirmed_before - self.found[-1].confirmed_after
        words = "; then ".join(map(str, self.found))
        place = ", ".join(dict.fromkeys(found.edit.place for found in self.found))
        return [Reading(fall, place, words + left)]


def search_edits(
    model: Model,
    tokens: Tensor,
    targets: Any,
    *,
    seconds: float = 120.0,
    kinds: Mapping[str, EditKind] = EDITS,
    progress: ShareDone | None = None,
) -> EditSearch:
    """The edits that lower a model's loss on these sequences, for at most so many seconds. `kinds`
    may have further kinds of edits, or others.

    Nothing of the model changes: it runs with other weights in their place. Raises ConfigError for
    fewer than two different sequences, for too few targets, for a loss that is no mean over
    sequences or not finite, and for a model that was opened with `embed=` or `head=`.
    """
    if len(tokens) < 2:
        raise ConfigError(
            "a search tests what it finds on other sequences, and there is one: give two or more"
        )
    different = _different(tokens)
    if len(different) < 2:
        raise ConfigError(
            f"a search tests what it finds on other sequences, and these {len(tokens)} are all the"
            " same: give a longer text"
        )
    runs = Runs(model, tokens[different], rows_of(targets, different, len(tokens)))
    runs.check_rows()
    searching = _Searching(runs, kinds, len(different) // 2, time.monotonic() + seconds, progress)
    return searching.result()


def _different(tokens: Tensor) -> Tensor:
    """The first row of each of those that are equal."""
    rows, kinds = torch.unique(tokens.flatten(1), dim=0, return_inverse=True)
    first = torch.full((len(rows),), len(tokens), device=tokens.device)
    order = torch.arange(len(tokens), device=tokens.device)
    return first.scatter_reduce(0, kinds, order, "amin").sort().values


class _Searching:
    def __init__(
        self,
        runs: Runs,
        kinds: Mapping[str, EditKind],
        half: int,
        deadline: float,
        progress: ShareDone | None,
    ):
        self.runs = runs
        self.kinds = kinds
        self.first = slice(0, half)
        self.second = slice(half, None)
        self.start = time.monotonic()
        self.deadline = deadline
        self.progress = progress
        self.tried = 0
        self.untried = 0

    def result(self) -> EditSearch:
        found: list[Found] = []
        while len(found) < MOST_EDITS:
            following = self._round()
            if following is None:
                break
            found.append(following)
            self.runs.keep(following.edit)
        return EditSearch(found, self.tried, self.untried)

    def _round(self) -> Found | None:
        """The edit that lowers the loss most, after those that are kept; None if there is none."""
        edits = edits_of(self.runs.subject, self.kinds)
        unedited = self.runs.losses(None, self.first)
        confirmed_unedited = self.runs.losses(None, self.second)
        rival = self._rival(unedited)
        before = self.runs.losses(rival, self.first)
        confirmed_before = self.runs.losses(rival, self.second)
        if unedited is None or confirmed_unedited is None:
            raise ConfigError("the loss is not finite, so no edit can be compared with it")
        if before is None or confirmed_before is None:
            return None
        if min(len(before), len(confirmed_before)) < FEWEST_TARGETS:
            raise ConfigError(
                f"{min(len(before), len(confirmed_before))} targets in a half of the sequences tell"
                f" nothing: give at least {2 * FEWEST_TARGETS}"
            )
        passing: list[tuple[float, Edit]] = []
        for i, edit in enumerate(edits):
            if time.monotonic() > self.deadline:
                self.untried = len(edits) - i
                break
            fall, strongest = self._strongest(edit, unedited, before)
            if fall is not None:
                passing.append((fall, strongest))
            if self.progress is not None:
                self.progress(max(i / len(edits), self._share_of_time()))
        for _, edit in sorted(passing, key=lambda pair: -pair[0]):
            after = self.runs.losses(edit, self.first)
            confirmed = self.runs.losses(edit, self.second)
            if after is None or confirmed is None:
                continue
            fall = _fall(confirmed_before, confirmed)
            if fall is not None and (fall > LARGE_FALL or self._beats_counting(confirmed)):
                return Found(
                    edit,
                    float(unedited.mean()),
                    float(after.mean()),
                    float(confirmed_unedited.mean()),
                    float(confirmed.mean()),
                    self.runs.unit,
                )
        return None

    def _beats_counting(self, losses: Tensor) -> bool:
        counting = self.runs.counting()
        return counting is None or float(losses.mean()) < counting

    def _rival(self, unedited: Tensor | None) -> Edit | None:
        """The factor of the outputs, below 1, that lowers the loss most, if one does."""
        best: Edit | None = None
        if unedited is None:
            return None
        least = float(unedited.mean())
        for edit in smaller_outputs():
            losses = self.runs.losses(edit, self.first)
            if losses is None or not float(losses.mean()) < least:
                break
            least = float(losses.mean())
            best = edit
        return best

    def _share_of_time(self) -> float:
        now = time.monotonic()
        return (now - self.start) / (self.deadline - self.start)

    def _strongest(self, edit: Edit, unedited: Tensor, before: Tensor) -> tuple[float | None, Edit]:
        """The fall by an edit, or by the strongest of its kind that helps; None if none passes."""
        largest: float | None = None
        strongest = edit
        least = float(unedited.mean())
        tried: Edit | None = edit
        while tried is not None:
            after = self.runs.losses(tried, self.first)
            self.tried += 1
            if after is None or not float(after.mean()) < least:
                break
            least = float(after.mean())
            fall = _fall(before, after)
            if fall is not None:
                largest = fall
                strongest = tried
            tried = tried.further() if tried.further is not None else None
        return largest, strongest


def _fall(before: Tensor, after: Tensor) -> float | None:
    """The mean fall of the loss; None if it is no more than the limits."""
    if len(before) != len(after):
        return None
    falls = before - after
    mean = float(falls.mean())
    error = float(falls.std()) / math.sqrt(len(falls))
    if mean > LEAST_FALL and mean > ERRORS * error:
        return mean
    return None

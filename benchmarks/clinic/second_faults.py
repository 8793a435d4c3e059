"""The faults of the second trial: those of the first one that can do harm, and further ones."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

from benchmarks.clinic import faults, second_model_faults, second_training_faults
from benchmarks.clinic.course import Course
from benchmarks.clinic.faults import Fault, block

NEVER_HARMFUL = (
    "a head of zeros",
    "all units dead",
    "a batch of another tokenizer",
    "a batch of one token",
    "accumulation not divided",
    "an FFN that dies",
    "an FFN the optimiser lacks",
)
"""Of the first trial: 5 or more patients, and each ended as well as its control untreated."""


def has_gains(course: Course) -> bool:
    return len(block(course).norms) > 1 and course.body.part("final_norm") is not None


def queries_as_values(course: Course) -> bool:
    part = block(course)
    return [each.shape for each in part.q] == [each.shape for each in part.v]


FITS: dict[str, Callable[[Course], bool]] = {
    "a dead gain before the head": has_gains,
    "a norm's gains near zero": has_gains,
    "a gain of 100": has_gains,
    "eps of 1000": has_gains,
    "weight decay on gains": has_gains,
    "queries and values swapped": queries_as_values,
}
"""Further conditions of old faults, since some new architectures lack what they spoil."""
CATEGORIES = {
    "a block drawn anew": "block not loaded",
    "a checkpoint half loaded": "block not loaded",
    "head drawn anew": "end not loaded",
    "a path cut by detach": "cut path",
}
"""Of old faults whose category the checks of today divide."""
WRONG_BY_DEFINITION = ("no causal mask",)
UNDONE_BY_SEARCH = (
    "scores 30 times too large",
    "scores 30 times too small",
    "scores too large everywhere",
    "embeddings 50 times too large",
    "embeddings 50 times too small",
    "positions 100 times too large",
    "positions reversed",
    "a block drawn anew",
    "no causal mask",
    "a norm's gains near zero",
    "a gain of 100",
    "eps of 1000",
    "FFN output 50 times too large",
    "FFN output 1000 times too small",
    "attention output 50 times too large",
    "head 30 times too large",
    "token ids shifted",
    "queries and values swapped",
    "output map transposed",
    "FFN output of the wrong sign",
    "router collapsed",
)
"""Old faults that a kind of edit of the issue's list undoes, in full or in part."""


def again(table: Mapping[str, Fault]) -> dict[str, Fault]:
    return {
        name: dataclasses.replace(
            fault,
            fits=FITS.get(name, fault.fits),
            category=CATEGORIES.get(name, fault.category),
            wrong_by_definition=name in WRONG_BY_DEFINITION,
            undone_by_search=name in UNDONE_BY_SEARCH,
        )
        for name, fault in table.items()
        if name not in NEVER_HARMFUL
    }


MODEL_FAULTS = again(faults.MODEL_FAULTS) | second_model_faults.ADDED
TRAINING_FAULTS = again(faults.TRAINING_FAULTS) | second_training_faults.ADDED

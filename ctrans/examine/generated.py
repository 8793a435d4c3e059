"""The continuations of `ctrans generate`, as one table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ctrans.measure.measured import Answer, Measured, Value
from ctrans.measure.measures import MEASURES, Measure

MEASURES.add(
    "ctrans generate",
    {
        "continuation": Measure(formula="the text that the model wrote"),
        "tokens generated": Measure(formula="the number of tokens of a continuation"),
    },
)


def measured(samples: Sequence[Mapping[str, Any]]) -> Measured:
    """The table of samples, each with its seed, its text and its tokens."""
    values = []
    for sample in samples:
        name = f"seed {sample['seed']}"
        values.append(Value(name, "continuation", None, words=sample["text"]))
        values.append(Value(name, "tokens generated", len(sample["tokens"])))
    plural = "" if len(samples) == 1 else "s"
    answer = Answer(f"{len(samples)} continuation{plural} of the prompt.", "good")
    return Measured(values=tuple(values), answers=(answer,))

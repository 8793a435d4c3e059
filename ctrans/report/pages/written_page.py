"""What `ctrans export` and `ctrans generate` show: a model for other libraries, and continuations
of a text.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ctrans.report.sections import Answer, Chapter, Column, Table, Words, cell


def exported(models: Mapping[str, Any], result: Mapping[str, Any]) -> list[Chapter]:
    """What the model is there, and its files."""
    parts = list[Answer | Words]()
    for name, each in models.items():
        written = f"Wrote the model as {each['family']} to {each['directory']}."
        parts += [Answer(f"{name}: {written}" if name else written, "good"), Words("Files:", each["files"])]
    return [Chapter("Export", parts)]


def generated(models: Mapping[str, Any], result: Mapping[str, Any]) -> list[Chapter]:
    """The continuations."""
    columns = (Column("seed"), Column("text"), Column("tokens"), Column("seconds"))
    samples = [sample for each in models.values() for sample in each["samples"]]
    rows = [[cell(each["seed"]), cell(each["text"]), cell(len(each["tokens"])), cell(each["seconds"])] for each in samples]
    answer = Answer(f"{len(samples)} continuation{'s' * (len(samples) != 1)} of the prompt.", "good")
    return [Chapter("Continuations", [answer, Table("", columns, rows)])]

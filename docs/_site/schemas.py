"""The JSON schema of every command's result, made from the classes of the table of measured values.

`python -m docs._site.schemas` writes docs/schemas/result.json.
"""

from __future__ import annotations

import json
from pathlib import Path

from ctrans.cli import COMMANDS
from ctrans.measure.findings import Finding
from ctrans.measure.measured import COLUMNS, SCHEMA, Answer
from docs._site.json_schema import (
    Schema,
    a_map,
    an_object,
    described,
    list_of,
    schema_of,
    with_definitions,
)

DOCUMENT = Path(__file__).parents[1] / "schemas" / "result.json"
OBJECT: Schema = {"type": "object"}
COLUMN_TYPES: dict[str, type] = {
    "model": str,
    "measure": str,
    "value": float | None,
    "depth": int | None,
    "head": int | None,
    "step": float | None,
    "error": float | None,
    "place": str,
    "words": str,
}
MEASURED = an_object(
    "What was measured: one table, by columns of one length.",
    schema={"const": SCHEMA},
    answers=described("The answer in sentences, and how to mark each.", list[Answer]),
    values=an_object(
        "The table. A row is a value of a measure (`measure`, listed by `ctrans report` and on the"
        " site) of a model, at a depth, a head, a step or a place in words, with its error.",
        **{name: list_of(schema_of(COLUMN_TYPES[name])) for name in COLUMNS},
    ),
    missing=a_map("By model and measure: why a figure was not measured.", dict[str, str]),
    findings=a_map("By model, the most severe first.", list[Finding]),
    notes=a_map("By model: remarks in sentences.", list[str]),
    reasons=a_map("By model: longer explanations, in sentences.", list[str]),
    styles=a_map("By model: its placement, which chooses colours.", str),
)


def schema() -> Schema:
    """The schema of the JSON of all commands."""
    says = (
        "The result of a ctrans command. Numbers that JSON lacks are the texts inf, -inf and nan."
        " Further keys are those of version 1, which had a form of its own for each command. They"
        " go with version 0.5."
    )
    begins: dict[str, Schema] = {
        "command": {"enum": list(COMMANDS)},
        "options": described("The command's options by name, with the values decided.", OBJECT),
        "environment": described("Versions, device, threads, plugins.", OBJECT),
        "measured": MEASURED,
    }
    made = {**an_object(says, **begins), "additionalProperties": True}
    start = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "ctrans"}
    return with_definitions({**start, **made})


def as_text() -> str:
    """The schema as the text of its file."""
    return json.dumps(schema(), indent=1) + "\n"


if __name__ == "__main__":
    DOCUMENT.write_text(as_text())

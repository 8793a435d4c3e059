"""What `ctrans export` and `ctrans generate` show: a model for other libraries, and continuations
of a text.
"""

from __future__ import annotations

from ctrans.report.sections import Answer, Chapter, JSONObject, Words, table


def chapters(models: JSONObject, result: JSONObject) -> list[Chapter]:
    """Those of the command that wrote the result."""
    return (_exported if result["command"] == "export" else _generated)(models)


def _exported(models: JSONObject) -> list[Chapter]:
    """What the model is there, and its files."""
    parts = list[Answer | Words]()
    for name, each in models.items():
        written = f"Wrote the model as {each['family']} to {each['directory']}."
        parts += [
            Answer(f"{name}: {written}" if name else written, "good"),
            Words("Files:", each["files"]),
        ]
    return [Chapter("Export", parts)]


def _generated(models: JSONObject) -> list[Chapter]:
    """The continuations."""
    samples = [sample for each in models.values() for sample in each["samples"]]
    rows = [[each["seed"], each["text"], len(each["tokens"]), each["seconds"]] for each in samples]
    answer = Answer(
        f"{len(samples)} continuation{'s' * (len(samples) != 1)} of the prompt.", "good"
    )
    return [Chapter("Continuations", [answer, table(["seed", "text", "tokens", "seconds"], rows)])]

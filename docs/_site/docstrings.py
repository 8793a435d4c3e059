"""Docstrings are plain text with formulas: what Markdown would take for tags, emphasis or tables
stands as it is.
"""

import re

import griffe


class PlainDocstrings(griffe.Extension):
    """Escapes everything of Markdown's outside of code but lists and `code`."""

    def on_instance(self, *, obj: griffe.Object, **kwargs: object) -> None:
        if obj.docstring is not None:
            obj.docstring.value = escaped(obj.docstring.value)


def escaped(text: str) -> str:
    """The text with <, >, *, _, [ and ] as themselves, code and doctests left alone."""
    parts = re.split(r"(`[^`\n]*`)", text)
    return "".join(
        part if part.startswith("`") else re.sub(r"([*_\[\]])", r"\\\1", part.replace("<", "&lt;"))
        for part in parts
    )

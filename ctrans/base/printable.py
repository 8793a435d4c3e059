"""Text from files and from users, as a terminal, a log or a page can show it."""

from __future__ import annotations

import re

UNSAFE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff\ufeff\ufffe\uffff\U000e0000-\U000e007f]"
)
"""Control characters except tab and newline, characters that change the direction of writing or
show nothing, halves of characters, and U+FFFE and U+FFFF, which are none.
"""

LONGEST_LINE = 300
"""Characters of an error's text that a line has at most."""


def printable(text: str) -> str:
    """The text with each unsafe character escaped as Python writes it, such as \\x1b."""
    return UNSAFE.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def text_of(error: BaseException) -> str:
    """The text of an error, also of a class of the user's whose text cannot be made."""
    try:
        return str(error)
    except Exception as error_of_text:
        return f"its text cannot be made: {type(error_of_text).__name__}"


def one_line(error: BaseException) -> str:
    """An error's text on one line, whole words of at most `LONGEST_LINE` characters; its type if it
    has no text.
    """
    words = text_of(error).split()
    text = " ".join(words)
    if len(text) > LONGEST_LINE:
        whole_words, _, _ = text[:LONGEST_LINE].rpartition(" ")
        text = f"{whole_words or text[:LONGEST_LINE]} .."
    return text or type(error).__name__

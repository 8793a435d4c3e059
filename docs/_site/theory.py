"""Puts the table of `ctrans verify` into THEORY.md, between its marker comments: `python -m docs._site.theory`, after that command."""

from pathlib import Path

START, END = "<!-- ctrans verify: start -->", "<!-- ctrans verify: end -->"
ROOT = Path(__file__).parents[2]


def between_markers(text: str, table: str) -> str:
    """The text with the table between the markers. Raises ValueError if it lacks one."""
    before, rest = text.split(START)
    _, after = rest.split(END)
    return f"{before}{START}\n\n{table}\n{END}{after}"


if __name__ == "__main__":
    page, table = ROOT / "THEORY.md", ROOT / "out" / "verify" / "verify.md"
    page.write_text(between_markers(page.read_text(encoding="utf-8"), table.read_text(encoding="utf-8")), encoding="utf-8")

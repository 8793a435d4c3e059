"""Plain English on every page: short sentences, and none of the phrases on which readers stumbled.
CONTRIBUTING.md has the rules.
"""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
GENERATED = {"gallery.md"}
PAGES = sorted(
    path
    for path in [
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        ROOT / "SECURITY.md",
        *(ROOT / "docs").rglob("*.md"),
    ]
    if path.name not in GENERATED and "api" not in path.parts
)
SOURCES = sorted(
    [
        *(ROOT / "ctrans").rglob("*.py"),
        *(ROOT / "solvers").rglob("*.py"),
        *(ROOT / "examples").rglob("*.py"),
    ]
)
LONG, SOME, LONGEST = 25, 0.1, 35
"""Words of a long sentence; the share of sentences of a page that may be long; words that no
sentence may have more of.
"""
BANNED = re.compile(
    r"\b(?:(?:is|are|was|were) (?:told|met|heeded|mended|left to)|tells? (?:its|their)"
    r" progress|what stands|stands? beside|"
    r"that (?:is|are) not there|heeds?|unsaid|likewise|mends?|dear tests?|can be asked|is so$)\b",
    re.I,
)


def paragraphs(text):
    """What a reader reads as prose: paragraphs and list items, without code, tables, headings,
    pictures, links and formulas in code.
    """
    text = re.sub(r"```.*?```|<[^>]+>|\$\$.*?\$\$", "", text, flags=re.S)
    for block in re.split(r"\n\s*\n|\n(?=\s*(?:[-*]|\d+\.) )", text):
        lines = [
            line
            for line in block.splitlines()
            if not re.match(r"\s*(?:#|\||!\[|--8<--|\?\?\?|:::)", line)
        ]
        words = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", " ".join(line.strip() for line in lines))
        if words.strip():
            yield re.sub(r"\s+", " ", words).strip()


def sentences(text):
    for paragraph in paragraphs(text):
        shown = re.sub(r"`[^`]*`", "code", paragraph)
        yield from re.split(r"(?<=[.!?:])\**\s+(?=[A-Z\"*(`]|code)", shown)


def length(sentence):
    return len(re.findall(r"[A-Za-z][\w'-]*", sentence))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_sentences_of_a_page_are_short(page):
    each = list(sentences(page.read_text()))
    longest = [sentence for sentence in each if length(sentence) > LONGEST]
    assert not longest, "\n".join(longest)
    long = [sentence for sentence in each if length(sentence) > LONG]
    assert len(long) <= max(1, SOME * len(each)), f"{len(long)} of {len(each)}:\n" + "\n".join(long)


@pytest.mark.parametrize(
    "page",
    [page for page in PAGES if page.name != "CONTRIBUTING.md"],
    ids=lambda page: str(page.relative_to(ROOT)),
)
def test_a_page_has_no_phrase_that_readers_stumbled_on(page):
    found = [
        f"{match.group()}: {paragraph}"
        for paragraph in paragraphs(page.read_text())
        for match in BANNED.finditer(paragraph)
    ]
    assert not found, "\n".join(found)


def test_texts_in_the_code_have_none_either():
    """Docstrings, help, messages: every string constant of the packages."""
    found = []
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
                words = re.sub(r"\s+", " ", re.sub(r"`[^`]*`", "code", node.value))
                found += [
                    f"{path.relative_to(ROOT)}:{node.lineno}: {match.group()}"
                    for match in BANNED.finditer(words)
                ]
    assert not found, f"{len(found)}:\n" + "\n".join(found[:200])


def docstring_lines(tree):
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        ):
            yield from (
                (node.lineno + i, line) for i, line in enumerate(node.value.value.splitlines())
            )


def test_docstrings_wrap_at_100_columns():
    """Prose does; tables, formulas set apart and code are as long as they must be."""
    apart = re.compile(r"\s*(?:\||>>>|\.\.\. )|.*\S {2,}\S|.*\w\(.*\)\)*\.?$|\s*ctrans ")
    long = {
        f"{path.relative_to(ROOT)}:{line}": text
        for path in SOURCES
        if "examples" not in path.parts
        for line, text in docstring_lines(ast.parse(path.read_text()))
        if len(text) > 100 and not apart.match(text)
    }
    assert not long, "\n".join(f"{place}: {text}" for place, text in long.items())

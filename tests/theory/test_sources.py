"""docs/why/sources.md has a row for everything numbered in the sources. The lists here are taken
from the sources themselves.
"""

import re
from pathlib import Path

import pytest

from ctrans.study.presets.table import PRESETS
from ctrans.theory.all_statements import all_statements

PAGE = (Path(__file__).parents[2] / "docs" / "why" / "sources.md").read_text()
VERDICTS = {"reproduced", "sharpened", "corrected", "refuted at this scale", "undecided"}


def numbered(word, *numbers):
    return {f"{word} {number}" for number in numbers}


KAN = (
    numbered("eq.", *range(1, 179))
    | numbered("lemma", 1, 9, 10)
    | numbered("theorem", 2, 3, 4, 5, 6)
    | numbered("proposition", 7, 8, 11, 12)
    | numbered("table", 1, 2)
    | numbered("figure", 1)
    | {
        "appendix B",
        "section 2, limit of depth",
        "section 3.2, weight decay",
        "section 3.3, well-posedness",
        "theorem 6, Pre-LN",
    }
    | {"section 4, skip connections", "section 5", "section 6, tuning", "section 6, depth"}
)
DIGEST = (
    numbered("mechanism", 1, 2, 3)
    | numbered("experiment", 1, 2, 3)
    | numbered("open question", 1, 2, 3)
    | numbered("next check", 1, 2, 3)
)
EMADI = (
    numbered("definition", 3.1, 4.1)
    | numbered("lemma", 3.2, 3.3, "A.1")
    | numbered("theorem", 4.2, 5.1, 5.2, 5.3, 5.4, 5.5, 6.1, 6.2)
    | numbered("corollary", "4.3(1)", "4.3(2)", "4.3(3)", "4.3(4)")
    | numbered("remark", "B.1", "B.2")
    | numbered("figure", 1, 2, 3, 4, 5, 6)
    | numbered("table", 1)
    | numbered("appendix", "E.2", "E.3", "E.4", "E.5", "E.6")
    | {"section 3.1", "section 6.1", "section 6.2, shared maps", "section 6.3"}
    | {"section 7, theta", "section 7, losses", "section 7, gradients"}
)
XIONG = (
    numbered("eq.", *range(1, 18))
    | numbered("lemma", 1, 2, 3)
    | numbered("figure", 1, 2, "3 (a, b)", "3 (c, d)", 4, 5)
    | {"table 1", "theorem 1", "definition 1", "section 3.3, other layers", "section 4.2, RAdam"}
    | numbered("section 3.4,", "concentration", "small rates")
)
KIM = (
    numbered("proposition 3.1,", "Pre-LN", "Post-LN", "Peri-LN")
    | numbered("summary,", "variance", "gradients", "convergence", "redundancy")
    | numbered(
        "table,", "Xavier", "initial variances", "weight decay", "norms at A, B, C", "QK-Norm"
    )
    | numbered(
        "rebuttal,",
        "last layer",
        "chain rule",
        "positive gains",
        "RMSNorm for LayerNorm",
        "ReLU for GELU",
        "optimiser",
    )
    | numbered(
        "rebuttal,",
        "massive activations",
        "exponential growth",
        "gradients of Post-LN",
        "small weights",
        "OLMo 2",
    )
    | numbered("rebuttal,", "learning rates", "SGD", "frozen gains", "vision")
    | {"review, scale"}
)
SOURCES = {"Kan": KAN, "Digest": DIGEST, "Emadi": EMADI, "Xiong": XIONG, "Kim": KIM}
ROWS = {
    part.split()[0].rstrip(":"): re.findall(
        r"^\| (?!in the source|---)(.*?) \| (.*?) \| (.*?) \| (.*?) \|$", part, re.MULTILINE
    )
    for part in PAGE.split("\n## ")[1:]
}


def expanded(label):
    """The single items of "eq. 19-21; lemma 9"."""
    for item in label.split("; "):
        span = re.fullmatch(r"eq\. (\d+)-(\d+)", item)
        yield from numbered("eq.", *range(int(span[1]), int(span[2]) + 1)) if span else [item]


@pytest.mark.parametrize("source", SOURCES)
def test_a_source_has_a_row_for_each_of_its_numbers_and_no_other(source):
    found = [item for label, *_ in ROWS[source] for item in expanded(label)]
    assert sorted(found) == sorted(SOURCES[source])
    assert set(ROWS) == set(SOURCES)


@pytest.mark.parametrize("source", SOURCES)
def test_a_row_has_a_verdict_and_names_statements_and_presets_that_are_there(source):
    known = {*all_statements(), *PRESETS, "pre", "output"}
    for label, claim, verdict, here in ROWS[source]:
        assert claim.endswith((".", "?")), label
        assert verdict in VERDICTS, label
        names = [
            name
            for name in re.findall(r"`([^`]+)`", here)
            if not name.startswith(("ctrans ", "--"))
        ]
        assert set(names) <= known, label
        assert here, label
        assert ("would decide" in here) is (verdict == "undecided"), label
        if verdict == "refuted at this scale":
            assert set(names) & set(PRESETS), label


def test_each_preset_of_a_paper_has_a_row():
    named = set(re.findall(r"`([^`]+)`", PAGE))
    assert set(PRESETS) <= named

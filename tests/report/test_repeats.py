"""Pages on which no description and no finding stands twice."""

import pytest

from ctrans.report.repeats import ABOVE, Cards, ShownPlot, ShownTable, cards_of, parts_of
from ctrans.report.sections import (
    Cell,
    Chapter,
    Column,
    Findings,
    Line,
    Page,
    Plot,
    Table,
    Words,
)

FINDING = {
    "check": "dead norm",
    "severity": "serious",
    "place": "segment 0",
    "value": 0.0,
    "figure": "gain 0",
    "limit": "below 0.1",
    "source": "us",
    "impact": "The norm does nothing.",
    "remediation": "Train it.",
}


def page_of_parts(*parts):
    return Page("t", "", [Chapter("c", parts)], {})


def test_a_finding_of_several_models_is_one_card_that_says_what_differs():
    other = {**FINDING, "place": "b, segment 3"}
    (card,) = cards_of([Findings([FINDING], "a"), Findings([other], "b")])
    assert (card.check, card.severity) == ("dead norm", "serious")
    assert card.rows == {
        "models": ["a; b"],
        "where": ["a: segment 0", "b: segment 3"],
        "figure": ["gain 0"],
        "limit": ["below 0.1 (us)"],
        "impact": ["The norm does nothing."],
        "fix": ["Train it."],
    }


def test_each_finding_of_one_model_is_a_card_and_the_most_severe_is_first():
    findings = [FINDING, FINDING, {**FINDING, "severity": "broken"}]
    cards = cards_of([Findings(findings)])
    assert [card.severity for card in cards] == ["broken", "serious", "serious"]
    assert "model" not in cards[0].rows


def test_each_finding_of_a_model_is_a_card_also_where_there_are_several_models():
    cards = cards_of([Findings([FINDING, FINDING], "a"), Findings([FINDING], "b")])
    assert [card.rows["models" if i == 0 else "model"] for i, card in enumerate(cards)] == [
        ["a; b"],
        ["a"],
    ]


@pytest.mark.parametrize("different", ["impact", "remediation", "limit", "severity", "check"])
def test_findings_that_say_other_things_are_other_cards(different):
    other = {**FINDING, different: "note"}
    assert len(cards_of([Findings([FINDING], "a"), Findings([other], "b")])) == 2


def test_findings_of_all_models_stand_together():
    page = page_of_parts(Findings([FINDING], "a"), Words("between"), Findings([FINDING], "b"))
    ((cards, words),) = parts_of(page)
    assert isinstance(cards, Cards)
    assert len(cards.cards) == 1
    assert words == Words("between")


def test_a_column_is_described_once_and_columns_of_one_meaning_together():
    columns = [Column("model"), Column("a", "what it is", "m"), Column("b", "what it is", "m")]
    rows = [[Cell("x"), Cell("1"), Cell("2")]]
    ((first, second),) = parts_of(page_of_parts(*2 * [Table("", columns, rows)]))
    assert first.meanings == {"what it is; m": ["a", "b"]}
    assert second == ShownTable(Table("", columns, rows), {})


def test_a_chart_is_described_once():
    chart = Plot("one", "x", "y", [Line("m", [0.0, 1.0], [1.0, 2.0])], "what it is")
    ((first, second),) = parts_of(page_of_parts(chart, chart))
    assert (first, second) == (ShownPlot(chart, "what it is"), ShownPlot(chart, ""))


def test_a_table_of_descriptions_says_which_stand_above():
    chart = Plot("one", "x", "y", [Line("m", [0.0, 1.0], [1.0, 2.0])], "what it is")
    columns = [Column("figure"), Column("formula", descriptions=True), Column("source")]
    rows = [[Cell("a"), Cell(text), Cell("what it is")] for text in ("what it is", "new", "new")]
    ((_, table),) = parts_of(page_of_parts(chart, Table("", columns, rows)))
    assert [row[1] for row in table.table.rows] == [ABOVE, Cell("new"), ABOVE]
    assert {row[2].text for row in table.table.rows} == {"what it is"}

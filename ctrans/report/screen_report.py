"""How a screening is shown on a terminal: one page for each model, and a ranking of several."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from rich import box
from rich.markup import escape
from rich.table import Table

from ctrans.stability.screening.case import exponent
from ctrans.stability.screening.screen import STEPS, Screening

KEY = (
    "Score of a step: geometric mean of 1/(1 + k) over its ingredients k >= 0, exponents in the weights and decades by depth; of the "
    "model: geometric mean of its steps'. It is from theory at these weights; whether it predicts training has not been measured."
)


def points(score: float | None) -> str:
    """A score in [0, 1] with two decimals, or a dash."""
    return "–" if score is None else f"{score:.2f}"


def screen_table(name: str, screening: Screening) -> Table:
    """A row for each step: verdict, figure, score and what the score is made of. Fits 80 columns."""
    table = Table(
        title=escape(f"{name}: stability score {total(screening)}"), box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False
    )
    table.title_style, table.title_justify = "bold", "left"
    for column in ("step", "verdict", "figure"):
        table.add_column(column, no_wrap=True)
    table.add_column("score", justify="right", no_wrap=True)
    table.add_column("ingredients k")
    for step, finding in screening.findings.items():
        ingredients = ", ".join(f"{what} {exponent(k)}" for what, k in finding.ingredients.items())
        table.add_row(step, finding.verdict, escape(finding.figure), points(finding.score), ingredients)
    return table


def screen_reasons(screening: Screening) -> str:
    """Why, one sentence a step, and what could not be computed."""
    lines = []
    for name, finding in screening.findings.items():
        lines.append(f"{name}: {STEPS[name].question} {finding.why}")
        lines += [f"  note: {note}" for note in dict.fromkeys(finding.notes)]
    return escape("\n".join(lines))


def ranked(screenings: Mapping[str, Screening]) -> list[str]:
    """The names, highest score first; those without a score last."""
    return sorted(screenings, key=lambda name: _rank(screenings[name].score.value), reverse=True)


def ranking_table(screenings: Mapping[str, Screening]) -> Table:
    """A row for each model, highest score first, with the score of every step."""
    table = Table(title="Ranking by stability score", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    table.title_style, table.title_justify = "bold", "left"
    scored = [name for name, step in STEPS.items() if step.scored]
    table.add_column("model", no_wrap=True)
    for column in ("score", *(name.removeprefix("well-") for name in scored)):
        table.add_column(column, justify="right", no_wrap=True)
    for name in ranked(screenings):
        score = screenings[name].score
        each = [points(score.steps.get(step)) for step in scored]
        table.add_row(name, points(score.value) + "*" * bool(score.missing), *each)
    if any(screening.score.missing for screening in screenings.values()):
        table.caption, table.caption_justify = (
            "* lacks a step or an ingredient: compares only with scores that lack the same",
            "left",
        )
    return table


def total(screening: Screening) -> str:
    """The score, and of how many steps it is where some have none."""
    score = screening.score
    lacking = f" without {', '.join(score.missing)}" if score.missing else ""
    return points(score.value) + lacking


def _rank(score: float | None) -> float:
    return -math.inf if score is None else score


def label(changes: Sequence[tuple[str, object]]) -> str:
    """A model's name from what sets it apart, as `peri, dt 0.1`."""
    words = [f"{value:g}" if isinstance(value, float) else str(value) for _, value in changes]
    return ", ".join(word if name == "placement" else f"{name} {word}" for (name, _), word in zip(changes, words, strict=True))

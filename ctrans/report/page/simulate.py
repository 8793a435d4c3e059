"""The page of `ctrans simulate`: how hidden states move through depth."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ctrans.report.page.parts import (
    Cell,
    Chapter,
    ColouredText,
    Column,
    Diagram,
    Line,
    Sheet,
    Token,
    Words,
    cell,
    digits,
    number,
    numbers,
)
from ctrans.report.token_colours import colours, visible

COLUMNS = (
    Column("model"),
    Column("ended", "whether the solution reached the end of the depth"),
    Column("mean |x| at the end", "mean absolute value of the hidden state's entries"),
    Column(
        "of its bound",
        "largest share of what theory allows that was reached behind any segment; above 100% the method does not resolve the ODE",
    ),
    Column("drift", "largest departure from the conservation law that the placement has, if any"),
    Column("discrete to ODE", "largest relative distance of the discrete model from the ODE that it is an Euler step of"),
)


def chapters(models: Mapping[str, Any], result: Mapping[str, Any]) -> list[Chapter]:
    """Verdicts, charts by depth-time, and remarks."""
    time = "depth-time t"
    charts = [
        Diagram(
            "Hidden states",
            time,
            "mean |x|",
            [*_lines(models, "mean_abs"), *_lines(models, "mean_abs", bound=True)],
            "Mean absolute value of the state's entries. Dashed: what the placement's theorem allows at most; n/a where there is none.",
        ),
        Diagram(
            "Variance",
            time,
            "variance over the width",
            [*_lines(models, "variance"), *_lines(models, "variance", bound=True)],
            "Variance of a token's entries, mean over tokens.",
        ),
        Diagram(
            "Discrete model and ODE",
            time,
            "|X_discrete − X_ODE| / |X_ODE|",
            _lines(models, "discrete_distance"),
            "How far the Transformer, one Euler step a sublayer, is from the flow that it discretises. Not an error of the model: a "
            "measure of how much the picture of a continuous depth describes it.",
        ),
    ]
    return [
        Chapter("What was found", [Sheet("", COLUMNS, [_row(name, model) for name, model in models.items()])]),
        Chapter("By depth", [chart for chart in charts if any(line.y for line in chart.lines)]),
        *_beside(models),
        Chapter("Remarks", [Words(f"{name}: {text}") for name, model in models.items() for text in _remarks(model)], folded=True),
    ]


def _beside(models: Mapping[str, Any]) -> list[Chapter]:
    """Chapters of what was looked at beside the trajectory; none of what was not."""
    told: list[tuple[str, list[Any]]] = [
        ("Exponents by input token", [_tokens(name, m["lyapunov"]) for name, m in models.items() if m.get("lyapunov")]),
        ("Spectra of matrix products", [_spectra(models)] if any(m.get("spectra") for m in models.values()) else []),
        ("Contributions", [_contributions(n, m["contributions"]) for n, m in models.items() if m.get("contributions")]),
    ]
    return [Chapter(title, parts) for title, parts in told if parts]


def _tokens(name: str, found: Mapping[str, Any]) -> ColouredText:
    values = [number(each) for each in found["exponents"]]
    known = [-math.inf if value is None else value for value in values]
    tokens = [
        Token(visible(word), colour, f"{digits(value)} (token {token})")
        for word, colour, value, token in zip(found["words"], colours(known), known, found["tokens"], strict=True)
    ]
    return ColouredText(
        f"{name}: log|dX_T[{found['reader']}]/dX_0[j]|/T of every input token j",
        tokens,
        "Red: a small change of the token grows on its way to the last one's state; blue: it decays; grey: it does not get there.",
    )


def _spectra(models: Mapping[str, Any]) -> Sheet:
    columns = (
        Column("model"),
        Column("segment"),
        Column("product", "Q'K of a head, O V of a head, or W_2 W_1 of an FFN or expert"),
        Column("head or expert"),
        Column("largest singular value"),
        Column("largest |eigenvalue|"),
        Column("positive", "share of the eigenvalues' sizes that those with positive real part have"),
    )
    keys = ("segment", "product", "part")
    rows = [
        [cell(name), *(cell(s[key]) for key in keys), cell(s["singular"][0]), cell(s["radius"]), cell(s["positive"])]
        for name, model in models.items()
        for s in model.get("spectra") or []
    ]
    return Sheet("", columns, rows)


def _contributions(name: str, found: Mapping[str, Any]) -> Sheet:
    columns = (
        Column("part"),
        Column("of the last state", "<part, X>/|X|^2, mean over tokens: these sum to 1"),
        Column("size", "|part|/|X|"),
        Column("logit", "added to the target's logit less the mean logit: these sum to it"),
    )
    logit = found["logit"] or [None] * len(found["names"])
    rows = [[cell(each) for each in row] for row in zip(found["names"], found["state"], found["size"], logit, strict=True)]
    return Sheet(name, columns, rows, str(found.get("note") or ""))


def _row(name: str, model: Mapping[str, Any]) -> list[Cell]:
    good = model["status"] == "success"
    used = [
        value for value in numbers((model["used"] or [])[1:]) if value is not None
    ]  # before the first it is 100% by definition
    share = max(used) if used else None
    drift = [value for value in numbers(model["drift"] or []) if value is not None]
    apart = [value for value in numbers(model["discrete_distance"]) if value is not None]
    return [
        cell(name),
        Cell("at the end" if good else str(model["message"]), mark="" if good else "bad"),
        cell(model["mean_abs"][-1]),
        cell(None) if share is None else Cell(f"{share:.0%}", share, "bad" if share > 1 + 1e-9 else ""),
        cell(max(drift) if drift else None),
        cell(max(apart) if apart else None),
    ]


def _lines(models: Mapping[str, Any], key: str, *, bound: bool = False) -> list[Line]:
    lines = []
    for name, model in models.items():
        values = (model["bounds"] or {}).get(key) if bound else model[key]
        if values:
            times = [number(time) or 0.0 for time in model["times"]][: len(values)]
            lines.append(Line(name, times, numbers(values), model["placement"], bound))
    return lines


def _remarks(model: Mapping[str, Any]) -> list[str]:
    law = [f"conserved: {model['law']}"] if model.get("law") else []
    unbounded = [str(model["unbounded"])] if model.get("unbounded") else []
    return [*law, *unbounded, *map(str, model.get("warnings") or [])]

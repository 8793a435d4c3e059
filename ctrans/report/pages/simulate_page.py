"""What `ctrans simulate` shows: how hidden states move through depth."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Mapping, Sequence
from typing import Any

from ctrans.report.placement_style import equation
from ctrans.report.sections import (
    Answer,
    Cell,
    Chapter,
    ColouredText,
    Column,
    JSONObject,
    Line,
    Plot,
    Table,
    Token,
    Words,
    digits,
    finite,
    percent,
    table,
)
from ctrans.report.token_colours import colours, visible

ROUNDING = 1e-9
LARGE = 10.0
CONSERVED = "departure from the quantity that this placement conserves"
SHARE = "size over bound. Above 100% the method takes too few steps"
APART = (
    "relative distance between the Transformer (one Euler step a sublayer) and the ODE that it"
    " discretises"
)
FORMULA = "|X_discrete − X_ODE| / |X_ODE|"
COLUMNS = (
    "model",
    Column("solved to the end", "whether the solution reached the end of the depth"),
    Column(
        "size at the start",
        "mean absolute value of the hidden state's entries, before the first layer",
        "mean |X_0|",
    ),
    Column("size at the end", "the same after the last layer", "mean |X_T|"),
    Column("share of the bound", SHARE, "the largest of all segments"),
    Column("conservation error", CONSERVED, "the largest of all segments"),
    Column("distance to the ODE", APART, FORMULA),
)
SEGMENT = Column("segment", "sublayers done")
BY_SEGMENT = {
    "times": Column("depth-time", "the sum of the sublayers' lengths dt", "t"),
    "mean_abs": Column("size", "mean absolute value of the hidden state's entries", "mean |x|"),
    "variance": Column("variance", "sample variance of all entries of the hidden state"),
    "rms": Column("root mean square", "of all entries", "rms", detail=True),
    "common": Column(
        "common to all tokens", "share of the state's squared size that is the same for all tokens"
    ),
    "paper": Column("paper's bound", "bound on the size as the paper prints it", detail=True),
    "bound": Column("bound", "the most that theory allows the size to be"),
    "share": Column("share of the bound", SHARE),
    "drift": Column("conservation error", CONSERVED),
    "discrete_distance": Column("distance to the ODE", APART, FORMULA),
    "error": Column(
        "method's error", "relative distance of the chosen method's solution from the ODE's"
    ),
}


models = operator.itemgetter("placements")


def chapters(models: JSONObject, result: JSONObject) -> list[Chapter]:
    """The answer with a row for each model, then figures by depth, tokens, matrices, contributions
    and remarks.
    """
    remarks = [
        Words(f"{name}: {text}") for name, model in models.items() for text in _remarks(model)
    ]
    theory = [Words(f"{name}: {text}") for name, model in models.items() for text in _theory(model)]
    by_depth = [_by_segment(name, model) for name, model in models.items()]
    return [
        Chapter(
            "Summary",
            [
                _answer(models),
                table(COLUMNS, [_row(name, model) for name, model in models.items()]),
            ],
        ),
        Chapter("Remarks", remarks),
        Chapter("By depth", _charts(models), picture="simulate"),
        *_analyses(models),
        Chapter("Figures by depth", by_depth, folded=len(models) > 1),
        Chapter("What theory says of each placement", theory, folded=True),
    ]


def _answer(models: JSONObject) -> Answer:
    """How far the states grow, and whether the solution can be trusted."""
    failed = [name for name, model in models.items() if model["status"] != "success"]
    if failed:
        return Answer(
            f"The solution broke off before the end of the depth: {', '.join(failed)}.", "bad"
        )
    growth = {name: finite(model["mean_abs"]) for name, model in models.items()}
    factors = {
        name: sizes[-1] / sizes[0] for name, sizes in growth.items() if sizes and sizes[0] > 0
    }
    if not factors:
        return Answer("The hidden states could not be measured.", "note")
    above = [
        name
        for name, model in models.items()
        if max(finite(model["used"]), default=0.0) > 1 + ROUNDING
    ]
    low = min(factors, key=factors.__getitem__)
    high = max(factors, key=factors.__getitem__)
    many = f"{digits(factors[low])} ({low}) to {digits(factors[high])} ({high})"
    if len(factors) == 1:
        change = digits(factors[low])
    else:
        change = many
    text = f"Through the depth the hidden states change in size by a factor of {change}"
    if above:
        where = ", ".join(above)
        return Answer(
            f"{text}, which exceeds the bound of the exact solution ({where}): the method takes too"
            " few steps.",
            "bad",
        )
    if any(model["bounds"] for model in models.values()):
        text += ", within what theory allows"
    large = not all(1 / LARGE <= factor <= LARGE for factor in factors.values())
    return Answer(f"{text}.", "note" if large else "good")


def _row(name: str, model: JSONObject) -> list[Any]:
    good = model["status"] == "success"
    used = finite(model["used"])[1:]  # before the first segment it is 100% by definition
    share = max(used, default=None)
    return [
        name,
        Cell("yes" if good else str(model["message"]), mark="" if good else "bad"),
        model["mean_abs"][0],
        model["mean_abs"][-1],
        Cell(percent(share), share, "bad" if share is not None and share > 1 + ROUNDING else ""),
        max(finite(model["drift"]), default=None),
        max(finite(model["discrete_distance"]), default=None),
    ]


def _by_segment(name: str, model: JSONObject) -> Table:
    bounds = model["bounds"] or {}
    figures = {
        **model,
        "common": [Cell(percent(share), share) for share in model.get("common", [])],
        "paper": bounds.get("seed_mean_abs"),
        "bound": bounds.get("mean_abs"),
        "share": [Cell(percent(used), used) for used in model["used"] or []],
        "drift": [None, *(model["drift"] or [])],
        "error": None if model["discrete"] else model["distance"],
    }
    columns = [figures[key] or [] for key in BY_SEGMENT]
    rows = itertools.zip_longest(range(len(model["times"])), *columns)
    step = equation(model["placement"]).partition(", v = ")[0]
    cost = (
        f"{model['evaluations']} evaluations, {model['accepted']} steps, {model['rejected']}"
        " rejected"
    )
    return table(
        [SEGMENT, *BY_SEGMENT.values()],
        rows,
        f"{name}: {step}",
        f"{cost}, {model['seconds']:.2f} s",
        rows_shown=7,
    )


def _charts(models: JSONObject) -> list[Plot]:
    return [
        Plot(
            "Hidden states",
            "depth-time t",
            "mean |x| over their entries",
            [*_lines(models, "mean_abs"), *_lines(models, "mean_abs", bound=True)],
            "Mean absolute value of the state's entries. Dashed: the most that the placement's"
            " theorem allows.",
        ),
        Plot(
            "Their variance",
            "depth-time t",
            "variance of all entries",
            [*_lines(models, "variance"), *_lines(models, "variance", bound=True)],
            "Sample variance of all entries of the state.",
        ),
        Plot(
            "The discrete model and its ODE",
            "depth-time t",
            "|X_discrete − X_ODE| / |X_ODE|",
            _lines(models, "discrete_distance"),
            "How far the Transformer, one Euler step a sublayer, is from the flow that it"
            " discretises. This is no error of the model: it measures how well a continuous depth"
            " describes it.",
        ),
    ]


def _lines(models: JSONObject, key: str, *, bound: bool = False) -> list[Line]:
    lines = []
    for name, model in models.items():
        if bound:
            values = (model["bounds"] or {}).get(key)
        else:
            values = model[key]
        if values:
            lines.append(
                Line(name, model["times"][: len(values)], values, model["placement"], bound)
            )
    return lines


def _remarks(model: JSONObject) -> list[str]:
    """What could not be computed, and warnings."""
    unreferenced = model.get("unreferenced")
    why = (
        unreferenced
        and f"the ODE to compare with could not be solved to the end, so that distances end early: {unreferenced}"
    )
    return [*filter(None, (model.get("unbounded"), why)), *(model.get("warnings") or [])]


def _theory(model: JSONObject) -> list[str]:
    """What the placement conserves, and why the paper's bound differs."""
    said = {
        "conserved": model.get("law"),
        "the paper's bound": (model.get("bounds") or {}).get("seed_note"),
    }
    return [f"{what}: {words}" for what, words in said.items() if words]


def _analyses(models: JSONObject) -> list[Chapter]:
    """Chapters of the analyses that the user asked for."""
    tokens = [
        _tokens(name, model["lyapunov"]) for name, model in models.items() if model.get("lyapunov")
    ]
    spectra = {name: model["spectra"] for name, model in models.items() if model.get("spectra")}
    without = [
        Words(f"{name}: {NO_SPECTRA}")
        for name, model in models.items()
        if model.get("spectra") == []
    ]
    parts = {
        name: model["contributions"] for name, model in models.items() if model.get("contributions")
    }
    return [
        Chapter("Exponents by input token", tokens),
        Chapter("Spectra of matrix products", [*_spectra(spectra), *without], picture="spectra"),
        Chapter("Contributions", _contributions(parts), picture="contributions"),
    ]


NO_SPECTRA = (
    "no map of this model gives access to its heads or its matrices, so that there are no spectra"
)


def _tokens(name: str, found: JSONObject) -> ColouredText:
    known = [-math.inf if value is None else value for value in found["exponents"]]
    ends = sorted(finite(known))
    if ends:
        scale = f"{digits(ends[0])} to {digits(ends[-1])}"
    else:
        scale = "no token reaches it"
    tokens = [
        Token(visible(str(word)), colour, f"{digits(value)} (token {token})")
        for word, colour, value, token in zip(
            found["words"], colours(known), known, found["tokens"], strict=True
        )
    ]
    return ColouredText(
        f"{name}: growth rate of a small change of each input token j,"
        f" log|dX_T[{found['reader']}]/dX_0[j]|/T, {scale}",
        tokens,
        "Red: the change grows on its way to the last token's state. Blue: it decays. Grey: it does"
        " not get there.",
    )


PRODUCTS = {"QK": "Q'K of a head", "OV": "O V of a head", "W_2 W_1": "W_2 W_1 of an FFN or expert"}


def _spectra(spectra: Mapping[str, Sequence[JSONObject]]) -> list[Table | Plot]:
    """Largest over heads and experts in a table; every head in the JSON; eigenvalues in the complex
    plane.
    """
    columns = (
        "model",
        "segment",
        Column("product", "; ".join(PRODUCTS.values())),
        Column("largest singular value", "over heads or experts", "sigma_max"),
        Column("largest eigenvalue", "in absolute value, over heads or experts", "|lambda|_max"),
        Column(
            "positive share",
            "share of the eigenvalues' sizes that those with positive real part have, mean over"
            " heads",
        ),
    )
    rows = []
    charts = []
    for name, every in spectra.items():
        groups: dict[tuple[int, str], list[JSONObject]] = {}
        for each in every:
            groups.setdefault((each["segment"], each["product"]), []).append(each)
        for (segment, product), own in groups.items():
            positive = sum(each["positive"] for each in own) / len(own)
            sizes = max(each["singular"][0] for each in own), max(each["radius"] for each in own)
            rows.append([name, segment, product, *sizes, Cell(f"{positive:.0%}", positive)])
        for product in PRODUCTS:
            own = [each for each in every if each["product"] == product]
            real, imaginary = (
                [value for each in own for value in each[part]] for part in ("real", "imaginary")
            )
            shade = [each["segment"] for each in own for _ in each["real"]]
            line = Line(name, real, imaginary, name, shade=shade)
            charts.append(
                Plot(
                    f"{name}: eigenvalues of {product}",
                    "real part",
                    "imaginary part",
                    [line],
                    log=False,
                    kind="points",
                )
            )
    return [table(columns, rows, rows_shown=7 * len(spectra), alternate=True), *charts]


def _contributions(found: Mapping[str, JSONObject]) -> list[Table | Plot]:
    columns = (
        Column("part", "embedding, sublayers in order, offsets"),
        Column(
            "share of the last state", "mean over tokens: the shares sum to 1", "<part, X>/|X|^2"
        ),
        Column("size", "relative to the last state", "|part|/|X|"),
        Column("added to the logit", "of the target, less the mean logit: the parts sum to it"),
    )
    made: list[Table | Plot] = []
    for name, each in found.items():
        logit = each["logit"] or [None] * len(each["names"])
        total = (
            "sum of all",
            sum(each["state"]),
            None,
            sum(each["logit"]) if each["logit"] else None,
        )
        rows = [*zip(each["names"], each["state"], each["size"], logit, strict=True), total]
        made.append(table(columns, rows, name, str(each.get("note") or ""), rows_shown=13))
    for key, title in (
        ("state", "share of the last state"),
        ("logit", "added to the target's logit"),
    ):
        bars = [
            Line(name, list(range(len(each[key]))), each[key], name)
            for name, each in found.items()
            if each[key]
        ]
        made.append(
            Plot(
                title, "embedding, sublayers in order, offsets", title, bars, log=False, kind="bars"
            )
        )
    return made

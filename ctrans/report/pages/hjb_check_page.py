"""What `ctrans hjb-check` shows: which weights need a bound or a decay so that every layer has a
finite best update.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from ctrans.control.costate import ZERO_GRADIENT
from ctrans.report.sections import (
    Answer,
    Cell,
    Chapter,
    Column,
    Findings,
    Line,
    Mark,
    Plot,
    Table,
    Words,
    cell,
    finite,
    number,
    numbers,
)

CheckJSON = Mapping[str, Any]
FREE = {"well-posed": "nothing", "well-posed for bounded gains": "gains", "degenerate": "weights", "open": "unknown"}
"""What has to be bounded or penalised so that H is finite, by verdict."""
NEEDS = (
    "what must stay bounded, or pay a penalty, so that every layer has a finite best update: nothing, the norms' gains and offsets, or "
    "the weights. A question mark: the evidence disagrees"
)
COLUMNS = (
    Column("model"),
    Column("needs a bound, ODE", NEEDS),
    Column("needs a bound, Transformer", NEEDS),
    Column(
        "steepest descent",
        "the fastest rate at which a layer's output could lower the loss",
        "H(P) = sup −<P, f>, in closed form",
    ),
    Column("found by search", "the best rate found without the formula; where it is infinite, within the largest bound tried"),
    Column(
        "penalty needed",
        "a weight penalty in the training loss above this value makes the rate finite (found-proven)",
        "dt lam* of lam/2 |W|^2 for every matrix, not AdamW's decoupled decay; at this text, these weights, attention rows, input gains "
        "and biases",
    ),
    Column(
        "verdict, ODE",
        "well-posed: H is finite. For bounded gains: for the norm's gains and offsets as they are; it grows in "
        "proportion to them. Degenerate: H is infinite. Biases or gains fixed: only if they are not trained",
        detail=True,
    ),
    Column(
        "verdict, Transformer",
        "the same for the discrete step. No ODE: a norm around the state that is no projection on a surface",
        detail=True,
    ),
    Column("segment", "the one with the largest costate, where H was taken", "P = dL/dX", detail=True),
    Column("Kan's value", "of H, for LayerNorm", detail=True),
    Column(
        "gap",
        "worst distance of the best velocities that were found from H",
        "(H − best)/S, S the size of H's terms",
        detail=True,
    ),
    Column("weight gap", "the same for the best last-layer weights W", detail=True),
    Column("KKT", "worst residual of the maximiser's first-order conditions", detail=True),
    Column("apart", "largest distance between maximisers from different starts", detail=True),
    Column("power of R", "exponent with which the value grows, |W| bounded by R", "k of R^k", detail=True),
    Column("power with gains", "the same with W, gains and offsets bounded by R together", "k of R^k", detail=True),
)
NO_ODE = "no ODE"


def models(result: Mapping[str, Any]) -> dict[str, Any]:
    """Checks by norm and placement, each with its `norm`; a name has the norm where there are
    several.
    """
    checks = result["checks"]
    return {
        name if len(checks) == 1 else f"{norm}, {name}": {**check, "norm": norm}
        for norm, row in checks.items()
        for name, check in row.items()
    }


def chapters(models: Mapping[str, CheckJSON], result: Mapping[str, Any]) -> list[Chapter]:
    """The answer with a row for each model, what a decay does, then growth with the weights,
    figures by depth and sets.
    """
    refused = [Words(f"n/a: {why}") for why in dict.fromkeys((result.get("not_applicable") or {}).values())]
    notes = [Words(line) for line in _notes(models)]
    found = [Findings(result["findings"])] if result.get("findings") else []
    sets = [[cell(name), *_segment(segment)] for name, model in models.items() for segment in model["segments"]]
    columns = [Column("model"), Column("segment"), Column("velocities that the placement allows"), Column("verdict"), Column("H")]
    summary = Table("", COLUMNS, [_row(name, model) for name, model in models.items()])
    return [
        Chapter("Verdicts", [_answer(models), summary, *refused, *notes]),
        Chapter("Findings", found, folded=all(each["severity"] == "note" for each in result["findings"])),
        Chapter("Growth with the weights", _growth(models), picture="hjb-check"),
        Chapter("By depth", _by_depth(models)),
        Chapter("Velocities that each placement allows", _sets(models), folded=True),
        Chapter("Segment by segment", [Table("", columns, sets)], folded=True),
        Chapter("The HJB equation in the plane", _plane(result), folded=True),
    ]


def _answer(models: Mapping[str, CheckJSON]) -> Answer:
    """Which models have a finite best update, and what the others need."""
    wrong = [name for name, model in models.items() if not model["agrees"]]
    if wrong:
        return Answer(f"The numerical evidence disagrees with the verdict for {', '.join(wrong)}.", "bad")
    groups: dict[str, dict[str, None]] = {}
    for name, model in models.items():
        groups.setdefault(_free(model, model["step_verdict"]), {})[_short(name, model)] = None
    says = {
        "nothing": "every layer of {} has a finite best update",
        "gains": "every layer of {} has a finite best update while the norms' gains stay bounded",
        "weights": "the best updates of {} are finite only with a bound or a penalty on the weights (no fault of a model)",
        "unknown": "it is not known whether the best updates of {} are finite",
    }
    other = "every layer of {} has a finite best update with {}"
    parts = [
        says.get(need, other).format(", ".join(names), need)
        for need, names in sorted(groups.items(), key=lambda each: list(says).index(each[0]) if each[0] in says else 0)
    ]
    text = "; ".join(parts)
    return Answer(f"{text[0].upper()}{text[1:]}.", "good")


def _short(name: str, model: CheckJSON) -> str:
    return name.removeprefix(f"{model['norm']}, ")


def _free(model: CheckJSON, verdict: str) -> str:
    """What has to be bounded; what must stay fixed where a penalty decides."""
    held = "+".join(model["held"]) if model["held"] else "the rest"
    return FREE.get(verdict, f"{held} fixed")


def _row(name: str, model: CheckJSON) -> list[Cell]:
    largest = next(s for s in model["segments"] if s["segment"] == model["largest"])
    evidence = model["evidence"] or {}
    has_ode = all(segment["ode"] for segment in model["segments"])
    doubt = "" if model["agrees"] else "?"
    mark: Mark = "bad" if doubt else ""

    def verdict(words: str) -> Cell:
        held = words.replace("the rest fixed", f"{'+'.join(model['held'])} fixed") if model["held"] else words
        return Cell(held + doubt, mark=mark)

    return [
        cell(name),
        Cell(_free(model, model["verdict"]) + doubt if has_ode else NO_ODE, mark=mark),
        Cell(_free(model, model["step_verdict"]) + doubt, mark=mark),
        _supremum(largest),
        cell(_found(largest)),
        Cell(penalty(model["training_threshold"])),
        verdict(model["verdict"]) if has_ode else Cell(NO_ODE),
        verdict(model["step_verdict"]),
        cell(model["largest"]),
        cell(largest["ellipsoid"]),
        *(cell(evidence.get(key)) for key in ("gap", "weights", "kkt", "uniqueness", "exponent", "gained")),
    ]


def _supremum(segment: Mapping[str, Any]) -> Cell:
    """H, from what was found to what is proven where its maximiser is the best that was found."""
    known, ceiling = number(segment["hamiltonian"]), number(segment["certificate"]["ceiling"])
    if known is None:
        return Cell("open" if segment["verdict"] == "open" else "finite")
    text = cell(segment["hamiltonian"]).text
    return Cell(text if ceiling is None or _decayed(segment) else f"{text}..{cell(ceiling).text}", known)


def _decayed(segment: Mapping[str, Any]) -> bool:
    """Whether the verdict is that of the weight decay asked about."""
    return bool(segment["verdict"] != segment["certificate"]["verdict"])


def _found(segment: Mapping[str, Any]) -> float | None:
    """The best value of a search; none where a weight decay decides, for which the search does not
    pay.
    """
    certificate = segment["certificate"]
    if _decayed(segment):
        return None
    if certificate["velocities"] is not None:
        return number(certificate["velocities"]["best"])
    return None if certificate["growth"] is None else number(certificate["growth"]["values"][-1])


def penalty(threshold: Mapping[str, Any] | None) -> str:
    """dt lam*, from what was found to what is proven where these differ, or a dash."""
    if threshold is None:
        return "–"
    lower, upper = number(threshold["lower"]) or 0.0, number(threshold["upper"]) or 0.0
    low, high, power = f"{lower:.2g}", f"{upper:.2g}", ""
    if 0 < upper < 0.1:  # one power for both takes less room
        k = math.floor(math.log10(upper))
        low, high, power = f"{lower / 10**k:.1f}", f"{upper / 10**k:.1f}", f"e{k}"
    return f"{low}{power}" if low == high else f"{low}-{high}{power}"


def _notes(models: Mapping[str, CheckJSON]) -> list[str]:
    """What replaces an ODE, what was skipped, what a weight decay does, and where more than one
    velocity is optimal.
    """
    lines = [f"{name}: {model['instead']}" for name, model in models.items() if model["instead"] is not None]
    lines += [
        f"{name}: {where} is skipped: {why}" for name, model in models.items() for where, why in (model["skipped"] or {}).items()
    ]
    for name, model in models.items():
        lines += [f"{name}: {line}" for line in _decay_notes(model)]
        if not any(finite([segment["costate_norm"] for segment in model["segments"]])):
            lines.append(f"{name}: {ZERO_GRADIENT}; the verdict is of any other costate")
        ties = sum(segment["certificate"]["ties"] for segment in model["segments"])
        if ties:
            tokens = len(model["segments"]) * model["tokens"]
            lines.append(f"{name}: a tie, more than one velocity is optimal, for {ties} of {tokens} tokens")
    return lines


def _decay_notes(model: CheckJSON) -> list[str]:
    """What the weight decay asked about does, and what no weight decay can do."""
    threshold = model["training_threshold"]
    asked = next((s["weight_decay"] for s in model["segments"] if s["segment"] == model["largest"]), None)
    if asked is None:
        return []
    if threshold is None:
        unknown = sum(segment["verdict"] == "open" for segment in model["segments"])
        why = (
            "gives access to no path of two factors (a gate or a scale by channel makes a third): the decay it needs is not known"
        )
        return [f"{unknown} of {len(model['segments'])} segments have a map that {why}"] if unknown else []
    needed = f"dt lam* is {penalty(threshold)}"
    if asked < threshold["lower"]:
        lines = [f"a penalty of {asked:g} is {threshold['lower'] / asked:.3g} times too small for a finite H: {needed}"]
    elif asked < threshold["upper"]:
        lines = [f"a penalty of {asked:g} is between the dt lam* that was found and what is proven to suffice: {needed}"]
    else:
        lines = [f"a penalty of {asked:g} keeps both factors from running away: {needed}"]
    if threshold["bias"] > 0:
        lines.append(
            f"biases without decay make H infinite whatever the penalty, as dt |sum_j p_j| = {threshold['bias']:.2g} is not 0"
        )
    if threshold["gains"]:
        lines.append("so do the input norm's gains: trained, they are a third factor, and the value grows like R^3")
    return lines


def _sets(models: Mapping[str, CheckJSON]) -> list[Words]:
    """The admissible sets, each with the models that have a segment with it."""
    sets: dict[str, list[str]] = {}
    for name, model in models.items():
        for words in dict.fromkeys(segment["certificate"]["words"] for segment in model["segments"]):
            sets.setdefault(words, []).append(name)
    says = "f_j is the sublayer's output for token j, u_j a point of the norm's sphere"
    return [Words(says, [f"{', '.join(names)}: {words}" for words, names in sets.items()])]


def _segment(segment: Mapping[str, Any]) -> list[Cell]:
    certificate = segment["certificate"]
    where = Cell(f"{segment['segment']} ({segment['kind']})", float(segment["segment"]))
    return [where, cell(certificate["words"]), cell(segment["verdict"]), cell(certificate["hamiltonian"])]


def _norms(models: Mapping[str, CheckJSON]) -> dict[str, dict[str, CheckJSON]]:
    """The models by norm."""
    norms: dict[str, dict[str, CheckJSON]] = {}
    for name, model in models.items():
        norms.setdefault(model["norm"], {})[_short(name, model)] = model
    return norms


def _growth(models: Mapping[str, CheckJSON]) -> list[Plot]:
    """The best value with |W|_F <= R against R, at the segment with the largest costate; a chart
    for each norm.
    """
    charts = []
    for norm, row in _norms(models).items():
        lines: list[Line] = []
        for name, model in row.items():
            segment = next(s for s in model["segments"] if s["segment"] == model["largest"])
            certificate, growth = segment["certificate"], segment["certificate"]["growth"]
            closed = number(certificate["hamiltonian"])
            radii = [0.01, 100.0] if growth is None else finite(growth["radii"])
            share = radii if growth is None else [radius / math.sqrt(radii[0] * radii[-1]) for radius in radii]
            if growth is not None:
                lines.append(Line(name, share, numbers(growth["values"]), model["placement"]))
            slope = number(segment["slope"])
            bound = [closed] * len(radii) if slope is None else [slope * radius for radius in radii]
            if bound[0] is not None and math.isfinite(bound[0]):
                lines.append(Line(name, share, bound, model["placement"], bound=True))
        charts.append(
            Plot(
                norm,
                "bound on the last linear map's weights, R/R_0",
                "how fast the loss could fall, less any penalty",
                lines,
                "Found by search: solid. By formula: dashed. A curve that levels off is bounded; one that grows with R is not. R_0 makes "
                "the best velocity out of the features. Gains are as they are.",
                log_x=True,
            )
        )
    return charts


def _by_depth(models: Mapping[str, CheckJSON]) -> list[Plot]:
    charts = []
    for norm, row in _norms(models).items():
        costates = [_line(name, model, [s["costate_norm"] for s in model["segments"]]) for name, model in row.items()]
        values = [_line(name, model, [s["certificate"]["hamiltonian"] for s in model["segments"]]) for name, model in row.items()]
        charts += [
            Plot(f"Costate, {norm}", "depth-time t", "|P| = |dL/dX|", costates, "The loss's gradient by the state."),
            Plot(
                f"Steepest descent, {norm}",
                "depth-time t",
                "H(P) = sup −<P, f>",
                values,
                "Where it is infinite there is no point.",
            ),
        ]
    return charts


def _line(name: str, model: CheckJSON, values: Sequence[Any]) -> Line:
    return Line(name, [number(s["time"]) or 0.0 for s in model["segments"]], numbers(values), model["placement"])


def _plane(result: Mapping[str, Any]) -> list[Table]:
    """What --pde found, as it is in the JSON."""
    study = result.get("pde")
    return (
        [Table("", [Column("figure"), Column("value")], [[cell(key), cell(value)] for key, value in study.items()])]
        if study
        else []
    )

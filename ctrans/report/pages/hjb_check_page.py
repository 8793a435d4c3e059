"""What `ctrans hjb-check` shows: which weights need a bound or a decay so that every layer has a
finite best output.
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
    JSONObject,
    Line,
    Mark,
    Plot,
    Words,
    digits,
    finite,
    table,
)

FREE = {
    "well-posed": "nothing",
    "well-posed for bounded gains": "gains",
    "degenerate": "weights",
    "open": "unknown",
}
"""What has to be bounded or penalised so that H is finite, by verdict."""
NEEDS = (
    "what must be bounded or penalised so that every layer has a finite best output: the norms'"
    " gains and offsets, or the weights. A question mark: the evidence disagrees"
)
SUMMARY = (
    "model",
    Column("needs a bound, ODE", NEEDS),
    Column("needs a bound, Transformer", NEEDS),
    Column(
        "steepest descent",
        "loss decrease per unit of depth-time by a layer's best output",
        "H(P) = sup −<P, f>, in closed form",
    ),
    Column(
        "penalty needed",
        "the weight penalty above which the rate is finite (found-proven)",
        "dt lam* of lam/2 |W|^2 for every matrix, not AdamW's decoupled decay; at this text, these"
        " weights, attention rows, input gains and biases",
    ),
)
EVIDENCE = {
    "gap": Column(
        "gap",
        "worst distance of the best velocities that were found from H",
        "(H − best)/S, S the size of H's terms",
    ),
    "weights": Column("weight gap", "the same for the best last-layer weights W"),
    "kkt": Column("KKT", "worst residual of the maximiser's first-order conditions"),
    "uniqueness": Column("apart", "largest distance between maximisers from different starts"),
    "exponent": Column(
        "power of R", "exponent with which the value grows, |W| bounded by R", "k of R^k"
    ),
    "gained": Column(
        "power with gains", "the same with W, gains and offsets bounded by R together", "k of R^k"
    ),
}
DETAILS = (
    "model",
    Column(
        "verdict, ODE",
        "well-posed: H is finite. For bounded gains: H is finite at the norm's present gains and"
        " offsets, and grows in proportion to them. Degenerate: H is infinite. Biases or gains"
        " fixed: only if they are not trained",
    ),
    Column(
        "verdict, Transformer",
        "the same for the discrete step. No ODE: a norm around the state that is no projection on a"
        " surface",
    ),
    Column("segment", "the one with the largest costate, where H was taken", "P = dL/dX"),
    Column(
        "found by search",
        "the best rate that gradient ascents found; where it is infinite, within the largest bound"
        " tried",
    ),
    Column("Kan's value", "of H, for LayerNorm"),
    *EVIDENCE.values(),
)
NO_ODE = "no ODE"


def models(result: JSONObject) -> dict[str, Any]:
    """Checks by norm and placement, each with its `norm` and its `short` name; a name has the norm
    where there are several.
    """
    checks = result["checks"]
    return {
        name if len(checks) == 1 else f"{norm}, {name}": {**check, "norm": norm, "short": name}
        for norm, row in checks.items()
        for name, check in row.items()
    }


def chapters(models: Mapping[str, JSONObject], result: JSONObject) -> list[Chapter]:
    """The answer with a row for each placement, growth with the weights, figures by depth, and
    details by model.
    """
    rows = _rows(models)
    refused = [
        Words(f"n/a: {why}") for why in dict.fromkeys((result.get("not_applicable") or {}).values())
    ]
    joined = next((each for each in rows.values() if len(each) > 1), [])
    if joined:
        meaning = f"Two figures are of {', '.join(model['norm'] for model in joined)}."
    else:
        meaning = ""
    summary = table(SUMMARY, [_row(name, each) for name, each in rows.items()], meaning=meaning)
    findings = result.get("findings") or []
    wrong = [each for each in findings if each["severity"] != "note"]
    notes = _merged([each for each in findings if each["severity"] == "note"])
    by_segment = [
        [name, *_segment(segment)]
        for name, model in models.items()
        for segment in model["segments"]
    ]
    columns = ["model", "segment", "velocities that the placement allows", "verdict", "H"]
    plane = table(["figure", "value"], (result.get("pde") or {}).items())
    return [
        Chapter("Verdicts", [_answer(rows), summary, *refused, *map(Words, _notes(models))]),
        Chapter("Evidence that disagrees", [Findings(wrong)]),
        Chapter("Growth with the weights", _growth(models), picture="hjb-check"),
        Chapter("By depth", _by_depth(models)),
        Chapter("Infinite or undecided", [Findings(notes)], folded=True),
        Chapter(
            "Evidence",
            [table(DETAILS, [_details(name, model) for name, model in models.items()])],
            folded=True,
        ),
        Chapter("Allowed velocities", _sets(models), folded=True),
        Chapter("Segment by segment", [table(columns, by_segment)], folded=True),
        Chapter("The HJB equation in the plane", [plane], folded=True),
    ]


def _rows(models: Mapping[str, JSONObject]) -> dict[str, list[JSONObject]]:
    """The models of each row: those that differ only in their norm and have the same verdicts."""
    groups: dict[str, dict[str, JSONObject]] = {}
    for name, model in models.items():
        groups.setdefault(model["short"], {})[name] = model
    rows: dict[str, list[JSONObject]] = {}
    for short, group in groups.items():
        alike = (
            len(
                {
                    (each["verdict"], each["step_verdict"], each["agrees"], *each["held"])
                    for each in group.values()
                }
            )
            == 1
        )
        if alike:
            rows |= {short: list(group.values())}
        else:
            rows |= {name: [model] for name, model in group.items()}
    return rows


def _merged(findings: Sequence[JSONObject]) -> list[JSONObject]:
    """The findings of one check as one, with the places of all."""
    merged: dict[str, list[JSONObject]] = {}
    for each in findings:
        merged.setdefault(each["check"], []).append(each)
    return [
        {**alike[0], "places": [place for each in alike for place in each["places"] or [each]]}
        for alike in merged.values()
    ]


def _answer(rows: Mapping[str, Sequence[JSONObject]]) -> Answer:
    """Which models have a finite best output, and what the others need."""
    wrong = [name for name, (model, *_) in rows.items() if not model["agrees"]]
    if wrong:
        return Answer(
            f"The numerical evidence disagrees with the verdict for {', '.join(wrong)}.", "bad"
        )
    groups: dict[str, list[str]] = {}
    for name, (model, *_) in rows.items():
        groups.setdefault(_free(model, model["step_verdict"]), []).append(name)
    says = {
        "nothing": "every layer of {} has a finite best output",
        "gains": "every layer of {} has a finite best output while the norms' gains stay bounded",
        "weights": (
            "the best outputs of {} are finite only with a bound or a penalty on the weights (no"
            " fault of a model)"
        ),
        "unknown": "it is not known whether the best outputs of {} are finite",
    }
    other = "every layer of {} has a finite best output with {}"
    parts = [
        says.get(need, other).format(", ".join(names), need)
        for need, names in sorted(
            groups.items(), key=lambda each: list(says).index(each[0]) if each[0] in says else 0
        )
    ]
    text = "; ".join(parts)
    apart = [
        name
        for name, (model, *_) in rows.items()
        if _free(model, model["verdict"]) != _free(model, model["step_verdict"])
    ]
    if apart:
        ode = (
            f" This is about the Transformer: the ODE of {', '.join(apart)} needs more, as the"
            " table shows."
        )
    else:
        ode = ""
    return Answer(f"{text[0].upper()}{text[1:]}.{ode} Numerical searches agree.", "good")


def _free(model: JSONObject, verdict: str) -> str:
    """What has to be bounded; what must stay fixed where a penalty decides."""
    if model["held"]:
        held = "+".join(model["held"])
    else:
        held = "the rest"
    return FREE.get(verdict, f"{held} fixed")


def _largest(model: JSONObject) -> JSONObject:
    """The segment with the largest costate."""
    found: JSONObject = next(s for s in model["segments"] if s["segment"] == model["largest"])
    return found


def _has_ode(model: JSONObject) -> bool:
    return all(segment["ode"] for segment in model["segments"])


def _row(name: str, models: Sequence[JSONObject]) -> list[Any]:
    """The verdict that the models share, and the figures of each."""
    first = models[0]
    if first["agrees"]:
        doubt = ""
    else:
        doubt = "?"
    mark: Mark = "bad" if doubt else ""
    figures = [
        [_supremum(_largest(model)), Cell(penalty(model["training_threshold"]))] for model in models
    ]
    return [
        name,
        Cell(_free(first, first["verdict"]) + doubt if _has_ode(first) else NO_ODE, mark=mark),
        Cell(_free(first, first["step_verdict"]) + doubt, mark=mark),
        *(
            Cell(", ".join(dict.fromkeys(each.text for each in cells)), cells[0].value)
            for cells in zip(*figures, strict=True)
        ),
    ]


def _details(name: str, model: JSONObject) -> list[Any]:
    evidence = model["evidence"] or {}

    def verdict(words: str) -> Cell:
        if model["held"]:
            held = words.replace("the rest fixed", f"{'+'.join(model['held'])} fixed")
        else:
            held = words
        return Cell(held if model["agrees"] else f"{held}?", mark="" if model["agrees"] else "bad")

    return [
        name,
        verdict(model["verdict"]) if _has_ode(model) else NO_ODE,
        verdict(model["step_verdict"]),
        model["largest"],
        _found(_largest(model)),
        _largest(model)["ellipsoid"],
        *(evidence.get(key) for key in EVIDENCE),
    ]


def _supremum(segment: JSONObject) -> Cell:
    """H, from what was found to what is proven where its maximiser is the best that was found."""
    known = segment["hamiltonian"]
    ceiling = segment["certificate"]["ceiling"]
    if known is None:
        return Cell("open" if segment["verdict"] == "open" else "finite")
    if ceiling is None or _decayed(segment):
        proven = ""
    else:
        proven = f"..{digits(ceiling)}"
    return Cell(f"{digits(known)}{proven}", known)


def _decayed(segment: JSONObject) -> bool:
    """Whether the verdict is that of the weight decay asked about."""
    return bool(segment["verdict"] != segment["certificate"]["verdict"])


def _found(segment: JSONObject) -> Any:
    """The best value of a search; none where a weight decay decides, for which the search does not
    pay.
    """
    certificate = segment["certificate"]
    if _decayed(segment):
        return None
    if certificate["velocities"] is not None:
        return certificate["velocities"]["best"]
    if certificate["growth"] is None:
        return None
    return certificate["growth"]["values"][-1]


def penalty(threshold: JSONObject | None) -> str:
    """dt lam*, from what was found to what is proven where these differ, or a dash."""
    if threshold is None:
        return "–"
    lower = threshold["lower"]
    upper = threshold["upper"]
    low = f"{lower:.2g}"
    high = f"{upper:.2g}"
    power = ""
    if 0 < upper < 0.1:  # one power for both takes less room
        k = math.floor(math.log10(upper))
        low = f"{lower / 10**k:.1f}"
        high = f"{upper / 10**k:.1f}"
        power = f"e{k}"
    if low == high:
        return f"{low}{power}"
    return f"{low}-{high}{power}"


def _notes(models: Mapping[str, JSONObject]) -> list[str]:
    """What replaces an ODE, what was skipped, what a weight decay does, and where more than one
    velocity is optimal.
    """
    lines = [
        f"{name}: {model['instead']}"
        for name, model in models.items()
        if model["instead"] is not None
    ]
    lines += [
        f"{name}: {where} is skipped: {why}"
        for name, model in models.items()
        for where, why in (model["skipped"] or {}).items()
    ]
    for name, model in models.items():
        lines += [f"{name}: {line}" for line in _decay_notes(model)]
        if not any(finite([segment["costate_norm"] for segment in model["segments"]])):
            lines.append(f"{name}: {ZERO_GRADIENT}; the verdict is of any other costate")
        ties = sum(segment["certificate"]["ties"] for segment in model["segments"])
        if ties:
            tokens = len(model["segments"]) * model["tokens"]
            lines.append(
                f"{name}: a tie, more than one velocity is optimal, for {ties} of {tokens} tokens"
            )
    return lines


def _decay_notes(model: JSONObject) -> list[str]:
    """What the weight decay asked about does, and what no weight decay can do."""
    threshold = model["training_threshold"]
    asked = _largest(model)["weight_decay"]
    if asked is None:
        return []
    if threshold is None:
        unknown = sum(segment["verdict"] == "open" for segment in model["segments"])
        why = (
            "gives access to no path of two factors (a gate or a scale by channel makes a third):"
            " the decay it needs is not known"
        )
        if unknown:
            return [f"{unknown} of {len(model['segments'])} segments have a map that {why}"]
        return []
    needed = f"dt lam* is {penalty(threshold)}"
    if asked < threshold["lower"]:
        lines = [
            f"a penalty of {asked:g} is {threshold['lower'] / asked:.3g} times too small for a"
            f" finite H: {needed}"
        ]
    elif asked < threshold["upper"]:
        lines = [
            f"a penalty of {asked:g} is between the dt lam* that was found and what is proven to"
            f" suffice: {needed}"
        ]
    else:
        lines = [f"a penalty of {asked:g} keeps both factors from running away: {needed}"]
    if threshold["bias"] > 0:
        lines.append(
            "biases without decay make H infinite whatever the penalty, as dt |sum_j p_j| ="
            f" {threshold['bias']:.2g} is not 0"
        )
    if threshold["gains"]:
        lines.append(
            "so do the input norm's gains: trained, they are a third factor, and the value grows"
            " like R^3"
        )
    return lines


def _sets(models: Mapping[str, JSONObject]) -> list[Words]:
    """The admissible sets, each with the models that have a segment with it."""
    sets: dict[str, list[str]] = {}
    for name, model in models.items():
        for words in dict.fromkeys(
            segment["certificate"]["words"] for segment in model["segments"]
        ):
            sets.setdefault(words, []).append(name)
    says = "f_j is the sublayer's output for token j, u_j a point of the norm's sphere"
    return [Words(says, [f"{', '.join(names)}: {words}" for words, names in sets.items()])]


def _segment(segment: JSONObject) -> list[Any]:
    certificate = segment["certificate"]
    where = Cell(f"{segment['segment']} ({segment['kind']})", float(segment["segment"]))
    return [where, certificate["words"], segment["verdict"], certificate["hamiltonian"]]


def _norms(models: Mapping[str, JSONObject]) -> dict[str, dict[str, JSONObject]]:
    """The models by norm."""
    norms: dict[str, dict[str, JSONObject]] = {}
    for model in models.values():
        norms.setdefault(model["norm"], {})[model["short"]] = model
    return norms


def _growth(models: JSONObject) -> list[Plot]:
    """The best value with |W|_F <= R against R, at the segment with the largest costate; a chart
    for each norm.
    """
    return [
        Plot(
            norm,
            "bound on the last linear map's weights, R/R_0",
            "how fast the loss could fall, less any penalty",
            [line for name, model in row.items() for line in _growth_lines(name, model)],
            "Found by search: solid. By formula: dashed. A curve that levels off is bounded; one"
            " that grows with R is not. R_0 makes the best velocity out of the features. Gains are"
            " as they are.",
            log_x=True,
        )
        for norm, row in _norms(models).items()
    ]


def _growth_lines(name: str, model: JSONObject) -> list[Line]:
    """What a search found, and where it is finite what the formula says."""
    segment = _largest(model)
    growth = segment["certificate"]["growth"]
    slope = segment["slope"]
    lines = list[Line]()
    radii = [0.01, 100.0]
    share = [0.01, 100.0]
    if growth is not None:
        radii = finite(growth["radii"])
        share = [radius / math.sqrt(radii[0] * radii[-1]) for radius in radii]
        lines.append(Line(name, share, growth["values"], model["placement"]))
    bound = [
        segment["certificate"]["hamiltonian"] if slope is None else slope * radius
        for radius in radii
    ]
    return [
        *lines,
        *([Line(name, share, bound, model["placement"], bound=True)] if finite(bound[:1]) else []),
    ]


def _by_depth(models: JSONObject) -> list[Plot]:
    charts = []
    for norm, row in _norms(models).items():
        costates = [
            _line(name, model, [s["costate_norm"] for s in model["segments"]])
            for name, model in row.items()
        ]
        values = [
            _line(name, model, [s["certificate"]["hamiltonian"] for s in model["segments"]])
            for name, model in row.items()
        ]
        t = "depth-time t"
        formula = "H(P) = sup −<P, f>"
        where = "Where it is infinite there is no point."
        charts += [
            Plot(
                f"Costate, {norm}",
                t,
                "|P| = |dL/dX|",
                costates,
                "The loss's gradient by the state.",
            ),
            Plot(f"Steepest descent, {norm}", t, formula, values, where),
        ]
    return charts


def _line(name: str, model: JSONObject, values: Sequence[Any]) -> Line:
    return Line(
        name, [segment["time"] for segment in model["segments"]], values, model["placement"]
    )

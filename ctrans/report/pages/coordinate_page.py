"""What `ctrans coordinate-check` shows: how activations, and what updates do to them, grow with the
width.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from ctrans.report.sections import Answer, Cell, Chapter, Column, Line, Plot, Table, number, numbers
from ctrans.training.coordinate_check import Coordinates, Power, powers

MOST_LINES = 7
"""Places of a chart: of more, some that lie evenly along the depth, the logits among them."""
SURE = 2.0
"""An exponent differs from 0 where it is so many standard errors away."""
SIZE = "k of mean |activation| ~ width^k, with its standard error"
CHANGE = "k of mean |change| ~ width^k: 0 where one learning rate suits every width, above 0 where wide models need a smaller one"


def chapters(models: Mapping[str, Any], result: Mapping[str, Any]) -> list[Chapter]:
    """The place that grows most, exponents by place, and sizes and changes against the width."""
    parts, charts = list[Answer | Table](), list[Plot]()
    for name, found in models.items():
        charts += _charts(name, found)
        parts += [_answer(found), _table(name, found)]
    return [Chapter("Growth with the width", parts), Chapter("By width", charts, picture="coordinate-check")]


def _answer(found: Mapping[str, Any]) -> Answer:
    known = [_power(each) for each in found["change_powers"][-1]]
    grows = any(each.exponent > SURE * (0.0 if math.isnan(each.error) else each.error) for each in known)
    words = found["verdict"]
    text = f"Updates move activations {words}." if words.startswith("most") else f"{words[0].upper()}{words[1:]}."
    return Answer(text, "note" if grows else "good")


def _table(name: str, found: Mapping[str, Any]) -> Table:
    after = found["coordinates"][-1]["t"]
    columns = [Column("size at the start", SIZE), Column(f"size after {after}", SIZE)]
    columns += [Column(f"change after {each['t']}", CHANGE) for each in found["coordinates"][1:]]
    values = [found["size_powers"][0], found["size_powers"][-1], *found["change_powers"][1:]]
    rows = [[Cell(place), *(_cell(each[k]) for each in values)] for k, place in enumerate(found["places"])]
    return Table(name, [Column("place"), *columns], rows, "Exponents k of the growth with the width, with standard errors.")


def _power(found: Mapping[str, Any]) -> Power:
    return Power(*(math.nan if (value := number(found[key])) is None else value for key in ("exponent", "error")))


def _cell(found: Mapping[str, Any]) -> Cell:
    power = _power(found)
    return Cell("–" if math.isnan(power.exponent) else str(power), None if math.isnan(power.exponent) else power.exponent)


def _charts(name: str, found: Mapping[str, Any]) -> list[Plot]:
    shown = _evenly(len(found["places"]))
    first, last = found["coordinates"][0], found["coordinates"][-1]
    panels = (("Size at the start", first["sizes"]), (f"Change after {last['t']} updates", last["changes"]))
    return [
        Plot(
            f"{name}: {title}" if name else title,
            "width",
            "mean |entry|",
            [Line(found["places"][k], list(map(float, values)), numbers([row[k] for row in values.values()])) for k in shown],
            log_x=True,
        )
        for title, values in panels
    ]


def _evenly(count: int) -> list[int]:
    lines = min(count, MOST_LINES)
    return sorted({round(i * (count - 1) / max(1, lines - 1)) for i in range(lines)})


def coordinate_words(found: Sequence[Coordinates], places: Sequence[str], widths: Sequence[int]) -> str:
    """What was measured at the place whose change grows most with the width after the last update,
    and over which widths.
    """
    last = found[-1]
    grown = [(power, place) for power, place in zip(powers(last.changes), places, strict=True) if not math.isnan(power.exponent)]
    if not grown:
        return "no place changed at every width, or one is not finite: no exponent can be given"
    power, place = max(grown, key=lambda each: each[0].exponent)
    after = f"after {last.t} update{'s' * (last.t != 1)}, from width {min(widths)} to {max(widths)}"
    return f"most at {place}: its change {growth_words(power)} {after}"


def growth_words(power: Power) -> str:
    """The exponent in words. Within two standard errors of 0 it is "not told from standing still";
    two widths have no error.
    """
    how = f"width^{power}"
    unsure = SURE * power.error if not math.isnan(power.error) else 0.0
    if abs(power.exponent) <= unsure:
        return f"is not told from standing still ({how})"
    return f"{'grows' if power.exponent > 0 else 'shrinks'} like {how}"

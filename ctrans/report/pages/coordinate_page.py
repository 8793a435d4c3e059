"""What `ctrans coordinate-check` shows: how activations, and what updates do to them, grow with the
width.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from ctrans.report.sections import Answer, Cell, Chapter, Column, JSONObject, Line, Plot, Table, cell, table
from ctrans.training.coordinate_check import Coordinates, Power, powers

MOST_LINES = 7
"""Places of a chart: of more, some that lie evenly along the depth, the logits among them."""
SURE = 2.0
"""An exponent differs from 0 where it is so many standard errors away."""
SIZE = "k of mean |activation| ~ width^k, with its standard error"
CHANGE = "k of mean |change| ~ width^k: 0 where one learning rate suits every width, above 0 where wide models need a smaller one"


def chapters(models: JSONObject, result: JSONObject) -> list[Chapter]:
    """The place that grows most, exponents by place, and sizes and changes against the width."""
    parts, charts = list[Answer | Table](), list[Plot]()
    for name, found in models.items():
        charts += _charts(name, found)
        parts += [_answer(found), _table(name, found)]
    return [Chapter("Growth with the width", parts), Chapter("By width", charts, picture="coordinate-check")]


def _answer(found: JSONObject) -> Answer:
    grows = any(each.exponent > unsure(each) for each in (Power(**each) for each in found["change_powers"][-1]))
    words = found["verdict"]
    text = f"Updates move activations {words}." if words.startswith("most") else f"{words[0].upper()}{words[1:]}."
    return Answer(text, "note" if grows else "good")


def _table(name: str, found: JSONObject) -> Table:
    after = found["coordinates"][-1]["t"]
    columns = [Column("size at the start", SIZE), Column(f"size after {after}", SIZE)]
    columns += [Column(f"change after {each['t']}", CHANGE) for each in found["coordinates"][1:]]
    values = [found["size_powers"][0], found["size_powers"][-1], *found["change_powers"][1:]]
    rows = [[place, *(_cell(each[k]) for each in values)] for k, place in enumerate(found["places"])]
    return table(name, ["place", *columns], rows, "Exponents k of the growth with the width, with standard errors.")


def _cell(found: JSONObject) -> Cell:
    power = Power(**found)
    return cell(None) if math.isnan(power.exponent) else Cell(str(power), power.exponent)


def _charts(name: str, found: JSONObject) -> list[Plot]:
    shown = _evenly(len(found["places"]))
    first, last = found["coordinates"][0], found["coordinates"][-1]
    panels = (("Size at the start", first["sizes"]), (f"Change after {last['t']} updates", last["changes"]))
    return [
        Plot(
            f"{name}: {title}" if name else title,
            "width",
            "mean |entry|",
            [Line(found["places"][k], list(map(float, values)), [row[k] for row in values.values()]) for k in shown],
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


def unsure(power: Power) -> float:
    """Up to which size an exponent is not told from 0."""
    return 0.0 if math.isnan(power.error) else SURE * power.error


def growth_words(power: Power) -> str:
    """The exponent in words. Within two standard errors of 0 it is "not told from standing still";
    two widths have no error.
    """
    how = f"width^{power}"
    if abs(power.exponent) <= unsure(power):
        return f"is not told from standing still ({how})"
    return f"{'grows' if power.exponent > 0 else 'shrinks'} like {how}"

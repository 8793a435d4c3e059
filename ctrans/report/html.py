"""A page as one HTML file: styles, scripts, charts' library and data inside, nothing from a
network.
"""

from __future__ import annotations

import base64
import dataclasses
import gzip
import hashlib
import importlib.util
import json
import math
import re
from collections.abc import Sequence
from functools import cache
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ctrans.base.json_values import plain
from ctrans.base.printable import printable
from ctrans.report.drawable import drawable
from ctrans.report.map_colours import RAMPS
from ctrans.report.placement_style import looks_of
from ctrans.report.repeats import parts_of
from ctrans.report.sections import SEVERITY_MARKS, Page, Plot, digits
from solvers import ConfigError

if TYPE_CHECKING:
    import markupsafe

MOST_LINES = 7
"""Most lines of a chart that its description in words has."""
MISSING = "a page needs mpld3 and jinja2: pip install 'ctrans[report]'"
DRAWING = ("scales.js", "charts.js")
"""Scripts that need d3."""


def render(page: Page) -> str:
    """The page's HTML. All that came from a user, names of models and files, is escaped: text is
    never taken for markup.

    Raises ConfigError where the libraries of the extra `report` are not installed.
    """
    charts = [chart for chapter in page.chapters for chart in chapter.charts]
    library, library_hash = _library()
    script = _file("page.js")
    text: str = _template().render(
        page=page,
        parts=parts_of(page),
        number={id(chart): i for i, chart in enumerate(charts)},
        described=_described,
        severities=SEVERITY_MARKS,
        charts=_packed(_drawing(charts)),
        results=_packed(_json(plain(_download(page)))),
        results_name=_download_name(page),
        library=library,
        allowed=f"{_hash(script)} {library_hash}",
        style=_file("page.css"),
        script=script,
        kind=lambda part: type(part).__name__,
        place=id,
    )
    return text


def check_libraries() -> None:
    """Raises ConfigError where the libraries of the extra `report` are not installed."""
    _template()
    _library()


@cache
def _template() -> Any:
    try:
        import jinja2
    except ImportError:
        raise ConfigError(MISSING) from None
    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    environment.filters["coded"] = _coded
    return environment.from_string(_file("page.html.j2"))


@cache
def _library() -> tuple[str, str]:
    """The script that draws, packed, and its hash: d3, as the Python package mpld3 brings it, and
    our charts. Packed, d3 has 104 KB in place of 238.

    mpld3 is not imported as Python, which would take longer than the page.
    """
    try:
        d3 = (_folder_of("mpld3") / "js" / "d3.v5.min.js").read_text("utf-8")
    except OSError:
        raise ConfigError(MISSING) from None
    script = "\n".join((d3, *map(_file, DRAWING)))
    return _packed(script), _hash(script)


def _folder_of(package: str) -> Path:
    """Where a package is installed, without importing it. Raises FileNotFoundError without it."""
    found = importlib.util.find_spec(package)
    if found is None or found.origin is None:
        raise FileNotFoundError(package)
    return Path(found.origin).parent


def _packed(text: str) -> str:
    """The text, packed by gzip and written in base64, which the browser unpacks. No tag can begin
    in it, whatever the text is.
    """
    return base64.b64encode(gzip.compress(text.encode(), mtime=0)).decode()


def _hash(script: str) -> str:
    """The script's name in a content security policy, by which a browser runs this one and no
    other.
    """
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"


def _file(name: str) -> str:
    return resources.files("ctrans.report").joinpath(name).read_text("utf-8")


def _coded(text: str) -> markupsafe.Markup:
    """The text, escaped, with `code` between backticks as an element."""
    import markupsafe

    return markupsafe.Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", str(markupsafe.escape(text))))


def _described(chart: Plot) -> str:
    """The chart in words, for those who cannot see it: each line's first and last figure."""
    lines = []
    for line in chart.lines[:MOST_LINES]:
        points = [(x, y) for x, y in zip(line.x, line.y, strict=True) if y is not None]
        if points and chart.kind != "points":
            first, start = points[0]
            last, end = points[-1]
            name = line.model
            if line.bound and not line.predicted:
                name = f"{line.model}, bound"
            lines.append(
                f"{name}: {digits(start)} at {digits(first)}, {digits(end)} at {digits(last)}"
            )
    return f"{chart.title}: {chart.y} against {chart.x}. {'; '.join(lines)}"


def _download(page: Page) -> Any:
    """What the page's button gives: the result, or several by their names."""
    if len(page.results) == 1:
        return next(iter(page.results.values()))
    return page.results


def _download_name(page: Page) -> str:
    if len(page.results) == 1:
        return f"{printable(_download(page)['command'])}.json"
    return "results.json"


def _drawing(charts: Sequence[Plot]) -> str:
    """What the scripts draw, as JSON: the charts, the looks of their lines and the colours of
    maps.
    """
    drawing = {
        "charts": [dataclasses.asdict(drawable(chart)) for chart in charts],
        "looks": _looks(charts),
        "ramps": RAMPS,
    }
    return _json(_without_infinities(drawing))


def _json(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), allow_nan=False)


def _without_infinities(value: Any) -> Any:
    """The value with null for infinities and nan: nothing can be drawn there."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {str(key): _without_infinities(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_without_infinities(entry) for entry in value]
    return value


def _looks(charts: Sequence[Plot]) -> list[dict[str, Any]]:
    """The look of every line, as pictures have it, and whether its name is `local` to a chart."""
    from matplotlib.colors import to_hex

    lines = [line for chart in charts for line in chart.lines]
    models = {line.model for line in lines if not line.local}
    looks = looks_of((line.model, line.placement) for line in lines)
    return [
        {
            "name": name,
            "colour": to_hex(look.colour),
            "marker": look.marker,
            "repeat": look.repeat,
            "local": name not in models,
        }
        for name, look in looks.items()
    ]

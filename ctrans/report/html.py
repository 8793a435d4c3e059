"""A page as one HTML file: styles, script, pictures' library and data inside, nothing from a
network.
"""

from __future__ import annotations

import base64
import dataclasses
import gzip
import hashlib
import json
import math
import re
from collections.abc import Sequence
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING, Any

from ctrans.base.json_values import plain
from ctrans.base.printable import UNSAFE
from ctrans.report.placement_style import looks_of
from ctrans.report.sections import SEVERITY_MARKS, Page, Plot, digits, finding_rows
from solvers import ConfigError

if TYPE_CHECKING:
    import markupsafe

MOST_LINES = 7
"""Most lines of a chart that its description in words has."""
MISSING = "a page needs plotly and jinja2: pip install 'ctrans[report]'"


def render(page: Page) -> str:
    """The page's HTML. All that came from a user, names of models and files, is escaped: text is
    never taken for markup.

    Raises ConfigError where the libraries of the extra `report` are not installed.
    """
    charts = [chart for chapter in page.chapters for chart in chapter.charts]
    library, library_hash = _library()
    text: str = _template().render(
        page=page,
        number={id(chart): i for i, chart in enumerate(charts)},
        described=_described,
        finding_rows=finding_rows,
        severities=SEVERITY_MARKS,
        charts=_data([dataclasses.asdict(chart) for chart in charts]),
        results=_data(plain(page.results)),
        looks=_data(_looks(charts)),
        library=library,
        allowed=f"{_hash(_file('page.js').encode())} {library_hash}",
        style=_file("page.css"),
        script=_file("page.js"),
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
    """Plotly's script as its Python package brings it, packed by gzip as text: 2 MB in place of
    4.8, which the browser unpacks. And the hash of the script.

    Not imported as Python, which would take longer than the page.
    """
    try:
        script = resources.files("plotly").joinpath("package_data", "plotly.min.js").read_bytes()
    except (ImportError, OSError):
        raise ConfigError(MISSING) from None
    return base64.b64encode(gzip.compress(script, mtime=0)).decode(), _hash(script)


def _hash(script: bytes) -> str:
    """The script's name in a content security policy, by which a browser runs this one and no
    other.
    """
    return f"'sha256-{base64.b64encode(hashlib.sha256(script).digest()).decode()}'"


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


def _data(value: Any) -> str:
    """JSON that may stand in a script element: no tag can begin in it, and infinities are null, as
    nothing can be drawn there.
    """
    text = json.dumps(_drawable(value), separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    text = UNSAFE.sub(lambda match: json.dumps(match[0])[1:-1], text)
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def _drawable(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {str(key): _drawable(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_drawable(entry) for entry in value]
    return value


SYMBOLS = {
    "o": "circle",
    "s": "square",
    "D": "diamond",
    "^": "triangle-up",
    "v": "triangle-down",
    "P": "cross",
    "X": "x",
    "*": "star",
}
"""Matplotlib's names of marks in Plotly's words."""


def _looks(charts: Sequence[Plot]) -> list[Any]:
    """Name, colour, mark and number of repeats of every model, as pictures have them."""
    from matplotlib.colors import to_hex

    looks = looks_of((line.model, line.placement) for chart in charts for line in chart.lines)
    return [
        [name, to_hex(look.colour), SYMBOLS.get(look.marker, "circle"), look.repeat]
        for name, look in looks.items()
    ]

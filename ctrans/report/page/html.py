"""A page as one HTML file: styles, script, pictures' library and data inside, nothing from a network."""

from __future__ import annotations

import base64
import dataclasses
import functools
import gzip
import json
from importlib import resources
from typing import Any

from ctrans.placement import PLACEMENTS
from ctrans.report.files import plain
from ctrans.report.page.parts import Diagram, Page
from ctrans.report.placement_style import MIXED_COLOUR, MIXED_MARKER
from solvers import ConfigError

MISSING = "a page needs plotly and jinja2: pip install 'ctrans[report]'"


def render(page: Page) -> str:
    """The page's HTML. All that came from a user, names of models and files, is escaped: text is never taken for markup.

    Raises ConfigError where the libraries of the extra `report` are not installed.
    """
    charts = [part for chapter in page.chapters for part in chapter.parts if isinstance(part, Diagram)]
    text: str = _template().render(
        page=page,
        number={id(chart): i for i, chart in enumerate(charts)},
        charts=_data([_of(chart) for chart in charts]),
        results=_data(plain(page.results)),
        looks=_data(_looks()),
        library=_library(),
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


@functools.cache
def _template() -> Any:
    try:
        import jinja2
    except ImportError:
        raise ConfigError(MISSING) from None
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined)
    return environment.from_string(_file("page.html.j2"))


@functools.cache
def _library() -> str:
    """Plotly's script as its Python package brings it, packed by gzip as text: 2 MB in place of 4.8, which the browser unpacks.

    Not imported as Python, which would take longer than the page.
    """
    try:
        script = resources.files("plotly").joinpath("package_data", "plotly.min.js").read_bytes()
    except (ImportError, OSError):
        raise ConfigError(MISSING) from None
    return base64.b64encode(gzip.compress(script, mtime=0)).decode()


def _file(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text("utf-8")


def _of(chart: Diagram) -> dict[str, Any]:
    return {**dataclasses.asdict(chart), "id": None}


def _data(value: Any) -> str:
    """JSON that may stand in a script element: no tag can begin in it, and infinities are null, as nothing can be drawn there."""
    text = json.dumps(_drawable(value), separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def _drawable(value: Any) -> Any:
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return None
    if isinstance(value, dict):
        return {str(key): _drawable(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_drawable(item) for item in value]
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


def _looks() -> dict[str, Any]:
    """Every placement's colour and mark, as pictures everywhere have them, and those of models that mix placements."""
    from matplotlib.colors import to_hex

    known = {name: [to_hex(placement.colour), SYMBOLS.get(placement.marker, "circle")] for name, placement in PLACEMENTS.items()}
    return {**known, "": [to_hex(MIXED_COLOUR), SYMBOLS.get(MIXED_MARKER, "circle")]}

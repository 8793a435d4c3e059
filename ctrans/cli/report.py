"""`ctrans report`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ctrans.base.given_files import read_json
from ctrans.base.option import option
from ctrans.cli.click_options import argument
from ctrans.cli.ending import directory_of, end
from ctrans.cli.model_sources import labels
from ctrans.cli.request import WrittenRequest, command_of
from ctrans.report.contents import page_of
from ctrans.report.html import check_libraries, render
from solvers import ConfigError

PAGE = "report.html"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReportRequest(WrittenRequest):
    """The request of `report`: JSON files as `results`."""

    results: tuple[Path, ...] = argument("RESULT.json...", required=True)
    out: Path | None = option(
        None,
        "Directory for report.html and report.json.",
        group="Output",
        default_words="out/report",
    )


@command_of(ReportRequest, "report")
def command(request: ReportRequest) -> None:
    """Put the JSON results of commands side by side on one page.

    Results of the same command share tables and charts: for example screenings of two
    architectures, or of one model before and after a change. Results of different commands follow
    one another. The page is one HTML file with interactive figures, sortable tables and the JSON.
    It needs no network. This command needs mpld3 and jinja2 (pip install 'ctrans[report]').

    \b
    ctrans report out/screen/screen.json
    ctrans report before/screen.json after/screen.json --out out/compared
    ctrans screen --compare dt=1,0.1 --quick --html screen.html
    """
    check_libraries()
    results = _read(request.results)
    page = page_of(results)
    names: list[str] = []
    if not request.html_path:
        names.append(PAGE)
    directory = directory_of(request, files=names)
    about = {
        "results": {
            name: {key: result.get(key) for key in ("command", "environment")}
            for name, result in results.items()
        },
        "chapters": [chapter.title for chapter in page.chapters],
    }
    files: dict[str, Callable[[], bytes]] = {}
    if not request.html_path:
        files[PAGE] = lambda: render(page).encode()
    end(request, directory, result=about, report=page, files=files)


def _read(paths: Sequence[Path]) -> dict[str, Any]:
    """The results by the parts of their paths that differ. Raises ConfigError for a file that is
    named twice or cannot be read.
    """
    if len(set(paths)) < len(paths):
        twice = next(path for path in paths if paths.count(path) > 1)
        raise ConfigError(f"{str(twice)!r} is named twice: name each result once")
    return dict(zip(labels([str(path) for path in paths]), map(read_json, paths), strict=True))

"""How a command ends: what it found is written, shown and judged, in the same way by all of them."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import click
import torch
from rich.console import Console
from rich.markup import escape

from ctrans import __version__
from ctrans.cli.inputs import InputSummary
from ctrans.cli.model_sources import resolved
from ctrans.cli.plugins import LOADED
from ctrans.cli.request import Request, WrittenRequest
from ctrans.report.contents import page_of
from ctrans.report.files import check_writable, to_json, write_atomic
from ctrans.report.html import check_libraries, render
from ctrans.report.picture import pictures
from ctrans.report.sections import Page
from ctrans.report.terminal import show
from solvers import ConfigError

CPU = torch.device("cpu")


@dataclasses.dataclass(frozen=True, kw_only=True)
class CommandEnding:
    """What a command found.

    - `result`: the result's own keys, after `command`, `options`, `environment` and `model`. `SECTIONS` makes what is shown of it.
    - `options`: what became of options, and options that are shown last
    - `looked_at`: models and text, for commands that look at models
    - `device`: what it was computed on
    - `files`: further files of the directory, besides JSON and charts: names, and what makes their content
    - `report`: the page to show, where it is not that of the result alone
    - `failures`: what went wrong, a line each; the exit code is then 1
    """

    result: Mapping[str, Any]
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    looked_at: InputSummary | None = None
    device: torch.device = CPU
    files: Mapping[str, Callable[[], bytes]] = dataclasses.field(default_factory=dict)
    report: Page | None = None
    failures: Sequence[str] = ()


def directory_of(request: WrittenRequest) -> Path | None:
    """Where files go: as asked, nowhere when the JSON goes to stdout, else out/<command>.

    Called when all else about a request is checked and nothing is computed: ConfigError unless files can be written there.
    """
    directory = request.out if request.out is not None else None if request.quiet else Path("out") / request.command
    check_json(request, directory)
    if directory is not None:
        check_writable(directory)
    return directory


def check_json(request: Request, made: Path | None = None) -> None:
    """Raises ConfigError unless JSON and page can be written where they were asked for.

    The directory of a page is created, like the directory of --out, which is `made`. That of the JSON has to exist.
    """
    if request.json_path is not None and not request.quiet:
        _check_file("json", Path(request.json_path), request.command, made)
    if request.html_path is not None:
        _check_file("html", Path(request.html_path), request.command, made)
        check_libraries()


def _check_file(kind: str, path: Path, command: str, made: Path | None) -> None:
    if path.is_dir():
        raise ConfigError(f"--{kind} {str(path)!r} is a directory: give a file in it, as {str(path / f'{command}.{kind}')!r}")
    if made is not None and path.parent.absolute() == made.absolute():
        return
    if kind == "json" and not path.parent.is_dir():
        raise ConfigError(f"--{kind} {str(path)!r}: there is no directory {str(path.parent)!r}; make it, or choose another place")
    check_writable(path.parent)


def end(request: Request, directory: Path | None, ending: CommandEnding) -> None:
    """Writes JSON and files, prints what was found unless stdout is for the JSON, and exits with 1 where something failed.

    The JSON comes first: a picture that cannot be drawn must not lose what hours of computing found.
    """
    models = ending.looked_at
    shown = request.shown(**({} if models is None else resolved(models.found)), **ending.options)
    about = {} if models is None else {"model": models.summary}
    result = {**result_of(request, shown, ending.device), **about, **ending.result}
    text = write_json(request, directory, result, ending.report)
    page = ending.report or page_of({request.command: json.loads(text)})
    files = {**(pictures(page) if ending.report is None else {}), **ending.files}
    if directory is not None:
        for name, make in files.items():
            write_atomic(directory / name, make())
    if not request.quiet:
        console = Console()
        looked_at = None if models is None else models.words
        show(page, console, looked_at=looked_at, verbose=request.verbose)
        _show_files(request, directory, [f"{request.command}.json", *files], console)
    for failure in ending.failures:
        click.echo(f"ctrans: {failure}", err=True)
    if ending.failures:
        raise SystemExit(1)


def result_of(request: Request, options: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    """How every result begins: the command, its options, and what it depends on besides them."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    environment = {"ctrans": __version__, "torch": torch.__version__, "device": name, "threads": torch.get_num_threads()}
    environment |= {"plugins": list(LOADED)} if LOADED else {}
    return {"command": request.command, "options": options, "environment": environment}


def write_json(request: Request, directory: Path | None, result: Mapping[str, Any], report: Page | None = None) -> str:
    """Writes the result object into the directory, and wherever it was asked for; after that its page. Gives the JSON's text."""
    text = save_json(request, directory, result)
    if request.quiet:
        click.echo(text, nl=False)
    if request.html_path is not None:
        page = report or page_of({request.command: json.loads(text)})
        write_atomic(Path(request.html_path), render(page).encode())
    return text


def save_json(request: Request, directory: Path | None, result: Mapping[str, Any]) -> str:
    """The same, but not to stdout, and without the page; gives the text."""
    text = to_json(result) + "\n"
    if directory is not None:
        write_atomic(directory / f"{request.command}.json", text.encode())
    if request.json_path is not None and not request.quiet:
        write_atomic(Path(request.json_path), text.encode())
    return text


def _show_files(request: Request, directory: Path | None, names: Sequence[str], console: Console) -> None:
    """Where the files are."""
    written = [] if directory is None else [f"{directory}/{name}" for name in names]
    written += [] if request.html_path is None else [request.html_path]
    if written:
        console.print(escape("Written: " + ", ".join(written)), soft_wrap=True, highlight=False)

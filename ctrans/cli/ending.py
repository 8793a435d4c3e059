"""The end of a command: all commands write and print their results in the same way."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import click
import torch
from rich.console import Console

from ctrans import __version__
from ctrans.base.json_values import plain
from ctrans.base.printable import printable
from ctrans.cli.exits import Exit
from ctrans.cli.inputs import Batch
from ctrans.cli.model_sources import ModelSource, resolved
from ctrans.cli.plugins import LOADED
from ctrans.cli.request import STDOUT, Request, WrittenRequest
from ctrans.cli.say import naming_stdout, say
from ctrans.measure.measured import Measured
from ctrans.measure.measures import MEASURES
from ctrans.model.config import GPTConfig
from ctrans.model.remarks import remarks_on
from ctrans.report.contents import page_of, page_of_table
from ctrans.report.files import check_writable, takes_data, to_json, write_atomic
from ctrans.report.html import check_libraries, render
from ctrans.report.ownership import (
    WAY_ON,
    check_replaceable,
    check_result,
    is_own_picture,
    place_of,
)
from ctrans.report.picture import pictures
from ctrans.report.sections import Page
from ctrans.report.terminal import show
from solvers import ConfigError

CPU = torch.device("cpu")


def directory_of(
    request: WrittenRequest,
    default: Path | None = None,
    files: Sequence[str] = (),
    other_files: Sequence[str] = (),
) -> Path | None:
    """The directory for a result's files: --out, else none with --json -, else `default` or
    out/COMMAND. For `files` and `other_files` see `check_outputs`.

    Call it after all checks and before the computation. Raises ConfigError if files cannot be
    written there.
    """
    directory = request.out
    if directory is None and not request.quiet:
        directory = default or Path("out") / request.command
    check_outputs(request, directory, files, other_files)
    if directory is not None:
        check_writable(directory)
    return directory


def check_outputs(
    request: Request,
    directory: Path | None = None,
    files: Sequence[str] = (),
    other_files: Sequence[str] = (),
) -> None:
    """Raises ConfigError unless all files of the output can be written, each in a place of its own,
    and replace no input of the command and nothing that ctrans did not write. ctrans makes the
    directory of the page, and that of --out (`directory`). The directory of the JSON must exist.

    - `files`: names in `directory` of the result's files, besides its JSON and its pictures
    - `other_files`: names there, or absolute paths, of what the command writes and checks elsewhere
    """
    of_result = [f"{name}.png" for name in (request.command, *picture_names(request.command))]
    of_result += files
    _check_apart(request, directory, [*of_result, *other_files])
    for kind, path in _named_files(request).items():
        check_file_of(kind, path, request, directory)
    if request.html_path is not None:
        check_libraries()
    if directory is not None:
        check_result(
            directory,
            request.command,
            of_result,
            overwrite=request.overwrite,
            inputs=request.inputs,
            way_on=_way_on(request),
        )


def _way_on(request: Request) -> str:
    """The advice for a file that the command does not replace."""
    if getattr(request, "resume", False):  # which excludes --overwrite
        return "move it away"
    return WAY_ON


def _named_files(request: Request) -> dict[str, Path]:
    """The files that the user named for the output, by the name of the option."""
    named: dict[str, Path] = {}
    if request.json_path is not None and not request.quiet:
        named["json"] = Path(request.json_path)
    if request.html_path is not None:
        named["html"] = Path(request.html_path)
    for kind in ("sarif", "junit"):
        path = getattr(request, kind, None)
        if path is not None:
            named[kind] = path
    return named


def _check_apart(request: Request, directory: Path | None, own_names: Sequence[str]) -> None:
    """Raises ConfigError if a file that the user named for the output has the place of another one,
    or of one that the command writes by itself.
    """
    kinds: dict[Path, str] = {}
    for kind, path in _named_files(request).items():
        if takes_data(path):
            continue
        place = place_of(path)
        if place in kinds:
            raise ConfigError(
                f"--{kinds[place]} and --{kind} name the same file, {str(path)!r}: choose two"
                " places"
            )
        kinds[place] = kind
    home = Path(os.path.realpath(directory or Path()))
    own_places = {home / name for name in own_names}
    result = home / f"{request.command}.json"
    for place, kind in kinds.items():
        # a file in the place of another, or below it, as in a directory of checkpoints
        around = {place, *place.parents}
        clashes = bool(own_places & around)
        if directory is not None:
            is_the_same_json = kind == "json" and place == result
            clashes = clashes or (result in around and not is_the_same_json)
            clashes = clashes or place in {home, *home.parents}
        if clashes:
            raise ConfigError(
                f"--{kind} {str(place)!r} is a place where ctrans {request.command} itself writes:"
                " choose another one"
            )


def check_file_of(kind: str, path: Path, request: Request, directory: Path | None) -> None:
    """Raises ConfigError unless the file of the option --`kind` can be written, and replaces
    nothing that ctrans did not write. ctrans makes `directory`.
    """
    if path.is_dir():
        raise ConfigError(
            f"--{kind} {str(path)!r} is a directory: give a file in it, as"
            f" {str(path / f'{request.command}.{kind}')!r}"
        )
    if takes_data(path):
        return
    check_replaceable(
        path, overwrite=request.overwrite, inputs=request.inputs, way_on=_way_on(request)
    )
    if directory is not None and path.parent.absolute() == directory.absolute():
        return
    if kind == "json" and not path.parent.is_dir():
        raise ConfigError(
            f"--{kind} {str(path)!r}: there is no directory {str(path.parent)!r}; make it, or"
            " choose another place"
        )
    check_writable(path.parent)


def picture_names(command: str) -> list[str]:
    """The names of the PNG files that measures of a command have of their own, without the suffix.
    A process that ran other commands knows their measures too.
    """
    own = (f"ctrans {command}", f"ctrans.{command}")
    return sorted(
        {
            measure.picture
            for measure in MEASURES.values()
            if measure.picture and measure.measured_by.startswith(own)
        }
    )


def end(
    request: Request,
    directory: Path | None,
    result: Mapping[str, Any],
    *,
    options: Mapping[str, Any] = MappingProxyType({}),
    inputs: Batch | None = None,
    files: Mapping[str, Callable[[], bytes]] = MappingProxyType({}),
    report: Page | None = None,
    measured: Measured | None = None,
    failures: Sequence[str] = (),
    code: int = 1,
) -> None:
    """Writes and prints a result. Exits with `code` if there are failures.

    The JSON is written first, so that a figure that cannot be drawn does not lose the result. With
    --json - stdout holds the JSON only.

    - `result`: its own keys, after `command`, `options`, `environment` and `model`
    - `options`: values that replace those of the request
    - `inputs`: models and text, for commands that run models
    - `files`: further files of the directory, or elsewhere by absolute paths: names, and functions
      that make the content
    - `report`: the page to show, if it is not that of the result
    - `measured`: the table of measured values, which the page is drawn from
    - `failures`: one line each
    """
    if inputs is None:
        begin = result_of(request, request.shown(**options), CPU)
        recognised = None
    else:
        effective_options = request.shown(**resolved(inputs.sources), **options)
        begin = result_of(request, effective_options, inputs.tokens.device)
        begin["model"] = inputs.summary
        recognised = inputs.recognised
    whole_result = {**begin, **result}
    if measured is not None and inputs is not None:
        measured = _with_remarks(measured, inputs.sources)
    if measured is not None:
        whole_result = plain({**begin, "measured": measured.as_json(), **result})
        report = page_of_table(whole_result, measured)
    page = write_result(request, directory, whole_result, report)
    drawn: dict[str, Callable[[], bytes]] = {}
    if (report is None or measured is not None) and directory is not None:
        drawn = pictures(page)
        _remove_pictures(request, directory, kept=drawn)
    for name, make in {**drawn, **files}.items():
        if directory is not None or Path(name).is_absolute():
            write_atomic((directory or Path()) / name, make())
    written: list[str] = []
    if directory is not None:
        written += [f"{directory}/{name}" for name in (f"{request.command}.json", *drawn)]
        written += [str(directory / name) for name in files]
    if request.html_path is not None:
        written.append(request.html_path)
    print_page(request, page, written, looked_at=recognised)
    for failure in failures:
        say(failure, error=True)
    if failures:
        raise Exit(code)


def _remove_pictures(request: Request, directory: Path, kept: Collection[str]) -> None:
    """Removes the pictures of an earlier result that this one does not draw again. Pictures that
    ctrans did not write stay.
    """
    for name in (request.command, *picture_names(request.command)):
        path = directory / f"{name}.png"
        if path.name not in kept and path.is_file() and is_own_picture(path):
            with contextlib.suppress(OSError):
                path.unlink()


def _with_remarks(measured: Measured, sources: Sequence[ModelSource]) -> Measured:
    """The table with the remarks on architectures of ctrans."""
    notes = dict(measured.notes)
    for source in sources:
        if isinstance(source.config, GPTConfig):
            remarks = remarks_on(source.config)
            if remarks:
                notes[source.name] = [*notes.get(source.name, ()), *remarks]
    return replace(measured, notes=notes)


def result_of(request: Request, options: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    """The common keys of all results: the command, its options, and what else the result depends
    on.
    """
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    else:
        name = device.type
    environment: dict[str, Any] = {
        "ctrans": __version__,
        "torch": torch.__version__,
        "device": name,
        "threads": torch.get_num_threads(),
    }
    if LOADED:
        environment["plugins"] = list(LOADED)
    return {"command": request.command, "options": options, "environment": environment}


def print_page(
    request: Request, page: Page, written: Sequence[str], *, looked_at: str | None = None
) -> None:
    """Prints the page and the files that were written, unless stdout is closed or holds the
    JSON.
    """
    if request.quiet or not sys.stdout.writable():
        return
    console = Console(emoji=False, highlight=False)
    with naming_stdout():
        show(page, console, looked_at=looked_at, verbose=request.verbose, explain=request.explain)
        if written:
            console.print(printable(f"Written: {', '.join(written)}"), soft_wrap=True, markup=False)


def write_result(
    request: Request, directory: Path | None, result: Mapping[str, Any], report: Page | None = None
) -> Page:
    """Writes the result to the directory, to --json and as the page of --html. Returns the page."""
    text = save_json(request, directory, result)
    if request.quiet:
        say(text, end="", to=click.get_current_context().meta[STDOUT])
    page = report or page_of({request.command: json.loads(text)})
    if request.html_path is not None:
        write_atomic(Path(request.html_path), render(page).encode())
    return page


def save_json(request: Request, directory: Path | None, result: Mapping[str, Any]) -> str:
    """Writes the JSON to the directory and to --json, but not to stdout. Returns its text."""
    text = to_json(result) + "\n"
    if directory is not None:
        write_atomic(directory / f"{request.command}.json", text.encode())
    if request.json_path is not None and not request.quiet:
        write_atomic(Path(request.json_path), text.encode())
    return text

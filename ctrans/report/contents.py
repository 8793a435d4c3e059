"""A command's page: by `view`, from the table of measured values in its JSON.

So the page of a stored result equals the page that the command made. Several results of one
command, of models or of commits, become one page that shows all of their models together.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ctrans.base.old_names import REMOVED_COMMANDS
from ctrans.measure.measured import Measured, escaped, joined, measured_in
from ctrans.report import other
from ctrans.report.sections import (
    Answer,
    Chapter,
    JSONObject,
    Mark,
    Page,
    Words,
    cell,
    decoded,
    table,
)
from ctrans.report.view import view
from solvers import ConfigError, shown

ENTRIES = {
    "simulate": ("ctrans.examine.simulated", "ctrans.examine.converged"),
    "screen": ("ctrans.examine.screened",),
    "diagnose": ("ctrans.examine.diagnosed",),
    "hjb-check": (
        "ctrans.examine.certified",
        "ctrans.examine.principled",
        "ctrans.examine.valued",
        "ctrans.training.degeneracy",
    ),
    "compare": ("ctrans.examine.compared",),
    "control": ("ctrans.examine.principled",),
    "convergence": ("ctrans.examine.converged",),
    "train": ("ctrans.training.trained",),
    "watch": ("ctrans.training.monitor.training_measures",),
    "coordinate-check": ("ctrans.training.transferred",),
    "study": ("ctrans.study.studied",),
    "verify": ("ctrans.examine.verified",),
    "generate": ("ctrans.examine.generated",),
}
"""The modules with the entries of a command's measures, imported when a result of it is shown.

`measured_in` of the first one makes the table of a result of version 1. Version 0.5 removes it.
"""
OWN_CHARTS = {"hjb-check": "ctrans.report.growth"}
"""The module of the chapter of a result whose charts have code of their own."""
WITHOUT_TABLE = ("generate",)
"""Commands whose results of version 1 have nothing that makes a table."""
WRONG = (
    KeyError,
    TypeError,
    AttributeError,
    IndexError,
    ValueError,
    StopIteration,
    ArithmeticError,
)
"""What a result raises that no command has written."""


def page_of(results: JSONObject) -> Page:
    """The page of one or several results, by a name for each. Results of one command share their
    tables and charts.

    Raises ConfigError for what no ctrans command has written.
    """
    if not results:
        raise ConfigError("there are no results: give at least one")
    groups: dict[str, dict[str, Any]] = {}
    for name, result in decoded(results).items():
        command = result.get("command") if isinstance(result, Mapping) else None
        if not isinstance(command, str):
            raise ConfigError(
                f"{name}: this is no result of a ctrans command: give a file that one has written"
                " by --json or --out"
            )
        if command in REMOVED_COMMANDS:
            raise ConfigError(
                f"{name}: the command ctrans {command} was removed, and with it the page of its"
                f" results: use {REMOVED_COMMANDS[command]}"
            )
        if command not in ENTRIES and not result.keys() - {*other.ABOUT}:
            raise ConfigError(
                f"{name}: it says that {shown(command)} wrote it, and holds no result: give a file"
                " that a ctrans command has written by --json or --out"
            )
        groups.setdefault(command, {})[name] = result
    chapters: list[Chapter] = []
    lines: list[str] = []
    for command, group in groups.items():
        try:
            of_command = _chapters(command, group)
            if len(groups) > 1:
                of_command = _named(command, group, of_command)
            chapters += [*of_command, _options(command, group)]
            lines += [_line(command, name, result) for name, result in group.items()]
        except WRONG as error:
            raise _unreadable(command, group, error) from error
    title = " and ".join(f"ctrans {command}" for command in groups)
    return Page(title, "; ".join(lines), chapters, dict(results))


def _named(
    command: str, group: Mapping[str, JSONObject], chapters: Sequence[Chapter]
) -> list[Chapter]:
    """The chapters of one of several commands: they begin with its name and those of its results,
    and an answer with that of its result. Of several results the answers have it already.
    """
    named = []
    for chapter in chapters:
        parts = list(chapter.parts)
        if len(group) == 1:
            (name,) = group
            parts = [
                replace(part, text=f"{name}: {part.text}") if isinstance(part, Answer) else part
                for part in parts
            ]
        named.append(replace(chapter, parts=parts))
    if named:
        heading = Words(f"ctrans {command}: {', '.join(group)}")
        named[0] = replace(named[0], parts=[heading, *named[0].parts])
    return named


def _unreadable(command: str, group: Mapping[str, JSONObject], error: Exception) -> ConfigError:
    """The error for results of which some have another shape than the command writes today."""
    culprits = [name for name, result in group.items() if not _has_page(command, name, result)]
    names = culprits or list(group)
    start = f"{', '.join(names)}: ctrans {command} does not write this"
    if isinstance(error, ConfigError):
        return ConfigError(f"{start}: {error}")
    if isinstance(error, KeyError):
        difference = f"the key {str(error.args[0])!r} is missing"
    else:
        difference = "a value in it is of another type"
    environment = group[names[0]].get("environment")
    if isinstance(environment, Mapping) and environment.get("ctrans"):
        start += f" today, and ctrans {environment['ctrans']} wrote it"
    return ConfigError(f"{start}: {difference}. Run ctrans {command} again for a new file")


def _has_page(command: str, name: str, result: JSONObject) -> bool:
    """Whether a result alone can be shown."""
    try:
        _chapters(command, {name: result})
        _line(command, name, result)
    except WRONG:
        return False
    return True


def page_of_table(result: JSONObject, measured: Measured) -> Page:
    """The page of one result, in JSON's types, whose table is at hand. `page_of` makes the same of
    its JSON alone.
    """
    command = result["command"]
    group = {command: decoded(result)}
    chapters = [
        *view(escaped(measured), command),
        *_own_charts(command, group),
        _options(command, group),
    ]
    line = _line(command, command, group[command])
    return Page(f"ctrans {command}", line, chapters, {command: result})


def table_of(command: str, result: JSONObject) -> Measured:
    """The table of measured values in a command's JSON."""
    modules = [importlib.import_module(name) for name in ENTRIES.get(command, ())]
    if "measured" in result:
        return measured_in(result["measured"])
    of_version_1: Callable[[JSONObject], Measured] = modules[0].measured_in
    return of_version_1(result)


def _has_table(command: str, result: JSONObject) -> bool:
    """Whether the result has a table of measured values, or one can be made of it."""
    return "measured" in result or (command in ENTRIES and command not in WITHOUT_TABLE)


def _chapters(command: str, group: Mapping[str, JSONObject]) -> Sequence[Chapter]:
    if command == "watch":
        training = importlib.import_module("ctrans.report.training")
        return _shown(training.chapters(_unnamed_alone(group)))
    if all(_has_table(command, result) for result in group.values()):
        tables = {label: table_of(command, result) for label, result in group.items()}
        return [*view(escaped(joined(tables)), command), *_own_charts(command, group)]
    return _shown(other.chapters(_unnamed_alone(group)))


def _unnamed_alone(group: Mapping[str, JSONObject]) -> Mapping[str, JSONObject]:
    """The results by name; one alone has no name."""
    if len(group) > 1:
        return group
    return {"": next(iter(group.values()))}


def _shown(chapters: Sequence[Chapter]) -> list[Chapter]:
    return [chapter.shown for chapter in chapters if chapter.shown.parts]


def _own_charts(command: str, group: Mapping[str, JSONObject]) -> list[Chapter]:
    if command not in OWN_CHARTS:
        return []
    chapter: Callable[[JSONObject], Chapter] = importlib.import_module(OWN_CHARTS[command]).chapter
    return [chapter(result) for result in group.values()]


def _options(command: str, group: Mapping[str, JSONObject]) -> Chapter:
    """Options and environment of each result; what differs is marked."""
    rows = []
    for part in ("options", "environment"):
        keys = dict.fromkeys(key for result in group.values() for key in result.get(part) or {})
        for key in keys:
            values = [(result.get(part) or {}).get(key) for result in group.values()]
            mark: Mark = ""
            if len({cell(value).text for value in values}) > 1:
                mark = "note"
            rows.append([key, *(cell(value, mark) for value in values)])
    several = len(group) > 1
    columns = ["option", *(group if several else ["value"])]
    models = []
    for name, result in group.items():
        model = _model(result)
        if model and several:
            model = f"{name}: {model}"
        if model:
            models.append(Words(model))
    return Chapter(
        f"Options and versions of {command}", [*models, table(columns, rows)], folded=True
    )


def _model(result: JSONObject) -> str:
    """What was recognised in an imported model."""
    model = result.get("model")
    if not isinstance(model, Mapping):
        return ""
    several = model.get("several")
    if isinstance(several, Mapping):
        return "; ".join(
            f"{name}: {described['described']}"
            for name, described in several.items()
            if isinstance(described, Mapping)
        )
    return str(model.get("described", ""))


def _line(command: str, name: str, result: JSONObject) -> str:
    """A result in a line: which model it is about, and its size."""
    options = result.get("options") or {}
    texts = {
        "depth": "{} block",
        "width": "width {}",
        "heads": "{} head",
        "dt": "step dt = {}",
        "seed": "seed {}",
    }
    sizes = []
    for key, text in texts.items():
        value = options.get(key)
        if value is None:
            continue
        size: str = text.format(value)
        if key in ("depth", "heads") and value != 1:
            size += "s"
        sizes.append(size)
    named = (result.get("study") or {}).get("name") or (result.get("log") or {}).get("model")
    described = _model(result) or ", ".join(sizes) or str(named or "")
    if name == command:
        return described
    return f"{name}: {described or command}"

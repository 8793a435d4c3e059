"""How a command's result is shown: `SECTIONS` has one entry for each command, which reads the
command's JSON alone.

So the page of a stored result equals the page that the command made. Several results of one
command, of models or of commits, become one page that shows all of their models together.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ctrans.report.sections import Chapter, JSONObject, Page, Words, cell, decoded, table
from solvers import ConfigError, checked

SECTIONS = {
    "screen": "screen",
    "diagnose": "diagnose",
    "simulate": "simulate",
    "hjb-check": "hjb_check",
    "control": "control",
    "convergence": "convergence",
    "verify": "verify",
    "train": "train",
    "watch": "watch",
    "study": "study",
    "coordinate-check": "coordinate",
    "export": "written",
    "generate": "written",
}
"""The page of each command: a module, imported when it is needed, whose `chapters` takes models by
name, of one or several results, and the first result, which has what all have in common. Its
`models` finds the models in a result; without it the result is of one thing.

A command that has no entry is shown as tables of all that its result holds (`other_page`).
"""


@checked
def page_of(results: JSONObject) -> Page:
    """The page of one or several results, by a name for each. Results of one command share their
    tables and charts.

    Raises ConfigError for what no ctrans command has written.
    """
    if not results:
        raise ConfigError("there are no results: give at least one")
    groups: dict[str, dict[str, Any]] = {}
    for name, result in decoded(results).items():
        if isinstance(result, Mapping):
            command = result.get("command")
        else:
            command = None
        if not isinstance(command, str):
            raise ConfigError(
                f"{name}: this is no result of a ctrans command: give a file that one has written"
                " by --json or --out"
            )
        groups.setdefault(command, {})[name] = result
    chapters: list[Chapter] = []
    asked: list[str] = []
    for command, group in groups.items():
        try:
            chapters += [*_chapters(command, group), _options(command, group)]
            asked += [_line(command, name, result) for name, result in group.items()]
        except (
            KeyError,
            TypeError,
            AttributeError,
            IndexError,
            ValueError,
            StopIteration,
            ArithmeticError,
        ) as error:
            raise ConfigError(
                f"{', '.join(group)}: ctrans {command} does not write this ({type(error).__name__}:"
                f" {error}): make the result anew"
            ) from None
    return Page(
        " and ".join(f"ctrans {command}" for command in groups),
        "; ".join(asked),
        chapters,
        dict(results),
    )


def _chapters(command: str, group: Mapping[str, JSONObject]) -> Sequence[Chapter]:
    page = importlib.import_module(f"ctrans.report.pages.{SECTIONS.get(command, 'other')}_page")
    models_in: Callable[[JSONObject], JSONObject] = getattr(
        page, "models", lambda result: {"": result}
    )
    models: dict[str, Any] = {}
    for label, result in group.items():
        for name, model in models_in(result).items():
            models[": ".join(filter(None, (label, name))) if len(group) > 1 else name] = model
    chapters = page.chapters(models, next(iter(group.values())))
    return [each.shown for each in chapters if each.shown.parts]


def _options(command: str, group: Mapping[str, JSONObject]) -> Chapter:
    """Options and environment of each result; what differs is marked."""
    rows = []
    for part in ("options", "environment"):
        keys = dict.fromkeys(key for result in group.values() for key in result.get(part) or {})
        for key in keys:
            values = [(result.get(part) or {}).get(key) for result in group.values()]
            differs = len({cell(value).text for value in values}) > 1
            rows.append([key, *(cell(value, "note" if differs else "") for value in values)])
    several = len(group) > 1
    columns = ["option", *(group if several else ["value"])]
    models = [
        Words(f"{name}: {words}" if several else words)
        for name, result in group.items()
        if (words := _model(result))
    ]
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
            f"{name}: {each['described']}"
            for name, each in several.items()
            if isinstance(each, Mapping)
        )
    return str(model.get("described", ""))


def _line(command: str, name: str, result: JSONObject) -> str:
    """A result in a line: which model it is about, and its size."""
    options = result.get("options") or {}
    words = {
        "depth": "{} block",
        "width": "width {}",
        "heads": "{} head",
        "dt": "step dt = {}",
        "seed": "seed {}",
    }
    given = {key: options[key] for key in words if options.get(key) is not None}
    known = [
        words[key].format(value) + "s" * (key in ("depth", "heads") and value != 1)
        for key, value in given.items()
    ]
    named = (result.get("study") or {}).get("name") or (result.get("log") or {}).get("model")
    described = _model(result) or ", ".join(known) or str(named or "")
    if name == command:
        return described
    return f"{name}: {described or command}"

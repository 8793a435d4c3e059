"""What a page says of a command's result: one entry of `CONTENTS` by command, made of its JSON alone.

So a page of a result that was kept yesterday is the one that the command would have made, and several results of one command, of
models or of commits, become one page with all of their models beside each other.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ctrans.report.page import (
    anything,
    control,
    convergence,
    diagnose,
    families,
    hjb_check,
    screen,
    simulate,
    study,
    train,
    verify,
    watch,
)
from ctrans.report.page.parts import Cell, Chapter, Column, Page, Sheet, Words, cell
from solvers import ConfigError

CommandResult = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Content:
    """How the models of a result are found in it, by name, and what a page says of those of one or several results.

    `chapters` is given the models, and the first result for what all have in common (meanings, limits).
    """

    models: Callable[[CommandResult], Mapping[str, Any]]
    chapters: Callable[[Mapping[str, Any], CommandResult], Sequence[Chapter]]


CONTENTS: dict[str, Content] = {
    "screen": Content(lambda result: result["models"], screen.chapters),
    "diagnose": Content(lambda result: result["placements"], diagnose.chapters),
    "simulate": Content(lambda result: result["placements"], simulate.chapters),
    "hjb-check": Content(hjb_check.models, hjb_check.chapters),
    "control": Content(control.models, control.chapters),
    "convergence": Content(convergence.models, convergence.chapters),
    "verify": Content(lambda result: {"": result}, verify.chapters),
    "train": Content(lambda result: {"": result}, train.chapters),
    "watch": Content(lambda result: {"": result}, watch.chapters),
    "study": Content(lambda result: {"": result}, study.chapters),
    "families": Content(lambda result: result["families"], families.chapters),
}
"""A command that is not here has a page with all that its result holds, as tables (`anything`)."""


def page_of(results: Mapping[str, Any]) -> Page:
    """The page of one or several results, by a name that tells them apart; those of one command are put beside each other.

    Raises ConfigError for what no command of ours has written.
    """
    if not results:
        raise ConfigError("there are no results: give at least one")
    groups: dict[str, dict[str, Any]] = {}
    for name, result in results.items():
        command = result.get("command") if isinstance(result, Mapping) else None
        if not isinstance(command, str):
            raise ConfigError(
                f"{name}: this is no result of a ctrans command: give a file that one has written by --json or --out"
            )
        groups.setdefault(command, {})[name] = result
    chapters: list[Chapter] = []
    for command, group in groups.items():
        chapters += [*_told(command, group), _asked(command, group)]
    title = " and ".join(f"ctrans {command}" for command in groups)
    asked = "; ".join(_line(command, name, result) for command, group in groups.items() for name, result in group.items())
    return Page(title, asked, chapters, dict(results))


def _told(command: str, group: Mapping[str, CommandResult]) -> Sequence[Chapter]:
    content = CONTENTS.get(command)
    first = next(iter(group.values()))
    if content is None:
        return [
            chapter for name, result in group.items() for chapter in anything.chapters(name if len(group) > 1 else "", result)
        ]
    try:
        models: dict[str, Any] = {}
        for label, result in group.items():
            for name, model in content.models(result).items():
                models[name if len(group) == 1 else f"{label}: {name}" if name else label] = model
        return content.chapters(models, first)
    except (KeyError, TypeError, AttributeError, IndexError, ValueError) as error:
        names = ", ".join(group)
        raise ConfigError(
            f"{names}: this is not what ctrans {command} writes ({type(error).__name__}: {error}): make the result anew"
        ) from None


def _asked(command: str, group: Mapping[str, CommandResult]) -> Chapter:
    """Options and environment of each result, and what differs marked."""
    names = list(group)
    rows = []
    for part in ("options", "environment"):
        keys = dict.fromkeys(key for result in group.values() for key in result.get(part) or {})
        for key in keys:
            values = [cell((result.get(part) or {}).get(key)) for result in group.values()]
            differs = len({value.text for value in values}) > 1
            rows.append([Cell(key), *(Cell(v.text, v.value, "note" if differs else "") for v in values)])
    columns = [Column("option"), *(Column(name if len(names) > 1 else "value") for name in names)]
    told = [Words(f"{name}: {words}" if len(names) > 1 else words) for name, result in group.items() if (words := _model(result))]
    return Chapter(
        f"What {command} was asked, and by which versions it was computed", [*told, Sheet("", columns, rows)], folded=True
    )


def _model(result: CommandResult) -> str:
    """What was recognised in an imported model."""
    model = result.get("model")
    several = model.get("several") if isinstance(model, Mapping) else None
    if isinstance(several, Mapping):
        return "; ".join(f"{name}: {each['described']}" for name, each in several.items() if isinstance(each, Mapping))
    return str(model.get("described", "")) if isinstance(model, Mapping) else ""


def _line(command: str, name: str, result: CommandResult) -> str:
    """A result in a line: what was looked at and how large it was."""
    options = result.get("options") or {}
    known = [f"{key} {options[key]}" for key in ("depth", "width", "heads", "dt", "seed") if options.get(key) is not None]
    said = _model(result) or ", ".join(known)
    return said if name == command else f"{name}: {said or command}"

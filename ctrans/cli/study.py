"""`ctrans study`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from ctrans.cli.ending import check_outputs, end
from ctrans.cli.plugins import digest_of_plugins
from ctrans.cli.request import absolute_paths, check_exclusive, command_of
from ctrans.cli.say import say
from ctrans.cli.study_request import TOML, StudyRequest, begins, carry_out, costs, engine, processes
from ctrans.report.ownership import is_own_file
from ctrans.study import export
from ctrans.study.carry_out import Prospect, prospect
from ctrans.study.database import FILE, STORE_FILES, Store, open_store
from ctrans.study.description import Study
from ctrans.study.engine import check_ray
from ctrans.study.finished import FinishedRuns
from ctrans.study.outcomes import Floor, curves, losses, outcomes_of, stable_rule, states
from ctrans.study.presets.claim import Verdict, judge
from ctrans.study.presets.preset import Preset
from ctrans.study.presets.table import PRESETS
from ctrans.study.run_key import PLUGINS
from ctrans.study.studied import measured
from ctrans.study.study_file import read_study
from ctrans.study.training import FAILED
from ctrans.training.data import Data
from ctrans.training.data_sources import read_source
from solvers import ConfigError, unknown

CAUSES = 5
"""The largest number of failures that are printed; the store has all."""


@command_of(StudyRequest, "study")
def command(request: StudyRequest) -> None:
    """Run a study: many trainings, stored in one SQLite file, and a comparison of their results.

    NAME is an experiment of a paper at a size that a laptop can train: {presets}. It shows the
    paper's claim, the measurement and a verdict. FILE.toml has the base configuration, what varies,
    learning rates, seeds and a budget (README). Each run is a training like that of `ctrans train`;
    a run that diverges is a result too. If the study is killed, the same command continues it, and
    no run is repeated.

    \b
    ctrans study kan-table-2
    ctrans study xiong-warmup --scale paper --bin data/openwebtext --dry-run
    ctrans study placements.toml --workers 2 --export csv
    """
    directory = _directory(request)
    _check(request, directory)
    PLUGINS["digest"] = digest_of_plugins() or ""
    study = _study(request)
    if request.dry_run:
        if (directory / FILE).exists():
            with open_store(directory, write=False) as store:
                _say_damage(store)
                plan = prospect(study, store)
        else:
            plan = prospect(study, None)
        result = {**begins(plan), "cost": costs(plan, processes(request.workers))}
        end(request, None, result=result, measured=measured(result))
        return
    with open_store(directory, write=not request.report) as store:
        _say_damage(store)
        plan = prospect(study, store, as_begun=request.report)
        if plan.left and not request.report:
            carry_out(plan, store, engine(request.workers, request.ray))
            plan = prospect(study, store)
        _end(request, directory, store, plan)


def _say_damage(store: Store) -> None:
    for line in store.damaged:
        say(line, error=True)


def _study(request: StudyRequest) -> Study:
    """The named study with the request's changes. Raises ConfigError for an unknown name."""
    if request.name.endswith(TOML):
        if "scale" in request.typed:
            raise ConfigError(
                "--scale is for presets, and a file sets its own sizes: leave --scale out"
            )
        study = read_study(Path(request.name))
    else:
        study = _preset(request).study(request.name, request.scale)
    source = absolute_paths(file=request.file, bin=request.bin)
    names_data = any(source.values())
    if names_data and study.task is not None:
        raise ConfigError(
            f"{study.name} is of the task {study.source['task']}, which has its own data: leave out"
            " --file and --bin"
        )
    changes: dict[str, Any] = {}
    if names_data:
        changes["source"] = source
    elif not request.name.endswith(TOML):
        _check_text(request, study)
    if request.budget is not None:
        changes["budget"] = request.budget
    return dataclasses.replace(study, **changes)


def _check_text(request: StudyRequest, study: Study) -> None:
    """Raises ConfigError if the preset has a text of its own, which is not there."""
    place = study.source.get("bin")
    if place and not request.report and not Path(place).is_dir():
        raise ConfigError(
            f"{request.name} reads {place!r}, which is not there: make it with `make text` in a"
            " clone of ctrans and start the study there, or give a text of yours by --bin or --file"
        )


def _preset(request: StudyRequest) -> Preset:
    if request.name in PRESETS:
        return PRESETS[request.name]
    if Path(request.name + TOML).is_file():
        raise ConfigError(
            f"ctrans has no study {request.name!r}: for the file in this directory give"
            f" {request.name + TOML!r}"
        )
    raise unknown("study", request.name, PRESETS)


def _directory(request: StudyRequest) -> Path:
    if request.name.endswith(TOML) or request.scale == "small":
        name = Path(request.name).stem
    else:
        name = f"{request.name}-{request.scale}"
    return request.out or Path("out") / "study" / name


def _check(request: StudyRequest, directory: Path) -> None:
    """Raises ConfigError for options that exclude each other or that this machine cannot follow."""
    check_exclusive(request, ("file", "bin"), ("dry_run", "report"), ("workers", "ray"))
    if request.ray is not None:
        check_ray()
    exported: list[str] = []
    for form in _formats(request, directory):
        try:
            export.check_format(form)
        except ConfigError as error:
            if form in request.formats:
                raise
            raise ConfigError(
                f"{str(directory)!r} has an earlier export as {form}, which would not fit the new"
                f" study.json: move it away. {error}"
            ) from None
        exported += export.names(form)
    check_outputs(request, directory, exported, STORE_FILES)


def _formats(request: StudyRequest, directory: Path) -> list[str]:
    """The formats of the tables: those asked for, and those of an earlier export that is there. It
    would say less than the new result beside it.
    """
    there = [
        form
        for form in export.FORMATS
        if any(
            path.is_file() and path.stat().st_size and is_own_file(path)
            for path in (directory / name for name in export.names(form))
        )
    ]
    return list(dict.fromkeys([*request.formats, *there]))


def _end(request: StudyRequest, directory: Path, store: Store, plan: Prospect) -> None:
    """Writes and prints the results of the runs so far."""
    runs = plan.kept(store)
    data = _data(plan, runs)
    floor = None
    floors: Mapping[str, Any] = {}
    if data is not None:
        floor = Floor(data.depthless_loss(), data.guess_loss())
        floors = data.floors()
    outcomes = outcomes_of(runs, floor)
    failed = [run for run in runs if run.result.ending == FAILED]
    result = {
        **begins(plan),
        "failed": len(failed),
        "outcomes": outcomes,
        "losses": losses(runs),
        "curves": curves(runs),
        "states": states(runs),
        **floors,
        "stable_rule": stable_rule(runs, floor),
        "verdict": _verdict(request, plan, runs, floor),
    }
    files: dict[str, Callable[[], bytes]] = {}
    for form in _formats(request, directory):
        files |= export.files(form, store, plan.keys_today, outcomes)
    failures = []
    if failed:
        failures.append(
            f"{len(failed)} of {len(plan.runs)} runs failed; the same command tries them again"
        )
    causes = dict.fromkeys(
        f"{run.run.case}, try {run.tries}: {run.result.message}" for run in failed
    )
    table = measured(result)
    notes = {"": [*plan.remarks, *table.notes[""]]}
    end(
        request,
        directory,
        result=result,
        measured=dataclasses.replace(table, notes=notes),
        files=files,
        failures=[*failures, *islice(causes, CAUSES)],
    )


def _verdict(
    request: StudyRequest, plan: Prospect, runs: FinishedRuns, floor: Floor | None
) -> Verdict | None:
    """The verdict of a preset, from the seeds whose runs are all finished. Otherwise the two sides
    of a comparison would be means over different seeds.
    """
    if request.name.endswith(TOML):
        return None
    preset = _preset(request)
    unfinished_seeds = {run.training.seed for run in plan.left.values()}
    finished = [run for run in runs if run.run.training.seed not in unfinished_seeds]
    to_halve = None
    if floor is not None and plan.study.task is not None:
        to_halve = floor.depth
    return judge(preset.claim, preset.source, preset.contrasts, finished, preset.notes, to_halve)


def _data(plan: Prospect, runs: FinishedRuns) -> Data | None:
    """The data of the runs; None before the first run, and where they are missing or others."""
    if not runs:
        return None
    context = runs[0].run.model.context
    try:
        data = read_source(plan.study.source, context)
    except ConfigError:
        return None
    if data.matches(plan.fingerprints[context]):
        return data
    return None


command.help = (command.help or "").replace("{presets}", ", ".join(PRESETS))

"""`ctrans study`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from rich.markup import escape
from rich.table import Table

from ctrans.cli.ending import CommandEnding, check_json, end
from ctrans.cli.request import command_of
from ctrans.cli.study_request import StudyRequest, begins, carry_out, engine, options_of, rest, tell_cost
from ctrans.depth import check_count
from ctrans.report.files import png
from ctrans.report.study_report import outcomes_table, plateau_words, rates_figure
from ctrans.report.verdict_report import effects_table, verdict_figure
from ctrans.study import export
from ctrans.study.carry_out import Prospect, prospect
from ctrans.study.database import Finished, Store, open_store
from ctrans.study.description import Study
from ctrans.study.engine import check_ray
from ctrans.study.outcomes import losses, outcomes_of
from ctrans.study.presets.claim import Verdict, judge
from ctrans.study.presets.table import PRESETS, Preset
from ctrans.study.study_file import read_study
from ctrans.training.data import read_source
from solvers import ConfigError
from solvers.errors import unknown

TOML = ".toml"
PREDICT = "predict"
MOVED = (
    "the study of prediction is an experiment of the repository now: in a checkout, python -m benchmarks.prediction --help shows its "
    "stages; docs/why/prediction.md has what came out"
)


@command_of(StudyRequest, "study")
def command(request: StudyRequest) -> None:
    """Carry out a study: many trainings, kept in one SQLite file, and what they show together.

    NAME is an experiment of a paper, tried at a size that a laptop trains, with what it claims, what was measured and a verdict: {presets}.
    FILE.toml says the base configuration, what varies, learning rates, seeds and a budget (README). Each run is a training as `ctrans
    train` makes it; one that diverges is a result. After a kill at any moment the same command goes on, and nothing runs twice.

    \b
    ctrans study kan-table-2
    ctrans study xiong-warmup --scale paper --bin data/openwebtext --dry-run
    ctrans study placements.toml --workers 2 --export csv
    """
    if request.name == PREDICT:
        raise ConfigError(MOVED)
    directory = _directory(request)
    _check(request, directory)
    study = _study(request)
    if request.dry_run:
        tell_cost(request, study, directory)
        return
    if request.report:
        with open_store(directory, write=False) as store:
            _end(request, directory, study, store, prospect(study, store, as_begun=True))
        return
    with open_store(directory) as store:
        plan = prospect(study, store)
        if plan.left:
            carry_out(plan, store, engine(request.workers, request.ray))
        _end(request, directory, study, store, prospect(study, store))


def _study(request: StudyRequest) -> Study:
    """The study that is meant, with what options say. Raises ConfigError for an unknown name."""
    if request.name.endswith(TOML):
        if "scale" in request.typed:
            raise ConfigError("--scale is for presets: a file says its sizes itself")
        study = read_study(Path(request.name))
    else:
        study = _preset(request).study(request.name, request.scale)
    given = request.source
    if any(given.values()) and study.task is not None:
        raise ConfigError(
            f"{study.name} is of the task {study.source['task']}, which brings its data: leave --file and --bin out"
        )
    changes: dict[str, Any] = {"source": given} if any(given.values()) else {}
    changes |= {"budget": request.budget} if request.budget is not None else {}
    return dataclasses.replace(study, **changes)


def _preset(request: StudyRequest) -> Preset:
    if request.name in PRESETS:
        return PRESETS[request.name]
    if Path(request.name + TOML).is_file():
        raise ConfigError(f"{request.name!r} is no study that ctrans has: for the file here give {request.name + TOML!r}")
    raise unknown("study", request.name, [*PRESETS, PREDICT])


def _directory(request: StudyRequest) -> Path:
    name = (
        Path(request.name).stem if request.name.endswith(TOML) or request.scale == "small" else f"{request.name}-{request.scale}"
    )
    return Path("out") / "study" / name if request.out is None else request.out


def _check(request: StudyRequest, directory: Path) -> None:
    """ConfigError for options that exclude each other or cannot be."""
    if moved := {"stage", "regime"} & request.typed:
        raise ConfigError(f"--{min(moved)}: {MOVED}")
    if request.file is not None and request.bin is not None:
        raise ConfigError("--file and --bin exclude each other: choose one")
    if request.dry_run and request.report:
        raise ConfigError("--dry-run and --report exclude each other: choose one")
    if request.workers is not None:
        check_count("workers", request.workers, 1024)
        if request.ray is not None:
            raise ConfigError("--workers and --ray exclude each other: Ray has as many as its processors; leave one out")
    if request.ray is not None:
        check_ray()
    for name in request.formats:
        export.check_format(name)
    check_json(request, directory)


def _end(request: StudyRequest, directory: Path, study: Study, store: Store, plan: Prospect) -> None:
    """Writes and prints what the study's runs show by now."""
    runs = plan.kept(store)
    outcomes, verdict, frequencies = outcomes_of(runs), _verdict(request, plan, runs), _frequencies_loss(plan, runs)
    files: dict[str, Callable[[], bytes]] = {"study.png": lambda: png(_figure(study, runs, verdict))}
    files |= {name: make for each in request.formats for name, make in export.files(each, store, outcomes).items()}
    findings = {
        **begins(plan),
        "outcomes": outcomes,
        "losses": losses(runs),
        "frequencies_loss": frequencies,
        "verdict": verdict,
    }
    ending = CommandEnding(
        result=findings,
        page=[*_page(runs, outcomes, frequencies, verdict)],
        options=options_of(request),
        files=files,
        said=f"{len(runs)} of {len(plan.runs)} runs are done{rest(plan)}. ",
    )
    end(request, directory, ending)


def _verdict(request: StudyRequest, plan: Prospect, runs: Sequence[Finished]) -> Verdict | None:
    """A preset's, of the seeds whose runs are all done: means over other runs on one side than on the other compare nothing."""
    if request.name.endswith(TOML):
        return None
    preset, left = _preset(request), {run.training.seed for run in plan.left.values()}
    whole = [run for run in runs if run.run.training.seed not in left]
    return judge(preset.claim, preset.source, preset.contrasts, whole, preset.notes)


def _figure(study: Study, runs: Sequence[Finished], verdict: Verdict | None) -> Figure:
    return rates_figure(runs, study.name) if verdict is None else verdict_figure(runs, verdict, study.name)


def _frequencies_loss(plan: Prospect, runs: Sequence[Finished]) -> float | None:
    """As `Data.frequencies_loss`; None for a task, whose targets are not the next tokens, where nothing is done, and where the data that
    the runs had are not here.
    """
    if plan.study.task is not None or not runs:
        return None
    context = runs[0].run.model.context
    try:
        data = read_source(plan.study.source, context)
    except ConfigError:
        return None
    return data.frequencies_loss() if data.fingerprint() == plan.fingerprints[context] else None


def _page(
    runs: Sequence[Finished], outcomes: dict[str, dict[str, float | None]], frequencies: float | None, verdict: Verdict | None
) -> Iterator[str | Table]:
    if runs:
        yield outcomes_table(runs, outcomes)
    if frequencies is not None:
        yield f"\n{escape(plateau_words(runs, outcomes, frequencies))}"
    if verdict is not None:
        yield from ("", f"[bold]Claim[/]: {escape(verdict.claim)} ({escape(verdict.source)}).", "", effects_table(verdict), "")
        yield f"[bold]{verdict.verdict}[/]." + (f" Note: {escape(verdict.notes)}." if verdict.notes else "")


command.help = (command.help or "").replace("{presets}", ", ".join(PRESETS))

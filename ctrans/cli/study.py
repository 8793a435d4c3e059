"""`ctrans study`."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import click
import torch
from matplotlib.figure import Figure
from rich.markup import escape
from rich.table import Table

from ctrans.cli import options
from ctrans.cli.ending import CommandEnding, check_json, end
from ctrans.cli.request import WrittenRequest, takes
from ctrans.depth import check_count
from ctrans.report.files import png
from ctrans.report.progress import duration, progress_bar
from ctrans.report.study_report import cost_table, outcomes_table, rates_figure
from ctrans.report.verdict_report import effects_table, verdict_figure
from ctrans.study import export
from ctrans.study.carry_out import Advance, Prospect, carry_out_study, prospect
from ctrans.study.cost import Cost, cost_of, flops_of, measured_rate
from ctrans.study.description import Study
from ctrans.study.engine import Engine, by_ray, check_ray, in_processes
from ctrans.study.presets.claim import Verdict, judge
from ctrans.study.presets.table import PRESETS, get_preset
from ctrans.study.store import FILE, Finished, Store, open_store
from ctrans.study.study_file import read_study
from ctrans.training.data import read_source
from solvers import ConfigError

TOML = ".toml"


@dataclasses.dataclass(frozen=True, kw_only=True)
class StudyRequest(WrittenRequest):
    """What `study` is asked.

    - `name`: a preset, or a TOML file
    - `scale`, `file`, `bin`, `budget`: of presets, its size; what it is trained on; and its limit, where they differ from what it says
    - `workers`, `ray`: where runs are carried out
    - `dry_run`, `report`: whether only the cost is told, or only what is kept shown
    - `formats`: of exports
    """

    name: str
    scale: str
    file: Path | None
    bin: Path | None
    budget: float | None
    workers: int | None
    ray: str | None
    dry_run: bool
    report: bool
    formats: tuple[str, ...]

    unshown: ClassVar[frozenset[str]] = WrittenRequest.unshown | {"formats"}

    @property
    def processes(self) -> int:
        """How many processes train here."""
        return self.workers or os.cpu_count() or 1


@click.command("study")
@click.argument("name", metavar="NAME|FILE.toml")
@click.option(
    "--scale", default="small", show_default=True, metavar="NAME", help="Of a preset: small, or paper, the published sizes."
)
@click.option("--file", type=click.Path(path_type=Path), help="Train on this file's bytes.")
@click.option("--bin", type=click.Path(path_type=Path), help="Train on nanoGPT's train.bin and val.bin in this directory.")
@click.option("--budget", type=float, help="Processor hours in all after which no further run begins; the same command goes on.")
@click.option("--workers", type=int, help="Processes, each of one thread.  [default: as many as processors]")
@click.option("--ray", metavar="ADDRESS", help="Carry runs out on the Ray cluster at this address (auto: one that runs here).")
@click.option("--dry-run", is_flag=True, help="Only say what it costs: a short run is timed.")
@click.option("--report", is_flag=True, help="Train nothing: make tables and pictures anew from what is kept.")
@click.option(
    "--export",
    "formats",
    multiple=True,
    metavar="NAME",
    help=f"Repeatable: write the tables as {options.one_of(export.FORMATS)} too.",
)
@click.option(
    "--out", type=click.Path(path_type=Path), help=f"Directory of {FILE}, study.json and study.png.  [default: out/study/NAME]"
)
@options.json_option
@takes(StudyRequest)
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
    study, directory = _study(request), _directory(request)
    _check(request, directory)
    if request.dry_run:
        _tell_cost(request, study, directory)
        return
    if request.report:
        with open_store(directory, write=False) as store:
            _end(request, directory, study, store, prospect(study, store))
        return
    with open_store(directory) as store:
        plan = prospect(study, store)
        if plan.left:
            _carry_out(request, plan, store)
        _end(request, directory, study, store, prospect(study, store))


def _study(request: StudyRequest) -> Study:
    """The study that is meant, with what options say. Raises ConfigError for a name that is none."""
    if request.name.endswith(TOML):
        if "scale" in request.typed:
            raise ConfigError("--scale is for presets: a file says its sizes itself")
        study = read_study(Path(request.name))
    else:
        study = get_preset(request.name).study(request.name, request.scale)
    if request.file is not None and request.bin is not None:
        raise ConfigError("--file and --bin exclude each other: choose one")
    given = {
        name: str(path.absolute()) if path is not None else None for name, path in (("file", request.file), ("bin", request.bin))
    }
    changes: dict[str, Any] = {"source": given} if any(given.values()) else {}
    changes |= {"budget": request.budget} if request.budget is not None else {}
    return dataclasses.replace(study, **changes)


def _directory(request: StudyRequest) -> Path:
    name = (
        Path(request.name).stem if request.name.endswith(TOML) or request.scale == "small" else f"{request.name}-{request.scale}"
    )
    return Path("out") / "study" / name if request.out is None else request.out


def _check(request: StudyRequest, directory: Path) -> None:
    """ConfigError for options that exclude each other or cannot be."""
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


def _cost(request: StudyRequest, plan: Prospect) -> tuple[Cost, Cost]:
    """What it costs in all, and what is left, by a run of middling size that is timed on one thread."""
    by_size = sorted(plan.runs.values(), key=flops_of)
    middle = by_size[len(by_size) // 2]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    rate = measured_rate(middle, read_source(plan.study.source, middle.model.context))
    torch.set_num_threads(threads)
    return cost_of(list(plan.runs.values()), rate), cost_of(list(plan.left.values()), rate)


def _tell_cost(request: StudyRequest, study: Study, directory: Path) -> None:
    """Prints and writes what it costs. Nothing is made but the JSON."""
    if (directory / FILE).exists():
        with open_store(directory, write=False) as store:
            plan = prospect(study, store)
    else:
        plan = prospect(study, None)
    whole, left = _cost(request, plan)
    findings = {**_begins(study, plan), "cost": _as_object(left, request.processes), "outcomes": {}, "verdict": None}
    end(
        request,
        None,
        CommandEnding(findings=findings, page=[cost_table(whole, left, request.processes)], options=_options(request)),
    )


def _carry_out(request: StudyRequest, plan: Prospect, store: Store) -> None:
    with progress_bar("study", len(plan.left)) as advance:
        done = 0

        def observe(at: Advance) -> None:
            nonlocal done
            for _ in range(at.done - done):
                advance(f"{duration(at.seconds_left)} left")
            done = at.done

        carry_out_study(plan, store, _engine(request), observe)


def _engine(request: StudyRequest) -> Engine:
    return partial(in_processes, request.processes) if request.ray is None else partial(by_ray, request.ray)


def _end(request: StudyRequest, directory: Path, study: Study, store: Store, plan: Prospect) -> None:
    """Writes and prints what the study's runs show by now."""
    runs, outcomes = store.runs(plan.runs.keys()), store.outcomes()
    verdict = _verdict(request, runs)
    files: dict[str, Callable[[], bytes]] = {"study.png": lambda: png(_figure(study, runs, verdict))}
    files |= {name: partial(make, store) for each in request.formats for name, make in export.files(each).items()}
    findings = {**_begins(study, plan), "cost": None, "outcomes": outcomes, "verdict": verdict}
    ending = CommandEnding(
        findings=findings,
        page=[*_page(runs, outcomes, verdict)],
        options=_options(request),
        files=files,
        said=f"{len(runs)} of {len(plan.runs)} runs are done{_rest(plan)}. ",
    )
    end(request, directory, ending)


def _verdict(request: StudyRequest, runs: Sequence[Finished]) -> Verdict | None:
    """A preset's, of the runs by now."""
    if request.name.endswith(TOML):
        return None
    preset = get_preset(request.name)
    return judge(preset.claim, preset.source, preset.contrasts, runs, preset.notes)


def _figure(study: Study, runs: Sequence[Finished], verdict: Verdict | None) -> Figure:
    return rates_figure(runs, study.name) if verdict is None else verdict_figure(runs, verdict, study.name)


def _page(
    runs: Sequence[Finished], outcomes: dict[str, dict[str, float | None]], verdict: Verdict | None
) -> Iterator[str | Table]:
    if runs:
        yield outcomes_table(runs, outcomes)
    if verdict is not None:
        yield from ("", f"[bold]Claim[/]: {escape(verdict.claim)} ({escape(verdict.source)}).", "", effects_table(verdict), "")
        yield f"[bold]{verdict.verdict}[/]." + (f" Note: {escape(verdict.notes)}." if verdict.notes else "")


def _rest(plan: Prospect) -> str:
    if not plan.left:
        return ""
    return "; the budget is spent, give more by --budget" if plan.study.budget is not None else "; the same command goes on"


def _begins(study: Study, plan: Prospect) -> dict[str, Any]:
    return {"study": study.as_object(), "runs": len(plan.runs), "done": len(plan.runs) - len(plan.left)}


def _as_object(cost: Cost, workers: int) -> dict[str, float]:
    return {**dataclasses.asdict(cost), "processor_hours": cost.processor_hours, "hours": cost.hours(workers)}


def _options(request: StudyRequest) -> dict[str, Any]:
    return {"formats": list(request.formats)}


command.help = (command.help or "").replace("{presets}", ", ".join(PRESETS))

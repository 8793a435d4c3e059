"""The request of `ctrans study`, the cost of a study, and how to run what is left of it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ctrans.base.option import Range, option
from ctrans.cli.click_options import argument
from ctrans.cli.plugins import LOADED, load_plugin
from ctrans.cli.request import WrittenRequest
from ctrans.report.progress import duration, progress_bar
from ctrans.study.carry_out import Prospect, carry_out_study
from ctrans.study.cost import Cost, cost_of, flops_of, measured_rate
from ctrans.study.database import FILE, Store
from ctrans.study.engine import Engine, Job, Work, by_ray, in_processes
from ctrans.study.export import FORMATS
from ctrans.study.study_file import PATHS, read_study
from ctrans.study.training import RunResult
from ctrans.training.data_sources import read_source
from solvers import ConfigError

TOML = ".toml"
"""How the name of a study's file ends."""


@dataclass(frozen=True, kw_only=True)
class StudyRequest(WrittenRequest):
    """The request of `study`.

    - `name`: a preset, or a TOML file
    - `scale`, `file`, `bin`, `budget`: changes of a preset
    - `workers`, `ray`: where runs take place
    """

    name: str = argument("NAME|FILE.toml")
    scale: str = option(
        "small", "For a preset: small, or paper for the published sizes.", metavar="NAME"
    )
    file: Path | None = option(None, "Train on this file's bytes.")
    bin: Path | None = option(None, "Train on nanoGPT's train.bin and val.bin in this directory.")
    budget: float | None = option(
        None,
        "Total processor hours after which no new run begins. The same command continues the"
        " study.",
    )
    workers: int | None = option(
        None,
        "Processes, each with one thread.",
        limits=Range(1, 1024),
        default_words="the number of processors",
    )
    ray: str | None = option(
        None,
        "Use the Ray cluster at this address (auto: the one on this machine).",
        metavar="ADDRESS",
    )
    dry_run: bool = option(
        default=False, help="Only show the cost. ctrans times a short run for it."
    )
    report: bool = option(
        default=False, help="Train nothing: make tables and figures from the finished runs."
    )
    formats: tuple[str, ...] = option(
        (), "Repeatable: also write the tables.", flags="--export", choices=FORMATS
    )
    out: Path | None = option(
        None,
        f"Directory of {FILE}, study.json and study.png.",
        group="Output",
        default_words="out/study/NAME",
    )

    @property
    def inputs(self) -> list[Path]:
        """Also the data that a study file or a preset names."""
        inputs = super().inputs
        with contextlib.suppress(ConfigError):  # the command says later what is wrong with it
            if self.name.endswith(TOML):
                source = read_study(Path(self.name)).source
                names = [source.get(name) for name in PATHS]
                inputs += [Path(name) for name in names if name is not None]
        return inputs


def cost(plan: Prospect) -> tuple[Cost, Cost]:
    """The cost of all runs, and of the runs that are left. Times the run of median size on one
    thread.
    """
    by_size = sorted(plan.runs.values(), key=flops_of)
    middle = by_size[len(by_size) // 2]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    rate = measured_rate(middle, read_source(plan.study.source, middle.model.context))
    torch.set_num_threads(threads)
    return cost_of(list(plan.runs.values()), rate), cost_of(list(plan.left.values()), rate)


def carry_out(plan: Prospect, store: Store, engine: Engine) -> None:
    """Runs what is left, with a progress bar. Raises as `carry_out_study`."""
    with progress_bar("study", len(plan.left)) as advance:
        done = 0

        def observe(now: int, seconds_left: float) -> None:
            nonlocal done
            advance(f"{duration(seconds_left)} left", now - done)
            done = now

        carry_out_study(plan, store, engine, observe)


def processes(workers: int | None) -> int:
    """The number of training processes on this machine."""
    return workers or os.cpu_count() or 1


def engine(workers: int | None, ray: str | None) -> Engine:
    """The Ray cluster at this address, or processes of this machine without one. Their processes
    import the plugins first.
    """
    carry_out_job: Work = Job.carry_out
    if LOADED:
        carry_out_job = partial(_with_plugins, dict(LOADED))
    if ray is None:
        return partial(in_processes, processes(workers), carry_out=carry_out_job)
    return partial(by_ray, ray, carry_out=carry_out_job)


def _with_plugins(plugins: Mapping[str, bytes], job: Job) -> list[RunResult]:
    """The results of a job in a process that has imported nothing of the user's. Raises ConfigError
    for a plugin with another digest than in the process that stores the results.
    """
    for name, digest in plugins.items():
        load_plugin(name)
        if LOADED[name] != digest:
            raise ConfigError(
                f"plugin {name!r} is not as it was when the study began: bring it back, or start"
                " the same command again, which trains with the present plugin"
            )
    return job.carry_out()


def begins(plan: Prospect) -> dict[str, Any]:
    """The keys of every study's result: the study and its progress. The other keys are empty."""
    maps: dict[str, Any] = {name: {} for name in ("outcomes", "losses", "curves", "states")}
    nothing = dict.fromkeys(
        ("cost", "frequencies_loss", "depthless_loss", "stable_rule", "verdict")
    )
    done = len(plan.runs) - len(plan.left)
    return {
        "study": asdict(plan.study),
        "runs": len(plan.runs),
        "done": done,
        "failed": 0,
        **maps,
        **nothing,
    }


def costs(plan: Prospect, processes: int) -> dict[str, Any]:
    """The cost of what is left as JSON, in processor hours and in hours with so many processes;
    under `all`, that of all runs.
    """
    cost_of_all, cost_of_the_rest = cost(plan)
    return {
        **_cost_as_json(cost_of_the_rest, processes),
        "processes": processes,
        "all": _cost_as_json(cost_of_all, processes),
    }


def _cost_as_json(cost: Cost, processes: int) -> dict[str, Any]:
    return {
        **asdict(cost),
        "processor_hours": cost.processor_hours,
        "hours": cost.hours(processes),
    }

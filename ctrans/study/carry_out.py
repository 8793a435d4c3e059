"""Carries out the runs that a study lacks, and stores each run as it ends."""

from __future__ import annotations

import contextlib
import dataclasses
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

from ctrans.study.cost import flops_of
from ctrans.study.database import Finished, Store
from ctrans.study.description import PlannedRun, Study, check_data
from ctrans.study.engine import Engine, Job
from ctrans.study.population import grouped
from ctrans.training.data_sources import read_source
from ctrans.training.loop import Ending
from solvers import ConfigError

HOUR = 3600.0


@dataclasses.dataclass(frozen=True)
class Prospect:
    """A study and the state of its store.

    - `runs`, `left`: all runs by key, and those that are not done
    - `names`: the store's keys of the runs that are done, by key
    - `fingerprints`: of the data, by context
    """

    study: Study
    runs: dict[str, PlannedRun]
    left: dict[str, PlannedRun]
    names: dict[str, str]
    fingerprints: Mapping[int, str]

    def kept(self, store: Store) -> list[Finished]:
        """The runs of this study that the store has, each with its case in this study."""
        now = {each: key for key, each in {**{key: key for key in self.runs}, **self.names}.items()}
        return [dataclasses.replace(each, run=self.runs[now[each.key]]) for each in store.runs(now)]

    @property
    def jobs(self) -> list[Job]:
        """The runs that are left as jobs, with populations where they are faster."""
        source = tuple(sorted(self.study.source.items()))
        return [Job(tuple(group), source) for group in grouped(list(self.left.values()))]


def prospect(study: Study, store: Store | None, *, as_begun: bool = False) -> Prospect:
    """Compares a study with its store. With `as_begun` it does not read data of which the store has
    the fingerprint, so that you can look at a study without them.

    Raises ConfigError if the store is another study's, or the data are too few.
    """
    runs = study.runs()
    if as_begun and store is not None:
        fingerprints = store.data()
    else:
        fingerprints = {}
    contexts = {run.model.context for run in runs}
    if not contexts <= fingerprints.keys():
        data = {context: read_source(study.source, context) for context in contexts}
        check_data(study, data)
        fingerprints = {
            **{context: each.fingerprint() for context, each in data.items()},
            **fingerprints,
        }
    by_key = {run.key(fingerprints[run.model.context]): run for run in runs}
    if store is None:
        return Prospect(study, by_key, by_key, {}, fingerprints)
    kept = store.about("name")
    if kept is not None and kept != study.name:
        raise ConfigError(
            f"{str(store.path)!r} is the study {kept!r}, not {study.name!r}: choose another --out"
        )
    done = store.known(fingerprints)
    left = {key: run for key, run in by_key.items() if key not in done}
    return Prospect(
        study, by_key, left, {key: done[key] for key in by_key if key in done}, fingerprints
    )


def carry_out_study(
    plan: Prospect,
    store: Store,
    engine: Engine,
    observe: Callable[[int, float], None] = lambda done, seconds: None,
) -> bool:
    """Carries out the runs that are left, and stores them. Returns whether all runs are done,
    within the budget.

    It calls `observe` with the number of runs that it has done, and the estimated seconds of the
    rest, by floating-point operations. It does not store interrupted runs. Raises the errors of the
    engine; runs done before are stored.
    """
    study = plan.study
    store.tell("name", study.name)
    store.tell("description", dataclasses.asdict(study))
    store.begin_on(plan.fingerprints)
    commit = commit_of_ctrans()
    keys = {id(run): key for key, run in plan.left.items()}
    total = sum(flops_of(run) for run in plan.left.values())
    worked = 0.0
    started = time.perf_counter()
    count = 0
    with contextlib.closing(engine(_within(plan.jobs, plan, store))) as results:
        for job, found in results:
            pairs = zip(job.runs, found, strict=True)
            usable = [
                (keys[id(run)], run, result)
                for run, result in pairs
                if result.ending != Ending.INTERRUPTED.value
            ]
            store.add(usable, commit)
            count += len(usable)
            worked += sum(map(flops_of, job.runs))
            elapsed = time.perf_counter() - started
            observe(count, elapsed * (total - worked) / worked)
    return count == len(plan.left)


def _within(jobs: Iterable[Job], plan: Prospect, store: Store) -> Iterator[Job]:
    """The jobs until the study's runs have used the processor hours of its budget. Runs that have
    begun still end and are stored.
    """
    budget = plan.study.budget
    for job in jobs:
        if budget is not None and store.spent([*plan.runs, *plan.names.values()]) >= budget * HOUR:
            return
        yield job


def commit_of_ctrans() -> str:
    """The commit of the source tree of ctrans, with a + if it has changes; "" without one."""
    place = Path(__file__).parent

    def git(*arguments: str) -> str:
        done = subprocess.run(
            ["git", "-C", str(place), *arguments], capture_output=True, text=True, check=True
        )
        return done.stdout.strip()

    try:
        git(
            "ls-files", "--error-unmatch", "--", Path(__file__).name
        )  # an installed copy may lie in another repository
        return git("rev-parse", "HEAD") + (
            "+" if git("status", "--porcelain", "--untracked-files=no", "--", "../..") else ""
        )
    except (OSError, subprocess.CalledProcessError):
        return ""

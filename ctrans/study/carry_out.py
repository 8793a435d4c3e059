"""Carries out the runs that a study lacks, and stores each run as it ends."""

from __future__ import annotations

import contextlib
import dataclasses
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

from ctrans.study.cost import flops_of
from ctrans.study.database import Store
from ctrans.study.description import PlannedRun, Study, check_data
from ctrans.study.engine import Engine, Job
from ctrans.study.finished import Finished
from ctrans.study.population import grouped
from ctrans.training.data import Data
from ctrans.training.data_sources import read_source
from ctrans.training.loop import Ending
from solvers import ConfigError

HOUR = 3600.0


@dataclasses.dataclass(frozen=True)
class Prospect:
    """A study and the state of its store.

    - `runs`, `left`: all runs by key, and those that are not done yet
    - `names`: the store's keys of the runs that are done, by key
    - `fingerprints`: of the data, by context
    - `are_present_data`: whether they are those of the data as they are now
    - `unreadable`: why these cannot be read; "" if they can
    - `on_other_data`: how many runs of this study the store has on other data, or with other
      plugins
    """

    study: Study
    runs: dict[str, PlannedRun]
    left: dict[str, PlannedRun]
    names: dict[str, str]
    fingerprints: Mapping[int, str]
    are_present_data: bool = True
    unreadable: str = ""
    on_other_data: int = 0

    @property
    def remarks(self) -> list[str]:
        """Which data the runs are of, if the store or the study has several."""
        lines = []
        if self.unreadable:
            lines.append(
                "The study's data cannot be compared with those that it began with, of which these"
                f" runs are: {self.unreadable}."
            )
        elif not self.are_present_data:
            lines.append(
                "The study's data changed: these runs are of the earlier data. Without --report"
                " the same command trains on the present data."
            )
        if self.on_other_data:
            lines.append(
                f"The store also has runs of this study on other data, {self.on_other_data} of"
                " them, or with other plugins. They are not shown."
            )
        return lines

    def kept(self, store: Store) -> list[Finished]:
        """The runs of this study that the store has, each with its case in this study."""
        return [
            dataclasses.replace(finished, run=self.runs[self.keys_today[finished.key]])
            for finished in store.runs(self.keys_today)
        ]

    @property
    def keys_today(self) -> dict[str, str]:
        """The present keys of this study's runs by the keys under which the store has them."""
        return {self.names.get(key, key): key for key in self.runs}

    @property
    def jobs(self) -> list[Job]:
        """The runs that are left as jobs, with populations where they are faster."""
        source = tuple(sorted(self.study.source.items()))
        groups = map(tuple, grouped(list(self.left.values())))
        return [Job(group, source, self.fingerprints[group[0].model.context]) for group in groups]


def prospect(study: Study, store: Store | None, *, as_begun: bool = False) -> Prospect:
    """Compares a study with its store. With `as_begun` the data may be missing, or have no runs:
    then the runs are those on the data of which the store has the fingerprint, so that you can look
    at a study without its data.

    Raises ConfigError if the store is another study's, or the data are too few.
    """
    if store is None:
        fingerprints = _fingerprints(study, {})
        by_key = _by_key(study, fingerprints)
        return Prospect(study, by_key, by_key, {}, fingerprints)
    name = store.about("name")
    if name is not None and name != study.name:
        raise ConfigError(
            f"{str(store.path)!r} is the study {name!r}, not {study.name!r}: choose another --out"
        )
    stored = store.data()
    has_all_stored = _contexts(study) <= stored.keys()
    try:
        present = _with_store(study, store, _fingerprints(study, stored))
    except ConfigError as error:
        if not (as_begun and has_all_stored):
            raise
        described = store.about("description") or {}
        described_study = dataclasses.replace(study, source=described.get("source", study.source))
        return dataclasses.replace(
            _with_store(described_study, store, stored),
            are_present_data=False,
            unreadable=str(error),
        )
    if as_begun and has_all_stored and not present.names:
        begun = _with_store(study, store, stored)
        if begun.names:
            return dataclasses.replace(begun, are_present_data=False)
    return present


def _with_store(study: Study, store: Store, fingerprints: Mapping[int, str]) -> Prospect:
    """Compares a study on the data of these fingerprints with its store."""
    by_key = _by_key(study, fingerprints)
    done = store.known(fingerprints)
    missing = {key: run for key, run in by_key.items() if key not in done}
    names = {key: done[key] for key in by_key if key in done}
    return Prospect(
        study,
        by_key,
        missing,
        names,
        fingerprints,
        on_other_data=store.number_of_others(by_key.values(), names.values()),
    )


def _contexts(study: Study) -> set[int]:
    return {run.model.context for run in study.runs()}


def _by_key(study: Study, fingerprints: Mapping[int, str]) -> dict[str, PlannedRun]:
    """The study's runs by their keys on the data of these fingerprints."""
    return {run.key(fingerprints[run.model.context]): run for run in study.runs()}


def _fingerprints(study: Study, stored: Mapping[int, str]) -> dict[int, str]:
    """The fingerprints of the study's data by context. Raises ConfigError for missing data, and for
    too few.
    """
    by_context = {context: read_source(study.source, context) for context in _contexts(study)}
    check_data(study, by_context)
    return {
        context: _fingerprint(data, stored.get(context)) for context, data in by_context.items()
    }


def _fingerprint(data: Data, stored: str | None) -> str:
    """The fingerprint of the data: the stored one if it is theirs, also in an older form, so that
    the runs of a study keep their keys.
    """
    if stored is not None and data.matches(stored):
        return stored
    return data.fingerprint()


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
        for job, job_results in results:
            usable = [
                (keys[id(run)], run, result)
                for run, result in zip(job.runs, job_results, strict=True)
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
    keys = [*plan.runs, *plan.names.values()]
    for job in jobs:
        if budget is not None and store.spent(keys) >= budget * HOUR:
            return
        yield job


def commit_of_ctrans() -> str:
    """The commit of the source tree of ctrans, with a + if it has changes; "" without one."""
    folder = Path(__file__).parent

    def git(*arguments: str) -> str:
        process = subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, text=True, check=True
        )
        return process.stdout.strip()

    try:
        # fails for an installed copy, which may lie in another repository
        git("ls-files", "--error-unmatch", "--", Path(__file__).name)
        commit = git("rev-parse", "HEAD")
        if git("status", "--porcelain", "--untracked-files=no", "--", "../.."):
            return f"{commit}+"
        return commit
    except (OSError, subprocess.CalledProcessError):
        return ""

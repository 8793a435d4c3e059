"""A study from where it stands to its end: what is left is carried out, and every run is kept as it
is done.
"""

from __future__ import annotations

import dataclasses
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

from ctrans.study.cost import flops_of
from ctrans.study.database import Finished, Store
from ctrans.study.description import PlannedRun, Study, check_data
from ctrans.study.engine import Engine, Job
from ctrans.study.outcomes import outcomes_of
from ctrans.study.population import grouped
from ctrans.study.training import INTERRUPTED
from ctrans.training.data_sources import read_source
from solvers import ConfigError

HOUR = 3600.0


@dataclasses.dataclass(frozen=True)
class Prospect:
    """A study beside its store: all its runs by key, those that are left, the keys that the store
    has of those that are done, and the fingerprints of the data by context.
    """

    study: Study
    runs: dict[str, PlannedRun]
    left: dict[str, PlannedRun]
    names: dict[str, str] = dataclasses.field(default_factory=dict)
    fingerprints: Mapping[int, str] = dataclasses.field(default_factory=dict)

    def kept(self, store: Store) -> list[Finished]:
        """The study's runs that are done, and no other's that the store has from before; each in
        the case that it is of this study.
        """
        now = {each: key for key, each in {**{key: key for key in self.runs}, **self.names}.items()}
        return [dataclasses.replace(each, run=self.runs[now[each.key]]) for each in store.runs(now)]

    @property
    def jobs(self) -> list[Job]:
        """What is left, as engines take it: populations where they pay."""
        source = tuple(sorted(self.study.source.items()))
        return [Job(tuple(group), source) for group in grouped(list(self.left.values()))]


@dataclasses.dataclass(frozen=True)
class Advance:
    """A word on how a study comes on: runs done now, of how many left, and seconds that the rest
    will take, by what the runs so far took for their floating-point operations.
    """

    done: int
    total: int
    seconds_left: float


def prospect(study: Study, store: Store | None, *, as_begun: bool = False) -> Prospect:
    """What there is to do. With `as_begun` the data are those that the store was begun with, which
    need not be here: to look at what is done. Raises ConfigError where the store is another
    study's, or the data do not suffice.
    """
    runs = study.runs()
    fingerprints = store.data() if as_begun and store is not None else {}
    contexts = {run.model.context for run in runs}
    if not contexts <= fingerprints.keys():
        data = {context: read_source(study.source, context) for context in contexts}
        check_data(study, data)
        fingerprints = {**{context: each.fingerprint() for context, each in data.items()}, **fingerprints}
    by_key = {run.key(fingerprints[run.model.context]): run for run in runs}
    if store is None:
        return Prospect(study, by_key, by_key)
    kept = store.about("name")
    if kept is not None and kept != study.name:
        raise ConfigError(f"{str(store.path)!r} is the study {kept!r}, not {study.name!r}: choose another --out")
    done = store.known(fingerprints)
    left = {key: run for key, run in by_key.items() if key not in done}
    return Prospect(study, by_key, left, {key: done[key] for key in by_key if key in done}, fingerprints)


def carry_out_study(plan: Prospect, store: Store, engine: Engine, observe: Callable[[Advance], None] = lambda _: None) -> bool:
    """Carries out what is left, and keeps the outcomes; whether all is done, and not the budget
    spent before.

    An interrupted run is not kept. Errors are those of the engine; what is done by then is kept.
    """
    study = plan.study
    store.tell("name", study.name)
    store.tell("description", study.as_object())
    store.begin_on(plan.fingerprints)
    commit, keys = commit_of_ctrans(), {id(run): key for key, run in plan.left.items()}
    total = sum(flops_of(run) for run in plan.left.values())
    worked, started, count = 0.0, time.perf_counter(), 0
    results = engine(_within(plan.jobs, plan, store))
    try:
        for job, found in results:
            usable = [(run, result) for run, result in zip(job.runs, found, strict=True) if result.ending != INTERRUPTED]
            store.add([(keys[id(run)], run, result) for run, result in usable], commit)
            count += len(usable)
            worked += sum(flops_of(run) for run in job.runs)
            elapsed = time.perf_counter() - started
            observe(Advance(count, len(plan.left), elapsed * (total - worked) / worked))
    finally:
        close = getattr(results, "close", None)
        if close is not None:
            close()
        store.put_outcomes(outcomes_of(plan.kept(store)))
    return count == len(plan.left)


def _within(jobs: Iterable[Job], plan: Prospect, store: Store) -> Iterator[Job]:
    """The jobs, while the budget lasts: what is under way when it is spent is ended and kept."""
    for job in jobs:
        if spent(plan, store):
            return
        yield job


def spent(plan: Prospect, store: Store) -> bool:
    """Whether the budget's processor hours are used up by the study's runs."""
    budget = plan.study.budget
    return budget is not None and store.spent([*plan.runs, *plan.names.values()]) >= budget * HOUR


def commit_of_ctrans() -> str:
    """The commit of the source tree that this runs from, with a + where it was changed; "" where it
    is in none.
    """
    place = Path(__file__).parent

    def git(*arguments: str) -> str:
        done = subprocess.run(["git", "-C", str(place), *arguments], capture_output=True, text=True, check=True)
        return done.stdout.strip()

    try:
        git("ls-files", "--error-unmatch", "--", Path(__file__).name)  # an installed copy may lie in a tree of something else
        return git("rev-parse", "HEAD") + ("+" if git("status", "--porcelain", "--untracked-files=no", "--", "../..") else "")
    except (OSError, subprocess.CalledProcessError):
        return ""

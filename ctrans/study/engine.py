"""Where runs are carried out: in processes of this machine, or by Ray. Neither schedules by hand.

An engine takes jobs, each some runs, and gives their results as they come. A job that a process
dies in is given to another, up to `TRIES` times; results are kept by the process that asked, and by
no other.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import importlib.util
import multiprocessing
import multiprocessing.connection
import os
import signal
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures.process import BrokenProcessPool
from typing import Any

import torch

from ctrans.study.description import PlannedRun
from ctrans.study.population import train_population
from ctrans.study.training import RunResult, train_run
from ctrans.training.data import Data
from ctrans.training.data_sources import read_source
from solvers import ConfigError, SolveError

TRIES = 3
"""How often a job is given to a process that then dies."""


@dataclasses.dataclass(frozen=True)
class Job:
    """Runs that are carried out together: one, or several that are a population. `source` is where
    their data are.
    """

    runs: tuple[PlannedRun, ...]
    source: tuple[tuple[str, str | None], ...]

    def carry_out(self) -> list[RunResult]:
        """Their results."""
        data = data_of(self.source, self.runs[0].model.context)
        return [train_run(self.runs[0], data)] if len(self.runs) == 1 else train_population(self.runs, data)


@functools.lru_cache(maxsize=8)
def data_of(source: tuple[tuple[str, str | None], ...], context: int) -> Data:
    """The data, read once by each process."""
    return read_source(dict(source), context)


Done = tuple[Job, list[RunResult]]
Work = Callable[[Job], list[RunResult]]
Engine = Callable[[Iterable[Job]], Iterator[Done]]
"""What carries jobs out: it takes one when it can begin it, and not before, so that whoever gives
them may stop.
"""


@dataclasses.dataclass
class Queue:
    """Jobs that come one by one, and before them those that are to be done again."""

    coming: Iterator[Job]
    again: deque[Job] = dataclasses.field(default_factory=deque)

    def first(self) -> Job | None:
        """The next job, which stays the first until `taken`; None where there is none."""
        if not self.again and (job := next(self.coming, None)) is not None:
            self.again.append(job)
        return self.again[0] if self.again else None

    def taken(self) -> None:
        """The first job has begun."""
        self.again.popleft()


def in_processes(
    workers: int, jobs: Iterable[Job], carry_out: Callable[[Job], list[RunResult]] = Job.carry_out
) -> Iterator[tuple[Job, list[RunResult]]]:
    """Results as they come, from so many processes of one thread each. They end with this one,
    however it ends.

    No job begins that nobody asks for: at most one for each process is under way. Raises SolveError
    where `TRIES` processes died in a job, or beside it.
    """
    queue, died = Queue(iter(jobs)), Counter[int]()
    while True:
        # afresh after a death, which breaks the whole pool
        with _pool(workers) as pool:
            under_way: dict[concurrent.futures.Future[list[RunResult]], Job] = {}
            try:
                while True:
                    while len(under_way) < workers and (job := queue.first()) is not None:
                        under_way[pool.submit(carry_out, job)] = job
                        queue.taken()
                    if not under_way:
                        return
                    done, _ = concurrent.futures.wait(under_way, return_when=concurrent.futures.FIRST_COMPLETED)
                    for future in done:
                        results = future.result()
                        yield under_way.pop(future), results
            except BrokenProcessPool:
                died.update(id(job) for job in under_way.values())
                queue.again.extendleft(under_way.values())
        worst = [job.runs[0].case for job in under_way.values() if died[id(job)] >= TRIES]
        if worst:
            raise SolveError(f"{TRIES} processes died in one run, {' or '.join(worst)}: is memory out? Lower --workers")


def _pool(workers: int) -> concurrent.futures.ProcessPoolExecutor:
    # a fresh interpreter: torch's threads do not survive a fork
    context = multiprocessing.get_context("spawn")
    return concurrent.futures.ProcessPoolExecutor(workers, mp_context=context, initializer=_begin_process)


def _begin_process() -> None:
    """One thread; an interruption ends the run under way, which is then nobody's, and not the
    process; no life after the parent.
    """
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, lambda *_: None)
    parent = multiprocessing.parent_process()
    assert parent is not None, "a pool's process has a parent"

    def follow() -> None:
        multiprocessing.connection.wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()


def check_ray() -> None:
    """Raises ConfigError where Ray is not installed."""
    if importlib.util.find_spec("ray") is None:
        raise ConfigError("--ray needs Ray, which is not installed: pip install 'ctrans[ray]', or leave it out")


def by_ray(
    address: str, jobs: Iterable[Job], carry_out: Callable[[Job], list[RunResult]] = Job.carry_out
) -> Iterator[tuple[Job, list[RunResult]]]:
    """Results as they come from the Ray cluster at that address, one processor a job; a job whose
    node is lost is tried elsewhere.

    Raises ConfigError where there is no cluster, SolveError where Ray gives a job up.
    """
    check_ray()
    import ray

    try:
        ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise ConfigError(
            f"no Ray cluster answers at {address!r}: {_first_line(error)}; start one with: ray start --head"
        ) from None
    try:
        remote = ray.remote(num_cpus=1, max_retries=TRIES)(_one_thread)
        queue = Queue(iter(jobs))
        under_way: dict[Any, Job] = {}
        while True:
            while len(under_way) < ray.cluster_resources().get("CPU", 1) and (job := queue.first()) is not None:
                under_way[remote.remote(carry_out, job)] = job
                queue.taken()
            if not under_way:
                return
            (ready,), _ = ray.wait(list(under_way), num_returns=1)
            try:
                results = ray.get(ready)
            except ray.exceptions.RayError as error:
                raise SolveError(f"Ray gave up a run, {under_way[ready].runs[0].case}: {_first_line(error)}") from None
            yield under_way.pop(ready), results
    finally:
        ray.shutdown()


def _one_thread(carry_out: Work, job: Job) -> list[RunResult]:
    torch.set_num_threads(1)
    return carry_out(job)


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)

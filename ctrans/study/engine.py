"""Engines carry out runs: in processes of this machine, or on a Ray cluster.

An engine takes jobs of one or more runs, and yields their results as they end. If a process dies,
another one repeats its job, up to `TRIES` times. Only the calling process stores results.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import importlib.util
import itertools
import multiprocessing
import multiprocessing.connection
import os
import signal
import threading
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterable
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
"""The largest number of tries of a job whose process dies."""


@dataclasses.dataclass(frozen=True)
class Job:
    """Runs that are carried out together: one run, or a population. `source` is that of their
    data, with the fingerprint of the data for which the runs are planned.
    """

    runs: tuple[PlannedRun, ...]
    source: tuple[tuple[str, str | None], ...]
    fingerprint: str

    def carry_out(self) -> list[RunResult]:
        """The results of the runs. Raises ConfigError where the source has other data."""
        data = data_of(self.source, self.runs[0].model.context, self.fingerprint)
        if len(self.runs) == 1:
            return [train_run(self.runs[0], data)]
        return train_population(self.runs, data)


@functools.lru_cache(maxsize=8)
def data_of(source: tuple[tuple[str, str | None], ...], context: int, fingerprint: str) -> Data:
    """The data. Each process reads them once. Raises ConfigError if the fingerprint is not theirs:
    a file may change while a study runs, or be another one on another machine.
    """
    data = read_source(dict(source), context)
    if not data.matches(fingerprint):
        raise ConfigError(
            f"{data.name} has other data than when the study began: bring them back, or start the"
            " same command again, which trains on the present data"
        )
    return data


Done = tuple[Job, list[RunResult]]
Work = Callable[[Job], list[RunResult]]
Engine = Callable[[Iterable[Job]], Generator[Done, None, None]]
"""Carries out jobs. It takes the next job when it can begin it, so that the caller can stop."""


def in_processes(
    workers: int, jobs: Iterable[Job], carry_out: Work = Job.carry_out
) -> Generator[Done, None, None]:
    """Yields results from `workers` processes of one thread each. The processes end with this one.

    At most one job per process has begun at any time. Raises SolveError if `TRIES` processes died
    during a job.
    """
    spawn = multiprocessing.get_context("spawn")  # torch's threads do not survive a fork
    coming = iter(jobs)
    again = deque[Job]()
    died = Counter[int]()
    while True:
        # a death breaks the whole pool, so make a new one
        with concurrent.futures.ProcessPoolExecutor(
            workers, mp_context=spawn, initializer=_begin_process
        ) as pool:
            under_way: dict[concurrent.futures.Future[list[RunResult]], Job] = {}
            try:
                while True:
                    while len(under_way) < workers:
                        if not again:
                            again.extend(itertools.islice(coming, 1))
                        if not again:
                            break
                        future = pool.submit(carry_out, again[0])
                        under_way[future] = again.popleft()
                    if not under_way:
                        return
                    done, _ = concurrent.futures.wait(
                        under_way, return_when=concurrent.futures.FIRST_COMPLETED
                    )
                    for future in done:
                        results = future.result()
                        yield under_way.pop(future), results
            except (KeyboardInterrupt, SystemExit):
                # the pool would wait for the ends of its runs
                for process in multiprocessing.active_children():
                    process.kill()
                raise
            except BrokenProcessPool:
                died.update(id(job) for job in under_way.values())
                again.extendleft(under_way.values())
        given_up = [job.runs[0].case for job in under_way.values() if died[id(job)] >= TRIES]
        if given_up:
            raise SolveError(
                f"{TRIES} processes died in one run, {' or '.join(given_up)}: they may be out of"
                " memory: lower --workers"
            )


def _begin_process() -> None:
    """Sets one thread, ignores SIGINT, so that it ends only the present run, and ends the process
    with its parent.
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
    """Raises ConfigError if Ray is not installed."""
    if importlib.util.find_spec("ray") is None:
        raise ConfigError(
            "--ray needs Ray, which is not installed: pip install 'ctrans[ray]', or leave it out"
        )


def by_ray(
    address: str, jobs: Iterable[Job], carry_out: Work = Job.carry_out
) -> Generator[Done, None, None]:
    """Yields results from the Ray cluster at that address, with one processor per job. Another node
    repeats the job of a lost node.

    Raises ConfigError without a cluster, SolveError if Ray gives up a job.
    """
    check_ray()
    import ray

    try:
        ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise ConfigError(
            f"no Ray cluster answers at {address!r}: {_first_line(error)}; start one with: ray"
            " start --head"
        ) from None
    try:
        remote = ray.remote(num_cpus=1, max_retries=TRIES)(_one_thread)
        coming = iter(jobs)
        under_way = dict[Any, Job]()
        while True:
            while len(under_way) < ray.cluster_resources().get("CPU", 1):
                job = next(coming, None)
                if job is None:
                    break
                under_way[remote.remote(carry_out, job)] = job
            if not under_way:
                return
            (ready,), _ = ray.wait(list(under_way), num_returns=1)
            try:
                results = ray.get(ready)
            except ray.exceptions.RayError as error:
                raise SolveError(
                    f"Ray gave up a run, {under_way[ready].runs[0].case}: {_first_line(error)}"
                ) from None
            yield under_way.pop(ready), results
    finally:
        ray.shutdown()


def _one_thread(carry_out: Work, job: Job) -> list[RunResult]:
    torch.set_num_threads(1)
    return carry_out(job)


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)

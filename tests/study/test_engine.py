"""No run is lost or doubled, though processes die."""

import os
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import pytest

from ctrans.study.carry_out import prospect
from ctrans.study.engine import by_ray, check_ray, in_processes
from ctrans.study.training import RunResult
from solvers import ConfigError, SolveError
from tests.study.helpers import small

ROOT = Path(__file__).parents[2]


def jobs():
    return prospect(small(), None).jobs


def quick(job):
    return [RunResult("finished", "", [], 0.0, {"pid": os.getpid()}) for _ in job.runs]


def dies_once(job):
    mark = Path(os.environ["CTRANS_TEST_MARK"])
    if not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return quick(job)


def dies(job):
    os.kill(os.getpid(), signal.SIGKILL)


def names(found):
    return sorted(
        run.case + str(run.training.learning_rate) for job, _ in found for run in job.runs
    )


def everything():
    return sorted(run.case + str(run.training.learning_rate) for job in jobs() for run in job.runs)


@pytest.mark.slow
def test_local_processes_give_every_result_once():
    begun = []
    found = []
    for done in in_processes(2, (begun.append(job) or job for job in jobs()), quick):
        found.append(done)
        assert len(begun) <= len(found) + 1  # none is taken before it can begin
    assert names(found) == everything()
    assert os.getpid() not in {
        result.environment["pid"] for _, results in found for result in results
    }


@pytest.mark.slow
def test_a_process_that_dies_costs_no_run(tmp_path, monkeypatch):
    monkeypatch.setenv("CTRANS_TEST_MARK", str(tmp_path / "died"))
    assert names(in_processes(1, jobs(), dies_once)) == everything()


@pytest.mark.slow
def test_a_run_that_kills_every_process_is_named():
    with pytest.raises(SolveError, match="memory"):
        list(in_processes(1, jobs(), dies))


PARENT = """
import os, sys, time
from tests.study.test_engine import jobs
from ctrans.study.engine import in_processes
def waits(job):
    print(os.getpid(), flush=True)
    time.sleep(600)
if __name__ == "__main__":
    list(in_processes(1, jobs(), waits))
"""


@pytest.mark.slow
def test_processes_end_with_the_one_that_asked_though_it_is_killed(tmp_path):
    script = tmp_path / "parent.py"
    script.write_text(PARENT)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        [sys.executable, str(script)], stdout=subprocess.PIPE, text=True, env=environment
    )
    child = int(process.stdout.readline())
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    process.stdout.close()
    for _ in range(100):
        if not Path(f"/proc/{child}").exists():
            return
        time.sleep(0.1)
    pytest.fail(f"process {child} lives on")


def test_ray_is_asked_for_by_name_where_it_is_missing(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'ctrans\[ray\]'"):
        check_ray()


def slow(job):
    time.sleep(1.0)
    return quick(job)


STARTS = 3
"""How often two nodes are started: one ends itself where its agent is not there within some 15
seconds, as on a busy machine.
"""


def two_nodes():
    """A cluster on this machine and the node of it that is not the head."""
    from ray.cluster_utils import Cluster

    said = []
    for _ in range(STARTS):
        cluster = Cluster()
        try:
            cluster.add_node(num_cpus=1, include_dashboard=False)
            other = cluster.add_node(num_cpus=1)
            cluster.wait_for_nodes()
        except Exception as error:  # Ray has no class of its own for it
            said.append(f"{type(error).__name__}: {error}")
            cluster.shutdown()
        else:
            return cluster, other
    pytest.fail(
        "Ray started no two nodes; raylet.out in its session's logs says why ('Timed out waiting':"
        f" a busy machine): {said}"
    )


@pytest.mark.slow
@pytest.mark.skipif(
    find_spec("ray") is None, reason="Ray is not installed: pip install 'ctrans[ray]'"
)
def test_ray_loses_and_doubles_no_run_when_a_node_is_killed():
    """A cluster of two nodes on this machine, one of which is killed while it works."""
    cluster, other = two_nodes()
    try:
        found = []
        for done in by_ray(cluster.address, jobs() * 2, slow):
            found.append(done)
            if len(found) == 1:
                cluster.remove_node(other, allow_graceful=False)
        assert len(found) == 8
        assert names(found) == sorted(2 * everything())
    finally:
        cluster.shutdown()

"""How threads wait is set before torch is imported, and their number follows from the size of the
work.
"""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from ctrans.base import threads
from tests.helpers import NAMES, small_model, tokens

ROOT = Path(__file__).parents[2]
BENCHMARKS = sorted(
    path for path in (ROOT / "benchmarks").glob("*.py") if "__main__" in path.read_text()
)
VARIABLES = (*threads.USERS, "OMP_NUM_THREADS")
TELL = """
import os, sys
class Told:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            print([os.environ.get(name) for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")])
sys.meta_path.insert(0, Told())
from ctrans.cli import main
main(["simulate", "--help"])
"""


@pytest.fixture
def nothing_set(monkeypatch):
    """The variables as on a machine whose user said nothing; and torch's threads given back
    after.
    """
    before = torch.get_num_threads()
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    yield monkeypatch
    torch.set_num_threads(before)


def at_import(**environment):
    kept = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    done = subprocess.run(
        [sys.executable, "-c", TELL],
        env={**kept, **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.splitlines()[0]


@pytest.mark.slow
def test_a_command_sets_how_threads_wait_before_torch_is_there():
    assert at_import() == str(list(threads.WAITING.values()))


@pytest.mark.slow
def test_what_the_user_set_is_left_alone(nothing_set):
    assert at_import(OMP_WAIT_POLICY="active") == "['active', None]"
    for name in threads.USERS:
        with nothing_set.context() as context:
            context.setenv(name, "7")
            threads.wait_passively()
            assert {other for other in threads.USERS if other in os.environ} == {name}


def test_the_tests_wait_passively_too():
    assert any(name in os.environ for name in threads.USERS)


@pytest.mark.parametrize("path", BENCHMARKS, ids=lambda path: path.stem)
def test_a_benchmark_imports_torch_after_it_set_how_threads_wait(path):
    if path.name in ("threads.py", "between.py", "unchanged.py", "mutation.py"):
        pytest.skip("sets it for the processes that it starts")
    lines = {}
    for node in ast.parse(path.read_text()).body:
        called = (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Call)
            and ast.unparse(node.value.func)
        )
        names = (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else [getattr(node, "module", None) or called]
        )
        for name in names:
            lines.setdefault(str(name).split(".")[0], node.lineno)
    if not lines.keys() & {"torch", "benchmarks", "ctrans", "solvers"}:
        return  # nothing of it imports torch
    assert lines["wait_passively"] < lines.get(
        "torch", lines.get("benchmarks")
    )  # whose record imports it


@pytest.mark.parametrize("placement", NAMES)
def test_flops_are_what_torch_counts(placement):
    model = small_model(placement, depth=1)
    x = model.embed(tokens(batch=3, length=8))
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model.depth(x)
    assert counter.get_total_flops() == threads.flops(width=16, batch=3, context=8)


@pytest.mark.slow
@given(st.floats(0, 1e15), st.floats(0, 1e15), st.sampled_from([2, 4, 8]))
def test_more_work_has_as_many_threads_or_more(some, more, itemsize):
    few, many = sorted((some, more))
    assert (
        1 <= threads.worth(few, itemsize) <= threads.worth(many, itemsize) <= threads.worth(many, 8)
    )


def test_a_small_model_has_one_thread_and_a_large_one_all_there_are(nothing_set):
    for have in (1, 2, 4):
        torch.set_num_threads(have)
        threads.choose_threads(threads.flops(width=1024, batch=8, context=1024))
        assert torch.get_num_threads() == have
        threads.choose_threads(threads.flops(width=64, batch=1, context=16))
        assert torch.get_num_threads() == 1


def test_the_number_that_the_user_set_is_left_alone(nothing_set):
    torch.set_num_threads(2)
    nothing_set.setenv("OMP_NUM_THREADS", "2")
    threads.choose_threads(0)
    assert torch.get_num_threads() == 2
